"""From an accelerator straight into shared memory: while one part is on its way, the next one is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rlhpc.runtime.comm.shared_memory import ALIGN, Segment, SegmentPool, spans_of
from rlhpc.runtime.devices import SideCopies, locked

#: Where to and where from: flat, uint8, of one size.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Copies(Protocol):
    """Copies into host memory beside whatever else is done."""

    def begin(self, pairs: Pairs) -> Callable[[], None]:
        """Begins to copy; what it returns waits until all has been copied. Until then nobody changes the sources."""


class Carrier:
    """Writes parts from tensors that are not on the CPU.

    Args:
        pool: Of this process.
        copies: What copies.
    """

    def __init__(self, pool: SegmentPool, copies: Copies) -> None:
        self._pool, self._copies = pool, copies

    @classmethod
    def of(cls, pool: SegmentPool, device: str) -> Carrier:
        """For tensors of a kind of device."""
        return cls(pool, SideCopies(device))

    def begin(
        self, tensors: Sequence[torch.Tensor], table: bytes, readers: int, *, keep: bool
    ) -> tuple[str, tuple[int, int], Callable[[], None]]:
        """Begins to write a segment, as `SegmentPool.write` would.

        Args:
            tensors: Contiguous.
            table: What comes behind them.
            readers: How many will read it.
            keep: See `SegmentPool.write`.

        Returns:
            Path of the segment, (offset, size) of the table, and what waits until all is there.
        """
        spans = spans_of([*(tensor.nbytes for tensor in tensors), len(table)])
        segment = self._pool.reserve(sum(size + -size % ALIGN for _, size in spans), readers, keep=keep)
        memory = _locked(segment)
        start, size = spans[-1]
        segment.memory[start : start + size] = table
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        places = [memory[start : start + size] for start, size in spans[:-1]]
        return segment.path, spans[-1], self._copies.begin(list(zip(places, flat, strict=True)))


def _locked(segment: Segment) -> torch.Tensor:
    """A segment's memory, its pages locked for as long as the pool has it: it goes from part to part."""
    if segment.locked is None:
        segment.locked = locked(segment.memory)
    found: torch.Tensor = segment.locked
    return found
