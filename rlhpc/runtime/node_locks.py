"""Locks of a node that the ranks of a run share: accelerators and TCP ports.

A lock is a flock on a file in the session's folder of the node, so that it is free when its holder ends for any reason.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rlhpc.runtime.comm.context import check_run, default_wait_deadline_s, installed_context
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError

#: Seconds between two attempts to take a lock, at first and at most.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.05
_MAX_ATTEMPTS = 1000
#: First port that needs no privileges.
_FIRST_PORT = 1024
#: Descriptors of the ports that this process has reserved. They stay open until the process ends.
_reserved_ports: dict[int, int] = {}


def _open_lock(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(descriptor: int, owner: str) -> bool:
    """Tries to take a lock, and writes its owner into the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner.encode(), 0)
    return True


class DeviceLock:
    """Lock on the accelerators of a rank: one rank of the run at a time has an accelerator's lock, on each node.

    For ranks of several groups that share accelerators and must not use them at the same time: `with self.device_lock: …`. A
    rank without accelerators gets its lock at once. The thread with the lock may take it again. A rank that ends has no lock.
    Ranks of jobs with a private /tmp do not see each other's locks.

    Args:
        folder: Folder of the lock files; None locks within this process.
        accelerators: Names of the rank's accelerators on this machine.
        owner: Name of the rank, for messages.
    """

    def __init__(self, folder: Path | None, accelerators: Sequence[str], owner: str) -> None:
        # all ranks take locks in the same order, so that none waits for another one that waits for it
        self._paths = [folder / f"accelerator-{name}" for name in sorted(set(accelerators))] if folder else []
        self._owner = owner
        self._thread_lock = threading.RLock()
        self._depth, self._holder = 0, 0
        self._descriptors: list[int] = []

    def acquire(self) -> None:
        """Waits until no other rank has the lock of one of the rank's accelerators, and takes their locks.

        Raises:
            DeadlineExceeded: Another rank kept a lock until the session's wait deadline; the message names the rank.
        """
        self._thread_lock.acquire()
        try:
            for path in self._paths if self._depth == 0 else ():
                self._descriptors.append(_open_lock(path))
                self._wait_for(self._descriptors[-1], path)
        except BaseException:
            self._unlock()
            self._thread_lock.release()
            raise
        self._depth += 1
        self._holder = threading.get_ident()

    def _wait_for(self, descriptor: int, path: Path) -> None:
        context, pause_s = installed_context(), _MIN_PAUSE_S
        limit_s = context.wait_deadline if context is not None else default_wait_deadline_s()
        deadline = time.monotonic() + limit_s
        while not _try_lock(descriptor, self._owner):
            check_run()
            if time.monotonic() > deadline:
                holder_name = os.pread(descriptor, 100, 0).decode() or "another rank"
                raise DeadlineExceeded(
                    f"{self._owner} waited {limit_s:.1f} s for {path.name}, which {holder_name} has locked"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _unlock(self) -> None:
        while self._descriptors:
            descriptor = self._descriptors.pop()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have a copy of the descriptor
            os.close(descriptor)

    def release(self) -> None:
        """Releases the locks.

        Raises:
            RuntimeError: This thread does not have the lock.
        """
        if self._depth == 0 or self._holder != threading.get_ident():
            raise RuntimeError(f"device_lock.release: this thread of {self._owner} does not have the lock")
        if self._depth == 1:
            self._unlock()
        self._depth -= 1
        self._thread_lock.release()

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire_port(folder: Path | None, max_port: int | None, owner: str) -> int:
    """Finds a free TCP port and reserves it for this process; `Worker.acquire_free_port` describes it.

    Args:
        folder: Folder of the reservations; None reserves within this process.
        max_port: Largest port.
        owner: Name of the rank.

    Raises:
        RlhpcError: No free port was found.
        ValueError: `max_port` is out of its range.
    """
    if max_port is not None and not _FIRST_PORT <= max_port <= 65535:
        raise ValueError(f"acquire_free_port: max_port_num is {max_port}; allowed: {_FIRST_PORT} to 65535")
    for _ in range(_MAX_ATTEMPTS):
        # port 0 lets the kernel choose; `secrets` leaves the program's random numbers as they are
        port_number = 0 if max_port is None else _FIRST_PORT + secrets.randbelow(max_port - _FIRST_PORT + 1)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port_number))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port in _reserved_ports:
            continue
        if folder is None:
            _reserved_ports[port] = -1
            return port
        descriptor = _open_lock(folder / f"port-{port}")
        if _try_lock(descriptor, owner):
            _reserved_ports[port] = descriptor
            return port
        os.close(descriptor)
    raise RlhpcError(f"{owner} found no free port in {_MAX_ATTEMPTS} attempts (max_port_num={max_port})")
