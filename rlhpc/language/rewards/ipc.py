"""System V and POSIX objects for a sandboxed program to try its hands on."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
from collections.abc import Iterator
from typing import Any

_PRIVATE, _REMOVE, _CREATE = 0, 0, 0o100 | 0o2


@contextlib.contextmanager
def objects() -> Iterator[dict[str, Any]]:
    """A segment, a queue with one message, and a named queue; what a program needs to know of them.

    What this kernel does not offer has the number -1.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(_PRIVATE, ctypes.c_size_t(4096), 0o600)
    place = libc.shmat(segment, None, 0) if segment >= 0 else None
    if segment >= 0:
        libc.shmctl(segment, _REMOVE, None)  # it goes with this process, however that ends; until then it is there
    queue = libc.msgget(_PRIVATE, 0o600)
    name = f"/rlhpc-try-{secrets.token_hex(8)}"
    named = libc.mq_open(name.encode(), _CREATE, 0o600, None) if hasattr(libc, "mq_open") else -1
    try:
        if queue >= 0:
            libc.msgsnd(queue, ctypes.c_char_p(bytes([1, *bytes(15)])), ctypes.c_size_t(8), 0)
        yield {"segment": segment, "queue": queue, "name": name}
    finally:
        if place is not None:
            libc.shmdt(ctypes.c_void_p(place))
        if queue >= 0:
            libc.msgctl(queue, _REMOVE, None)
        if named >= 0:
            libc.mq_close(named)
            libc.mq_unlink(name.encode())
