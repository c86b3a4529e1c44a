"""Large copies, by several threads where the process may use several cores: one core alone cannot fill a memory bus."""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

#: Below this a copy is over before another thread has woken up.
_WORTH_IT = 8 << 20
#: Bytes that a thread copies at a time.
_PIECE = 2 << 20
#: Bytes that are copied without letting go of the interpreter's lock: there may be hundreds of such buffers.
_SMALL = 64 << 10
#: Most threads; more would add little, and there are other users on the machine.
_MAX_THREADS = 4

_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_helpers: list[threading.Thread] = []


def copy_into(memory: mmap.mmap, pieces: Iterable[tuple[int, Any]]) -> None:
    """Copies buffers to offsets of `memory`.

    Args:
        memory: Bytes.
        pieces: Offset and buffer (flat, contiguous) of each.
    """
    target, parts = np.frombuffer(memory, np.uint8), list[tuple[int, np.ndarray]]()
    for start, buffer in pieces:
        if (size := len(buffer)) > _SMALL:
            parts.append((start, np.frombuffer(buffer, np.uint8)))
        else:
            memory[start : start + size] = buffer
    threads = (
        min(len(os.sched_getaffinity(0)), _MAX_THREADS) if sum(len(source) for _, source in parts) >= _WORTH_IT else 1
    )
    if threads == 1:
        for start, source in parts:
            target[start : start + len(source)] = source
        return
    cut = [(start + at, source[at : at + _PIECE]) for start, source in parts for at in range(0, len(source), _PIECE)]
    turns, done = itertools.count(), threading.Semaphore(0)

    def work() -> None:
        # Pieces are handed out under the interpreter's lock; the copies themselves release it.
        while (turn := next(turns)) < len(cut):
            start, source = cut[turn]
            target[start : start + len(source)] = source

    def help_out() -> None:
        try:
            work()
        finally:
            done.release()

    while len(_helpers) < threads - 1:
        _helpers.append(threading.Thread(target=_help, name="rlhpc-copy", daemon=True))
        _helpers[-1].start()
    for _ in range(threads - 1):
        _jobs.put(help_out)
    try:
        work()
    finally:
        for _ in range(threads - 1):
            done.acquire()


def _help() -> None:
    while True:
        _jobs.get()()


def _forget_helpers() -> None:
    """After a fork: the helpers stay behind in the parent, and one of them may have held the queue's lock."""
    global _jobs
    _jobs = queue.SimpleQueue()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget_helpers)
