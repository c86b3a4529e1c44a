"""Self-test of the sandbox: attempts of actions that a confined program must not be able to perform."""

# This file makes raw system calls, and pathlib would slow down the start.
# ruff: noqa: PTH123
from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable
from typing import Any


def _open_connection(targets: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", targets["port"]), 2).close()


def _send_signal(targets: dict[str, Any]) -> None:
    os.kill(targets["pid"], 0)


def _read_environment(targets: dict[str, Any]) -> None:
    with open(f"/proc/{targets['pid']}/environ", "rb") as file:
        file.read()


def _read_secret(targets: dict[str, Any]) -> None:
    with open(targets["secret"]) as file:
        file.read()


def _change_files(targets: dict[str, Any]) -> None:
    def create(path: str) -> None:
        with open(path, "w"):
            pass

    write_attempts: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (create, (targets["folder"] + "/new",)),
        (os.chmod, (targets["folder"], 0o700)),
        (os.truncate, (targets["secret"], 0)),
        (os.utime, (targets["secret"],)),
    ]
    for attempt, arguments in write_attempts:
        try:
            attempt(*arguments)
            return
        except OSError:
            continue
    raise PermissionError


def _fork_processes(targets: dict[str, Any]) -> None:
    num_processes = 1 if targets["processes"] == 1 else targets["processes"] + 64
    reader, writer = os.pipe()
    try:
        for _ in range(num_processes):
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
    finally:
        os.close(writer)


def _allocate_memory(targets: dict[str, Any]) -> None:
    bytearray(targets["memory"] + (64 << 20))


def _check_ipc_access(targets: dict[str, Any]) -> None:
    """Accesses IPC objects of the same user by number and by name."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(512)
    segment, queue, buffer_size = targets["ipc"]["segment"], targets["ipc"]["queue"], ctypes.c_size_t(8)
    return_codes = [
        libc.shmctl(segment, 2, buffer),  # IPC_STAT
        libc.msgctl(queue, 2, buffer),
        libc.msgrcv(queue, buffer, buffer_size, ctypes.c_long(0), 0o4000),
        libc.msgsnd(queue, struct.pack("lq", 1, 0), buffer_size, 0o4000),
        libc.mq_unlink(targets["ipc"]["name"].encode()) if hasattr(libc, "mq_unlink") else -1,
    ]
    if max(return_codes) < 0:
        raise PermissionError


def _check_unlimited(resource_kind: int) -> Callable[[dict[str, Any]], None]:
    def attempt_to_raise(targets: dict[str, Any]) -> None:
        if resource.getrlimit(resource_kind)[1] != resource.RLIM_INFINITY:
            raise PermissionError

    return attempt_to_raise


ATTEMPTS = {
    "network": _open_connection,
    "signals": _send_signal,
    "environments": _read_environment,
    "reading": _read_secret,
    "writing": _change_files,
    "processes": _fork_processes,
    "ipc": _check_ipc_access,
    "memory": _allocate_memory,
    "cpu": _check_unlimited(resource.RLIMIT_CPU),
    "file size": _check_unlimited(resource.RLIMIT_FSIZE),
    "open files": _check_unlimited(resource.RLIMIT_NOFILE),
}


def run_attempts(targets: dict[str, Any]) -> dict[str, bool]:
    """Makes all attempts; returns whether each attempt succeeded, by name of the limit."""
    possible_actions = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(targets)
            possible_actions[name] = True
        except (OSError, MemoryError):
            possible_actions[name] = False
    return possible_actions
