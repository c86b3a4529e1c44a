"""Tensor slices as boxes: one range of indices per dimension.

Readers and writers of files and the weight sync describe their data by boxes alone, so they need not know how a model is
sharded. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Box(NamedTuple):
    """Slice of a tensor: one range of indices per dimension.

    Attributes:
        starts: First index in each dimension of the full tensor.
        sizes: Number of indices in each dimension.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Index after the last one in each dimension."""
        return tuple(start + size for start, size in zip(*self, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index into the full tensor, one slice per dimension."""
        return tuple(map(slice, self.starts, self.ends))

    def meet(self, other: Box) -> Box | None:
        """Returns the intersection with another box; None if the boxes do not overlap."""
        overlap = box_between(map(max, self.starts, other.starts), map(min, self.ends, other.ends))
        return overlap if all(size > 0 for size in overlap.sizes) else None

    def without(self, part: Box) -> list[Box]:
        """Returns boxes that together cover this box except `part`, which must lie within this box."""
        remaining, starts, sizes = list[Box](), list(self.starts), list(self.sizes)
        for axis, (start, size) in enumerate(zip(*part, strict=True)):
            end, stop = start + size, starts[axis] + sizes[axis]
            for slab_start, slab_end in ((starts[axis], start), (end, stop)):
                if slab_end > slab_start:
                    remaining.append(
                        Box(
                            (*starts[:axis], slab_start, *starts[axis + 1 :]),
                            (*sizes[:axis], slab_end - slab_start, *sizes[axis + 1 :]),
                        )
                    )
            starts[axis], sizes[axis] = start, size
        return remaining

    def within(self, outer: Box) -> Box:
        """Returns this box relative to the start of `outer`, which must contain this box."""
        return Box(
            tuple(start - outer_start for start, outer_start in zip(self.starts, outer.starts, strict=True)), self.sizes
        )


def box_between(starts: Iterable[int], ends: Iterable[int]) -> Box:
    """Returns the box from `starts` up to but not including `ends`."""
    start_indices = tuple(starts)
    return Box(start_indices, tuple(end - start for start, end in zip(start_indices, ends, strict=True)))


def full_box(shape: Iterable[int]) -> Box:
    """Returns the box of a full tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def uncovered(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """Returns boxes that together cover the part of `target` outside the given boxes."""
    remaining = [target]
    for box in boxes:
        overlaps = [(uncovered_box, uncovered_box.meet(box)) for uncovered_box in remaining]
        remaining = [
            remainder
            for uncovered_box, overlap in overlaps
            for remainder in ([uncovered_box] if overlap is None else uncovered_box.without(overlap))
        ]
    return remaining


def box_of(offset: int, shape: Sequence[int], strides: Sequence[int], full: Sequence[int]) -> Box | None:
    """Returns the box of a contiguous tensor that a view covers.

    Args:
        offset: Start of the view, in elements.
        shape, strides: Shape and strides of the view. The view may add or omit dimensions of size 1.
        full: Shape of the full tensor.

    Returns:
        The box; None if the view is not a box of the tensor, or if its dimensions are exchanged.
    """
    steps = [math.prod(full[axis + 1 :]) for axis in range(len(full))]
    starts, remainder = list[int](), offset
    for step in steps:
        starts.append(remainder // step if step else 0)
        remainder -= starts[-1] * step
    sizes, last_axis = [1] * len(full), -1
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        axis = next((i for i, step in enumerate(steps) if i > last_axis and step == stride and full[i] > 1), None)
        if axis is None or starts[axis] + size > full[axis]:
            return None
        sizes[axis], last_axis = size, axis
    return Box(tuple(starts), tuple(sizes))


def cut(tensor: Any, box: Box) -> Any:
    """Returns the view of a tensor that a box describes."""
    for axis, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor
