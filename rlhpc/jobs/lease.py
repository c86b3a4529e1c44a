"""Leases: files that name the one process, of any host, that may do something, and that it renews while it does."""

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
    """Returns whether the holder of a lease is alive: by its process id on this host; elsewhere by what `ask` finds out or,
    where that is None, by whether the holder renews the file.

    Args:
        path: The lease.
        content: What it was seen to contain.
        ask: Asks somebody who knows, such as the scheduler.
    """
    process = ProcessId.from_json(content.get("process"))
    if process is None:
        return False
    for known in (process.alive, ask):
        if (alive := known()) is not None:
            return alive
    return renewed_within(path, LEASE_S)


class Lease:
    """The right of one process to do something, while it holds a file that it created exclusively and renews.

    Locks of the filesystem are not used: some have none, and some keep them to one node.

    Args:
        path: The file. Its folder must exist.
        facts: What else it is to say about its holder.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.content = {
            **(facts or {}), "process": ProcessId.of(os.getpid()).to_json(), "nonce": secrets.token_hex(8),
        }  # fmt: skip
        self._released = threading.Event()

    def take(self) -> bool:
        """Takes the lease and renews it from now on; returns False where the file exists.

        Raises:
            OSError: It cannot be written.
        """
        if not create_exclusively(self.path, json.dumps(self.content).encode(), mode=0o600):
            return False
        threading.Thread(target=self._renew, name="rlhpc-lease", daemon=True).start()
        return True

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a full or stalled disk is no reason to give it up
                os.utime(self.path)

    def owns(self) -> bool:
        """Returns whether the file is still this holder's."""
        return read_json_file(self.path) == self.content

    def take_over(self) -> bool:
        """Takes the lease where no process holds it, or a dead one does; returns False where the holder is alive.

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
        """Removes the lease of a holder that is dead; puts it back if another has taken it meanwhile."""
        aside = self.path.with_suffix(f".stale-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self.path.rename(aside)
            if read_json_file(aside) != content:
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def release(self) -> None:
        """Gives the lease up. A file that another process has taken over is left alone."""
        self._released.set()
        if self.owns():
            self.path.unlink(missing_ok=True)
