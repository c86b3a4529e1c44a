"""Reusable shared-memory segments: file layout, the writer's pool and the reader's mappings.

Allocating a page takes longer than copying data into it, so a segment stays mapped at both ends and is reused for later
items. Its first page has one byte per reader with the reader's state. The writer sets all bytes after it has written the
data. A reader sets its byte when it has mapped the segment, and clears the byte when the last object that refers to the data
is deleted. Only one process at a time writes to a byte, so neither a lock nor a message is needed.

    0  free          1  written, not mapped by this reader yet          2  in use by this reader

The page's last byte is 3 while the writer keeps the segment for readers that may arrive later. The byte before it is 1 if
the page also records the process (pid and PID namespace) of each reader that uses the data, for up to 256 readers. With this
record the writer frees data that a killed process was using.

A reader keeps its mapping. Once all readers have mapped the segment, the writer may therefore unlink and forget the segment.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import logging
import mmap
import os
import queue
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.runtime.devices import locked_tensor, locks_pages
from rlhpc.runtime.host import has_ended, pid_namespace, process_id
from rlhpc.runtime.scratch import Scratch

#: The first page: one byte per reader.
HEADER = mmap.PAGESIZE
FREE, WRITTEN, USED, RETAINED = b"\0", b"\1", b"\2", b"\3"
ALIGN = 64
#: Separator of the two paths in `Packed.segment` if a message uses both a segment and an accelerator buffer.
PATH_SEPARATOR = "\n"
POPULATE = getattr(mmap, "MAPPOPULATE", 0)
#: Maximum number of readers whose processes the first page can record.
MAX_TRACKED = 256
_PROCESS = struct.Struct("II")
_TRACKS, _TABLE = HEADER - 2, HEADER - 8 - MAX_TRACKED * _PROCESS.size
_NAME = re.compile(r"(\d+\.\d+)-\d+")


class SegmentGone(Exception):
    """Error: the segment was unlinked before it was read, because its owner died or freed it."""


def unlink(path: str) -> None:
    """Removes a segment's file, if it still exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def capacity_of(num_bytes: int) -> int:
    """Returns the capacity of a segment for `num_bytes` bytes.

    The size is rounded up in steps of about an eighth of it, so that data of similar size can reuse the segment.
    """
    step = _find_capacity_step(num_bytes)
    return -(-num_bytes // step) * step


def largest_size_within(capacity: int) -> int:
    """Returns the largest size for which `capacity_of` returns at most `capacity`; 0 below a page."""
    step = _find_capacity_step(capacity)
    return capacity // step * step


def _find_capacity_step(num_bytes: int) -> int:
    return max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 4))


def spans_of(buffer_sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (offset, size) in a segment for buffers of these sizes, aligned to 64 bytes."""
    spans, offset = [], HEADER
    for buffer_size in buffer_sizes:
        spans.append((offset, buffer_size))
        offset += buffer_size + -buffer_size % ALIGN
    return spans


def layout(buffers: Sequence[Any]) -> tuple[list[tuple[int, int]], int]:
    """Returns (offset, length) of each buffer in a segment, and their total size including padding."""
    spans = spans_of(len(buffer) for buffer in buffers)
    return spans, sum(buffer_bytes + -buffer_bytes % ALIGN for _, buffer_bytes in spans)


def await_readers(page: mmap.mmap, num_readers: int, keeps_segment: bool = False) -> None:
    """Marks readers 0 to `readers - 1` as awaited; called by the writer while no process reads the segment."""
    tracks = b"\1" if num_readers <= MAX_TRACKED else FREE
    page[_TRACKS:HEADER] = tracks + (RETAINED if keeps_segment else FREE)
    page[:num_readers] = WRITTEN * num_readers


def begin_use(page: mmap.mmap, reader: int) -> None:
    """Marks the data as in use by a reader, which is this process."""
    if reader < MAX_TRACKED and page[_TRACKS]:
        _PROCESS.pack_into(page, _TABLE + _PROCESS.size * reader, os.getpid(), pid_namespace() & 0xFFFFFFFF)
    page[reader : reader + 1] = USED


def end_use(page: mmap.mmap, reader: int) -> None:
    """Marks the data as free for a reader that has finished or will never read the data."""
    page[reader : reader + 1] = FREE


def awaited_readers(page: mmap.mmap, num_readers: int) -> list[bool]:
    """Returns for each reader whether it still has to map the segment."""
    return [reader_state == WRITTEN[0] for reader_state in page[:num_readers]]


def free_ended(page: mmap.mmap, num_readers: int) -> None:
    """Frees data that was in use by readers whose processes have ended; called by the writer."""
    if not page[_TRACKS]:
        return
    for reader in range(num_readers):
        if page[reader] == USED[0]:
            pid, namespace = _PROCESS.unpack_from(page, _TABLE + _PROCESS.size * reader)
            if has_ended(f"{pid}.{namespace}") and page[reader] == USED[0]:
                end_use(page, reader)


class ShmSegment:
    """Shared-memory segment of the process that writes it.

    Attributes:
        path: Path of its file.
        capacity: Maximum number of bytes of data.
        readers: Number of readers of the current data.
        holders: For each reader, the reader's process or the process that stores its message (`host.process_key`); "" if the
            process is unknown. When the process ends, the data is free for this reader.
        last_check: Time (`time.monotonic`) at which the writer last checked whether readers have ended.
        is_pooled: Whether the segment may be reused; a segment on disk may not.
        write_time: Time (`time.monotonic`) at which the current data was written.
        locked: Page-locked tensor over the memory, which must live as long as the segment.
    """

    __slots__ = ("capacity", "holders", "last_check", "locked", "memory", "path", "pooled", "readers", "write_time")

    def __init__(self, path: str, capacity: int, memory: mmap.mmap, is_pooled: bool) -> None:
        self.path, self.capacity, self.memory, self.pooled = path, capacity, memory, is_pooled
        self.readers, self.write_time, self.last_check = 0, 0.0, 0.0
        self.holders: Sequence[str] = ()
        self.locked: Any = None

    def free(self) -> bool:
        """Returns whether all readers have finished with the data."""
        return self.memory[: self.readers] == FREE * self.readers

    def has_pending_readers(self) -> bool:
        """Returns whether any reader has not mapped the segment yet."""
        return WRITTEN in self.memory[: self.readers]


def map_segment(path: str, flags: int) -> mmap.mmap:
    """Maps a segment for reading and writing.

    Raises:
        SegmentGone: The segment no longer exists.
        PermissionError: The segment belongs to another user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise SegmentGone(path) from None
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "a segment of another user's", path)
        return mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def map_private(path: str) -> mmap.mmap:
    """Maps a segment privately, so that other processes do not see writes to the memory.

    Raises:
        SegmentGone: The segment no longer exists.
    """
    # without MAP_POPULATE, which would copy every page at once
    return map_segment(path, mmap.MAP_PRIVATE)


def discard(path: str, reader: int = 0) -> None:
    """Frees a message's segments for a reader that will not read them; ignores segments of other hosts.

    Args:
        path: Path of the segment, or two paths separated by `PATH_SEPARATOR`.
        reader: Number of the reader.
    """
    for segment_path in path.split(PATH_SEPARATOR):
        try:
            fd = os.open(segment_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            os.pwrite(fd, FREE, reader)
        finally:
            os.close(fd)


def _segments(folder: Path) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yields for each segment in a folder its path, the writer's process id, the readers' bytes, and whether it is kept."""
    for dir_entry in os.scandir(folder) if folder.is_dir() else ():
        if (name := _NAME.fullmatch(dir_entry.name)) is not None:
            with contextlib.suppress(OSError), open(dir_entry.path, "rb") as file:
                page = file.read(HEADER).ljust(HEADER, FREE)
                reader_states = page[:MAX_TRACKED] if page[_TRACKS] else page[:_TRACKS]
                yield dir_entry.path, name[1], reader_states, page[-1:] == RETAINED


def bytes_in_use(folder: Path) -> int:
    """Returns the total size in bytes of a folder's segments whose data is still in use."""
    num_bytes = 0
    for path, _, reader_states, is_kept in _segments(folder):
        with contextlib.suppress(OSError):
            num_bytes += os.stat(path).st_size if is_kept or reader_states.strip(FREE) else 0
    return num_bytes


def segments_in_use(folder: Path, process_id: str) -> int:
    """Returns the number of segments that a process has written and whose data is still in use."""
    return sum(
        writer == process_id and (is_kept or bool(reader_states.strip(FREE)))
        for _, writer, reader_states, is_kept in _segments(folder)
    )


def remove_idle_of_the_dead(folder: Path) -> None:
    """Removes idle segments left by processes that were killed on this host."""
    for path, writer, reader_states, _ in _segments(folder):
        if not reader_states.strip(FREE) and has_ended(writer):
            unlink(path)


#: Minimum bytes for a copy with several threads: a smaller copy ends before another thread has woken up.
_MIN_THREADED_BYTES = 8 << 20
#: Bytes that a thread copies at a time.
_COPY_BYTES = 2 << 20
#: Maximum bytes of a buffer that is copied without releasing the GIL; a message may have hundreds of such buffers.
_MAX_SINGLE_COPY = 64 << 10
#: Maximum number of copy threads; more threads would copy little faster, and other processes need cores too.
_MAX_THREADS = 4

_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_copy_threads: list[threading.Thread] = []


def copy_into(memory: mmap.mmap, placed_buffers: Iterable[tuple[int, Any]]) -> None:
    """Copies buffers to offsets in `memory`; uses several threads for large data.

    Args:
        memory: Memory to write to.
        placed_buffers: Pairs (offset, buffer); buffers are flat and contiguous.
    """
    target, large_buffers = np.frombuffer(memory, np.uint8), list[tuple[int, np.ndarray]]()
    for buffer_start, buffer in placed_buffers:
        if (buffer_size := len(buffer)) > _MAX_SINGLE_COPY:
            large_buffers.append((buffer_start, np.frombuffer(buffer, np.uint8)))
        else:
            memory[buffer_start : buffer_start + buffer_size] = buffer
    threads = (
        min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        if sum(len(source_view) for _, source_view in large_buffers) >= _MIN_THREADED_BYTES
        else 1
    )
    if threads == 1:
        for buffer_start, source_view in large_buffers:
            target[buffer_start : buffer_start + len(source_view)] = source_view
        return
    chunks = [
        (buffer_start + offset, source_view[offset : offset + _COPY_BYTES])
        for buffer_start, source_view in large_buffers
        for offset in range(0, len(source_view), _COPY_BYTES)
    ]
    next_chunk, finished_threads = itertools.count(), threading.Semaphore(0)

    def copy_chunks() -> None:
        # Threads take chunks under the GIL; the copies themselves release it.
        while (chunk_index := next(next_chunk)) < len(chunks):
            chunk_start, source_view = chunks[chunk_index]
            target[chunk_start : chunk_start + len(source_view)] = source_view

    def help_to_copy() -> None:
        try:
            copy_chunks()
        finally:
            finished_threads.release()

    while len(_copy_threads) < threads - 1:
        _copy_threads.append(threading.Thread(target=_run_jobs, name="rlhpc-copy", daemon=True))
        _copy_threads[-1].start()
    for _ in range(threads - 1):
        _jobs.put(help_to_copy)
    try:
        copy_chunks()
    finally:
        for _ in range(threads - 1):
            finished_threads.acquire()


def _run_jobs() -> None:
    while True:
        _jobs.get()()


def _reset_copy_threads() -> None:
    """Resets the copy threads after a fork: they exist only in the parent, and a thread may have held the queue's lock."""
    global _jobs
    _jobs = queue.SimpleQueue()
    _copy_threads.clear()


os.register_at_fork(after_in_child=_reset_copy_threads)


class Mappings:
    """Mappings of segments that other processes have written. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[str, mmap.mmap] = {}
        self._pages: dict[str, Any] = {}  # tensors that keep the pages of a segment locked
        self._sweep_at = 16

    def lease(self, path: str, reader: int, *, in_place: bool = True) -> memoryview:
        """Returns a view of a segment. The segment stays in use by the reader until the last reference to the view is deleted.

        Args:
            path: Path of the segment.
            reader: Number of this reader.
            in_place: Return a view of the shared memory itself; for callers that only read, or if no other process reads the
                segment. Otherwise return a view of a private mapping, so that other processes do not see writes.

        Raises:
            SegmentGone: The segment no longer exists.
        """
        shared_segment = self._map(path)
        begin_use(shared_segment, reader)
        memory = shared_segment if in_place else map_private(path)
        # The finalizer runs when the last tensor, array or slice of this view is deleted.
        memory_view = np.frombuffer(memory, np.uint8)
        weakref.finalize(memory_view, end_use, shared_segment, reader).atexit = False
        return memory_view.data

    def lock(self, path: str) -> None:
        """Page-locks a mapped segment, so that this process's accelerator copies from it by DMA.

        Locks a segment once for as long as it is mapped, because locking takes longer than a copy. Does nothing if this
        process uses no accelerator.
        """
        with self._lock:
            memory = self._mappings.get(path)
            if memory is not None and path not in self._pages and locks_pages():
                self._pages[path] = locked_tensor(memory)

    def _map(self, path: str) -> mmap.mmap:
        with self._lock:
            memory = self._mappings.get(path)
            if memory is None:
                if len(self._mappings) >= self._sweep_at:
                    self._sweep()
                memory = self._mappings[path] = map_segment(path, mmap.MAP_SHARED | POPULATE)
            return memory

    def _sweep(self) -> None:
        """Forgets removed segments, so that their memory is freed once no view refers to it."""
        self._mappings = {path: memory for path, memory in self._mappings.items() if os.path.exists(path)}
        self._pages = {path: pages for path, pages in self._pages.items() if path in self._mappings}
        self._sweep_at = max(16, 2 * len(self._mappings))


log = logging.getLogger(__name__)

#: Number of segments in use, oldest first, that are checked before a new one is created.
_MAX_CHECKED = 16
#: Maximum number of segments in use that a pool tracks. Further segments are forgotten once all readers have mapped them.
_MAX_BUSY = 4096
#: The last two bytes of a segment's first page belong to no reader.
_MAX_READERS = HEADER - 2
_MAX_ENDED = 4096
#: Seconds between checks whether the readers of a segment in use are alive: a killed reader does not clear its byte.
_CHECK_S = 5.0
_counter = itertools.count()


class SegmentPool:
    """Pool of the segments that this process writes. Any thread may call any method.

    Args:
        scratch: The session's folders on this host.
        max_idle: Bytes of free segments that the pool retains; by default a sixteenth of the shared memory, at most 2 GiB.
        patience: Seconds after which data for several readers is dropped, even if not all of them have read it.
    """

    def __init__(self, scratch: Scratch, max_idle: int | None = None, patience: float = 7200.0) -> None:
        self._scratch, self._patience = scratch, patience
        self._max_idle = default_idle(scratch) if max_idle is None else max_idle
        self._lock = threading.Lock()
        self._idle_segments: dict[int, list[ShmSegment]] = {}
        self._idle_bytes = 0
        self._busy_segments: collections.deque[ShmSegment] = collections.deque()
        self._by_path: dict[str, ShmSegment] = {}
        self._has_warned = False
        #: Processes that ended most recently: data written for them is freed at once.
        self._ended_processes: dict[str, None] = {}

    def write(
        self, buffers: Sequence[Any], num_readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Copies buffers into a segment with the layout of `spans_of`.

        Args:
            buffers: Flat, contiguous buffers.
            num_readers: Number of readers; they are numbered from 0.
            keep: Keep the segment until `drop`, for readers that arrive later.
            holders: For each reader, a process; when this process ends, the data is free for the reader. See `ShmSegment`.

        Returns:
            The segment's path, and (offset, length) of each buffer.

        Raises:
            OSError: Neither the shared memory nor the spill folder has enough space.
            ValueError: There are too many readers.
        """
        if num_readers > _MAX_READERS:
            raise ValueError(f"a segment has at most {_MAX_READERS} readers, not {num_readers}")
        spans, num_bytes = layout(buffers)
        capacity = capacity_of(num_bytes)
        if (segment := self._take_free(capacity)) is None:
            segment = self._create(capacity, num_bytes, buffers)
        else:
            copy_into(segment.memory, zip((span_start for span_start, _ in spans), buffers, strict=True))
        self._mark_in_use(segment, num_readers, keep, holders)
        return segment.path, spans

    def reserve(
        self, size: int, num_readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()
    ) -> ShmSegment:
        """Returns a segment for `size` bytes, which the caller writes to the segment's `memory` from offset `HEADER` on.

        The other arguments are as in `write`.

        Raises:
            OSError: Neither the shared memory nor the spill folder has enough space.
        """
        capacity = capacity_of(size)
        segment = self._take_free(capacity) or self._create(capacity, size, None)
        self._mark_in_use(segment, num_readers, keep, holders)
        return segment

    def _mark_in_use(self, segment: ShmSegment, num_readers: int, is_retained: bool, holders: Sequence[str]) -> None:
        segment.readers, segment.holders, segment.write_time = num_readers, holders, time.monotonic()
        await_readers(segment.memory, num_readers, is_retained)
        with self._lock:
            if not is_retained:
                self._busy_segments.append(segment)
            self._by_path[segment.path] = segment
            for slot, holder in enumerate(holders):
                if holder in self._ended_processes:
                    end_use(segment.memory, slot)

    def memory(self, path: str) -> mmap.mmap | None:
        """Returns the mapped memory of a segment of this process; None if the pool does not track the segment."""
        with self._lock:
            segment = self._by_path.get(path)
        return None if segment is None else segment.memory

    def list_pending_readers(self, path: str) -> list[bool]:
        """Returns for each reader whether it still has to map the segment; empty if the segment is not in use."""
        with self._lock:
            segment = self._by_path.get(path)
        return [] if segment is None else awaited_readers(segment.memory, segment.readers)

    def drop(self, path: str) -> None:
        """Removes a kept segment. The segment is not reused, because readers that have mapped it may still use it."""
        with self._lock:
            del self._by_path[path]
        unlink(path)

    def forget_process(self, process_id: str) -> None:
        """Frees all segments written for a process that has ended (`host.process_key`).

        These segments are not reused, so that their data stays unchanged if the process is alive after all.
        """
        with self._lock:
            self._ended_processes[process_id] = None
            if len(self._ended_processes) > _MAX_ENDED:
                del self._ended_processes[next(iter(self._ended_processes))]
            for segment in list(self._by_path.values()):
                slots = [slot for slot, holder in enumerate(segment.holders) if holder == process_id]
                for slot in slots:
                    if segment.memory[slot : slot + 1] != FREE:
                        end_use(segment.memory, slot)
                        segment.pooled = False
                if slots and segment.free() and segment in self._busy_segments:
                    self._busy_segments.remove(segment)
                    self._make_idle(segment)

    def release(self, path: str, reader: int) -> None:
        """Marks a segment as free for a reader on another host, which cannot map it."""
        with self._lock:
            segment = self._by_path.get(path)
        if segment is not None:
            end_use(segment.memory, reader)

    def close(self) -> None:
        """Removes the segments that are not in use. The removal of the session's folder removes the other segments."""
        with self._lock:
            for segment in itertools.chain(self._by_path.values(), *self._idle_segments.values()):
                if segment.free():
                    unlink(segment.path)
            self._busy_segments.clear()
            self._by_path.clear()
            self._idle_segments.clear()

    # -- reusing a segment ----------------------------------------------------------------------------------------

    def _take_free(self, capacity: int) -> ShmSegment | None:
        """Returns a free segment of exactly this capacity; None if the pool has no such segment."""
        with self._lock:
            for _ in range(
                len(self._busy_segments)
                if len(self._busy_segments) > _MAX_BUSY
                else min(_MAX_CHECKED, len(self._busy_segments))
            ):
                if self._idle_segments.get(capacity):
                    break
                self._check_oldest()
            if self._idle_segments.get(capacity):
                self._idle_bytes -= capacity
                return self._idle_segments[capacity].pop()
        return None

    def _check_oldest(self) -> None:
        """Checks the segment at the front of the queue of segments in use: recycles, forgets or requeues it."""
        segment = self._busy_segments.popleft()
        now = time.monotonic()
        if now - max(segment.write_time, segment.last_check) > _CHECK_S:
            segment.last_check = now
            free_ended(segment.memory, segment.readers)
        if segment.free():
            self._make_idle(segment)
            return
        has_awaited = segment.has_pending_readers()
        is_expired = segment.readers > 1 and now - segment.write_time > self._patience
        if (
            (len(self._busy_segments) >= _MAX_BUSY and not has_awaited)
            or (not segment.pooled and not has_awaited)
            or (has_awaited and is_expired)
        ):
            del self._by_path[segment.path]
            unlink(segment.path)
        else:
            self._busy_segments.append(segment)

    def _make_idle(self, segment: ShmSegment) -> None:
        """Adds a free segment to the idle segments. While these exceed `max_idle` bytes, removes the oldest of the largest."""
        del self._by_path[segment.path]
        if not segment.pooled:
            unlink(segment.path)
            return
        self._idle_segments.setdefault(segment.capacity, []).append(segment)
        self._idle_bytes += segment.capacity
        while self._idle_bytes > self._max_idle:
            largest_capacity = max(capacity for capacity, segments in self._idle_segments.items() if segments)
            unlink(self._idle_segments[largest_capacity].pop(0).path)
            self._idle_bytes -= largest_capacity

    # -- creating a segment ---------------------------------------------------------------------------------------

    def _create(self, capacity: int, num_bytes: int, buffers: Sequence[Any] | None) -> ShmSegment:
        """Creates a segment that contains the buffers. Without `buffers`, only allocates and maps the pages.

        Writes the data to the file instead of copying it into a mapping. The kernel then does not zero the pages first, and a
        full /dev/shm causes an error instead of a SIGBUS.
        """
        padded_buffers = ((buffer, b"\0" * (-len(buffer) % ALIGN)) for buffer in buffers or ())
        chunks = [b"\0" * HEADER, *itertools.chain.from_iterable(padded_buffers)]
        name = f"{process_id()}-{next(_counter)}"
        for folder in (self._scratch.shm, self._scratch.spill):
            path, is_spilled = str(folder / name), folder == self._scratch.spill
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.writelines(chunks)
                written_bytes = HEADER + (0 if buffers is None else num_bytes)
                file_length = HEADER + (num_bytes if is_spilled else capacity)
                if file_length > written_bytes:
                    os.posix_fallocate(fd, written_bytes, file_length - written_bytes)
                flags = mmap.MAP_SHARED | (POPULATE if buffers is None else 0)
                return ShmSegment(path, capacity, mmap.mmap(fd, file_length, flags=flags), is_pooled=not is_spilled)
            except OSError as error:
                os.unlink(path)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or is_spilled:
                    raise
                self._remove_idle()
                if not self._has_warned:
                    log.warning(
                        "%s is full: payloads go through files in %s (slower)", self._scratch.shm, self._scratch.spill
                    )
                    self._has_warned = True
            finally:
                os.close(fd)
        raise AssertionError("unreachable")

    def _remove_idle(self) -> None:
        """Removes all idle segments, because other data needs the memory."""
        with self._lock:
            for segments in self._idle_segments.values():
                for segment in segments:
                    unlink(segment.path)
                segments.clear()
            self._idle_bytes = 0


def default_idle(session_scratch: Scratch) -> int:
    """Returns the default bytes of free segments that a pool retains: a sixteenth of the shared memory, at most 2 GiB."""
    try:
        fs_stats = os.statvfs(session_scratch.shm)
    except OSError:
        return 256 << 20
    return min(2 << 30, fs_stats.f_blocks * fs_stats.f_frsize // 16)
