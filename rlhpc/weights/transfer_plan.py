"""Transfer plan of a reshard: assigns to each trainer rank the tensor slices that it sends to the engine ranks.

The plan is a pure function of the shard layouts of both sides, so it is the same on every rank. It is computed once for as
long as the same ranks take part. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhpc.checkpoint.tensor_slice import Box, full_box, uncovered
from rlhpc.runtime.errors import RlhpcError

#: A tensor that several ranks hold is cut into row blocks, so that none of them sends more than its share. A block has at
#: most 1 / `_BLOCKS_PER_RANK` of the bytes that a rank sends, and at least `_MIN_BLOCK_BYTES`.
_BLOCKS_PER_RANK = 24
_MIN_BLOCK_BYTES = 1 << 12


class Held(NamedTuple):
    """Slice of a tensor that a rank holds.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the full tensor.
        itemsize: Bytes of an element, as it is sent.
        box: Ranges of the slice.
        frozen: True if it never changes.
        dtype: Dtype as it is sent, without "torch.".
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    box: Box
    frozen: bool = False
    dtype: str = ""


class Piece(NamedTuple):
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
class Routes:
    """Transfer plan for receivers that request the same slices.

    Attributes:
        pieces: Slices in the order in which they are sent: layer by layer.
        shapes: Shapes of the full tensors.
        frozen: Names of tensors that never change.
        dtypes: Dtypes of the tensors, as they are sent.
    """

    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def sent(self) -> dict[int, int]:
        """Returns the bytes that each rank sends in a complete update."""
        bytes_by_rank = dict[int, int]()
        for piece in self.pieces:
            bytes_by_rank[piece.source] = bytes_by_rank.get(piece.source, 0) + piece.nbytes
        return bytes_by_rank


def route(
    held: Sequence[Sequence[Held]],
    requested: Mapping[str, Sequence[Box]] | None,
    load: Mapping[int, int] | None = None,
) -> Routes:
    """Plans an update.

    Args:
        held: Slices that each rank holds.
        requested: Slices that the receivers request; None requests all tensors. Overlaps of boxes are sent once.
        load: Bytes that each rank sends to other receivers.

    Raises:
        RlhpcError: No rank holds a requested slice; names the tensor.
    """
    holders = dict[str, list[tuple[int, Box]]]()
    shapes, sizes, frozen = dict[str, tuple[int, ...]](), dict[str, int](), set[str]()
    dtypes = dict[str, str]()
    for rank, entries in enumerate(held):
        for name, shape, itemsize, box, is_frozen, dtype in entries:
            holders.setdefault(name, []).append((rank, box))
            if shapes.setdefault(name, shape) != shape:
                raise RlhpcError(f"ranks of the trainer have {name} of shape {shapes[name]} and of {shape}")
            sizes[name], dtypes[name] = itemsize, dtype
            if is_frozen:
                frozen.add(name)
    atoms = _atoms(shapes, requested)
    if unknown := sorted(atoms.keys() - shapes.keys()):
        raise RlhpcError(f"the engine wants {', '.join(unknown[:3])}, and no rank of the trainer has such a tensor")
    total = sum(box.numel * sizes[name] for name, boxes in atoms.items() for box in boxes)
    block = max(_MIN_BLOCK_BYTES, total // max(1, len(held)) // _BLOCKS_PER_RANK)
    loads, pieces = dict(load or {}), list[Piece]()
    for name in sorted(atoms, key=_natural):
        for atom in atoms[name]:
            rows = block // max(1, sizes[name] * atom.numel // max(1, atom.sizes[0] if atom.sizes else 1))
            for row_block in _rows(atom, max(1, rows)) if _many(holders[name], atom) else [atom]:
                pieces += _from(name, row_block, holders[name], sizes[name], loads)
    shapes = {name: shapes[name] for name in atoms}
    return Routes(tuple(_join_blocks(pieces, sizes)), shapes, frozenset(frozen), dtypes)


def _atoms(
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


def _many(holders: Sequence[tuple[int, Box]], atom: Box) -> bool:
    """Returns whether several ranks hold the same elements."""
    overlaps = [overlap for _, box in holders if (overlap := atom.meet(box)) is not None]
    return sum(overlap.numel for overlap in overlaps) > atom.numel


def _rows(atom: Box, rows: int) -> list[Box]:
    """Cuts a box along its first dimension."""
    if not atom.sizes or atom.sizes[0] <= rows:
        return [atom]
    (start, *starts), (size, *sizes) = atom
    return [Box((start + offset, *starts), (min(rows, size - offset), *sizes)) for offset in range(0, size, rows)]


def _from(
    name: str, part: Box, holders: Sequence[tuple[int, Box]], itemsize: int, loads: dict[int, int]
) -> list[Piece]:
    """Assigns a slice to the ranks that hold it and have the fewest bytes to send."""
    remaining, pieces = [part], list[Piece]()
    for rank, box in sorted(holders, key=lambda holder: (loads.get(holder[0], 0), holder[0])):
        overlaps = [(missing_box, missing_box.meet(box)) for missing_box in remaining]
        remaining = [
            remainder
            for missing_box, overlap in overlaps
            for remainder in ([missing_box] if overlap is None else missing_box.without(overlap))
        ]
        for _, overlap in overlaps:
            if overlap is not None:
                pieces.append(Piece(name, overlap, rank, overlap.numel * itemsize))
                loads[rank] = loads.get(rank, 0) + overlap.numel * itemsize
        if not remaining:
            return pieces
    raise RlhpcError(f"no rank of the trainer has {remaining[0]} of {name}, which an engine wants")


def _join_blocks(pieces: Sequence[Piece], sizes: Mapping[str, int]) -> list[Piece]:
    """Joins neighbouring row blocks of one rank into one piece."""
    joined = list[Piece]()
    for piece in pieces:
        previous = joined[-1] if joined else None
        if previous is not None and previous.name == piece.name and previous.source == piece.source and piece.box.sizes:
            (start, *starts), (size, *row_sizes) = previous.box
            if (start + size, *starts) == piece.box.starts and tuple(row_sizes) == piece.box.sizes[1:]:
                joined_box = Box(previous.box.starts, (size + piece.box.sizes[0], *row_sizes))
                joined[-1] = Piece(previous.name, joined_box, previous.source, joined_box.numel * sizes[previous.name])
                continue
        joined.append(piece)
    return joined


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts layer 2 before layer 10."""
    return [(int(token), "") if token.isdigit() else (-1, token) for token in re.split(r"(\d+)", name)]


_ALIGN = 16
#: Bytes of a digest.
DIGEST = 8


@dataclass(frozen=True)
class Load:
    """Pieces that are transferred together, from all ranks that send some of them.

    Attributes:
        pieces: In the order of the routes.
        at: Offset of each piece, in bytes.
        spans: By trainer rank, start and end of the bytes it sends. The digests of its pieces come before the pieces.
        size: Total bytes.
    """

    pieces: tuple[Piece, ...]
    at: tuple[int, ...]
    spans: dict[int, tuple[int, int]]
    size: int

    def of(self, source: int) -> list[tuple[Piece, int]]:
        """Returns the pieces that a trainer rank sends, with their offsets."""
        return [
            piece_and_offset
            for piece_and_offset in zip(self.pieces, self.at, strict=True)
            if piece_and_offset[0].source == source
        ]


@dataclass(frozen=True)
class SliceReaders:
    """Receivers that request the same slices, and the loads sent to them.

    Attributes:
        loads: In the order of the transfer.
        ranks: Ranks in the group; each one forwards to the next.
    """

    loads: tuple[Load, ...]
    ranks: tuple[int, ...]


def loads(pieces: Sequence[Piece], max_bytes: int) -> tuple[Load, ...]:
    """Cuts the pieces for one group of readers into loads.

    Args:
        pieces: In order.
        max_bytes: Maximum bytes of a load, unless a single piece is larger.
    """
    full_loads, batch, nbytes = list[Load](), list[Piece](), 0
    for piece in pieces:
        if batch and nbytes + piece.nbytes > max_bytes:
            full_loads.append(_load(batch))
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    return (*full_loads, *([_load(batch)] if batch else []))


def _load(pieces: Sequence[Piece]) -> Load:
    offsets, spans, size = dict[int, int](), dict[int, tuple[int, int]](), 0
    for source in sorted({piece.source for piece in pieces}):
        start, piece_indices = size, [piece_index for piece_index, piece in enumerate(pieces) if piece.source == source]
        size += DIGEST * len(piece_indices)
        for piece_index in piece_indices:
            offsets[piece_index] = size + -size % _ALIGN
            size = offsets[piece_index] + pieces[piece_index].nbytes
        size += -size % _ALIGN
        spans[source] = (start, size)
    return Load(tuple(pieces), tuple(offsets[piece_index] for piece_index in range(len(pieces))), spans, size)
