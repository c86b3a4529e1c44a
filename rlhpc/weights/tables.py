"""What trainer and engines have said of shards (`reshard`), from which all of them work out the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhpc.checkpoint.tensor_slice import Box
from rlhpc.weights.group import Who
from rlhpc.weights.roads import HOST
from rlhpc.weights.rounds import Line, loads
from rlhpc.weights.routes import Held, Piece, Routes, route
from rlhpc.weights.together import Together

#: Engine tensor → the boxes that a rank wants of it; None: all of everything.
Wanted = Mapping[str, Sequence[Box]] | None


@dataclass(frozen=True)
class Tables:
    """What routes follow from.

    Attributes:
        held: What each rank of the trainer has.
        wanted: Different tables of what is wanted.
        of: Which of them each receiver's is.
        delta: `rollout.weight_delta`.
        road: `HOST`, or the kind of process group that carries what is not kept.
        name: Of these tables.
    """

    held: list[list[Held]]
    wanted: list[Wanted]
    of: Mapping[Who, int]
    delta: str
    road: str = HOST
    name: str = ""

    def routes(self) -> list[Routes]:
        """Those to each table's receivers; a rank that has much to send to some has less for the next."""
        found, load = list[Routes](), dict[int, int]()
        for table in self.wanted:
            found.append(route(self.held, table, load))
            for rank, nbytes in found[-1].sent().items():
                load[rank] = load.get(rank, 0) + nbytes
        return found

    def keeps(self, routes: Routes, piece: Piece) -> bool:
        """Whether a piece is kept for those who come later."""
        return self.delta == "elements" or (self.delta != "off" and piece.name in routes.frozen)

    def in_order(self, routes: Routes) -> list[Piece]:
        """Pieces as receivers get them: what is kept comes last."""
        return sorted(routes.pieces, key=lambda piece: self.keeps(routes, piece))

    def line(self, number: int, routes: Routes, most: int) -> Line:
        """Those who want what a table says, and what goes to them over a group, in loads of so many bytes."""
        ranks = [len(self.held) + rank for rank, of in enumerate(self.of.values()) if of == number]
        return Line(loads([p for p in self.in_order(routes) if not self.keeps(routes, p)], most), tuple(ranks))

    def together(self, trainer: str, me: Who) -> Together | None:
        """A rank's part in what goes over a group; None where all goes through the host."""
        if self.road == HOST:
            return None
        senders = [(trainer, rank) for rank in range(len(self.held))]
        return Together(self.road, (*senders, *self.of), len(senders), me, self.name)


@dataclass(frozen=True)
class Header:
    """What comes before a version.

    Attributes:
        version: Of the weights.
        tables: New ones, and then all goes through the host once; None if the last ones still hold.
    """

    version: int
    tables: Tables | None
