"""Shards over a process group of all who send them and all who take them in (`rounds`).

The first rank of the trainer asks who is at it. Only where all are, a version goes over the group: its ranks wait for each
other, and a receiver may be busy with something that waits for the trainer. When the rounds are through, or somebody is lost,
each says what it has got; the first says to all whether that was everything, or the version goes by another road.
"""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from rlhpc.checkpoint.tensor_slice import Box
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.weights.process_group import GroupLost, Presence, WeightProcessGroup, Who
from rlhpc.weights.transfer_plan import DIGEST, Held, Load, Piece, Routes, SliceReaders, loads, route
from rlhpc.weights.transport_select import HOST
from rlhpc.weights.verification import COST, WeightsDiffer
from rlhpc.weights.version_digest import digests

log = logging.getLogger(__name__)

T = TypeVar("T")
#: How long receivers have to be at it, or else the version takes another road.
READY_S = 2.0
_PAUSE_S, _LOOK_S = 0.001, 0.5
_READY, _DONE = "ready", "done"


class Together:
    """This process's part, for as long as the same ranks take part.

    Args:
        kind: `nccl` or `gloo`.
        members: The trainer's ranks, then those who receive.
        senders: How many of them are the trainer's.
        me: Which of them this is.
        name: Of what all of them share.

    Attributes:
        rank: This rank's number in the group.
        went: Whether all have got the last version.
    """

    def __init__(self, kind: str, members: tuple[Who, ...], senders: int, me: Who, name: str) -> None:
        self._kind, self._members, self._senders, self._me, self._key = kind, members, senders, me, f"shards/{name}"
        self.rank = members.index(me)
        self._presence = Presence(members, me)
        self._group: WeightProcessGroup | None = None
        self.went = False

    def run(self, version: int, rounds: Callable[[WeightProcessGroup], Iterator[T]]) -> Iterator[T]:
        """What the rounds of a version give. Afterwards `went` says whether all have got all."""
        self.went = False
        if not (name := self._begun(version)):
            return
        if self._group is None or self._group.name != name:
            self.end()
            self._group = WeightProcessGroup(self._kind, self._members, self._me, name)
        try:
            yield from rounds(self._group)
            mine = True
        except GroupLost as error:
            log.warning("%s; version %d goes through the host", error, version)
            mine = False
        except GeneratorExit:
            self.end(tell=True)
            self._say(_DONE, version, False)
            raise
        self.went = self._agreed(version, mine)
        if not self.went:
            self.end()

    def end(self, *, tell: bool = False) -> None:
        """Ends the group; others are told where they may be in the middle of something."""
        group, self._group = self._group, None
        if group is not None:
            group.end(tell=tell)

    def _begun(self, version: int) -> str:
        """The group that a version goes over; empty where not all are at it."""
        mine = "" if self._group is None else self._group.name
        if self.rank:
            if self.rank >= self._senders:
                self._say(_READY, version, mine)
            return str(p2p.follow_broadcast(self._members[0], lambda: None))
        there = self._heard(_READY, version, range(self._senders, len(self._members)), READY_S)
        if missing := [rank for rank in range(self._senders, len(self._members)) if rank not in there]:
            log.info("version %d goes through the host: %s not at it", version, self._presence.names(missing))
            return self._tell("")
        same = mine and {*there.values()} == {mine}
        return self._tell(mine if same else f"shards-{uuid.uuid4().hex}")

    def _agreed(self, version: int, mine: bool) -> bool:
        """Whether all have got a version."""
        if self.rank:
            self._say(_DONE, version, mine)
            return bool(p2p.follow_broadcast(self._members[0], lambda: None))
        others = range(1, len(self._members))
        context = current()
        done = self._heard(_DONE, version, others, context.wait_deadline)
        missing = [rank for rank in others if rank not in done]
        if late := [rank for rank in missing if rank not in self._presence.gone()]:
            raise DeadlineExceeded(
                f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(late)} to have version "
                f"{version} of the weights"
            )
        return bool(self._tell(mine and not missing and all(done.values())))

    # -- what the first hears and says ------------------------------------------------------------------------------

    def _say(self, what: str, version: int, value: Any) -> None:
        p2p.post((what, version, self.rank, value), self._key, *self._members[0])

    def _tell(self, value: T) -> T:
        groups: dict[str, list[int]] = {}
        for group, rank in self._members[1:]:
            groups.setdefault(group, []).append(rank)
        p2p.begin_broadcast(value, *self._members[0], list(groups.items()))()
        return value

    def _heard(self, what: str, version: int, whom: Sequence[int], patience: float) -> dict[int, Any]:
        """What others say, by rank; without those who have gone, or have said nothing in time."""
        found, context, start = dict[int, Any](), current(), time.monotonic()
        look, gone = start, set[int]()
        while {*whom} - found.keys() - gone and (now := time.monotonic()) - start < patience:
            context.check()
            if now >= look:
                gone, look = {*self._presence.gone()}, now + _LOOK_S
            try:
                said, of, rank, value = p2p.poll(self._key)
            except queue.Empty:
                time.sleep(_PAUSE_S)
                continue
            if (said, of) == (what, version):
                found[rank] = value
        return found


def give(
    group: WeightProcessGroup,
    lines: Sequence[SliceReaders],
    me: int,
    values: Callable[[Piece], torch.Tensor],
    version: int,
) -> Iterator[None]:
    """A version's rounds on a rank of the trainer.

    Args:
        group: With the trainer's ranks first.
        lines: Of all who receive.
        me: This rank.
        values: Those of a piece, as they are sent.
        version: Of the weights.
    """
    for now in range(max((len(line.loads) for line in lines), default=0)):
        sends = [
            (line.ranks[0], packed(line.loads[now], me, values, version, group.memory))
            for line in lines
            if now < len(line.loads) and me in line.loads[now].spans
        ]
        if sends:
            group.exchange(sends, [])
    group.settle()
    yield from ()


def take(
    group: WeightProcessGroup, line: SliceReaders, me: int, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A version's rounds on a rank that receives: pieces, which nobody writes to any more.

    Args:
        group: See `give`.
        line: Of this rank, and those who want the same.
        me: This rank's number in the group.
        dtypes: Of the tensors.
        version: Of the weights.

    Raises:
        WeightsDiffer: Something is not what was handed over.
    """
    place = line.ranks.index(me)
    below = line.ranks[place + 1 : place + 2]
    before: tuple[Load, torch.Tensor] | None = None
    for load in (*line.loads, None):
        sends = [(rank, before[1]) for rank in below] if before is not None else []
        takes, coming = [], None
        if load is not None:
            flat = group.memory(load.size)
            coming = load, flat
            above = {line.ranks[place - 1]: (0, load.size)} if place else load.spans
            takes = [(rank, flat[start:end]) for rank, (start, end) in above.items()]
        if sends or takes:
            group.exchange(sends, takes)
        if before is not None:
            yield from opened(*before, dtypes, version)
        group.settle()
        before = coming


def packed(
    load: Load,
    me: int,
    values: Callable[[Piece], torch.Tensor],
    version: int,
    memory: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """What a rank of the trainer sends of a load, with a digest of each piece; `give` has the arguments."""
    start, end = load.spans[me]
    flat, given = memory(end - start), list[tuple[str, torch.Tensor]]()
    for piece, at in load.of(me):
        tensor = values(piece)
        flat[at - start :][: piece.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        given.append((piece.label, tensor))
    found = _digests(given, version)
    proofs = np.array([found[label] for label, _ in given], np.uint64).view(np.uint8)
    flat[: len(proofs)].copy_(torch.from_numpy(proofs))
    return flat


def opened(
    load: Load, flat: torch.Tensor, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces of a load; see `take`."""
    tensors = [
        (piece, flat[at:][: piece.nbytes].view(getattr(torch, dtypes[piece.name])).view(piece.box.sizes))
        for piece, at in zip(load.pieces, load.at, strict=True)
    ]
    found = _digests([(piece.label, tensor) for piece, tensor in tensors], version)
    for source, (start, _) in load.spans.items():
        mine = load.of(source)
        proofs = flat[start:][: DIGEST * len(mine)].cpu().numpy().view(np.uint64)
        for (piece, _), proof in zip(mine, proofs, strict=True):
            if found[piece.label] != int(proof):
                raise WeightsDiffer(
                    f"weights of version {version}: {piece.label} is another than that which rank {source} of the trainer "
                    "handed over: nobody acts with it"
                )
    yield from tensors


@COST.proving()
def _digests(tensors: Sequence[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    return digests(tensors, version)


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

    def line(self, number: int, routes: Routes, most: int) -> SliceReaders:
        """Those who want what a table says, and what goes to them over a group, in loads of so many bytes."""
        ranks = [len(self.held) + rank for rank, of in enumerate(self.of.values()) if of == number]
        return SliceReaders(loads([p for p in self.in_order(routes) if not self.keeps(routes, p)], most), tuple(ranks))

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
