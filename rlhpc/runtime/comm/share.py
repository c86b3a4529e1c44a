"""One copy per host: of the receivers of a message on one host, the first fetches it for all.

They meet in a small file. Whoever holds its lock either fetches, or reads which segment holds the data; when the process
that fetches dies, the kernel gives the lock to the next, which finds the file empty and fetches itself.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlhpc.runtime.errors import DeadlineExceeded

#: The first receiver has memory that is still warm from last time; the others give it this long to come.
_PRECEDENCE_S = 0.05
_PAUSE_S = 0.001


class Share(NamedTuple):
    """A receiver's place among the receivers on its host.

    Attributes:
        name: Name of the message on this host.
        number, of: Which receiver this is, of how many.
        holders: Their processes (`host.process_key`), where these are known.
    """

    name: str
    number: int
    of: int
    holders: tuple[str, ...] = ()


def once_for_all(
    folder: Path, share: Share, fetch: Callable[[], str], check: Callable[[], None], timeout: float = 600.0
) -> str:
    """Fetches the message, or waits for the receiver that does; returns the path of its segment on this host.

    Args:
        folder: The session's folder on this host.
        share: The receiver that asks.
        fetch: Gets the message into a segment for all of them; called by one.
        check: Called while waiting; raises when the run has failed.
        timeout: Seconds.

    Raises:
        DeadlineExceeded: Another receiver on this host was fetching all that time.
    """
    meeting = folder / f"share-{share.name}"
    started = time.monotonic()
    while share.number and not meeting.exists() and time.monotonic() - started < _PRECEDENCE_S:
        time.sleep(_PAUSE_S)
    fd = os.open(meeting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _lock(fd):
            check()
            if time.monotonic() - started > timeout:
                raise DeadlineExceeded(f"waited {timeout:.0f} s for another rank of this host to fetch {share.name}")
            time.sleep(_PAUSE_S)
        come, _, path = os.pread(fd, 4096, 0).decode().partition(" ")
        path = path or fetch()
        number = int(come or 0) + 1
        if number == share.of:
            meeting.unlink(missing_ok=True)
        else:
            os.pwrite(fd, f"{number} {path}".encode(), 0)
        return path
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
