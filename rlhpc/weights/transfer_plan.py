"""Transfer plan of a reshard: assigns to each trainer rank the tensor slices that it sends to the engine ranks.

The plan is a pure function of the shard layouts of both sides, so it is the same on every rank. It is computed once for as
long as the same ranks take part. This module imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhpc.checkpoint.tensor_slice import Box, full_box, uncovered
from rlhpc.runtime.errors import RlhpcError

#: A tensor that several ranks hold is cut into row blocks, so that no rank sends more than its share. A block has at
#: most 1 / `_BLOCKS_PER_RANK` of the bytes that a rank sends, and at least `_MIN_BLOCK_BYTES`.
_BLOCKS_PER_RANK = 24
_MIN_BLOCK_BYTES = 1 << 12


class ShardMetadata(NamedTuple):
    """Slice of a tensor that a rank holds.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the full tensor.
        itemsize: Bytes of an element in the dtype in which it is sent.
        box: Ranges of the slice.
        frozen: True if the tensor never changes.
        dtype: Dtype in which the slice is sent, without "torch.".
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    box: Box
    frozen: bool = False
    dtype: str = ""


class SourceSlice(NamedTuple):
    """Slice of a tensor that one rank sends.

    Attributes:
        name: Name of the tensor.
        box: Ranges of the slice.
        source: The sending rank.
        nbytes: Size in bytes.
    """

    name: str
    box: Box
    source: int
    nbytes: int

    @property
    def label(self) -> str:
        """Unique name of the slice during the transfer."""
        return f"{self.name}@{','.join(f'{start}+{size}' for start, size in zip(*self.box, strict=True))}"


@dataclass(frozen=True)
class TransferPlan:
    """Transfer plan for receivers that request the same slices.

    Attributes:
        slices: Slices in the order in which they are sent: layer by layer.
        shapes: Shapes of the full tensors.
        frozen: Names of tensors that never change.
        dtypes: Dtypes in which the tensors are sent.
    """

    slices: tuple[SourceSlice, ...]
    shapes: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def bytes_by_rank(self) -> dict[int, int]:
        """Returns the bytes that each rank sends in a complete update."""
        bytes_by_rank = Counter[int]()
        for source_slice in self.slices:
            bytes_by_rank[source_slice.source] += source_slice.nbytes
        return bytes_by_rank


def plan_transfer(
    shards: Sequence[Sequence[ShardMetadata]],
    requested: Mapping[str, Sequence[Box]] | None,
    other_bytes: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Computes which trainer rank sends which slices of an update.

    Args:
        shards: Slices that each trainer rank holds.
        requested: Slices that the receivers request; None requests all tensors. Overlaps of boxes are sent once.
        other_bytes: Bytes that each rank sends to other receivers.

    Raises:
        RlhpcError: No rank holds a requested slice; names the tensor.
    """
    holders = dict[str, list[tuple[int, Box]]]()
    shapes, sizes, frozen = dict[str, tuple[int, ...]](), dict[str, int](), set[str]()
    dtypes = dict[str, str]()
    for rank, entries in enumerate(shards):
        for name, shape, itemsize, box, is_frozen, dtype in entries:
            holders.setdefault(name, []).append((rank, box))
            if shapes.setdefault(name, shape) != shape:
                raise RlhpcError(f"ranks of the trainer have {name} of shape {shapes[name]} and of {shape}")
            sizes[name], dtypes[name] = itemsize, dtype
            if is_frozen:
                frozen.add(name)
    boxes_by_name = _disjoint_boxes(shapes, requested)
    if unknown := sorted(boxes_by_name.keys() - shapes.keys()):
        raise RlhpcError(f"the engine wants {', '.join(unknown[:3])}, and no rank of the trainer has such a tensor")
    total_bytes = sum(box.numel * sizes[name] for name, boxes in boxes_by_name.items() for box in boxes)
    block_bytes = max(_MIN_BLOCK_BYTES, total_bytes // max(1, len(shards)) // _BLOCKS_PER_RANK)
    bytes_by_rank, slices = Counter(other_bytes or {}), list[SourceSlice]()
    for name in sorted(boxes_by_name, key=_natural_sort_key):
        for target in boxes_by_name[name]:
            max_rows = block_bytes // max(
                1, sizes[name] * target.numel // max(1, target.sizes[0] if target.sizes else 1)
            )
            for row_block in _cut_rows(target, max(1, max_rows)) if _has_copies(holders[name], target) else [target]:
                slices += _assign_sources(name, row_block, holders[name], sizes[name], bytes_by_rank)
    shapes = {name: shapes[name] for name in boxes_by_name}
    return TransferPlan(tuple(_join_blocks(slices, sizes)), shapes, frozenset(frozen), dtypes)


def _disjoint_boxes(
    shapes: Mapping[str, tuple[int, ...]], requested: Mapping[str, Sequence[Box]] | None
) -> dict[str, list[Box]]:
    """Returns the requested slices as boxes that do not overlap."""
    if requested is None:
        return {name: [full_box(shape)] for name, shape in shapes.items()}
    boxes_by_name = dict[str, list[Box]]()
    for name, boxes in requested.items():
        for box in boxes:
            disjoint = boxes_by_name.setdefault(name, [])
            disjoint += uncovered(box, disjoint)
    return boxes_by_name


def _has_copies(holders: Sequence[tuple[int, Box]], target: Box) -> bool:
    """Returns whether several ranks hold the same elements of a box."""
    overlaps = [overlap for _, box in holders if (overlap := target.meet(box)) is not None]
    return sum(overlap.numel for overlap in overlaps) > target.numel


def _cut_rows(box: Box, max_rows: int) -> list[Box]:
    """Cuts a box along its first dimension."""
    if not box.sizes or box.sizes[0] <= max_rows:
        return [box]
    (start, *starts), (size, *sizes) = box
    return [
        Box((start + offset, *starts), (min(max_rows, size - offset), *sizes)) for offset in range(0, size, max_rows)
    ]


def _assign_sources(
    name: str, target: Box, holders: Sequence[tuple[int, Box]], itemsize: int, bytes_by_rank: Counter[int]
) -> list[SourceSlice]:
    """Assigns a slice to the ranks that hold it and have the fewest bytes to send."""
    remaining, slices = [target], list[SourceSlice]()
    for rank, box in sorted(holders, key=lambda holder: (bytes_by_rank[holder[0]], holder[0])):
        for overlap in filter(None, (missing_box.meet(box) for missing_box in remaining)):
            slices.append(SourceSlice(name, overlap, rank, overlap.numel * itemsize))
            bytes_by_rank[rank] += overlap.numel * itemsize
        remaining = [remainder for missing_box in remaining for remainder in uncovered(missing_box, [box])]
        if not remaining:
            return slices
    raise RlhpcError(f"no rank of the trainer has {remaining[0]} of {name}, which an engine wants")


def _join_blocks(slices: Sequence[SourceSlice], sizes: Mapping[str, int]) -> list[SourceSlice]:
    """Joins neighbouring row blocks of one rank into one slice."""
    joined = list[SourceSlice]()
    for source_slice in slices:
        previous = joined[-1] if joined else None
        if (
            previous is not None
            and previous.name == source_slice.name
            and previous.source == source_slice.source
            and source_slice.box.sizes
        ):
            (start, *starts), (size, *row_sizes) = previous.box
            if (start + size, *starts) == source_slice.box.starts and tuple(row_sizes) == source_slice.box.sizes[1:]:
                joined_box = Box(previous.box.starts, (size + source_slice.box.sizes[0], *row_sizes))
                joined[-1] = SourceSlice(
                    previous.name, joined_box, previous.source, joined_box.numel * sizes[previous.name]
                )
                continue
        joined.append(source_slice)
    return joined


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts layer 2 before layer 10."""
    return [(int(token), "") if token.isdigit() else (-1, token) for token in re.split(r"(\d+)", name)]


_ALIGN = 16
#: Bytes of a digest.
DIGEST_BYTES = 8


@dataclass(frozen=True)
class TransferRound:
    """Slices that several trainer ranks transfer together.

    Attributes:
        slices: Slices in the order of the plan.
        offsets: Offset of each slice, in bytes.
        spans: Start and end of the bytes that each trainer rank sends. The digests of its slices come before the slices.
        size: Total bytes.
    """

    slices: tuple[SourceSlice, ...]
    offsets: tuple[int, ...]
    spans: dict[int, tuple[int, int]]
    size: int

    def slices_of(self, source: int) -> list[tuple[SourceSlice, int]]:
        """Returns the slices that a trainer rank sends, with their offsets."""
        return [
            slice_and_offset
            for slice_and_offset in zip(self.slices, self.offsets, strict=True)
            if slice_and_offset[0].source == source
        ]


@dataclass(frozen=True)
class SliceReaders:
    """Receivers that request the same slices, and the rounds in which they are sent.

    Attributes:
        rounds: Rounds in the order of the transfer.
        ranks: Ranks of the receivers in the process group; each rank forwards data to the next.
    """

    rounds: tuple[TransferRound, ...]
    ranks: tuple[int, ...]


def plan_rounds(slices: Sequence[SourceSlice], max_bytes: int) -> tuple[TransferRound, ...]:
    """Cuts the slices for one group of readers into rounds.

    Args:
        slices: Slices in the order in which they are sent.
        max_bytes: Maximum bytes of a round, unless a single slice is larger.
    """
    slices_by_round, nbytes = list[list[SourceSlice]](), 0
    for source_slice in slices:
        if not slices_by_round or nbytes + source_slice.nbytes > max_bytes:
            slices_by_round.append([])
            nbytes = 0
        slices_by_round[-1].append(source_slice)
        nbytes += source_slice.nbytes
    return tuple(map(_build_round, slices_by_round))


def _build_round(slices: Sequence[SourceSlice]) -> TransferRound:
    offsets, spans, size = dict[int, int](), dict[int, tuple[int, int]](), 0
    for source in sorted({source_slice.source for source_slice in slices}):
        start, slice_indices = (
            size,
            [slice_index for slice_index, source_slice in enumerate(slices) if source_slice.source == source],
        )
        size += DIGEST_BYTES * len(slice_indices)
        for slice_index in slice_indices:
            offsets[slice_index] = size + -size % _ALIGN
            size = offsets[slice_index] + slices[slice_index].nbytes
        size += -size % _ALIGN
        spans[source] = (start, size)
    return TransferRound(tuple(slices), tuple(offsets[slice_index] for slice_index in range(len(slices))), spans, size)
