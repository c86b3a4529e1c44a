"""Reshard: each trainer rank sends the tensor slices that it holds to the engine ranks that request them, without a gather.

Trainer ranks publish the slices that they hold, and engine ranks those that they request. The routes follow from both
(`transfer_plan`), once for as long as the same ranks take part. During the transfer a slice is a separate tensor and travels
like any other (`transport`): through the sender's shared memory on one host, over TCP between hosts, where a host forwards to
others, with versions, digests, deltas and windows. A receiver assembles a tensor from its slices as they arrive, passes it to
the engine's loader and drops it.

Receivers that request the same slices (ranks of several engines with the same position in theirs) are served by one stream
of each trainer rank, all streams at the same time. All parts arrive in one order, and every receiver waits for its first
missing part only. So no two ranks wait for each other.

If each end computes on its own accelerator, parts that are not kept for later receivers go over a process group of all ends
(`reshard_collective`). The streams carry kept parts, each first version, and whatever the group could not deliver.
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
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.base import NamedTensors, NamedUpdates, Update
from rlhpc.weights.process_group import RankAddress
from rlhpc.weights.reshard_collective import CollectiveReshard, Header, RequestedSlices, Tables, give, take
from rlhpc.weights.sender import PART_BYTES
from rlhpc.weights.transfer_plan import Held, Piece, Routes, SliceReaders
from rlhpc.weights.transport import WeightReceiver, WeightSender
from rlhpc.weights.transport_select import AUTO, GLOO, HOST, NCCL, SEVERAL, End, Receiving, choose, find_end
from rlhpc.weights.verification import Proof

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

log = logging.getLogger(__name__)

_WANTS = "wants"
#: Minimum bytes of a stream's part.
_LEAST_PART = 8 << 20


@dataclass(frozen=True)
class Shard:
    """Slice of a tensor that this trainer rank holds.

    Attributes:
        name: The tensor's name in the model's files.
        shape: Shape of the full tensor.
        dtype: Dtype as it is sent.
        box: Ranges of the slice.
        values: Returns the slice, of the box's shape, in whatever dtype it is stored.
        frozen: True if it never changes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    values: Callable[[], torch.Tensor]
    frozen: bool = False

    @property
    def entry(self) -> Held:
        """Description of the slice for other ranks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Held(self.name, self.shape, self.dtype.itemsize, self.box, self.frozen, dtype)


@runtime_checkable
class SendsShards(Protocol):
    """A `WeightSync` in which every trainer rank sends the slices that it holds."""

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """Sends one version; all trainer ranks call it.

        Args:
            version: Version of the weights.
            shards: Slices of this rank; the same ones in every version.
        """

    def want(self, requested: RequestedSlices) -> None:
        """Requests the slices that this engine rank needs, once, before the first version arrives."""


@dataclass
class _SliceStream:
    """Slices that this trainer rank sends to receivers that request the same.

    Attributes:
        sender: Sends them.
        pieces: All pieces sent to these receivers.
        kept_pieces: Pieces that are kept for receivers that join later.
        still: Labels of pieces that never change and have been sent.
    """

    sender: WeightSender
    pieces: list[Piece]
    kept_pieces: list[Piece]
    still: set[str] = field(default_factory=set)


class ShardSync:
    """The strategy `shards`.

    Args:
        worker: A rank of the trainer, or of an engine.
        src: Group and rank of the trainer's first rank.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        complete_updates: Unused: a version is always complete.

    Attributes:
        road: Transport that is requested from `transport_select.choose`.
        sent: Bytes of weights that this rank sent, or forwarded over a group, in the last version.
    """

    road = AUTO

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        complete_updates: bool = False,
    ) -> None:
        self._worker, self._src, self._delta = worker, (src[0], src[1]), delta
        self._me, self._receivers = (worker.group_name, worker.rank), receivers
        self._tables: Tables | None = None
        self._collective: CollectiveReshard | None = None
        self.sent = 0
        # state of a trainer rank
        self._streams: list[_SliceStream] = []
        self._holding: dict[str, int] = {}
        self._lines: list[SliceReaders] = []
        # state of an engine rank
        self._sources: dict[int, WeightReceiver] = {}
        self._order: list[Piece] = []
        self._kept_pieces: list[Piece] = []
        self._moving: list[Piece] = []
        self._routes = Routes((), {})
        self._has_requested = False
        self._requested: RequestedSlices = None

    # -- the trainer's ranks --------------------------------------------------------------------------------------------

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """Sends one version (`SendsShards.send_shards`)."""
        if has_new_tables := self._tables is None:
            self._tables = self._agreed(shards)
        if self._me == self._src:
            p2p.begin_broadcast(
                Header(version, self._tables if has_new_tables else None), *self._src, self._receivers
            )()
        self.sent = 0
        sent_over_group = not has_new_tables and self._goes_over_group(version, shards)
        streams = [(stream, stream.kept_pieces if sent_over_group else stream.pieces) for stream in self._streams]
        self.sent += sum(
            piece.nbytes for stream, pieces in streams for piece in pieces if piece.label not in stream.still
        )
        async_works = [
            in_background(f"shards-{index}", functools.partial(self._send, *stream, version, shards))
            for index, stream in enumerate(streams)
            if stream[1]
        ]
        failure = None
        for work in async_works:
            try:
                work.wait()
            except BaseException as error:  # the other streams end by themselves; the first failure is raised
                failure = failure or error
        if failure is not None:
            raise failure

    def _goes_over_group(self, version: int, shards: Sequence[Shard]) -> bool:
        """Sends pieces that are not kept over a group; returns whether all ranks have received them."""
        if self._collective is None:
            return False
        rank, values = self._worker.rank, functools.partial(self._value, shards)
        for _ in self._collective.run(version, lambda group: give(group, self._lines, rank, values, version)):
            pass
        sent_pieces = (piece for line in self._lines for load in line.loads for piece, _ in load.of(rank))
        self.sent += sum(piece.nbytes for piece in sent_pieces) if self._collective.went else 0
        return self._collective.went

    def _send(self, stream: _SliceStream, pieces: list[Piece], version: int, shards: Sequence[Shard]) -> None:
        """Sends a stream's pieces of a version."""
        frozen = {piece.label for piece in pieces if shards[self._holding[piece.label]].frozen}
        pieces_to_send = (piece for piece in pieces if piece.label not in stream.still)
        stream.sender.send(
            version, ((piece.label, self._value(shards, piece)) for piece in pieces_to_send), frozen=frozen
        )
        if self._delta != "off":
            stream.still |= frozen

    def _value(self, shards: Sequence[Shard], piece: Piece) -> torch.Tensor:
        """Returns the values of a piece, as they are sent."""
        shard = shards[self._holding[piece.label]]
        values = cut(shard.values(), piece.box.within(shard.box)).detach()
        return values.to(shard.dtype) if values.is_floating_point() else values

    def _agreed(self, shards: Sequence[Shard]) -> Tables:
        """Agrees on the routes with the other trainer ranks; only the first rank receives the requests."""
        worker, first_rank = self._worker, self._src[1]
        reports = worker.all_gather_object(([shard.entry for shard in shards], End.of(current(), self._me)))
        new_tables = self._collect_requests(*zip(*reports, strict=True)) if worker.rank == first_rank else None
        ranks = [(worker.group_name, list(range(worker.world_size)))]
        tables: Tables = worker.broadcast(new_tables, ranks, (self._src[0], first_rank))
        chunk_bytes, num_requests = max(_LEAST_PART, PART_BYTES // worker.world_size), len(tables.requested)
        self._streams, self._holding, routes = [], {}, tables.routes()
        for request_index in range(num_requests):
            local_pieces = [piece for piece in routes[request_index].pieces if piece.source == worker.rank]
            self._holding |= {piece.label: _holding(shards, piece) for piece in local_pieces}
            receivers = _group_ranks(
                [receiver for receiver, request_of in tables.of.items() if request_of == request_index]
            )
            sender = WeightSender(worker, receivers, self._delta, chunk_bytes, SEVERAL)
            self._streams.append(
                _SliceStream(sender, local_pieces, [p for p in local_pieces if tables.keeps(routes[request_index], p)])
            )
        self._collective = tables.open_collective(self._src[0], self._me)
        self._lines = [
            tables.line(request_index, routes[request_index], _load())
            for request_index in range(num_requests if self._collective else 0)
        ]
        return tables

    def _collect_requests(self, held: Sequence[list[Held]], ends: Sequence[End]) -> Tables:
        """Receives the slices that receivers request, and groups receivers that request the same."""
        context = current()
        requests: dict[RankAddress, tuple[str, RequestedSlices]] = _received_requests(self._worker)
        requested, request_index = list[RequestedSlices](), dict[RankAddress, int]()
        for group, ranks in self._receivers:
            for rank in ranks:
                record = context.member(group, rank)
                while requests.get((group, rank), ("", None))[0] != record["incarnation"]:
                    requests[group, rank] = p2p.recv(group, rank, tag=_WANTS)
                table = requests[group, rank][1]
                if table not in requested:
                    requested.append(table)
                request_index[group, rank] = requested.index(table)
        transport, reason = choose(
            ends[0], [*ends[1:], *(find_end(context, receiver) for receiver in request_index)], self.road
        )
        if transport not in (NCCL, GLOO) or self._delta == "elements":  # with delta "elements" every part is kept
            transport = HOST
        log.info("shards take the road %s: %s", transport, reason)
        return Tables([*held], requested, request_index, self._delta, transport, uuid.uuid4().hex)

    # -- an engine's ranks ----------------------------------------------------------------------------------------------

    def want(self, requested: RequestedSlices) -> None:
        """Requests slices (`SendsShards.want`)."""
        member_record = current().member(self._worker.group_name, self._worker.rank)
        self._has_requested, self._requested = True, requested
        table = None if requested is None else {name: tuple(boxes) for name, boxes in requested.items()}
        group, rank = self._src
        Receiving(self._me, self.road).tell()
        p2p.send(
            (member_record["incarnation"], table), self._worker.group_name, self._worker.rank, group, rank, tag=_WANTS
        )

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`). Each tensor has its full shape, and only the requested slices are
        written.
        """
        header: Header = p2p.follow_broadcast(self._src, lambda: None)
        if header.tables is not None:
            self._route(header.tables)
        return Update(header.version, True, self._arriving(header.version, header.tables is not None), proven=True)

    def _route(self, tables: Tables) -> None:
        request_index = tables.of[self._me]
        self._routes = routes = tables.routes()[request_index]
        self._order = tables.in_order(routes)
        self._kept_pieces = [piece for piece in self._order if tables.keeps(routes, piece)]
        self._moving = self._order[: len(self._order) - len(self._kept_pieces)]
        for rank in {piece.source for piece in self._order}:
            if rank not in self._sources:
                self._sources[rank] = WeightReceiver(
                    self._worker, (self._src[0], rank), complete_updates=True, road=SEVERAL
                )
        if self._collective is not None:
            self._collective.end()
        self._collective = tables.open_collective(self._src[0], self._me)
        self._lines = [tables.line(request_index, routes, _load())] if self._collective else []

    def _arriving(self, version: int, new: bool) -> NamedUpdates:
        """Yields full tensors, each as soon as all its slices have arrived."""
        yielded_names = set[str]()
        if collective := None if new else self._collective:
            line, dtypes = self._lines[0], self._routes.dtypes
            rounds = functools.partial(take, line=line, me=collective.rank, dtypes=dtypes, version=version)
            for name, tensor in self._put_together(self._moving, collective.run(version, rounds)):
                yielded_names.add(name)
                yield name, tensor
        is_received = collective is not None and collective.went
        is_last = collective is None or self._lines[0].ranks[-1] == collective.rank
        self.sent = sum(piece.nbytes for piece in self._moving) if is_received and not is_last else 0
        order = self._kept_pieces if is_received else self._order
        for name, tensor in self._put_together(order, self._streamed(version, order)):
            if name not in yielded_names:
                yield name, tensor

    def _streamed(self, version: int, order: Sequence[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yields pieces from the streams of the ranks that hold them."""
        updates = {rank: self._sources[rank].receive() for rank in sorted({piece.source for piece in order})}
        other_versions = {update.version for update in updates.values()} - {version}
        if other_versions:
            raise RlhpcError(f"parts of version {version} of the weights came with parts of {sorted(other_versions)}")
        verifications = {rank: Proof(update, f"{self._src[0]}-{rank}") for rank, update in updates.items()}
        streams = {rank: verification.complete_tensors() for rank, verification in verifications.items()}
        early_pieces = {rank: dict(itertools.islice(stream, 1)) for rank, stream in streams.items()}
        for piece in order:
            yield piece, _next(streams[piece.source], early_pieces[piece.source], piece)
        for rank, stream in streams.items():
            for label, _ in stream:
                raise RlhpcError(f"{label} of the weights came from rank {rank}, and is not wanted")
        for verification in verifications.values():
            verification.check()

    def _put_together(
        self, order: Sequence[Piece], pieces: Iterator[tuple[Piece, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors, each as soon as it has all its pieces."""
        num_missing, shapes = collections.Counter(piece.name for piece in order), self._routes.shapes
        tensors = dict[str, torch.Tensor]()
        for (name, box, *_), values in pieces:
            num_missing[name] -= 1
            if box.sizes == shapes[name]:
                yield name, values
                continue
            if name not in tensors:
                # Pages that are not written to use no memory.
                tensors[name] = torch.empty(shapes[name], dtype=values.dtype, device=values.device)
            cut(tensors[name], box).copy_(values)
            del values
            if not num_missing[name]:
                yield name, tensors.pop(name)

    # -- both -----------------------------------------------------------------------------------------------------------

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Rejects full tensors: this strategy sends shards (`send_shards`)."""
        raise RlhpcError("the strategy shards sends what each rank holds (send_shards)")

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`), by new routes, since receivers may have changed."""
        self._tables = None
        if self._collective is not None:
            self._collective.end()
        for stream in self._streams:
            stream.sender.forget()
        for receiver in self._sources.values():
            receiver.forget()
        if self._has_requested:
            self.want(self._requested)  # the request may have been lost


def _next(stream: Iterator[tuple[str, torch.Tensor]], early: dict[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """Returns a piece from its stream. Only kept pieces, which stay mapped, may arrive before their turn."""
    while piece.label not in early:
        label_and_tensor = next(stream, None)
        if label_and_tensor is None:
            raise RlhpcError(f"{piece.label} of the weights did not come from rank {piece.source} of the trainer")
        early[label_and_tensor[0]] = label_and_tensor[1]
    return early.pop(piece.label)


def _load() -> int:
    """Returns the bytes of one transfer over a group to receivers of the same slices, from all trainer ranks."""
    return max(_LEAST_PART, PART_BYTES // 4)


def _holding(shards: Sequence[Shard], piece: Piece) -> int:
    """Returns the index of the shard that contains a piece."""
    return next(
        index
        for index, shard in enumerate(shards)
        if shard.name == piece.name and shard.box.meet(piece.box) == piece.box
    )


def _group_ranks(receivers: Sequence[RankAddress]) -> list[tuple[str, list[int]]]:
    ranks_by_group = dict[str, list[int]]()
    for group, rank in receivers:
        ranks_by_group.setdefault(group, []).append(rank)
    return list(ranks_by_group.items())


def _received_requests(worker: Worker) -> dict[RankAddress, tuple[str, RequestedSlices]]:
    """Returns the requests that receivers have sent to this rank, by whichever strategy object received them."""
    requests: dict[RankAddress, tuple[str, RequestedSlices]] = worker.__dict__.setdefault("_rlhpc_wanted", {})
    return requests
