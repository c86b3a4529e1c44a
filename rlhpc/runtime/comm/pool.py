"""The writer's side of shared memory: segments that go from item to item as soon as all readers are done with one."""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from rlhpc.runtime.comm.copying import copy_into
from rlhpc.runtime.comm.segments import (
    ALIGN,
    FREE,
    HEADER,
    POPULATE,
    WRITTEN,
    Segment,
    await_readers,
    capacity_of,
    free_ended,
    layout,
    unlink,
)
from rlhpc.runtime.host import process_id
from rlhpc.runtime.scratch import Scratch

log = logging.getLogger(__name__)

_IOV_MAX = 512
#: Segments checked before a new one is made: the oldest in use are the likeliest to be free.
_LOOKS = 16
#: Segments in use that a pool keeps track of; what is written beyond them is forgotten as soon as its reader has come.
_MAX_BUSY = 4096
#: Two bytes of a segment's first page are no reader's.
_MAX_READERS = HEADER - 2
_MAX_ENDED = 4096
#: How often the readers of a segment in use are looked up: one that was killed does not say that it is done.
_CHECK_S = 5.0
_counter = itertools.count()


class SegmentPool:
    """The segments that this process writes. Any thread may call any method.

    Args:
        scratch: The session's folders on this host.
        max_idle: Bytes of free segments that are kept; by default a sixteenth of the shared memory, at most 2 GiB.
        patience: Seconds after which data for several readers is given up although one of them has not come.
    """

    def __init__(self, scratch: Scratch, max_idle: int | None = None, patience: float = 7200.0) -> None:
        self._scratch, self._patience = scratch, patience
        self._max_idle = default_idle(scratch) if max_idle is None else max_idle
        self._lock = threading.Lock()
        self._idle: dict[int, list[Segment]] = {}
        self._idle_bytes = 0
        self._busy: collections.deque[Segment] = collections.deque()
        self._by_path: dict[str, Segment] = {}
        self._warned = False
        #: Processes that have ended, the latest of them: what is written for one comes too late.
        self._ended: dict[str, None] = {}

    def write(
        self, buffers: Sequence[Any], readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Copies the buffers into a segment, as `spans_of` lays them out.

        Args:
            buffers: Flat, contiguous.
            readers: How many will read it; they are numbered from 0.
            keep: Keep it until `drop`, for readers that come later.
            holders: The readers' processes, see `Segment`.

        Returns:
            Path, and (offset, length) of each buffer.

        Raises:
            OSError: Neither the shared memory nor the spill folder has room.
        """
        if readers > _MAX_READERS:
            raise ValueError(f"a segment has at most {_MAX_READERS} readers, not {readers}")
        spans, size = layout(buffers)
        capacity = capacity_of(size)
        segment = self._take(capacity)
        if segment is None:
            segment = self._make(capacity, size, buffers)
        else:
            starts = (start for start, _ in spans)
            copy_into(segment.memory, zip(starts, buffers, strict=True))
        self._hold(segment, readers, keep, holders)
        return segment.path, spans

    def reserve(self, size: int, readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()) -> Segment:
        """A segment for `size` bytes that somebody else writes, into its `memory` from `HEADER` on; the rest as in `write`.

        Raises:
            OSError: Neither the shared memory nor the spill folder has room.
        """
        capacity = capacity_of(size)
        segment = self._take(capacity) or self._make(capacity, size, None)
        self._hold(segment, readers, keep, holders)
        return segment

    def _hold(self, segment: Segment, readers: int, keep: bool = False, holders: Sequence[str] = ()) -> None:
        segment.readers, segment.holders, segment.written = readers, holders, time.monotonic()
        await_readers(segment.memory, readers, keep)
        with self._lock:
            if not keep:
                self._busy.append(segment)
            self._by_path[segment.path] = segment
            for slot, holder in enumerate(holders):
                if holder in self._ended:
                    segment.memory[slot : slot + 1] = FREE

    def memory(self, path: str) -> mmap.mmap | None:
        """The memory that a segment of this process is mapped to, while the pool keeps track of it."""
        with self._lock:
            segment = self._by_path.get(path)
        return None if segment is None else segment.memory

    def awaited(self, path: str) -> list[bool]:
        """Which readers of a segment have not come yet; empty once the pool has it back."""
        with self._lock:
            segment = self._by_path.get(path)
        return [] if segment is None else [state == WRITTEN[0] for state in segment.memory[: segment.readers]]

    def drop(self, path: str) -> None:
        """Ends a kept segment. It is not written again, because readers that have mapped it still use it."""
        with self._lock:
            del self._by_path[path]
        unlink(path)

    def forget_process(self, process: str) -> None:
        """Frees what was written for a process that has ended (`host.process_key`), whether it had come for it or not.

        Its segments are not written again: should it live after all, it sees what it saw before.
        """
        with self._lock:
            self._ended[process] = None
            if len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            for segment in list(self._by_path.values()):
                slots = [slot for slot, holder in enumerate(segment.holders) if holder == process]
                for slot in slots:
                    if segment.memory[slot : slot + 1] != FREE:
                        segment.memory[slot : slot + 1] = FREE
                        segment.pooled = False
                if slots and segment.free() and segment in self._busy:
                    self._busy.remove(segment)
                    self._retire(segment)

    def release(self, path: str, reader: int) -> None:
        """Marks the segment as read by a reader that cannot map it."""
        with self._lock:
            segment = self._by_path.get(path)
        if segment is not None:
            segment.memory[reader : reader + 1] = FREE

    def close(self) -> None:
        """Removes the segments that nobody needs; the rest goes with the session's folder."""
        with self._lock:
            for segment in [*self._by_path.values(), *(one for idle in self._idle.values() for one in idle)]:
                if segment.free():
                    unlink(segment.path)
            self._busy.clear()
            self._by_path.clear()
            self._idle.clear()

    # -- finding one ----------------------------------------------------------------------------------------------

    def _take(self, capacity: int) -> Segment | None:
        """A free segment of this size."""
        with self._lock:
            for _ in range(len(self._busy) if len(self._busy) > _MAX_BUSY else min(_LOOKS, len(self._busy))):
                if self._idle.get(capacity):
                    break
                self._look()
            if self._idle.get(capacity):
                self._idle_bytes -= capacity
                return self._idle[capacity].pop()
        return None

    def _look(self) -> None:
        """Checks the segment that has been in use longest."""
        segment = self._busy.popleft()
        now = time.monotonic()
        if now - max(segment.written, segment.checked) > _CHECK_S:
            segment.checked = now
            free_ended(segment.memory, segment.readers)
        if segment.free():
            self._retire(segment)
            return
        awaited = segment.awaited()
        expired = segment.readers > 1 and now - segment.written > self._patience
        if (
            (len(self._busy) >= _MAX_BUSY and not awaited)
            or (not segment.pooled and not awaited)
            or (awaited and expired)
        ):
            self._forget(segment)
        else:
            self._busy.append(segment)

    def _retire(self, segment: Segment) -> None:
        """Keeps a free segment, and removes those that have been idle longest if there are too many."""
        del self._by_path[segment.path]
        if not segment.pooled:
            unlink(segment.path)
            return
        self._idle.setdefault(segment.capacity, []).append(segment)
        self._idle_bytes += segment.capacity
        while self._idle_bytes > self._max_idle:
            largest = max(capacity for capacity, segments in self._idle.items() if segments)
            unlink(self._idle[largest].pop(0).path)
            self._idle_bytes -= largest

    def _forget(self, segment: Segment) -> None:
        del self._by_path[segment.path]
        unlink(segment.path)

    # -- making one -----------------------------------------------------------------------------------------------

    def _make(self, capacity: int, size: int, buffers: Sequence[Any] | None) -> Segment:
        """A new segment with the data. It is written rather than mapped and copied into: no page is zeroed first, and a
        full /dev/shm is an error instead of a SIGBUS. Without `buffers` its pages are there, and mapped."""
        chunks: list[Any] = [b"\0" * HEADER]
        for buffer in buffers or ():
            chunks += [buffer, b"\0" * (-len(buffer) % ALIGN)]
        name = f"{process_id()}-{next(_counter)}"
        for folder in (self._scratch.shm, self._scratch.spill):
            path, spilled = str(folder / name), folder == self._scratch.spill
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, chunks)
                written = HEADER + (0 if buffers is None else size)
                length = HEADER + (size if spilled else capacity)
                if length > written:
                    os.posix_fallocate(fd, written, length - written)
                flags = mmap.MAP_SHARED | (POPULATE if buffers is None else 0)
                return Segment(path, capacity, mmap.mmap(fd, length, flags=flags), pooled=not spilled)
            except OSError as error:
                os.unlink(path)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or spilled:
                    raise
                self._make_room()
                if not self._warned:
                    log.warning(
                        "%s is full: payloads go through files in %s (slower)", self._scratch.shm, self._scratch.spill
                    )
                    self._warned = True
            finally:
                os.close(fd)
        raise AssertionError("unreachable")

    def _make_room(self) -> None:
        """Frees all idle segments, because others need the room more."""
        with self._lock:
            for segments in self._idle.values():
                for segment in segments:
                    unlink(segment.path)
                segments.clear()
            self._idle_bytes = 0


def default_idle(scratch: Scratch) -> int:
    try:
        about = os.statvfs(scratch.shm)
    except OSError:
        return 256 << 20
    return min(2 << 30, about.f_blocks * about.f_frsize // 16)


def _write_all(fd: int, chunks: list[Any]) -> None:
    views = [memoryview(c).cast("B") for c in chunks if len(c)]
    while views:
        written = os.writev(fd, views[:_IOV_MAX])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
