"""Where data from other hosts arrives if only this process reads it: private memory in huge pages, reused.

On most systems shared memory has small pages, and the kernel takes a quarter more time to receive into them.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np

from rlhpc.runtime.comm.segments import capacity_of
from rlhpc.runtime.device import locked, locks_pages

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class Landing:
    """Memory that is lent out and returns by itself. Any thread may call any method.

    Args:
        max_idle: Bytes of free memory that are kept.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        # Reentrant: memory may return while this thread collects garbage in `take`.
        self._lock = threading.RLock()
        #: Memory, and what keeps its pages locked, if they are.
        self._idle: dict[int, list[tuple[mmap.mmap, Any]]] = {}
        self._idle_bytes = 0

    def take(self, size: int, *, lock: bool = False) -> memoryview:
        """Writable memory of `size` bytes, which returns when the last view of it is gone.

        Args:
            size: Bytes.
            lock: An accelerator of this process, if there is one, is to copy from there without the CPU's help.
        """
        capacity = capacity_of(size)
        with self._lock:
            waiting = self._idle.get(capacity)
            memory, pages = waiting.pop() if waiting else (None, None)
            self._idle_bytes -= capacity if memory is not None else 0
        if memory is None:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if _HUGE_PAGES is not None:
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(_HUGE_PAGES)
        if lock and pages is None and locks_pages():
            pages = locked(memory)
        view = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(view, self._back, capacity, memory, pages).atexit = False
        return view.data

    def _back(self, capacity: int, memory: mmap.mmap, pages: Any) -> None:
        with self._lock:
            if self._idle_bytes + capacity <= self._max_idle:
                self._idle.setdefault(capacity, []).append((memory, pages))
                self._idle_bytes += capacity
