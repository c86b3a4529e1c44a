"""The reader's side of shared memory: segments of other processes, kept mapped."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from rlhpc.runtime.comm.segments import FREE, POPULATE, begin_use, map_private, map_segment
from rlhpc.runtime.device import locked, locks_pages


class Mappings:
    """The segments of other processes that this one has mapped. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}
        self._pages: dict[str, Any] = {}  # what keeps those of a segment locked
        self._sweep_at = 16

    def lease(self, path: str, reader: int, *, own: bool = True) -> memoryview:
        """The data of a segment; it is the reader's until the last view of it is gone.

        Args:
            path: The segment.
            reader: Number of this reader.
            own: Nobody else reads it, or nobody writes to it: the view is of the segment itself. Otherwise it is a
                private one, where what is written stays here.

        Raises:
            SegmentGone: It is not there any more.
        """
        shared = self._map(path)
        begin_use(shared, reader)
        memory = shared if own else map_private(path)
        # A weak reference tells when the last tensor, array or slice that looks into this view is gone.
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, _clear, shared, reader).atexit = False
        return view.data

    def lock(self, path: str) -> None:
        """Has an accelerator of this process, if there is one, copy from a leased segment without the CPU's help; once for as
        long as it stays mapped, for that takes longer than a copy."""
        with self._lock:
            memory = self._mapped.get(path)
            if memory is not None and path not in self._pages and locks_pages():
                self._pages[path] = locked(memory)

    def _map(self, path: str) -> mmap.mmap:
        with self._lock:
            found = self._mapped.get(path)
            if found is None:
                if len(self._mapped) >= self._sweep_at:
                    self._sweep()
                found = self._mapped[path] = map_segment(path, mmap.MAP_SHARED | POPULATE)
            return found

    def _sweep(self) -> None:
        """Unmaps segments that their writers have given up, so that their memory is freed once nobody uses it."""
        self._mapped = {path: memory for path, memory in self._mapped.items() if os.path.exists(path)}
        self._pages = {path: pages for path, pages in self._pages.items() if path in self._mapped}
        self._sweep_at = max(16, 2 * len(self._mapped))


def _clear(memory: mmap.mmap, reader: int) -> None:
    memory[reader : reader + 1] = FREE
