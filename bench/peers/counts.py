"""Counts of a process's messages, and of its operations on files below a folder, for the model of `bench.scale_model`.

Imported by the driver, and by the fork server before it forks (`Session(preload=["bench.peers.counts"])`), so that every
process of a session counts them. `take` returns the counts since its last call. Heartbeats, the driver's regular checks of
the registry, and checks during a long wait whether a rank has left depend on time, not on the run's work. They have separate
keys (`TIMED`).
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlhpc.runtime.registry import DEPARTED

#: Folder whose files are counted.
_ROOT = os.environ.get("RLHPC_BENCH_COUNT_ROOT", "")
#: Counts that grow with time: heartbeats, phases of the start, operations of the driver's thread that watches the registry,
#: and reads of records of departed ranks.
TIMED = ("request NOTE alive", "request NOTE phase", "request NOTE", "file watch", "file departure")
#: Method that reads the counts of a rank; its messages are not counted.
READER = "take_counts"
_FILE_FUNCTIONS = (
    "open", "stat", "lstat", "rename", "replace", "unlink", "mkdir", "scandir", "listdir", "link", "chmod",
)  # fmt: skip

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_bytes: Counter[str] = Counter()
_installed = False


def size_of(frames: Any) -> int:
    """Returns the bytes of a message's frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def add_count(kind: str, num_bytes: int = 0, number: int = 1) -> None:
    """Adds to the counts of this process."""
    with _lock:
        _counts[kind] += number
        _bytes[kind] += num_bytes


def take_counts() -> tuple[dict[str, int], dict[str, int]]:
    """Returns the numbers and the bytes by kind since the last call."""
    with _lock:
        result = dict(_counts), dict(_bytes)
        _counts.clear()
        _bytes.clear()
    return result


def _wrap(owner: Any, name: str, count_before: Callable[..., None]) -> None:
    original_method: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        count_before(*args, **kwargs)
        return original_method(*args, **kwargs)

    setattr(owner, name, counted)


def _count_file(name: str) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if not _ROOT or not args or isinstance(args[0], int) or not os.fspath(args[0]).startswith(_ROOT):
            return
        is_watch = threading.current_thread().name in ("rlhpc-registry", "rlhpc-log-sizes")
        is_departure = f"/{DEPARTED}/" in os.fspath(args[0])
        add_count("file watch" if is_watch else "file departure" if is_departure else f"file {name}")

    return before


def _count_call(_: Any, record: Any, frames: list[Any]) -> None:
    if not bytes(frames[1]).startswith(READER.encode()):
        add_count("request CALL", size_of(frames))


def _count_answer(_: Any, caller: Any, frames: list[Any]) -> None:
    add_count("request ANSWER", size_of(frames))


def _count_request(_: Any, endpoint: str, frames: list[Any], *__: Any) -> None:
    operation = bytes(frames[1]).decode()
    if operation == "NOTE":
        note = bytes(frames[2])
        operation += next((f" {event.decode()}" for event in (b"alive", b"phase") if event in note), "")
    add_count(f"request {operation}", size_of(frames))


def _count_reply(_: Any, peer: Any, frames: list[Any]) -> None:
    add_count("request REPLY", size_of(frames))


def install(root: str) -> None:
    """Starts counting in this process and in processes that it forks."""
    global _ROOT, _installed
    _ROOT = root
    if _installed:
        return
    _installed = True
    from rlhpc.runtime.comm.service import Service
    from rlhpc.runtime.comm.zmq_sockets import Peers
    from rlhpc.runtime.rpc import CallReceiver, CallSender

    _wrap(CallSender, "send", _count_call)
    _wrap(CallReceiver, "answer", _count_answer)
    _wrap(Peers, "_send", _count_request)
    _wrap(Service, "reply", _count_reply)
    fetch = Peers.fetch

    def counted_fetch(self: Peers, endpoint: str, path: str, start: int, target: memoryview, **options: Any) -> bool:
        if is_done := fetch(self, endpoint, path, start, target, **options):
            add_count("fetch", len(target))
        return is_done

    Peers.fetch = counted_fetch  # type: ignore[method-assign]
    for name in _FILE_FUNCTIONS:
        _wrap(os, name, _count_file(name))
    _wrap(io, "open", _count_file("open"))
    builtins.open = io.open
    pathlib.io.open = io.open  # type: ignore[attr-defined]


if _ROOT:
    install(_ROOT)
