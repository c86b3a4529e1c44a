"""Shared-memory segments that are reused: file layout, the writer's pool and the reader's mappings.

A fresh page costs more than the bytes that go into it, so a segment stays mapped at both ends and is reused from item to
item. Its first page has one byte per reader that tells whether the reader still needs it: the writer sets them after
writing, each reader sets its byte when it has mapped the segment and clears it when the last object that refers to it is
gone. A byte has one writer at a time, so nothing is locked and no message is sent.

    0  free          1  written, its reader has not come yet          2  in use by its reader

The page's last byte is 3 while the writer keeps the segment for readers that may come later. The byte before it is 1 if
the page also names the process of each reader in use (pid and PID namespace), for up to 256 readers: data that a killed
process had in use becomes free again.

A reader keeps its mapping: once all readers have come, the writer may unlink the segment and forget it.
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

from rlhpc.runtime.devices import locked, locks_pages
from rlhpc.runtime.host import has_ended, pid_namespace, process_id
from rlhpc.runtime.scratch import Scratch

#: The first page: one byte per reader.
HEADER = mmap.PAGESIZE
FREE, WRITTEN, USED, RETAINED = b"\0", b"\1", b"\2", b"\3"
ALIGN = 64
#: Separator of the paths that a message claims, if it has both a segment and a buffer on an accelerator.
AND = "\n"
POPULATE = getattr(mmap, "MAPPOPULATE", 0)
#: Readers of a segment whose processes its page can hold.
MAX_TRACKED = 256
_PROCESS = struct.Struct("II")
_TRACKS, _TABLE = HEADER - 2, HEADER - 8 - MAX_TRACKED * _PROCESS.size
_NAME = re.compile(r"(\d+\.\d+)-\d+")


class SegmentGone(Exception):
    """The segment was unlinked before it was read: its owner died or freed it."""


def unlink(path: str) -> None:
    """Removes a segment's file, if it still exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def capacity_of(size: int) -> int:
    """Returns the capacity of a segment for this many bytes: the next eighth of a power of two, so that similar sizes share
    segments.
    """
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def spans_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (offset, size) of buffers with these sizes in a segment, aligned to 64 bytes."""
    spans, offset = [], HEADER
    for size in sizes:
        spans.append((offset, size))
        offset += size + -size % ALIGN
    return spans


def layout(buffers: Sequence[Any]) -> tuple[list[tuple[int, int]], int]:
    """Returns (offset, length) of each buffer in a segment, and their total size."""
    spans = spans_of(len(buffer) for buffer in buffers)
    return spans, sum(length + -length % ALIGN for _, length in spans)


def await_readers(page: mmap.mmap, readers: int, keep: bool = False) -> None:
    """Sets the marks of the awaited readers, numbered from 0; called by the writer, while no process reads."""
    tracks = b"\1" if readers <= MAX_TRACKED else FREE
    page[_TRACKS:HEADER] = tracks + (RETAINED if keep else FREE)
    page[:readers] = WRITTEN * readers


def begin_use(page: mmap.mmap, reader: int) -> None:
    """Sets the mark of a reader that has arrived: this process."""
    if reader < MAX_TRACKED and page[_TRACKS]:
        _PROCESS.pack_into(page, _TABLE + _PROCESS.size * reader, os.getpid(), pid_namespace() & 0xFFFFFFFF)
    page[reader : reader + 1] = USED


def end_use(page: mmap.mmap, reader: int) -> None:
    """Clears the mark of a reader that has finished, or that will not come."""
    page[reader : reader + 1] = FREE


def awaited_readers(page: mmap.mmap, readers: int) -> list[bool]:
    """Returns for each reader whether it is still awaited."""
    return [state == WRITTEN[0] for state in page[:readers]]


def free_ended(page: mmap.mmap, readers: int) -> None:
    """Releases data that ended readers had in use; called by the writer."""
    if not page[_TRACKS]:
        return
    for reader in range(readers):
        if page[reader] == USED[0]:
            pid, namespace = _PROCESS.unpack_from(page, _TABLE + _PROCESS.size * reader)
            if has_ended(f"{pid}.{namespace}") and page[reader] == USED[0]:
                end_use(page, reader)


class ShmSegment:
    """A segment, from its writer's side.

    Attributes:
        path: Its file.
        capacity: Bytes of data that fit.
        readers: Number of readers of the present data.
        holders: For each reader the process (`host.process_key`) that has to come, or that holds its message until then; "" if
            unknown.
        checked: Time of the last check of the readers, by `time.monotonic`.
        pooled: Whether it may be written again; one on disk may not.
        written: Time at which the present data was written, by `time.monotonic`.
        locked: Page-locked tensor over the memory, which must live as long as the segment.
    """

    __slots__ = ("capacity", "checked", "holders", "locked", "memory", "path", "pooled", "readers", "written")

    def __init__(self, path: str, capacity: int, memory: mmap.mmap, pooled: bool) -> None:
        self.path, self.capacity, self.memory, self.pooled = path, capacity, memory, pooled
        self.readers, self.written, self.checked = 0, 0.0, 0.0
        self.holders: Sequence[str] = ()
        self.locked: Any = None

    def free(self) -> bool:
        """Returns whether all readers are done."""
        return self.memory[: self.readers] == FREE * self.readers

    def awaited(self) -> bool:
        """Returns whether a reader is still awaited."""
        return WRITTEN in self.memory[: self.readers]


def map_segment(path: str, flags: int) -> mmap.mmap:
    """Maps a segment, for reading and writing.

    Raises:
        SegmentGone: The segment no longer exists.
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
    """Maps a segment privately: other processes do not see writes to the memory.

    Raises:
        SegmentGone: The segment no longer exists.
    """
    # Not populated: that would copy every page at once.
    return map_segment(path, mmap.MAP_PRIVATE)


def discard(path: str, reader: int = 0) -> None:
    """Frees the segments of a message for a reader that will not read it; does nothing for a segment of another host."""
    for segment_path in path.split(AND):
        try:
            fd = os.open(segment_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            os.pwrite(fd, FREE, reader)
        finally:
            os.close(fd)


def _segments(folder: Path) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yields for each segment in a folder: path, the writer's process, the readers' bytes, and whether it is kept."""
    for dir_entry in os.scandir(folder) if folder.is_dir() else ():
        if (name := _NAME.fullmatch(dir_entry.name)) is not None:
            with contextlib.suppress(OSError), open(dir_entry.path, "rb") as file:
                page = file.read(HEADER).ljust(HEADER, FREE)
                states = page[:MAX_TRACKED] if page[_TRACKS] else page[:_TRACKS]
                yield dir_entry.path, name[1], states, page[-1:] == RETAINED


def bytes_in_use(folder: Path) -> int:
    """Returns the bytes of the segments in a folder that hold data still in use."""
    total = 0
    for path, _, states, is_kept in _segments(folder):
        with contextlib.suppress(OSError):
            total += os.stat(path).st_size if is_kept or states.strip(FREE) else 0
    return total


def segments_in_use(folder: Path, process: str) -> int:
    """Counts the segments that a process has written and that hold data still in use."""
    return sum(
        writer == process and (is_kept or bool(states.strip(FREE))) for _, writer, states, is_kept in _segments(folder)
    )


def remove_idle_of_the_dead(folder: Path) -> None:
    """Removes idle segments left by processes that were killed on this host."""
    for path, writer, states, _ in _segments(folder):
        if not states.strip(FREE) and has_ended(writer):
            unlink(path)


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
    target, large_buffers = np.frombuffer(memory, np.uint8), list[tuple[int, np.ndarray]]()
    for start, buffer in pieces:
        if (size := len(buffer)) > _SMALL:
            large_buffers.append((start, np.frombuffer(buffer, np.uint8)))
        else:
            memory[start : start + size] = buffer
    threads = (
        min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        if sum(len(source) for _, source in large_buffers) >= _WORTH_IT
        else 1
    )
    if threads == 1:
        for start, source in large_buffers:
            target[start : start + len(source)] = source
        return
    chunks = [
        (start + offset, source[offset : offset + _PIECE])
        for start, source in large_buffers
        for offset in range(0, len(source), _PIECE)
    ]
    next_chunk, finished = itertools.count(), threading.Semaphore(0)

    def work() -> None:
        # Pieces are handed out under the interpreter's lock; the copies themselves release it.
        while (chunk_index := next(next_chunk)) < len(chunks):
            start, source = chunks[chunk_index]
            target[start : start + len(source)] = source

    def help_out() -> None:
        try:
            work()
        finally:
            finished.release()

    while len(_helpers) < threads - 1:
        _helpers.append(threading.Thread(target=_help, name="rlhpc-copy", daemon=True))
        _helpers[-1].start()
    for _ in range(threads - 1):
        _jobs.put(help_out)
    try:
        work()
    finally:
        for _ in range(threads - 1):
            finished.acquire()


def _help() -> None:
    while True:
        _jobs.get()()


def _forget_helpers() -> None:
    """Resets the helpers after a fork: they remain in the parent, and one of them may have held the queue's lock."""
    global _jobs
    _jobs = queue.SimpleQueue()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget_helpers)


class Mappings:
    """The segments of other processes that this one has mapped. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}
        self._pages: dict[str, Any] = {}  # tensors that keep the pages of a segment locked
        self._sweep_at = 16

    def lease(self, path: str, reader: int, *, in_place: bool = True) -> memoryview:
        """Returns the data of a segment, which stays in use by the reader until the last view of it is gone.

        Args:
            path: The segment.
            reader: Number of this reader.
            in_place: True if no other process reads or writes it: the view is of the segment itself. Otherwise it is a private
                mapping, whose changes stay in this process.

        Raises:
            SegmentGone: The segment no longer exists.
        """
        shared = self._map(path)
        begin_use(shared, reader)
        memory = shared if in_place else map_private(path)
        # A weak reference tells when the last tensor, array or slice that looks into this view is gone.
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, end_use, shared, reader).atexit = False
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
            memory = self._mapped.get(path)
            if memory is None:
                if len(self._mapped) >= self._sweep_at:
                    self._sweep()
                memory = self._mapped[path] = map_segment(path, mmap.MAP_SHARED | POPULATE)
            return memory

    def _sweep(self) -> None:
        """Unmaps segments that their writers have removed, so that their memory is freed once it has no users."""
        self._mapped = {path: memory for path, memory in self._mapped.items() if os.path.exists(path)}
        self._pages = {path: pages for path, pages in self._pages.items() if path in self._mapped}
        self._sweep_at = max(16, 2 * len(self._mapped))


log = logging.getLogger(__name__)

#: Segments checked before a new one is made: the oldest in use are the likeliest to be free.
_MAX_CHECKED = 16
#: Maximum of segments in use that a pool tracks; further ones are forgotten as soon as their reader has come.
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
        max_idle: Bytes of free segments that the pool retains; by default a sixteenth of the shared memory, at most 2 GiB.
        patience: Seconds after which data for several readers is dropped although one of them has not come.
    """

    def __init__(self, scratch: Scratch, max_idle: int | None = None, patience: float = 7200.0) -> None:
        self._scratch, self._patience = scratch, patience
        self._max_idle = default_idle(scratch) if max_idle is None else max_idle
        self._lock = threading.Lock()
        self._idle: dict[int, list[ShmSegment]] = {}
        self._idle_bytes = 0
        self._busy: collections.deque[ShmSegment] = collections.deque()
        self._by_path: dict[str, ShmSegment] = {}
        self._warned = False
        #: The latest processes that have ended: data written for one comes too late.
        self._ended_processes: dict[str, None] = {}

    def write(
        self, buffers: Sequence[Any], readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Copies the buffers into a segment, as `spans_of` lays them out.

        Args:
            buffers: Flat, contiguous buffers.
            readers: Number of readers; they are numbered from 0.
            keep: Keep the segment until `drop`, for readers that come later.
            holders: The readers' processes, see `ShmSegment`.

        Returns:
            Path, and (offset, length) of each buffer.

        Raises:
            OSError: Neither the shared memory nor the spill folder has capacity.
        """
        if readers > _MAX_READERS:
            raise ValueError(f"a segment has at most {_MAX_READERS} readers, not {readers}")
        spans, size = layout(buffers)
        capacity = capacity_of(size)
        if (segment := self._take(capacity)) is None:
            segment = self._make(capacity, size, buffers)
        else:
            copy_into(segment.memory, zip((start for start, _ in spans), buffers, strict=True))
        self._hold(segment, readers, keep, holders)
        return segment.path, spans

    def reserve(self, size: int, readers: int = 1, *, keep: bool = False, holders: Sequence[str] = ()) -> ShmSegment:
        """Returns a segment for `size` bytes that the caller writes, into its `memory` from `HEADER` on; the other arguments
        are those of `write`.

        Raises:
            OSError: Neither the shared memory nor the spill folder has capacity.
        """
        capacity = capacity_of(size)
        segment = self._take(capacity) or self._make(capacity, size, None)
        self._hold(segment, readers, keep, holders)
        return segment

    def _hold(self, segment: ShmSegment, readers: int, keep: bool, holders: Sequence[str]) -> None:
        segment.readers, segment.holders, segment.written = readers, holders, time.monotonic()
        await_readers(segment.memory, readers, keep)
        with self._lock:
            if not keep:
                self._busy.append(segment)
            self._by_path[segment.path] = segment
            for slot, holder in enumerate(holders):
                if holder in self._ended_processes:
                    end_use(segment.memory, slot)

    def memory(self, path: str) -> mmap.mmap | None:
        """Returns the memory that a segment of this process is mapped to, while the pool tracks it."""
        with self._lock:
            segment = self._by_path.get(path)
        return None if segment is None else segment.memory

    def awaited(self, path: str) -> list[bool]:
        """Returns for each reader of a segment whether it is still awaited; empty once the segment has returned to the
        pool."""
        with self._lock:
            segment = self._by_path.get(path)
        return [] if segment is None else awaited_readers(segment.memory, segment.readers)

    def drop(self, path: str) -> None:
        """Ends a kept segment. It is not reused, because readers that have mapped it still use it."""
        with self._lock:
            del self._by_path[path]
        unlink(path)

    def forget_process(self, process: str) -> None:
        """Frees the segments written for a process that has ended (`host.process_key`), whether or not it had mapped them.

        These segments are not reused: if the process is alive after all, its data stays unchanged.
        """
        with self._lock:
            self._ended_processes[process] = None
            if len(self._ended_processes) > _MAX_ENDED:
                del self._ended_processes[next(iter(self._ended_processes))]
            for segment in list(self._by_path.values()):
                slots = [slot for slot, holder in enumerate(segment.holders) if holder == process]
                for slot in slots:
                    if segment.memory[slot : slot + 1] != FREE:
                        end_use(segment.memory, slot)
                        segment.pooled = False
                if slots and segment.free() and segment in self._busy:
                    self._busy.remove(segment)
                    self._retire(segment)

    def release(self, path: str, reader: int) -> None:
        """Marks the segment as read by a reader that cannot map it."""
        with self._lock:
            segment = self._by_path.get(path)
        if segment is not None:
            end_use(segment.memory, reader)

    def close(self) -> None:
        """Removes the segments that are not in use; the remaining ones are removed with the session's folder."""
        with self._lock:
            for segment in itertools.chain(self._by_path.values(), *self._idle.values()):
                if segment.free():
                    unlink(segment.path)
            self._busy.clear()
            self._by_path.clear()
            self._idle.clear()

    # -- finding one ----------------------------------------------------------------------------------------------

    def _take(self, capacity: int) -> ShmSegment | None:
        """Returns a free segment of this size."""
        with self._lock:
            for _ in range(len(self._busy) if len(self._busy) > _MAX_BUSY else min(_MAX_CHECKED, len(self._busy))):
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
        has_awaited = segment.awaited()
        is_expired = segment.readers > 1 and now - segment.written > self._patience
        if (
            (len(self._busy) >= _MAX_BUSY and not has_awaited)
            or (not segment.pooled and not has_awaited)
            or (has_awaited and is_expired)
        ):
            del self._by_path[segment.path]
            unlink(segment.path)
        else:
            self._busy.append(segment)

    def _retire(self, segment: ShmSegment) -> None:
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

    # -- making one -----------------------------------------------------------------------------------------------

    def _make(self, capacity: int, size: int, buffers: Sequence[Any] | None) -> ShmSegment:
        """Creates a segment with the data.

        The data is written to the file rather than mapped and copied: no page is zeroed first, and a full /dev/shm is an error
        instead of a SIGBUS. Without `buffers`, its pages are allocated and mapped.
        """
        padded = ((buffer, b"\0" * (-len(buffer) % ALIGN)) for buffer in buffers or ())
        chunks = [b"\0" * HEADER, *itertools.chain.from_iterable(padded)]
        name = f"{process_id()}-{next(_counter)}"
        for folder in (self._scratch.shm, self._scratch.spill):
            path, is_spilled = str(folder / name), folder == self._scratch.spill
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.writelines(chunks)
                written = HEADER + (0 if buffers is None else size)
                length = HEADER + (size if is_spilled else capacity)
                if length > written:
                    os.posix_fallocate(fd, written, length - written)
                flags = mmap.MAP_SHARED | (POPULATE if buffers is None else 0)
                return ShmSegment(path, capacity, mmap.mmap(fd, length, flags=flags), pooled=not is_spilled)
            except OSError as error:
                os.unlink(path)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or is_spilled:
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
        """Frees all idle segments, because other data needs the memory."""
        with self._lock:
            for segments in self._idle.values():
                for segment in segments:
                    unlink(segment.path)
                segments.clear()
            self._idle_bytes = 0


def default_idle(scratch: Scratch) -> int:
    try:
        fs_stats = os.statvfs(scratch.shm)
    except OSError:
        return 256 << 20
    return min(2 << 30, fs_stats.f_blocks * fs_stats.f_frsize // 16)
