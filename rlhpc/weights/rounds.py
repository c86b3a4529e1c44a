"""In which rounds shards go over a process group, where each of its ranks sends what is there once.

The ranks of a trainer send load after load to the first of those who want the same, which passes each on to the next in the
round after, and so on. A round's sends and takes belong together on all ranks, and each rank goes through the rounds in order:
so nobody waits for somebody who waits for him. A pure function of the routes, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.weights.routes import Piece

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
class Line:
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
