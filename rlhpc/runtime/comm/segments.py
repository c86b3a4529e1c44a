"""Shared-memory segments that are reused: what is in their files. `pool` is the writer's side, `mappings` the reader's.

A fresh page costs more than the bytes that go into it, so a segment is kept mapped at both ends and goes from item to item.
Its first page has one byte per reader that says who still needs it: the writer sets them when it has written, each reader sets
its own when it has mapped the segment and clears it when the last object that looks into it is gone. A byte has one
writer at a time, so nothing is locked and no message is sent.

    0  free          1  written, its reader has not come yet          2  in use by its reader

The page's last byte is 3 while the writer keeps the segment for readers that may come later. The byte before it is 1 where
the page also says which process each reader in use is (pid and PID namespace), for up to 256 readers: what a process that
was killed had in use is free again.

What a reader has mapped stays its own: once all readers have come, the writer may unlink the segment and forget it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.host import has_ended, pid_namespace

#: The first page: one byte per reader.
HEADER = mmap.PAGESIZE
FREE, WRITTEN, USED, KEPT = b"\0", b"\1", b"\2", b"\3"
ALIGN = 64
#: Between the paths of what a message claims, where that is both a segment and a buffer on an accelerator.
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
    """Removes a segment's file; one that is already gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def capacity_of(size: int) -> int:
    """Bytes of a segment for this much data: the next eighth of a power of two, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def spans_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where buffers of these sizes go in a segment: (offset, size) of each, aligned to 64 bytes."""
    spans, offset = [], HEADER
    for size in sizes:
        spans.append((offset, size))
        offset += size + -size % ALIGN
    return spans


def layout(buffers: Sequence[Any]) -> tuple[list[tuple[int, int]], int]:
    """(offset, length) of each buffer in a segment, and the size of them all."""
    spans = spans_of(len(buffer) for buffer in buffers)
    return spans, sum(length + -length % ALIGN for _, length in spans)


def await_readers(page: mmap.mmap, readers: int, keep: bool = False) -> None:
    """Says that readers are to come, numbered from 0; called by the writer, while nobody reads."""
    tracks = b"\1" if readers <= MAX_TRACKED else FREE
    page[_TRACKS:HEADER] = tracks + (KEPT if keep else FREE)
    page[:readers] = WRITTEN * readers


def begin_use(page: mmap.mmap, reader: int) -> None:
    """Says that a reader has come: this process."""
    if reader < MAX_TRACKED and page[_TRACKS]:
        _PROCESS.pack_into(page, _TABLE + _PROCESS.size * reader, os.getpid(), pid_namespace() & 0xFFFFFFFF)
    page[reader : reader + 1] = USED


def free_ended(page: mmap.mmap, readers: int) -> None:
    """Frees what readers that have ended had in use; called by the writer."""
    if not page[_TRACKS]:
        return
    for reader in range(readers):
        if page[reader] == USED[0]:
            pid, namespace = _PROCESS.unpack_from(page, _TABLE + _PROCESS.size * reader)
            if has_ended(f"{pid}.{namespace}") and page[reader] == USED[0]:
                page[reader : reader + 1] = FREE


class Segment:
    """A segment as its writer knows it.

    Attributes:
        path: Its file.
        capacity: Bytes of data that fit.
        readers: How many readers the present data is for.
        holders: For each reader the process (`host.process_key`) that has to come, or that its message is with until then;
            "" where that is not known.
        checked: When the readers in use were last looked up, by `time.monotonic`.
        pooled: Whether it may be written again; one on disk may not.
        written: When the present data was written, by `time.monotonic`.
        locked: What its writer made of the memory, to be kept as long as the segment.
    """

    __slots__ = ("capacity", "checked", "holders", "locked", "memory", "path", "pooled", "readers", "written")

    def __init__(self, path: str, capacity: int, memory: mmap.mmap, pooled: bool) -> None:
        self.path, self.capacity, self.memory, self.pooled = path, capacity, memory, pooled
        self.readers, self.written, self.checked = 0, 0.0, 0.0
        self.holders: Sequence[str] = ()
        self.locked: Any = None

    def free(self) -> bool:
        """Whether all readers are done."""
        return self.memory[: self.readers] == FREE * self.readers

    def awaited(self) -> bool:
        """Whether some reader has yet to come."""
        return WRITTEN in self.memory[: self.readers]


def map_segment(path: str, flags: int) -> mmap.mmap:
    """Maps a segment, for reading and writing.

    Raises:
        SegmentGone: It is not there any more.
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
    """Maps a segment privately: what is written to the memory is not seen by others.

    Raises:
        SegmentGone: It is not there any more.
    """
    # Not populated: that would copy every page at once.
    return map_segment(path, mmap.MAP_PRIVATE)


def discard(path: str, reader: int = 0) -> None:
    """Frees what a message claims (segments) whose reader will not come; does nothing for a segment of another host."""
    for one in path.split(AND):
        try:
            fd = os.open(one, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            os.pwrite(fd, FREE, reader)
        finally:
            os.close(fd)


def _segments(folder: Path) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yields of each segment in a folder: path, the writer's process, the readers' bytes, and whether it is kept."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if (name := _NAME.fullmatch(entry.name)) is not None:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                page = file.read(HEADER).ljust(HEADER, FREE)
                states = page[:MAX_TRACKED] if page[_TRACKS] else page[:_TRACKS]
                yield entry.path, name[1], states, page[-1:] == KEPT


def bytes_in_use(folder: Path) -> int:
    """Bytes of the segments in a folder that hold data somebody needs."""
    total = 0
    for path, _, states, is_kept in _segments(folder):
        with contextlib.suppress(OSError):
            total += os.stat(path).st_size if is_kept or states.strip(FREE) else 0
    return total


def segments_in_use(folder: Path, process: str) -> int:
    """Counts the segments that a process has written and that hold data somebody needs."""
    return sum(
        writer == process and (is_kept or bool(states.strip(FREE))) for _, writer, states, is_kept in _segments(folder)
    )


def remove_idle_of_the_dead(folder: Path) -> None:
    """Removes idle segments left by processes that were killed on this host."""
    for path, writer, states, _ in _segments(folder):
        if not states.strip(FREE) and has_ended(writer):
            unlink(path)
