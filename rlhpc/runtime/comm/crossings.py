"""What a message says of tensors that stay on the accelerator, and the lease beside their memory.

A lease is a page of shared memory with the same byte for each reader as a segment's first page: written, in use, free. With
the byte goes the reader's process, because device memory is scarce: what a reader that was killed had in use is free again.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import NamedTuple

from rlhpc.runtime.comm.segments import ALIGN, FREE, HEADER, MAX_TRACKED, await_readers, begin_use, free_ended

#: Most readers of a message.
MOST = MAX_TRACKED


class Part(NamedTuple):
    """A tensor: where it begins, and its form."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Crossing(NamedTuple):
    """Tensors in a buffer of their sender's.

    Attributes:
        endpoint: The sender's service.
        path: The buffer's lease, by which it is known.
        address: The accelerator.
        memory: What the buffer is opened by.
        event: What the event is opened by that says that the tensors are written.
        size: Bytes.
        parts: The tensors.
    """

    endpoint: dict[str, str]
    path: str
    address: str
    memory: bytes
    event: bytes
    size: int
    parts: list[Part]


def layout(tensors: list[tuple[str, tuple[int, ...], int]]) -> tuple[list[Part], int]:
    """Where tensors (dtype, shape, bytes of an element) go in a buffer, and the size of them all."""
    parts, offset = [], 0
    for dtype, shape, itemsize in tensors:
        nbytes = math.prod(shape) * itemsize
        parts.append(Part(offset, dtype, shape, nbytes))
        offset += nbytes + -nbytes % ALIGN
    return parts, offset


def make_lease(path: str) -> mmap.mmap:
    """A new lease."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, HEADER)
        return mmap.mmap(fd, HEADER)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def lend(lease: mmap.mmap, readers: int) -> None:
    """Says that readers are to come; called by the sender of a free buffer."""
    await_readers(lease, readers)


def begin(lease: mmap.mmap, reader: int) -> bool:
    """Says that a reader has come; False if it is awaited no longer."""
    if lease[reader : reader + 1] == FREE:
        return False
    begin_use(lease, reader)
    return True


def end(lease: mmap.mmap, reader: int) -> None:
    """Says that a reader is done."""
    lease[reader : reader + 1] = FREE


def is_free(lease: mmap.mmap, readers: int) -> bool:
    """Whether nobody needs a buffer; called by its sender. What readers that have died had in use is freed."""
    if lease[:readers] == FREE * readers:
        return True
    free_ended(lease, readers)
    return bool(lease[:readers] == FREE * readers)
