"""Weights from shards to shards: each trainer rank sends the boxes that it holds to the engine ranks that want them.

Nobody gathers. Trainers say which parts of which tensors they hold, engines which they want; the routes follow from both
(`routes`), once for as long as the same ranks take part. On its way a part is a tensor of its own, and travels as tensors do
(`transport`): from the sender's own shared memory on one host, over TCP between hosts, where a host passes on to others what
it has got; with versions, digests, deltas, and windows. A receiver puts a tensor's parts together as they come, gives it to
the engine's loader and drops it.

Receivers that want the same (ranks of several engines with the same place in theirs) are served by one stream of each
trainer rank, all streams at the same time. All parts come in one order, and everybody waits for the first that it lacks
alone: so nobody waits for somebody who waits for him.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from rlhpc.checkpoint.boxes import Box, cut
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.proof import Proof
from rlhpc.weights.publish import PART_BYTES
from rlhpc.weights.roads import SEVERAL
from rlhpc.weights.routes import Held, Piece, Routes, route
from rlhpc.weights.strategy import NamedTensors, NamedUpdates, Update
from rlhpc.weights.transport import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

#: Engine tensor → the boxes that a rank wants of it; None: all of everything.
Wanted = Mapping[str, Sequence[Box]] | None
#: A receiving rank.
Who = tuple[str, int]
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
        return Held(self.name, self.shape, self.dtype.itemsize, self.box, self.frozen)


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


@dataclass(frozen=True)
class _Tables:
    """What routes follow from.

    Attributes:
        held: What each rank of the trainer has.
        wanted: Different tables of what is wanted.
        of: Which of them each receiver's is.
        delta: `rollout.weight_delta`.
    """

    held: list[list[Held]]
    wanted: list[Wanted]
    of: Mapping[Who, int]
    delta: str

    def routes(self) -> list[Routes]:
        """Those to each table's receivers; a rank that has much to send to some has less for the next."""
        found, load = list[Routes](), dict[int, int]()
        for table in self.wanted:
            found.append(route(self.held, table, load))
            for rank, nbytes in found[-1].sent().items():
                load[rank] = load.get(rank, 0) + nbytes
        return found

    def in_order(self, routes: Routes) -> list[Piece]:
        """Pieces as receivers get them: what is kept for those who come later comes last."""
        kept = (lambda name: True) if self.delta == "elements" else routes.frozen.__contains__
        if self.delta == "off":
            return list(routes.pieces)
        return sorted(routes.pieces, key=lambda piece: kept(piece.name))


@dataclass(frozen=True)
class _Header:
    """What comes before a version.

    Attributes:
        version: Of the weights.
        tables: New ones; None if the last ones still hold.
    """

    version: int
    tables: _Tables | None


class ShardSync:
    """The strategy `shards`.

    Args:
        worker: A rank of the trainer, or of an engine.
        src: Group and rank of the trainer's first rank.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        whole: Not needed: a version always comes complete.
    """

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        whole: bool = False,
    ) -> None:
        self._worker, self._src, self._delta = worker, (src[0], src[1]), delta
        self._receivers = receivers
        self._senders: list[tuple[WeightSender, list[tuple[Piece, int]]]] = []
        self._tables: _Tables | None = None
        self._sources: dict[int, WeightReceiver] = {}
        self._order: list[Piece] = []
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._told = False
        self._wanted: Wanted = None
        #: What never changes and has been sent.
        self._still: set[tuple[int, str]] = set()
        #: Bytes of weights that this rank sent in the last version.
        self.sent = 0

    # -- the trainer's ranks --------------------------------------------------------------------------------------------

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """See `SendsShards.send_shards`."""
        tables = None
        if self._tables is None:
            tables = self._tables = self._agreed(shards)
        if self._worker.rank == self._src[1]:
            group, rank = self._src
            p2p.begin_broadcast(_Header(version, tables), group, rank, self._receivers)()
        self.sent = sum(
            piece.nbytes
            for sender, pieces in self._senders
            for piece, _ in pieces
            if (id(sender), piece.label) not in self._still
        )
        works = [
            in_background(f"shards-{number}", functools.partial(self._send, *stream, version, shards))
            for number, stream in enumerate(self._senders)
        ]
        failed = None
        for work in works:
            try:
                work.wait()
            except BaseException as error:  # the others end by themselves, and the first failure is the one to be seen
                failed = failed or error
        if failed is not None:
            raise failed

    def _send(
        self, sender: WeightSender, pieces: list[tuple[Piece, int]], version: int, shards: Sequence[Shard]
    ) -> None:
        """Sends a stream's part of a version."""
        frozen = {piece.label for piece, number in pieces if shards[number].frozen}
        sender.send(version, self._values(sender, pieces, shards), frozen=frozen)
        if self._delta != "off":
            self._still |= {(id(sender), label) for label in frozen}

    def _values(
        self, sender: WeightSender, pieces: Iterable[tuple[Piece, int]], shards: Sequence[Shard]
    ) -> NamedTensors:
        for piece, number in pieces:
            if (id(sender), piece.label) in self._still:
                continue
            shard = shards[number]
            values = cut(shard.values(), piece.box.within(shard.box)).detach()
            yield piece.label, values.to(shard.dtype) if values.is_floating_point() else values

    def _agreed(self, shards: Sequence[Shard]) -> _Tables:
        """Has the trainer's ranks agree on who sends what; only the first hears what is wanted."""
        worker, first = self._worker, self._src[1]
        held = worker.all_gather_object([shard.entry for shard in shards])
        made = self._heard(held) if worker.rank == first else None
        ranks = [(worker.group_name, list(range(worker.world_size)))]
        tables: _Tables = worker.broadcast(made, ranks, (self._src[0], first))
        mine: list[list[tuple[Piece, int]]] = []
        for routes in tables.routes():
            mine.append([(p, _holding(shards, p)) for p in routes.pieces if p.source == worker.rank])
        part = max(_LEAST_PART, PART_BYTES // worker.world_size)
        to = [_by_group([who for who, of in tables.of.items() if of == number]) for number in range(len(mine))]
        self._senders = [
            (
                WeightSender(worker, to[number], self._delta, part, SEVERAL),
                pieces,
            )
            for number, pieces in enumerate(mine)
            if pieces
        ]
        return tables

    def _heard(self, held: list[list[Held]]) -> _Tables:
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
        return _Tables(held, wanted, of, self._delta)

    # -- an engine's ranks ----------------------------------------------------------------------------------------------

    def want(self, wanted: Wanted) -> None:
        """See `SendsShards.want`."""
        me = current().member(self._worker.group_name, self._worker.rank)
        self._told, self._wanted = True, wanted
        table = None if wanted is None else {name: tuple(boxes) for name, boxes in wanted.items()}
        group, rank = self._src
        p2p.send((me["incarnation"], table), self._worker.group_name, self._worker.rank, group, rank, tag=_WANTS)

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`). Each tensor comes in full shape, and only what this rank wants of
        it has been written."""
        header: _Header = p2p.follow_broadcast(self._src, lambda: None)
        if header.tables is not None:
            self._route(header.tables)
        updates = {rank: self._sources[rank].receive() for rank in sorted({piece.source for piece in self._order})}
        other = {update.version for update in updates.values()} - {header.version}
        if other:
            raise RlhpcError(f"parts of version {header.version} of the weights came with parts of {sorted(other)}")
        proofs = {rank: Proof(update, f"{self._src[0]}-{rank}") for rank, update in updates.items()}
        return Update(header.version, True, self._put_together(proofs), proven=True)

    def _route(self, tables: _Tables) -> None:
        routes = tables.routes()[tables.of[self._worker.group_name, self._worker.rank]]
        self._order, self._shapes = tables.in_order(routes), routes.shapes
        for rank in {piece.source for piece in self._order}:
            if rank not in self._sources:
                self._sources[rank] = WeightReceiver(self._worker, (self._src[0], rank), whole=True, road=SEVERAL)

    def _put_together(self, proofs: Mapping[int, Proof]) -> NamedUpdates:
        """Whole tensors, each as soon as it has all its parts."""
        streams = {rank: proof.whole() for rank, proof in proofs.items()}
        missing = collections.Counter(piece.name for piece in self._order)
        whole, early = dict[str, torch.Tensor](), {rank: dict(itertools.islice(s, 1)) for rank, s in streams.items()}
        for piece in self._order:
            name, box = piece.name, piece.box
            values = _next(streams[piece.source], early[piece.source], piece)
            missing[name] -= 1
            if box.sizes == self._shapes[name]:
                yield name, values
            else:
                if name not in whole:
                    # Pages of it that are not written to are not there.
                    whole[name] = torch.empty(self._shapes[name], dtype=values.dtype, device=values.device)
                cut(whole[name], box).copy_(values)
                if not missing[name]:
                    yield name, whole.pop(name)
            del values
        for rank, stream in streams.items():
            for label, _ in stream:
                raise RlhpcError(f"{label} of the weights came from rank {rank}, and is not wanted")
        for proof in proofs.values():
            proof.check()

    # -- both -----------------------------------------------------------------------------------------------------------

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Refuses: whole tensors are sent by other strategies."""
        raise RlhpcError("the strategy shards sends what each rank holds (send_shards)")

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`), by new routes: receivers may be others."""
        self._tables = None
        self._still.clear()
        for sender, _ in self._senders:
            sender.forget()
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
