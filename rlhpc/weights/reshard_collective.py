"""Reshard over one process group of trainer and engine ranks, in rounds.

The first trainer rank checks which receivers are ready. A version is sent over the group only if all are, because the group's
ranks wait for each other and a receiver may be busy with a call that waits for the trainer. When the rounds are done, or a
rank is lost, each rank reports whether it has received its pieces. The first rank tells all others whether all pieces arrived;
otherwise the version is sent by another transport.
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
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.weights.process_group import GroupLost, Presence, RankAddress, WeightProcessGroup
from rlhpc.weights.transfer_plan import DIGEST, Held, Load, Piece, Routes, SliceReaders, loads, route
from rlhpc.weights.transport_select import HOST
from rlhpc.weights.verification import COST, WeightsDiffer, digests

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Seconds in which the receivers must be ready; otherwise the version takes another transport.
READY_S = 2.0
_PAUSE_S, _LOOK_S = 0.001, 0.5
_READY, _DONE = "ready", "done"


class CollectiveReshard:
    """This process's end of a collective reshard, for as long as the same ranks take part.

    Args:
        kind: `nccl` or `gloo`.
        members: The trainer's ranks, then the receivers.
        senders: Number of trainer ranks.
        me: The member that this process is.
        name: Name that all members share.

    Attributes:
        rank: This rank's number in the group.
        went: Whether all ranks have received the last version.
    """

    def __init__(self, kind: str, members: tuple[RankAddress, ...], senders: int, me: RankAddress, name: str) -> None:
        self._kind, self._members, self._senders, self._me, self._key = kind, members, senders, me, f"shards/{name}"
        self.rank = members.index(me)
        self._presence = Presence(members, me)
        self._group: WeightProcessGroup | None = None
        self.went = False

    def run(self, version: int, rounds: Callable[[WeightProcessGroup], Iterator[T]]) -> Iterator[T]:
        """Yields the results of a version's rounds. Afterwards `went` says whether all ranks have received it."""
        self.went = False
        if not (name := self._agree_on_group(version)):
            return
        if self._group is None or self._group.name != name:
            self.end()
            self._group = WeightProcessGroup(self._kind, self._members, self._me, name)
        try:
            yield from rounds(self._group)
            received_all = True
        except GroupLost as error:
            log.warning("%s; version %d goes through the host", error, version)
            received_all = False
        except GeneratorExit:
            self.end(tell=True)
            self._say(_DONE, version, False)
            raise
        self.went = self._agreed(version, received_all)
        if not self.went:
            self.end()

    def end(self, *, tell: bool = False) -> None:
        """Ends the group; `tell` notifies the other ranks, which may be in the middle of an operation."""
        group, self._group = self._group, None
        if group is not None:
            group.end(tell=tell)

    def _agree_on_group(self, version: int) -> str:
        """Returns the name of the group for a version; empty if a receiver is not ready."""
        local_name = "" if self._group is None else self._group.name
        if self.rank:
            if self.rank >= self._senders:
                self._say(_READY, version, local_name)
            return str(p2p.follow_broadcast(self._members[0], lambda: None))
        names_by_rank = self._collect_reports(_READY, version, range(self._senders, len(self._members)), READY_S)
        if missing := [rank for rank in range(self._senders, len(self._members)) if rank not in names_by_rank]:
            log.info("version %d goes through the host: %s not at it", version, self._presence.names(missing))
            return self._tell("")
        is_common = local_name and {*names_by_rank.values()} == {local_name}
        return self._tell(local_name if is_common else f"shards-{uuid.uuid4().hex}")

    def _agreed(self, version: int, received_all: bool) -> bool:
        """Returns whether all ranks have received a version."""
        if self.rank:
            self._say(_DONE, version, received_all)
            return bool(p2p.follow_broadcast(self._members[0], lambda: None))
        peers = range(1, len(self._members))
        context = current()
        received_by_rank = self._collect_reports(_DONE, version, peers, context.wait_deadline)
        missing = [rank for rank in peers if rank not in received_by_rank]
        if silent := [rank for rank in missing if rank not in self._presence.missing_ranks()]:
            raise DeadlineExceeded(
                f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(silent)} to have version "
                f"{version} of the weights"
            )
        return bool(self._tell(received_all and not missing and all(received_by_rank.values())))

    # -- messages to and from the first rank ------------------------------------------------------------------------

    def _say(self, topic: str, version: int, value: Any) -> None:
        p2p.post((topic, version, self.rank, value), self._key, *self._members[0])

    def _tell(self, value: T) -> T:
        groups: dict[str, list[int]] = {}
        for group, rank in self._members[1:]:
            groups.setdefault(group, []).append(rank)
        p2p.begin_broadcast(value, *self._members[0], list(groups.items()))()
        return value

    def _collect_reports(self, topic: str, version: int, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Returns the values that ranks reported, by rank; without ranks that have ended or did not report in time."""
        reports, context, start = dict[int, Any](), current(), time.monotonic()
        next_check, missing = start, set[int]()
        while {*ranks} - reports.keys() - missing and (now := time.monotonic()) - start < timeout_s:
            context.check()
            if now >= next_check:
                missing, next_check = {*self._presence.missing_ranks()}, now + _LOOK_S
            try:
                reported_topic, reported_version, rank, report = p2p.poll(self._key)
            except queue.Empty:
                time.sleep(_PAUSE_S)
                continue
            if (reported_topic, reported_version) == (topic, version):
                reports[rank] = report
        return reports


def give(
    group: WeightProcessGroup,
    lines: Sequence[SliceReaders],
    me: int,
    values: Callable[[Piece], torch.Tensor],
    version: int,
) -> Iterator[None]:
    """Runs a version's rounds on a trainer rank.

    Args:
        group: Group with the trainer's ranks first.
        lines: Readers of all receivers.
        me: This rank.
        values: Returns a piece's values, as they are sent.
        version: Version of the weights.
    """
    for round_index in range(max((len(line.loads) for line in lines), default=0)):
        sends = [
            (line.ranks[0], packed(line.loads[round_index], me, values, version, group.memory))
            for line in lines
            if round_index < len(line.loads) and me in line.loads[round_index].spans
        ]
        if sends:
            group.exchange(sends, [])
    group.settle()
    yield from ()


def take(
    group: WeightProcessGroup, line: SliceReaders, me: int, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Runs a version's rounds on a receiving rank and yields its pieces, which are not written to afterwards.

    Args:
        group: See `give`.
        line: Readers that this rank belongs to.
        me: This rank's number in the group.
        dtypes: Dtypes of the tensors.
        version: Version of the weights.

    Raises:
        WeightsDiffer: A received piece differs from the one that was sent.
    """
    position = line.ranks.index(me)
    next_ranks = line.ranks[position + 1 : position + 2]
    previous_load: tuple[Load, torch.Tensor] | None = None
    for load in (*line.loads, None):
        sends = [(rank, previous_load[1]) for rank in next_ranks] if previous_load is not None else []
        receives, current_load = [], None
        if load is not None:
            flat = group.memory(load.size)
            current_load = load, flat
            sources = {line.ranks[position - 1]: (0, load.size)} if position else load.spans
            receives = [(rank, flat[start:end]) for rank, (start, end) in sources.items()]
        if sends or receives:
            group.exchange(sends, receives)
        if previous_load is not None:
            yield from opened(*previous_load, dtypes, version)
        group.settle()
        previous_load = current_load


def packed(
    load: Load,
    me: int,
    values: Callable[[Piece], torch.Tensor],
    version: int,
    memory: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Packs a trainer rank's pieces of a load, with a digest of each; the arguments are those of `give`."""
    start, end = load.spans[me]
    flat, named_tensors = memory(end - start), list[tuple[str, torch.Tensor]]()
    for piece, offset in load.of(me):
        tensor = values(piece)
        flat[offset - start :][: piece.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        named_tensors.append((piece.label, tensor))
    digests_by_label = _digests(named_tensors, version)
    packed_digests = np.array([digests_by_label[label] for label, _ in named_tensors], np.uint64).view(np.uint8)
    flat[: len(packed_digests)].copy_(torch.from_numpy(packed_digests))
    return flat


def opened(
    load: Load, flat: torch.Tensor, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yields the pieces of a load, after verification (see `take`)."""
    tensors = [
        (piece, flat[offset:][: piece.nbytes].view(getattr(torch, dtypes[piece.name])).view(piece.box.sizes))
        for piece, offset in zip(load.pieces, load.at, strict=True)
    ]
    digests_by_label = _digests([(piece.label, tensor) for piece, tensor in tensors], version)
    for source, (start, _) in load.spans.items():
        source_pieces = load.of(source)
        sent_digests = flat[start:][: DIGEST * len(source_pieces)].cpu().numpy().view(np.uint64)
        for (piece, _), sent_digest in zip(source_pieces, sent_digests, strict=True):
            if digests_by_label[piece.label] != int(sent_digest):
                raise WeightsDiffer(
                    f"weights of version {version}: {piece.label} is another than that which rank {source} of the trainer "
                    "handed over: nobody acts with it"
                )
    yield from tensors


@COST.proving()
def _digests(tensors: Sequence[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    return digests(tensors, version)


#: Engine tensor → the boxes that a rank requests of it; None requests all tensors.
RequestedSlices = Mapping[str, Sequence[Box]] | None


@dataclass(frozen=True)
class Tables:
    """Shard layouts from which the routes follow.

    Attributes:
        held: Slices that each trainer rank holds.
        requested: Distinct tables of requested slices.
        of: Index into `requested` for each receiver.
        delta: `rollout.weight_delta`.
        road: Transport for pieces that are not kept.
        name: Unique name of these tables.
    """

    held: list[list[Held]]
    requested: list[RequestedSlices]
    of: Mapping[RankAddress, int]
    delta: str
    road: str = HOST
    name: str = ""

    def routes(self) -> list[Routes]:
        """Returns the routes to the receivers of each table; a rank that sends much to some gets less for the next."""
        routes, load = list[Routes](), dict[int, int]()
        for table in self.requested:
            routes.append(route(self.held, table, load))
            for rank, nbytes in routes[-1].sent().items():
                load[rank] = load.get(rank, 0) + nbytes
        return routes

    def keeps(self, routes: Routes, piece: Piece) -> bool:
        """Returns whether a piece is kept for receivers that join later."""
        return self.delta == "elements" or (self.delta != "off" and piece.name in routes.frozen)

    def in_order(self, routes: Routes) -> list[Piece]:
        """Returns pieces in the order in which receivers get them; kept pieces come last."""
        return sorted(routes.pieces, key=lambda piece: self.keeps(routes, piece))

    def line(self, number: int, routes: Routes, max_bytes: int) -> SliceReaders:
        """Returns the receivers of a table and their loads over a group, each of at most `max_bytes` bytes."""
        ranks = [len(self.held) + rank for rank, table_index in enumerate(self.of.values()) if table_index == number]
        return SliceReaders(
            loads([piece for piece in self.in_order(routes) if not self.keeps(routes, piece)], max_bytes), tuple(ranks)
        )

    def open_collective(self, trainer: str, me: RankAddress) -> CollectiveReshard | None:
        """Returns a rank's end of the collective reshard; None if everything goes through the host."""
        if self.road == HOST:
            return None
        senders = [(trainer, rank) for rank in range(len(self.held))]
        return CollectiveReshard(self.road, (*senders, *self.of), len(senders), me, self.name)


@dataclass(frozen=True)
class Header:
    """Message that precedes a version.

    Attributes:
        version: Version of the weights.
        tables: New tables, with which everything goes through the host once; None if the last tables still hold.
    """

    version: int
    tables: Tables | None
