"""Leases: exclusive rights of one process on any host, held through a file that the process renews while it runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.shared_files import read_json_file, renewed_within
from rlhpc.runtime.errors import DeadlineExceeded, SubmitError
from rlhpc.runtime.files import MISSING_NAME_S, create_exclusively, remove_if, repeat_look

#: Seconds without a renewal after which a holder on another host is considered dead.
LEASE_S = 30.0
#: Seconds between two renewals by a live holder.
RENEW_S = 5.0


def is_holder_alive(path: Path, lock_content: Mapping[str, Any], ask: Callable[[], bool | None] = lambda: None) -> bool:
    """Returns whether the holder of a lease is alive.

    Checks the process id on this host. For another host, calls `ask`; if `ask` returns None, watches whether the holder
    renews the file.

    Args:
        path: File of the lease.
        lock_content: Content of the file.
        ask: Queries another source, such as the scheduler.
    """
    process = ProcessId.from_json(lock_content.get("process"))
    if process is None:
        return False
    for ask_if_alive in (process.alive, ask):
        if (is_alive := ask_if_alive()) is not None:
            return is_alive
    return renewed_within(path, LEASE_S)


def holder() -> dict[str, Any]:
    """Returns the content of a lease that this process holds."""
    return {"process": ProcessId.from_pid(os.getpid()).to_json(), "nonce": secrets.token_hex(8)}


class Lease:
    """Exclusive right of one process, held through a file that it created exclusively and renews.

    Does not use filesystem locks: some filesystems lack locks, and others limit them to one node.

    Args:
        path: File of the lease. Its folder must exist.
        content: Content of the file; by default the result of `holder()`.
    """

    def __init__(self, path: Path, content: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.content = holder() if content is None else dict(content)
        self._release_event = threading.Event()

    def take(self) -> bool:
        """Takes the lease and starts a thread that renews it; returns False if the file exists.

        Raises:
            OSError: The file cannot be written.
        """
        if not create_exclusively(self.path, json.dumps(self.content).encode(), mode=0o600):
            return False
        threading.Thread(target=self._renew, name="rlhpc-lease", daemon=True).start()
        return True

    def _renew(self) -> None:
        while not self._release_event.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a full or stalled disk does not end the lease
                os.utime(self.path)

    def end_renewal(self) -> None:
        """Stops renewing the file without removing it."""
        self._release_event.set()

    def owns(self) -> bool:
        """Returns whether the file still belongs to this holder."""
        return read_json_file(self.path) == self.content

    def take_over(self) -> bool:
        """Takes the lease if it is free or its holder is dead; returns False if the holder is alive.

        Raises:
            OSError: The file cannot be written.
        """
        holder_content = self.take_or_read()
        if holder_content is None:
            return True
        if is_holder_alive(self.path, holder_content):
            return False
        self.remove_dead(holder_content)
        return self.take()

    def take_or_read(self) -> Mapping[str, Any] | None:
        """Takes the lease if it is free; otherwise returns the content of the holder's file, as `holder` returns it.

        A file without content is awaited for some seconds, and then counts as one of a dead holder ({}): this host may
        remember that the file was missing, and on a filesystem without hard links, it may be half-written.

        Returns:
            None if this process has the lease now.

        Raises:
            OSError: The file cannot be written.
        """
        for _ in repeat_look(0.1, MISSING_NAME_S):
            if self.take():
                return None
            if (lock_content := read_json_file(self.path)) is not None:
                return lock_content
        return {}

    def remove_dead(self, lock_content: Mapping[str, Any]) -> None:
        """Removes the lease of a dead holder. Keeps the file if another process has taken the lease in the meantime.

        One process at a time may remove a holder's lease: the one that holds the lease for its removal. Without that,
        the file could change its holder between the look at its content and its removal.

        Args:
            lock_content: Content of the dead holder's file, from `take_or_read`.
        """
        digest = hashlib.sha256(json.dumps(lock_content, sort_keys=True).encode()).hexdigest()[:16]
        removal = Lease(self.path.with_suffix(f".dead-{digest}"))
        if not removal.take_over():
            time.sleep(0.1)  # another process removes it
            return
        try:
            remove_if(self.path, lambda path: (read_json_file(path) or {}) == lock_content)
        finally:
            removal.release()

    def release(self) -> None:
        """Releases the lease. Keeps the file if another process has taken over the lease."""
        self.end_renewal()
        remove_if(self.path, lambda path: read_json_file(path) == self.content)


@contextlib.contextmanager
def lease_lock(path: Path, subject: str, timeout_s: float = 120.0) -> Iterator[None]:
    """Holds a lock under which one process at a time, on any host, decides about a job.

    Args:
        path: File of the lease; its folder must exist.
        subject: Name of the job, for messages.
        timeout_s: Maximum seconds to wait for another process.

    Raises:
        DeadlineExceeded: The other process did not finish in time.
        SubmitError: The folder cannot be written.
    """
    lease, deadline = Lease(path), time.monotonic() + timeout_s
    try:
        while not lease.take_over():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{subject}: another process has been submitting it for {timeout_s:.0f} s and holds {path}; if it hangs, "
                    "end it and try again"
                )
            time.sleep(0.1)
    except OSError as error:
        raise SubmitError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lease.release()
