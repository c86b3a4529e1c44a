"""Who sends which part of which tensor: what trainers hold, met with what engines want.

A pure function of the two tables, so it is the same on every rank, and is made once for as long as the same ranks take part.
Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhpc.checkpoint.tensor_slice import Box, uncovered, whole
from rlhpc.runtime.errors import RlhpcError

#: A tensor that several ranks hold is cut so that none of them sends more than its share: each row block is at most this
#: part of what a rank sends, and no smaller than so many bytes.
_FINE, _LEAST = 24, 1 << 12


class Held(NamedTuple):
    """What a rank has of a tensor.

    Attributes:
        name: The tensor.
        shape: Of all of it.
        itemsize: Bytes of an element, as it is sent.
        box: The part.
        frozen: Whether it never changes.
        dtype: As it is sent, without "torch.".
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    box: Box
    frozen: bool = False
    dtype: str = ""


class Piece(NamedTuple):
    """A part of a tensor that one rank sends.

    Attributes:
        name: The tensor.
        box: The part.
        source: The rank.
        nbytes: Its bytes.
    """

    name: str
    box: Box
    source: int
    nbytes: int

    @property
    def label(self) -> str:
        """What it is called on its way."""
        return f"{self.name}@{','.join(f'{start}+{size}' for start, size in zip(*self.box, strict=True))}"


@dataclass(frozen=True)
class Routes:
    """Who sends what to receivers that want the same.

    Attributes:
        pieces: In the order in which they are sent: layer by layer.
        shapes: Of the whole tensors.
        frozen: Tensors that never change.
        dtypes: Of the tensors, as they are sent.
    """

    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends in a complete update."""
        found = dict[int, int]()
        for piece in self.pieces:
            found[piece.source] = found.get(piece.source, 0) + piece.nbytes
        return found


def route(
    held: Sequence[Sequence[Held]],
    wanted: Mapping[str, Sequence[Box]] | None,
    load: Mapping[int, int] | None = None,
) -> Routes:
    """Plans an update.

    Args:
        held: What each rank has.
        wanted: What receivers want; None is all of everything. What boxes have in common is sent once.
        load: Bytes that ranks send besides.

    Raises:
        RlhpcError: Nobody has something that is wanted; names the tensor.
    """
    holders = dict[str, list[tuple[int, Box]]]()
    shapes, sizes, frozen = dict[str, tuple[int, ...]](), dict[str, int](), set[str]()
    dtypes = dict[str, str]()
    for rank, entries in enumerate(held):
        for name, shape, itemsize, box, still, dtype in entries:
            holders.setdefault(name, []).append((rank, box))
            if shapes.setdefault(name, shape) != shape:
                raise RlhpcError(f"ranks of the trainer have {name} of shape {shapes[name]} and of {shape}")
            sizes[name], dtypes[name] = itemsize, dtype
            if still:
                frozen.add(name)
    atoms = _atoms(shapes, wanted)
    if unknown := sorted(atoms.keys() - shapes.keys()):
        raise RlhpcError(f"the engine wants {', '.join(unknown[:3])}, and no rank of the trainer has such a tensor")
    total = sum(box.numel * sizes[name] for name, boxes in atoms.items() for box in boxes)
    block = max(_LEAST, total // max(1, len(held)) // _FINE)
    loads, pieces = dict(load or {}), list[Piece]()
    for name in sorted(atoms, key=_natural):
        for atom in atoms[name]:
            rows = block // max(1, sizes[name] * atom.numel // max(1, atom.sizes[0] if atom.sizes else 1))
            for part in _rows(atom, max(1, rows)) if _many(holders[name], atom) else [atom]:
                found = _from(name, part, holders[name], sizes[name], loads)
                pieces += found
    shapes = {name: shapes[name] for name in atoms}
    return Routes(tuple(_joined(pieces, sizes)), shapes, frozenset(frozen), dtypes)


def _atoms(shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Sequence[Box]] | None) -> dict[str, list[Box]]:
    """All that is wanted, as boxes that do not overlap."""
    if wanted is None:
        return {name: [whole(shape)] for name, shape in shapes.items()}
    found = dict[str, list[Box]]()
    for name, boxes in wanted.items():
        for box in boxes:
            own = found.setdefault(name, [])
            own += uncovered(box, own)
    return found


def _many(holders: Sequence[tuple[int, Box]], atom: Box) -> bool:
    """Whether several ranks have some of the same."""
    parts = [part for _, box in holders if (part := atom.meet(box)) is not None]
    return sum(part.numel for part in parts) > atom.numel


def _rows(atom: Box, rows: int) -> list[Box]:
    """A box, cut along its first dimension."""
    if not atom.sizes or atom.sizes[0] <= rows:
        return [atom]
    (start, *starts), (size, *sizes) = atom
    return [Box((start + at, *starts), (min(rows, size - at), *sizes)) for at in range(0, size, rows)]


def _from(
    name: str, part: Box, holders: Sequence[tuple[int, Box]], itemsize: int, loads: dict[int, int]
) -> list[Piece]:
    """A part, from those who have it and have the least to send."""
    left, found = [part], list[Piece]()
    for rank, box in sorted(holders, key=lambda holder: (loads.get(holder[0], 0), holder[0])):
        meets = [(one, one.meet(box)) for one in left]
        left = [rest for one, met in meets for rest in ([one] if met is None else one.without(met))]
        for _, met in meets:
            if met is not None:
                found.append(Piece(name, met, rank, met.numel * itemsize))
                loads[rank] = loads.get(rank, 0) + met.numel * itemsize
        if not left:
            return found
    raise RlhpcError(f"no rank of the trainer has {left[0]} of {name}, which an engine wants")


def _joined(pieces: Sequence[Piece], sizes: Mapping[str, int]) -> list[Piece]:
    """Neighbouring row blocks from one rank as one piece."""
    found = list[Piece]()
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.name == piece.name and last.source == piece.source and piece.box.sizes:
            (start, *starts), (size, *rest) = last.box
            if (start + size, *starts) == piece.box.starts and tuple(rest) == piece.box.sizes[1:]:
                box = Box(last.box.starts, (size + piece.box.sizes[0], *rest))
                found[-1] = Piece(last.name, box, last.source, box.numel * sizes[last.name])
                continue
        found.append(piece)
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


_ALIGN = 16
#: Bytes of a digest.
DIGEST = 8


@dataclass(frozen=True)
class Load:
    """Pieces that go together, from all who have some.

    Attributes:
        pieces: In the order of the routes.
        at: Where each lies, in bytes.
        spans: By rank of the trainer, start and end of what it sends: the digests of its pieces come before them.
        size: Bytes of all.
    """

    pieces: tuple[Piece, ...]
    at: tuple[int, ...]
    spans: dict[int, tuple[int, int]]
    size: int

    def of(self, source: int) -> list[tuple[Piece, int]]:
        """What comes from a rank of the trainer, and where it lies."""
        return [place for place in zip(self.pieces, self.at, strict=True) if place[0].source == source]


@dataclass(frozen=True)
class SliceReaders:
    """Those who want the same, and what that is.

    Attributes:
        loads: In the order in which they go.
        ranks: In the group; each passes on to the next.
    """

    loads: tuple[Load, ...]
    ranks: tuple[int, ...]


def loads(pieces: Sequence[Piece], most: int) -> tuple[Load, ...]:
    """Cuts up what goes to a line.

    Args:
        pieces: In order.
        most: Bytes of a load, where no single piece is larger.
    """
    found, together, nbytes = list[Load](), list[Piece](), 0
    for piece in pieces:
        if together and nbytes + piece.nbytes > most:
            found.append(_load(together))
            together, nbytes = [], 0
        together.append(piece)
        nbytes += piece.nbytes
    return (*found, *([_load(together)] if together else []))


def _load(pieces: Sequence[Piece]) -> Load:
    at, spans, size = dict[int, int](), dict[int, tuple[int, int]](), 0
    for source in sorted({piece.source for piece in pieces}):
        start, mine = size, [number for number, piece in enumerate(pieces) if piece.source == source]
        size += DIGEST * len(mine)
        for number in mine:
            at[number] = size + -size % _ALIGN
            size = at[number] + pieces[number].nbytes
        size += -size % _ALIGN
        spans[source] = (start, size)
    return Load(tuple(pieces), tuple(at[number] for number in range(len(pieces))), spans, size)
