"""What a confined program must not be able to do. Each attempt says whether it got through."""

# Raw calls are the subject here, and pathlib would make the start slower.
# ruff: noqa: PTH123
from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable
from typing import Any


def _network(known: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", known["port"]), 2).close()


def _signals(known: dict[str, Any]) -> None:
    os.kill(known["pid"], 0)


def _environments(known: dict[str, Any]) -> None:
    with open(f"/proc/{known['pid']}/environ", "rb") as file:
        file.read()


def _reading(known: dict[str, Any]) -> None:
    with open(known["secret"]) as file:
        file.read()


def _writing(known: dict[str, Any]) -> None:
    def create(path: str) -> None:
        with open(path, "w"):
            pass

    tries: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (create, (known["folder"] + "/new",)),
        (os.chmod, (known["folder"], 0o700)),
        (os.truncate, (known["secret"], 0)),
        (os.utime, (known["secret"],)),
    ]
    for attempt, arguments in tries:
        try:
            attempt(*arguments)
            return
        except OSError:
            continue
    raise PermissionError


def _processes(known: dict[str, Any]) -> None:
    most = 1 if known["processes"] == 1 else known["processes"] + 64
    reader, writer = os.pipe()
    try:
        for _ in range(most):
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
    finally:
        os.close(writer)


def _memory(known: dict[str, Any]) -> None:
    bytearray(known["memory"] + (64 << 20))


def _ipc(known: dict[str, Any]) -> None:
    """Objects of the same user: to know a number or a name is enough."""
    libc, room = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(512)
    segment, queue, size = known["ipc"]["segment"], known["ipc"]["queue"], ctypes.c_size_t(8)
    results = [
        libc.shmctl(segment, 2, room),  # IPC_STAT
        libc.msgctl(queue, 2, room),
        libc.msgrcv(queue, room, size, ctypes.c_long(0), 0o4000),
        libc.msgsnd(queue, struct.pack("lq", 1, 0), size, 0o4000),
        libc.mq_unlink(known["ipc"]["name"].encode()) if hasattr(libc, "mq_unlink") else -1,
    ]
    if max(results) < 0:
        raise PermissionError


def _unlimited(kind: int) -> Callable[[dict[str, Any]], None]:
    def attempt(known: dict[str, Any]) -> None:
        if resource.getrlimit(kind)[1] != resource.RLIM_INFINITY:
            raise PermissionError

    return attempt


ATTEMPTS = {
    "network": _network,
    "signals": _signals,
    "environments": _environments,
    "reading": _reading,
    "writing": _writing,
    "processes": _processes,
    "ipc": _ipc,
    "memory": _memory,
    "cpu": _unlimited(resource.RLIMIT_CPU),
    "file size": _unlimited(resource.RLIMIT_FSIZE),
    "open files": _unlimited(resource.RLIMIT_NOFILE),
}


def attempts(known: dict[str, Any]) -> dict[str, bool]:
    """Whether each attempt got through, by the name of the limit."""
    through = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(known)
            through[name] = True
        except (OSError, MemoryError):
            through[name] = False
    return through
