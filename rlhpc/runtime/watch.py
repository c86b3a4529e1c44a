"""Watches the driver's registry: a run whose folder was removed, or that another driver has taken over, ends at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlhpc.runtime.errors import OwnershipError, RlhpcError, StaleGeneration
from rlhpc.runtime.registry import Keys, Registry

#: How often two small files on the shared filesystem are read.
LOOK_S = 5.0


class RegistryWatch:
    """A thread that checks whether the registry is still this driver's.

    Args:
        registry: The registry of the driver's generation.
        keys: The keys that the driver began with.
        fail: Called once with what is wrong; then the watch is over.
    """

    def __init__(self, registry: Registry, keys: Keys, fail: Callable[[RlhpcError], None]) -> None:
        self._registry, self._keys, self._fail = registry, keys, fail
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="rlhpc-registry", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._registry.require_whole(self._keys)
            except (StaleGeneration, OwnershipError) as error:
                if not self._over.is_set():
                    self._fail(error)
                return
            except (OSError, ValueError):
                continue  # a filesystem that stalls or is being written to is no reason to end

    def mine(self) -> bool:
        """Whether the registry is still this driver's; another driver's files must not be touched."""
        try:
            self._registry.require_whole(self._keys)
        except (RlhpcError, OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """Ends the watch: from now on nothing is reported."""
        self._over.set()
