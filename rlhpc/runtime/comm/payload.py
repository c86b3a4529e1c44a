"""Payloads: small ones travel inside their message, large ones through a shared-memory file that the reader maps.

A segment is written with `writev` (no page is zeroed first, and a full /dev/shm is an error instead of a SIGBUS), mapped by
the reader without a copy, and unlinked as soon as it is mapped: the memory lives exactly as long as the reader's tensors.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.comm.serialization import Buffer, dumps, loads
from rlhpc.runtime.scratch import Scratch

log = logging.getLogger(__name__)

INLINE_LIMIT = 32 * 1024
_ALIGN = 64
_IOV_MAX = 512
_counter = itertools.count()
_warned_full = False


class SegmentGone(Exception):
    """The segment was unlinked before it was read: its owner died or freed it."""


class Packed:
    """A serialized object, ready to be sent.

    Attributes:
        frames: Message frames: the pickle stream, a descriptor, and the buffers that travel inline.
        nbytes: Size of the object's data, what back pressure counts.
        segment: Path of the shared-memory file, or None when everything is inline.
    """

    __slots__ = ("frames", "nbytes", "segment")

    def __init__(self, frames: list[Any], nbytes: int, segment: str | None) -> None:
        self.frames, self.nbytes, self.segment = frames, nbytes, segment

    def discard(self) -> None:
        """Frees the segment of an item that nobody will read."""
        if self.segment:
            unlink(self.segment)


def unlink(path: str) -> None:
    """Removes a segment; one that is already gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write_all(fd: int, chunks: list[Any]) -> None:
    views = [memoryview(c).cast("B") for c in chunks if len(c)]
    while views:
        written = os.writev(fd, views[:_IOV_MAX])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def write_segment(scratch: Scratch, buffers: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
    """Writes the buffers into a new segment, each aligned to 64 bytes; returns its path and (offset, length) pairs.

    Where the shared memory is full the segment goes to the spill folder on disk, with one warning.
    """
    global _warned_full
    spans, chunks, offset = [], [], 0
    for buffer in buffers:
        size = len(buffer)
        spans.append((offset, size))
        padding = -size % _ALIGN
        chunks += [buffer, b"\0" * padding]
        offset += size + padding
    name = f"{os.getpid()}-{next(_counter)}"
    for folder in (scratch.shm, scratch.spill):
        path = str(folder / name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, chunks)
            return path, spans
        except OSError as error:
            os.unlink(path)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or folder == scratch.spill:
                raise
            if not _warned_full:
                log.warning("%s is full: payloads go through files in %s (slower)", scratch.shm, scratch.spill)
                _warned_full = True
        finally:
            os.close(fd)
    raise AssertionError("unreachable")


def pack(obj: Any, scratch: Scratch, origin: tuple[str, str]) -> Packed:
    """Serializes `obj`; `origin` is (host id, data endpoint) of this process, for readers on other hosts."""
    data, buffers = dumps(obj)
    nbytes = len(data) + sum(len(b) for b in buffers)
    if nbytes - len(data) < INLINE_LIMIT:
        return Packed([data, b"", *buffers], nbytes, None)
    path, spans = write_segment(scratch, buffers)
    return Packed([data, pickle.dumps((origin[0], origin[1], path, spans))], nbytes, path)


def map_segment(path: str, private: bool) -> mmap.mmap:
    """Maps a segment for reading and writing; `private` gives copy-on-write, for one with several readers."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SegmentGone(path) from None
    try:
        flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def unpack(
    frames: Sequence[Buffer],
    host: str,
    fetch: Callable[[str, str], Buffer],
    *,
    shared: bool = False,
    release: Callable[[str, str], None] | None = None,
) -> Any:
    """Rebuilds the object of `frames`.

    Args:
        frames: As made by `pack`, after transport.
        host: This process's host id; a segment of another host is fetched.
        fetch: `(endpoint, path) -> bytes` of a segment on another host.
        shared: The segment has other readers: map it copy-on-write and leave it in place.
        release: Called as `release(endpoint, path)` once the data is here; default unlinks on the same host.
    """
    data, descriptor, *inline = frames
    if not len(descriptor):
        return loads(data, [bytearray(b) for b in inline])
    origin_host, endpoint, path, spans = pickle.loads(descriptor)
    if origin_host == host:
        view = memoryview(map_segment(path, private=shared))
        if release:
            release(endpoint, path)
        elif not shared:
            unlink(path)
    else:
        view = memoryview(bytearray(fetch(endpoint, path)))
        if release:
            release(endpoint, path)
    return loads(data, [view[start : start + size] for start, size in spans])


def read_segment(folder_roots: tuple[Path, Path], path: str) -> bytes:
    """Bytes of a segment for a reader on another host; refuses any path outside the session's own folders."""
    if Path(path).parent not in folder_roots:
        raise PermissionError(f"{path} is not a segment of this session")
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise SegmentGone(path) from None
