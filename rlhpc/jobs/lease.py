"""Leases: files that name the one process, on any host, that may do something, and that renews the file meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import LEASE_S, RENEW_S, read_json_file, renewed_within
from rlhpc.runtime.files import create_exclusively

log = logging.getLogger(__name__)


def is_held(path: Path, content: Mapping[str, Any], ask: Callable[[], bool | None] = lambda: None) -> bool:
    """Returns whether the holder of a lease is alive: by its process id on this host; elsewhere by the result of `ask` or, if
    that
    is None, by whether the holder renews the file.

    Args:
        path: The lease.
        content: Content of the file.
        ask: Asks another source, such as the scheduler.
    """
    process = ProcessId.from_json(content.get("process"))
    if process is None:
        return False
    for check in (process.alive, ask):
        if (alive := check()) is not None:
            return alive
    return renewed_within(path, LEASE_S)


class Lease:
    """Exclusive right of one process, held through a file that it created exclusively and renews.

    Filesystem locks are not used: some filesystems have none, and some limit them to one node.

    Args:
        path: The file. Its folder must exist.
        facts: Further facts about the holder to write.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        process = ProcessId.of(os.getpid()).to_json()
        self.content = {**(facts or {}), "process": process, "nonce": secrets.token_hex(8)}
        self._released = threading.Event()

    def take(self) -> bool:
        """Takes the lease and renews it from now on; returns False if the file exists.

        Raises:
            OSError: It cannot be written.
        """
        if not create_exclusively(self.path, json.dumps(self.content).encode(), mode=0o600):
            return False
        threading.Thread(target=self._renew, name="rlhpc-lease", daemon=True).start()
        return True

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a full or stalled disk does not end the lease
                os.utime(self.path)

    def owns(self) -> bool:
        """Returns whether the file still belongs to this holder."""
        return read_json_file(self.path) == self.content

    def take_over(self) -> bool:
        """Takes the lease if no process or a dead one holds it; returns False if the holder is alive.

        Raises:
            OSError: It cannot be written.
        """
        if self.take():
            return True
        holder = read_json_file(self.path)
        if holder is not None and is_held(self.path, holder):
            return False
        self.remove_dead(holder)
        return self.take()

    def remove_dead(self, content: Mapping[str, Any] | None) -> None:
        """Removes the lease of a dead holder; restores it if another process took it in the meantime."""
        aside = self.path.with_suffix(f".stale-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self.path.rename(aside)
            if read_json_file(aside) != content:
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def release(self) -> None:
        """Releases the lease. A file that another process has taken over is left alone."""
        self._released.set()
        if self.owns():
            self.path.unlink(missing_ok=True)
