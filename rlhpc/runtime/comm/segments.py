"""Shared-memory segments that are reused: what is in their files. `pool` is the writer's side, `mappings` the reader's.

A fresh page costs more than the bytes that go into it, so a segment is kept mapped at both ends and goes from item to item.
Its first page has one byte per reader that says who still needs it: the writer sets them when it has written, each reader sets
its own when it has mapped the segment and clears it when the last object that looks into it is gone. A byte has one
writer at a time, so nothing is locked and no message is sent.

    0  free          1  written, its reader has not come yet          2  in use by its reader

The page's last byte is 3 while the writer keeps the segment for readers that may come later.

What a reader has mapped stays its own: once all readers have come, the writer may unlink the segment and forget it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: The first page: one byte per reader.
HEADER = mmap.PAGESIZE
FREE, WRITTEN, USED, KEPT = b"\0", b"\1", b"\2", b"\3"
ALIGN = 64
#: Between the paths of what a message claims, where that is both a segment and a buffer on an accelerator.
AND = "\n"
POPULATE = getattr(mmap, "MAPPOPULATE", 0)
_NAME = re.compile(r"(\d+)-\d+")


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


class Segment:
    """A segment as its writer knows it.

    Attributes:
        path: Its file.
        capacity: Bytes of data that fit.
        readers: How many readers the present data is for.
        pooled: Whether it may be written again; one on disk may not.
        written: When the present data was written, by `time.monotonic`.
        locked: What its writer made of the memory, to be kept as long as the segment.
    """

    __slots__ = ("capacity", "locked", "memory", "path", "pooled", "readers", "written")

    def __init__(self, path: str, capacity: int, memory: mmap.mmap, pooled: bool) -> None:
        self.path, self.capacity, self.memory, self.pooled = path, capacity, memory, pooled
        self.readers, self.written = 0, 0.0
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


def _segments(folder: Path, idle: bytes = FREE) -> Iterator[tuple[str, int, bool]]:
    """For each segment in a folder: its path, the writer's process id, and whether somebody needs it."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if (name := _NAME.fullmatch(entry.name)) is not None:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                yield entry.path, int(name[1]), bool(file.read(HEADER).strip(idle))


def bytes_in_use(folder: Path) -> int:
    """Bytes of the segments in a folder that hold data somebody needs."""
    total = 0
    for path, _, needed in _segments(folder):
        with contextlib.suppress(OSError):
            total += os.stat(path).st_size if needed else 0
    return total


def remove_idle_of_the_dead(folder: Path) -> None:
    """Removes idle segments left by processes that were killed on this host."""
    for path, pid, needed in _segments(folder, FREE + KEPT):
        if not needed and not os.path.exists(f"/proc/{pid}"):
            unlink(path)
