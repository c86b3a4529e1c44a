"""What the kernel does for a process when its parent, or its child, ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent dies; exits at once if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undoes `die_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Makes orphans among this process's descendants its own children, so that it can end and reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
