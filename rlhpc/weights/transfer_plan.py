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

from rlhpc.checkpoint.tensor_slice import TensorSlice, full_slice, subtract_slices
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.text import format_names

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
        tensor_slice: Ranges of the slice.
        frozen: True if the tensor never changes.
        dtype: Dtype in which the slice is sent, without "torch.".
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    tensor_slice: TensorSlice
    frozen: bool = False
    dtype: str = ""


class SourceSlice(NamedTuple):
    """Slice of a tensor that one rank sends.

    Attributes:
        name: Name of the tensor.
        tensor_slice: Ranges of the slice.
        source: The sending rank.
        nbytes: Size in bytes.
    """

    name: str
    tensor_slice: TensorSlice
    source: int
    nbytes: int

    @property
    def label(self) -> str:
        """Unique name of the slice during the transfer."""
        ranges = ",".join(f"{start}+{size}" for start, size in zip(*self.tensor_slice, strict=True))
        return f"{self.name}@{ranges}"


@dataclass(frozen=True)
class TransferPlan:
    """Transfer plan for receivers that request the same slices.

    Attributes:
        slices: Slices in the order in which they are sent: layer by layer.
        shapes: Shapes of the full tensors.
        frozen_names: Names of tensors that never change.
        dtypes: Dtypes in which the tensors are sent.
    """

    slices: tuple[SourceSlice, ...]
    shapes: Mapping[str, tuple[int, ...]]
    frozen_names: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def bytes_by_rank(self) -> dict[int, int]:
        """Returns the bytes that each rank sends in a complete update."""
        bytes_by_rank = Counter[int]()
        for source_slice in self.slices:
            bytes_by_rank[source_slice.source] += source_slice.nbytes
        return bytes_by_rank


def plan_transfer(
    shards: Sequence[Sequence[ShardMetadata]],
    requested_slices: Mapping[str, Sequence[TensorSlice]] | None,
    other_bytes: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Computes which trainer rank sends which slices of an update.

    Args:
        shards: Slices that each trainer rank holds.
        requested_slices: Slices that the receivers request; None requests all tensors. Overlaps of slices are sent once.
        other_bytes: Bytes that each rank sends to other receivers.

    Raises:
        RlhpcError: No rank holds a requested slice; names the tensor.
    """
    holders = dict[str, list[tuple[int, TensorSlice]]]()
    shapes, element_sizes, frozen_names = dict[str, tuple[int, ...]](), dict[str, int](), set[str]()
    dtypes = dict[str, str]()
    for rank, shard_entries in enumerate(shards):
        for name, shape, itemsize, tensor_slice, is_frozen, dtype in shard_entries:
            holders.setdefault(name, []).append((rank, tensor_slice))
            if shapes.setdefault(name, shape) != shape:
                raise RlhpcError(f"ranks of the trainer have {name} of shape {shapes[name]} and of {shape}")
            element_sizes[name], dtypes[name] = itemsize, dtype
            if is_frozen:
                frozen_names.add(name)
    slices_by_name = _disjoint_slices(shapes, requested_slices)
    if unknown_names := sorted(slices_by_name.keys() - shapes.keys()):
        raise RlhpcError(
            f"the engine wants {format_names(unknown_names)}, and no rank of the trainer has such a tensor"
        )
    total_bytes = sum(
        tensor_slice.numel * element_sizes[name]
        for name, tensor_slices in slices_by_name.items()
        for tensor_slice in tensor_slices
    )
    block_bytes = max(_MIN_BLOCK_BYTES, total_bytes // max(1, len(shards)) // _BLOCKS_PER_RANK)
    bytes_by_rank, slices = Counter(other_bytes or {}), list[SourceSlice]()
    for name in sorted(slices_by_name, key=_natural_sort_key):
        for target in slices_by_name[name]:
            max_rows = block_bytes // max(
                1, element_sizes[name] * target.numel // max(1, target.sizes[0] if target.sizes else 1)
            )
            for row_block in _cut_rows(target, max(1, max_rows)) if _has_copies(holders[name], target) else [target]:
                slices += _assign_sources(name, row_block, holders[name], element_sizes[name], bytes_by_rank)
    shapes = {name: shapes[name] for name in slices_by_name}
    return TransferPlan(tuple(_join_blocks(slices, element_sizes)), shapes, frozenset(frozen_names), dtypes)


def _disjoint_slices(
    shapes: Mapping[str, tuple[int, ...]], requested_slices: Mapping[str, Sequence[TensorSlice]] | None
) -> dict[str, list[TensorSlice]]:
    """Returns the requested slices as slices that do not overlap."""
    if requested_slices is None:
        return {name: [full_slice(shape)] for name, shape in shapes.items()}
    slices_by_name = dict[str, list[TensorSlice]]()
    for name, tensor_slices in requested_slices.items():
        for tensor_slice in tensor_slices:
            disjoint = slices_by_name.setdefault(name, [])
            disjoint += subtract_slices(tensor_slice, disjoint)
    return slices_by_name


def _has_copies(holders: Sequence[tuple[int, TensorSlice]], target: TensorSlice) -> bool:
    """Returns whether several ranks hold the same elements of a slice."""
    overlaps = [shared_slice for _, tensor_slice in holders if (shared_slice := target.meet(tensor_slice)) is not None]
    return sum(shared_slice.numel for shared_slice in overlaps) > target.numel


def _cut_rows(tensor_slice: TensorSlice, max_rows: int) -> list[TensorSlice]:
    """Cuts a slice along its first dimension."""
    if not tensor_slice.sizes or tensor_slice.sizes[0] <= max_rows:
        return [tensor_slice]
    (row_start, *inner_starts), (num_rows, *inner_sizes) = tensor_slice
    return [
        TensorSlice((row_start + offset, *inner_starts), (min(max_rows, num_rows - offset), *inner_sizes))
        for offset in range(0, num_rows, max_rows)
    ]


def _assign_sources(
    name: str,
    target: TensorSlice,
    holders: Sequence[tuple[int, TensorSlice]],
    itemsize: int,
    bytes_by_rank: Counter[int],
) -> list[SourceSlice]:
    """Assigns a slice to the ranks that hold it and have the fewest bytes to send."""
    missing_slices, slices = [target], list[SourceSlice]()
    for rank, tensor_slice in sorted(holders, key=lambda holder: (bytes_by_rank[holder[0]], holder[0])):
        for shared_slice in filter(None, (missing_slice.meet(tensor_slice) for missing_slice in missing_slices)):
            slices.append(SourceSlice(name, shared_slice, rank, shared_slice.numel * itemsize))
            bytes_by_rank[rank] += shared_slice.numel * itemsize
        missing_slices = [
            remainder
            for missing_slice in missing_slices
            for remainder in subtract_slices(missing_slice, [tensor_slice])
        ]
        if not missing_slices:
            return slices
    raise RlhpcError(f"no rank of the trainer has {missing_slices[0]} of {name}, which an engine wants")


def _join_blocks(slices: Sequence[SourceSlice], element_sizes: Mapping[str, int]) -> list[SourceSlice]:
    """Joins neighbouring row blocks of one rank into one slice."""
    joined_slices = list[SourceSlice]()
    for source_slice in slices:
        last_slice = joined_slices[-1] if joined_slices else None
        if (
            last_slice is not None
            and last_slice.name == source_slice.name
            and last_slice.source == source_slice.source
            and source_slice.tensor_slice.sizes
        ):
            (row_start, *inner_starts), (num_rows, *row_sizes) = last_slice.tensor_slice
            if (row_start + num_rows, *inner_starts) == source_slice.tensor_slice.starts and tuple(
                row_sizes
            ) == source_slice.tensor_slice.sizes[1:]:
                joined_slice = TensorSlice(
                    last_slice.tensor_slice.starts, (num_rows + source_slice.tensor_slice.sizes[0], *row_sizes)
                )
                joined_slices[-1] = SourceSlice(
                    last_slice.name,
                    joined_slice,
                    last_slice.source,
                    joined_slice.numel * element_sizes[last_slice.name],
                )
                continue
        joined_slices.append(source_slice)
    return joined_slices


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts layer 2 before layer 10."""
    return [(int(token), "") if token.isdigit() else (-1, token) for token in re.split(r"(\d+)", name)]


_ALIGN = 16
#: Bytes of a digest.
DIGEST_BYTES = 8


@dataclass(frozen=True)
class TransferRound:
    """Slices that several trainer ranks transfer at the same time.

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

    def slices_of(self, source_rank: int) -> list[tuple[SourceSlice, int]]:
        """Returns the slices that a trainer rank sends, with their offsets."""
        return [
            slice_and_offset
            for slice_and_offset in zip(self.slices, self.offsets, strict=True)
            if slice_and_offset[0].source == source_rank
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
    slices_by_round, bytes_by_round = list[list[SourceSlice]](), 0
    for source_slice in slices:
        if not slices_by_round or bytes_by_round + source_slice.nbytes > max_bytes:
            slices_by_round.append([])
            bytes_by_round = 0
        slices_by_round[-1].append(source_slice)
        bytes_by_round += source_slice.nbytes
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
