"""Weights from shards to shards: each trainer rank sends the boxes that it holds to the engine ranks that want them.

Nobody gathers. Trainers say which parts of which tensors they hold, engines which they want; the routes follow from both
(`routes`), once for as long as the same ranks take part. On its way a part is a tensor of its own, and travels as tensors do
(`transport`): from the sender's own shared memory on one host, over TCP between hosts, where a host passes on to others what
it has got; with versions, digests, deltas, and windows. A receiver puts a tensor's parts together as they come, gives it to
the engine's loader and drops it.

Receivers that want the same (ranks of several engines with the same place in theirs) are served by one stream of each
trainer rank, all streams at the same time. All parts come in one order, and everybody waits for the first that it lacks
alone: so nobody waits for somebody who waits for him.

Where each computes on an accelerator of its own, what is not kept for those who come later goes over a process group of them
all (`together`); the streams carry what is, each first version, and whatever the group could not.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from rlhpc.checkpoint.tensor_slice import Box, cut
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.base import NamedTensors, NamedUpdates, Update
from rlhpc.weights.process_group import Who
from rlhpc.weights.reshard_collective import Header, Tables, Together, Wanted, give, take
from rlhpc.weights.sender import PART_BYTES
from rlhpc.weights.transfer_plan import Held, Piece, Routes, SliceReaders
from rlhpc.weights.transport import WeightReceiver, WeightSender
from rlhpc.weights.transport_select import AUTO, GLOO, HOST, NCCL, SEVERAL, End, Receiving, choose, said
from rlhpc.weights.verification import Proof

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

log = logging.getLogger(__name__)

_WANTS = "wants"
#: The smallest part that a stream is cut into.
_LEAST_PART = 8 << 20


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that this rank of a trainer holds.

    Attributes:
        name: The tensor's name in the model's files.
        shape: Of all of it.
        dtype: As it is sent.
        box: The part.
        values: Gives the part, of the box's shape, in whatever dtype it is kept.
        frozen: Whether it never changes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    values: Callable[[], torch.Tensor]
    frozen: bool = False

    @property
    def entry(self) -> Held:
        """What others need to know of it."""

        dtype = str(self.dtype).removeprefix("torch.")
        return Held(self.name, self.shape, self.dtype.itemsize, self.box, self.frozen, dtype)


@runtime_checkable
class SendsShards(Protocol):
    """A `WeightSync` to which every rank of the trainer sends what it holds."""

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """Sends one version; all ranks of the trainer call it.

        Args:
            version: Version of the weights.
            shards: What this rank holds; the same parts in every version.
        """

    def want(self, wanted: Wanted) -> None:
        """Says what this rank of an engine wants, once, before the first version comes."""


@dataclass
class _SliceStream:
    """What this rank of a trainer sends to those who want the same.

    Attributes:
        sender: Sends it.
        pieces: All that goes to them.
        kept: What of that is kept for those who come later.
        still: Labels of what never changes and has been sent.
    """

    sender: WeightSender
    pieces: list[Piece]
    kept: list[Piece]
    still: set[str] = field(default_factory=set)


class ShardSync:
    """The strategy `shards`.

    Args:
        worker: A rank of the trainer, or of an engine.
        src: Group and rank of the trainer's first rank.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        whole: Not needed: a version always comes complete.

    Attributes:
        road: What `roads.choose` is asked for.
        sent: Bytes of weights that this rank sent, or passed on over a group, in the last version.
    """

    road = AUTO

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        whole: bool = False,
    ) -> None:
        self._worker, self._src, self._delta = worker, (src[0], src[1]), delta
        self._me, self._receivers = (worker.group_name, worker.rank), receivers
        self._tables: Tables | None = None
        self._together: Together | None = None
        self.sent = 0
        # of a trainer's rank
        self._streams: list[_SliceStream] = []
        self._holding: dict[str, int] = {}
        self._lines: list[SliceReaders] = []
        # of an engine's rank
        self._sources: dict[int, WeightReceiver] = {}
        self._order: list[Piece] = []
        self._kept: list[Piece] = []
        self._moving: list[Piece] = []
        self._routes = Routes((), {})
        self._told = False
        self._wanted: Wanted = None

    # -- the trainer's ranks --------------------------------------------------------------------------------------------

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """See `SendsShards.send_shards`."""
        if new := self._tables is None:
            self._tables = self._agreed(shards)
        if self._me == self._src:
            p2p.begin_broadcast(Header(version, self._tables if new else None), *self._src, self._receivers)()
        self.sent = 0
        went = not new and self._goes_over_group(version, shards)
        streams = [(stream, stream.kept if went else stream.pieces) for stream in self._streams]
        self.sent += sum(p.nbytes for stream, pieces in streams for p in pieces if p.label not in stream.still)
        works = [
            in_background(f"shards-{number}", functools.partial(self._send, *stream, version, shards))
            for number, stream in enumerate(streams)
            if stream[1]
        ]
        failed = None
        for work in works:
            try:
                work.wait()
            except BaseException as error:  # the others end by themselves, and the first failure is the one to be seen
                failed = failed or error
        if failed is not None:
            raise failed

    def _goes_over_group(self, version: int, shards: Sequence[Shard]) -> bool:
        """Sends what is not kept over a group; says whether all have got it."""
        if self._together is None:
            return False
        me, values = self._worker.rank, functools.partial(self._value, shards)
        for _ in self._together.run(version, lambda group: give(group, self._lines, me, values, version)):
            pass
        mine = (piece for line in self._lines for load in line.loads for piece, _ in load.of(me))
        self.sent += sum(piece.nbytes for piece in mine) if self._together.went else 0
        return self._together.went

    def _send(self, stream: _SliceStream, pieces: list[Piece], version: int, shards: Sequence[Shard]) -> None:
        """Sends a stream's part of a version."""
        frozen = {piece.label for piece in pieces if shards[self._holding[piece.label]].frozen}
        left = (piece for piece in pieces if piece.label not in stream.still)
        stream.sender.send(version, ((piece.label, self._value(shards, piece)) for piece in left), frozen=frozen)
        if self._delta != "off":
            stream.still |= frozen

    def _value(self, shards: Sequence[Shard], piece: Piece) -> torch.Tensor:
        """A piece, as it is sent."""
        shard = shards[self._holding[piece.label]]
        values = cut(shard.values(), piece.box.within(shard.box)).detach()
        return values.to(shard.dtype) if values.is_floating_point() else values

    def _agreed(self, shards: Sequence[Shard]) -> Tables:
        """Has the trainer's ranks agree on who sends what; only the first hears what is wanted."""
        worker, first = self._worker, self._src[1]
        said = worker.all_gather_object(([shard.entry for shard in shards], End.of(current(), self._me)))
        made = self._heard(*zip(*said, strict=True)) if worker.rank == first else None
        ranks = [(worker.group_name, list(range(worker.world_size)))]
        tables: Tables = worker.broadcast(made, ranks, (self._src[0], first))
        part, to = max(_LEAST_PART, PART_BYTES // worker.world_size), len(tables.wanted)
        self._streams, self._holding, routes = [], {}, tables.routes()
        for number in range(to):
            mine = [piece for piece in routes[number].pieces if piece.source == worker.rank]
            self._holding |= {piece.label: _holding(shards, piece) for piece in mine}
            receivers = _by_group([who for who, of in tables.of.items() if of == number])
            sender = WeightSender(worker, receivers, self._delta, part, SEVERAL)
            self._streams.append(_SliceStream(sender, mine, [p for p in mine if tables.keeps(routes[number], p)]))
        self._together = tables.together(self._src[0], self._me)
        self._lines = [tables.line(number, routes[number], _load()) for number in range(to if self._together else 0)]
        return tables

    def _heard(self, held: Sequence[list[Held]], ends: Sequence[End]) -> Tables:
        """What receivers have said that they want, and which of them are served together."""
        context = current()
        known: dict[Who, tuple[str, Wanted]] = _known(self._worker)
        wanted, of = list[Wanted](), dict[Who, int]()
        for group, ranks in self._receivers:
            for rank in ranks:
                record = context.member(group, rank)
                while known.get((group, rank), ("", None))[0] != record["incarnation"]:
                    known[group, rank] = p2p.recv(group, rank, tag=_WANTS)
                table = known[group, rank][1]
                if table not in wanted:
                    wanted.append(table)
                of[group, rank] = wanted.index(table)
        road, why = choose(ends[0], [*ends[1:], *(said(context, who) for who in of)], self.road)
        if road not in (NCCL, GLOO) or self._delta == "elements":  # of which all is kept
            road = HOST
        log.info("shards take the road %s: %s", road, why)
        return Tables([*held], wanted, of, self._delta, road, uuid.uuid4().hex)

    # -- an engine's ranks ----------------------------------------------------------------------------------------------

    def want(self, wanted: Wanted) -> None:
        """See `SendsShards.want`."""
        me = current().member(self._worker.group_name, self._worker.rank)
        self._told, self._wanted = True, wanted
        table = None if wanted is None else {name: tuple(boxes) for name, boxes in wanted.items()}
        group, rank = self._src
        Receiving(self._me, self.road).tell()
        p2p.send((me["incarnation"], table), self._worker.group_name, self._worker.rank, group, rank, tag=_WANTS)

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`). Each tensor comes in full shape, and only what this rank wants of
        it has been written."""
        header: Header = p2p.follow_broadcast(self._src, lambda: None)
        if header.tables is not None:
            self._route(header.tables)
        return Update(header.version, True, self._arriving(header.version, header.tables is not None), proven=True)

    def _route(self, tables: Tables) -> None:
        number = tables.of[self._me]
        self._routes = routes = tables.routes()[number]
        self._order = tables.in_order(routes)
        self._kept = [piece for piece in self._order if tables.keeps(routes, piece)]
        self._moving = self._order[: len(self._order) - len(self._kept)]
        for rank in {piece.source for piece in self._order}:
            if rank not in self._sources:
                self._sources[rank] = WeightReceiver(self._worker, (self._src[0], rank), whole=True, road=SEVERAL)
        if self._together is not None:
            self._together.end()
        self._together = tables.together(self._src[0], self._me)
        self._lines = [tables.line(number, routes, _load())] if self._together else []

    def _arriving(self, version: int, new: bool) -> NamedUpdates:
        """Whole tensors, each as soon as it has all its parts."""
        given = set[str]()
        if together := None if new else self._together:
            line, dtypes = self._lines[0], self._routes.dtypes
            rounds = functools.partial(take, line=line, me=together.rank, dtypes=dtypes, version=version)
            for name, tensor in self._put_together(self._moving, together.run(version, rounds)):
                given.add(name)
                yield name, tensor
        went = together is not None and together.went
        last = together is None or self._lines[0].ranks[-1] == together.rank
        self.sent = sum(piece.nbytes for piece in self._moving) if went and not last else 0
        order = self._kept if went else self._order
        for name, tensor in self._put_together(order, self._streamed(version, order)):
            if name not in given:
                yield name, tensor

    def _streamed(self, version: int, order: Sequence[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Pieces, from the streams of those who hold them."""
        updates = {rank: self._sources[rank].receive() for rank in sorted({piece.source for piece in order})}
        other = {update.version for update in updates.values()} - {version}
        if other:
            raise RlhpcError(f"parts of version {version} of the weights came with parts of {sorted(other)}")
        proofs = {rank: Proof(update, f"{self._src[0]}-{rank}") for rank, update in updates.items()}
        streams = {rank: proof.whole() for rank, proof in proofs.items()}
        early = {rank: dict(itertools.islice(stream, 1)) for rank, stream in streams.items()}
        for piece in order:
            yield piece, _next(streams[piece.source], early[piece.source], piece)
        for rank, stream in streams.items():
            for label, _ in stream:
                raise RlhpcError(f"{label} of the weights came from rank {rank}, and is not wanted")
        for proof in proofs.values():
            proof.check()

    def _put_together(
        self, order: Sequence[Piece], pieces: Iterator[tuple[Piece, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, each as soon as it has all its pieces."""
        missing, shapes = collections.Counter(piece.name for piece in order), self._routes.shapes
        whole = dict[str, torch.Tensor]()
        for (name, box, *_), values in pieces:
            missing[name] -= 1
            if box.sizes == shapes[name]:
                yield name, values
                continue
            if name not in whole:
                # Pages of it that are not written to are not there.
                whole[name] = torch.empty(shapes[name], dtype=values.dtype, device=values.device)
            cut(whole[name], box).copy_(values)
            del values
            if not missing[name]:
                yield name, whole.pop(name)

    # -- both -----------------------------------------------------------------------------------------------------------

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Refuses: whole tensors are sent by other strategies."""
        raise RlhpcError("the strategy shards sends what each rank holds (send_shards)")

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`), by new routes: receivers may be others."""
        self._tables = None
        if self._together is not None:
            self._together.end()
        for stream in self._streams:
            stream.sender.forget()
        for receiver in self._sources.values():
            receiver.forget()
        if self._told:
            self.want(self._wanted)  # it may have been lost on its way


def _next(stream: Iterator[tuple[str, torch.Tensor]], early: dict[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """A piece from its stream. Only what is kept for those who come later, and stays mapped, may come before it is due."""
    while piece.label not in early:
        found = next(stream, None)
        if found is None:
            raise RlhpcError(f"{piece.label} of the weights did not come from rank {piece.source} of the trainer")
        early[found[0]] = found[1]
    return early.pop(piece.label)


def _load() -> int:
    """Bytes that go at a time over a group to those who want the same, from all ranks of the trainer."""
    return max(_LEAST_PART, PART_BYTES // 4)


def _holding(shards: Sequence[Shard], piece: Piece) -> int:
    """Which shard a piece lies in."""
    return next(
        number
        for number, shard in enumerate(shards)
        if shard.name == piece.name and shard.box.meet(piece.box) == piece.box
    )


def _by_group(receivers: Sequence[Who]) -> list[tuple[str, list[int]]]:
    found = dict[str, list[int]]()
    for group, rank in receivers:
        found.setdefault(group, []).append(rank)
    return list(found.items())


def _known(worker: Worker) -> dict[Who, tuple[str, Wanted]]:
    """What receivers have said to this rank, whatever it was that sent to them."""
    found: dict[Who, tuple[str, Wanted]] = worker.__dict__.setdefault("_rlhpc_wanted", {})
    return found
