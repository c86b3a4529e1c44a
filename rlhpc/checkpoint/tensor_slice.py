"""Tensor slices: one range of indices per dimension.

File readers and writers and the weight sync describe their data by slices, so they do not depend on how a model is
sharded. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class TensorSlice(NamedTuple):
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

    def meet(self, other_slice: TensorSlice) -> TensorSlice | None:
        """Returns the intersection with another slice; None if the slices do not overlap."""
        overlap = slice_between(map(max, self.starts, other_slice.starts), map(min, self.ends, other_slice.ends))
        return overlap if all(size > 0 for size in overlap.sizes) else None

    def subtract(self, part: TensorSlice) -> list[TensorSlice]:
        """Returns slices that cover this slice except `part`, which must lie within this slice."""
        remaining_slices, starts, sizes = list[TensorSlice](), list(self.starts), list(self.sizes)
        for axis, (start, size) in enumerate(zip(*part, strict=True)):
            end, stop = start + size, starts[axis] + sizes[axis]
            for slab_start, slab_end in ((starts[axis], start), (end, stop)):
                if slab_end > slab_start:
                    remaining_slices.append(
                        TensorSlice(
                            (*starts[:axis], slab_start, *starts[axis + 1 :]),
                            (*sizes[:axis], slab_end - slab_start, *sizes[axis + 1 :]),
                        )
                    )
            starts[axis], sizes[axis] = start, size
        return remaining_slices

    def within(self, containing_slice: TensorSlice) -> TensorSlice:
        """Returns this slice relative to the start of `containing_slice`, which must contain this slice."""
        return TensorSlice(
            tuple(start - outer_start for start, outer_start in zip(self.starts, containing_slice.starts, strict=True)),
            self.sizes,
        )


def slice_between(starts: Iterable[int], ends: Iterable[int]) -> TensorSlice:
    """Returns the slice from `starts` up to but not including `ends`."""
    start_indices = tuple(starts)
    return TensorSlice(start_indices, tuple(end - start for start, end in zip(start_indices, ends, strict=True)))


def full_slice(shape: Iterable[int]) -> TensorSlice:
    """Returns the slice of a full tensor."""
    sizes = tuple(shape)
    return TensorSlice((0,) * len(sizes), sizes)


def subtract_slices(target: TensorSlice, tensor_slices: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Returns slices that cover the part of `target` outside the given slices."""
    remaining_slices = [target]
    for tensor_slice in tensor_slices:
        overlaps = [(uncovered_slice, uncovered_slice.meet(tensor_slice)) for uncovered_slice in remaining_slices]
        remaining_slices = [
            remainder
            for uncovered_slice, overlap in overlaps
            for remainder in ([uncovered_slice] if overlap is None else uncovered_slice.subtract(overlap))
        ]
    return remaining_slices


def slice_of_view(
    offset: int, shape: Sequence[int], strides: Sequence[int], full_shape: Sequence[int]
) -> TensorSlice | None:
    """Returns the slice of a contiguous tensor that a view covers.

    Args:
        offset: Start of the view, in elements.
        shape, strides: Shape and strides of the view. The view may add or omit dimensions of size 1.
        full_shape: Shape of the full tensor.

    Returns:
        The slice; None if the view is not a slice of the tensor, or if its dimensions are exchanged.
    """
    steps = [math.prod(full_shape[axis + 1 :]) for axis in range(len(full_shape))]
    starts, remainder = list[int](), offset
    for step in steps:
        starts.append(remainder // step if step else 0)
        remainder -= starts[-1] * step
    sizes, last_axis = [1] * len(full_shape), -1
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        axis = next((i for i, step in enumerate(steps) if i > last_axis and step == stride and full_shape[i] > 1), None)
        if axis is None or starts[axis] + size > full_shape[axis]:
            return None
        sizes[axis], last_axis = size, axis
    return TensorSlice(tuple(starts), tuple(sizes))


def cut(tensor: Any, tensor_slice: TensorSlice) -> Any:
    """Returns the view of a tensor that a slice describes."""
    for axis, (start, size) in enumerate(zip(*tensor_slice, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor
