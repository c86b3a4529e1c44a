"""Reshard over one process group of trainer and engine ranks, in rounds.

The first trainer rank checks which receivers are ready. A version is sent over the group only if all are, because the group's
ranks wait for each other and a receiver may be busy with a call that waits for the trainer. When the rounds are done, or a
rank is lost, each rank reports whether it has received its slices. The first rank tells all others whether all slices arrived;
otherwise the version is sent by another transport.
"""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from rlhpc.checkpoint.tensor_slice import TensorSlice
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.weights.process_group import GroupLost, Presence, RankAddress, WeightProcessGroup, group_ranks
from rlhpc.weights.transfer_plan import (
    DIGEST_BYTES,
    ShardMetadata,
    SliceReaders,
    SourceSlice,
    TransferPlan,
    TransferRound,
    plan_rounds,
    plan_transfer,
)
from rlhpc.weights.transport_select import HOST
from rlhpc.weights.verification import COST, WeightsDiffer, digests

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Seconds within which all receivers must be ready; otherwise the version uses another transport.
READY_S = 2.0
_POLL_INTERVAL_S, _CHECK_INTERVAL_S = 0.001, 0.5
_READY, _DONE = "ready", "done"


class CollectiveReshard:
    """This process's end of a collective reshard. It is used as long as the same ranks take part.

    Args:
        kind: `nccl` or `gloo`.
        addresses: The trainer's ranks, then the receivers.
        num_senders: Number of trainer ranks.
        local_address: Address of this process.
        name: Name that all members share.

    Attributes:
        kind: See the argument.
        rank: This rank's number in the group.
        has_succeeded: Whether all ranks have received the last version.
    """

    def __init__(
        self, kind: str, addresses: tuple[RankAddress, ...], num_senders: int, local_address: RankAddress, name: str
    ) -> None:
        self.kind, self._addresses, self._senders, self._local_address, self._key = (
            kind,
            addresses,
            num_senders,
            local_address,
            f"shards/{name}",
        )
        self.rank = addresses.index(local_address)
        self._presence = Presence(addresses, local_address)
        self._group: WeightProcessGroup | None = None
        self.has_succeeded = False

    def run(self, version: int, run_rounds: Callable[[WeightProcessGroup], Iterator[T]]) -> Iterator[T]:
        """Runs a version's rounds and yields their results. Then `has_succeeded` is True if all ranks have the version."""
        self.has_succeeded = False
        if not (name := self._agree_on_group(version)):
            return
        if self._group is None or self._group.name != name:
            self.end()
            self._group = WeightProcessGroup(self.kind, self._addresses, self._local_address, name)
        try:
            yield from run_rounds(self._group)
            received_all = True
        except GroupLost as error:
            log.warning("%s; version %d goes through the host", error, version)
            received_all = False
        except GeneratorExit:
            self.end(notifies=True)
            self._report(_DONE, version, False)
            raise
        self.has_succeeded = self._agree_on_success(version, received_all)
        if not self.has_succeeded:
            self.end()

    def end(self, *, notifies: bool = False) -> None:
        """Ends the group; `notifies` informs the other ranks, which may be in the middle of an operation."""
        group, self._group = self._group, None
        if group is not None:
            group.end(notifies=notifies)

    def _agree_on_group(self, version: int) -> str:
        """Returns the name of the group for a version; empty if a receiver is not ready."""
        local_name = "" if self._group is None else self._group.name
        if self.rank:
            if self.rank >= self._senders:
                self._report(_READY, version, local_name)
            return str(p2p.follow_broadcast(self._addresses[0], lambda: None))
        names_by_rank = self._collect_reports(_READY, version, range(self._senders, len(self._addresses)), READY_S)
        if missing_ranks := [rank for rank in range(self._senders, len(self._addresses)) if rank not in names_by_rank]:
            log.info("version %d goes through the host: %s not at it", version, self._presence.names(missing_ranks))
            return self._broadcast("")
        is_common = local_name and {*names_by_rank.values()} == {local_name}
        return self._broadcast(local_name if is_common else f"shards-{uuid.uuid4().hex}")

    def _agree_on_success(self, version: int, has_received_all: bool) -> bool:
        """Returns whether all ranks have received a version."""
        if self.rank:
            self._report(_DONE, version, has_received_all)
            return bool(p2p.follow_broadcast(self._addresses[0], lambda: None))
        peers = range(1, len(self._addresses))
        context = current()
        received_by_rank = self._collect_reports(_DONE, version, peers, context.wait_deadline)
        missing_ranks = [rank for rank in peers if rank not in received_by_rank]
        if silent_ranks := [rank for rank in missing_ranks if rank not in self._presence.missing_ranks()]:
            raise DeadlineExceeded(
                f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(silent_ranks)} to have "
                f"version {version} of the weights"
            )
        return bool(self._broadcast(has_received_all and not missing_ranks and all(received_by_rank.values())))

    # -- messages to and from the first rank ------------------------------------------------------------------------

    def _report(self, topic: str, version: int, value: Any) -> None:
        p2p.post((topic, version, self.rank, value), self._key, *self._addresses[0])

    def _broadcast(self, value: T) -> T:
        p2p.begin_broadcast(value, *self._addresses[0], group_ranks(self._addresses[1:]))()
        return value

    def _collect_reports(
        self, report_topic: str, version: int, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, Any]:
        """Returns the value that each rank reported. Omits ranks that have ended or did not report in time."""
        reports, context, start_time = dict[int, Any](), current(), time.monotonic()
        next_check, missing_ranks = start_time, set[int]()
        while {*ranks} - reports.keys() - missing_ranks and (now := time.monotonic()) - start_time < timeout_s:
            context.check()
            if now >= next_check:
                missing_ranks, next_check = {*self._presence.missing_ranks()}, now + _CHECK_INTERVAL_S
            try:
                reported_topic, reported_version, rank, report = p2p.poll(self._key)
            except queue.Empty:
                time.sleep(_POLL_INTERVAL_S)
                continue
            if (reported_topic, reported_version) == (report_topic, version):
                reports[rank] = report
        return reports


def send_rounds(
    group: WeightProcessGroup,
    reader_groups: Sequence[SliceReaders],
    rank: int,
    read_slice: Callable[[SourceSlice], torch.Tensor],
    version: int,
) -> Iterator[None]:
    """Sends the slices of a version from a trainer rank, round by round.

    Args:
        group: Group with the trainer's ranks first.
        reader_groups: Groups of receivers with their rounds.
        rank: This rank.
        read_slice: Returns a slice's values in the dtype in which they are sent.
        version: Version of the weights.
    """
    for round_index in range(max((len(readers.rounds) for readers in reader_groups), default=0)):
        round_sends = [
            (readers.ranks[0], pack_round(readers.rounds[round_index], rank, read_slice, version, group.memory))
            for readers in reader_groups
            if round_index < len(readers.rounds) and rank in readers.rounds[round_index].spans
        ]
        if round_sends:
            group.exchange(round_sends, [])
    group.wait()
    yield from ()


def receive_rounds(
    group: WeightProcessGroup, readers: SliceReaders, rank: int, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[SourceSlice, torch.Tensor]]:
    """Runs a version's rounds on a receiving rank and yields its slices. Their memory is not reused afterwards.

    Args:
        group: See `send_rounds`.
        readers: Group of receivers that this rank belongs to.
        rank: This rank's number in the group.
        dtypes: Dtypes of the tensors.
        version: Version of the weights.

    Raises:
        WeightsDiffer: A received slice differs from the one that was sent.
    """
    reader_position = readers.ranks.index(rank)
    next_ranks = readers.ranks[reader_position + 1 : reader_position + 2]
    previous_round: tuple[TransferRound, torch.Tensor] | None = None
    for transfer_round in (*readers.rounds, None):
        round_sends = [(next_rank, previous_round[1]) for next_rank in next_ranks] if previous_round is not None else []
        receives, current_round = [], None
        if transfer_round is not None:
            flat_buffer = group.memory(transfer_round.size)
            current_round = transfer_round, flat_buffer
            source_spans = (
                {readers.ranks[reader_position - 1]: (0, transfer_round.size)}
                if reader_position
                else transfer_round.spans
            )
            receives = [
                (source_rank, flat_buffer[span_start:span_end])
                for source_rank, (span_start, span_end) in source_spans.items()
            ]
        if round_sends or receives:
            group.exchange(round_sends, receives)
        if previous_round is not None:
            yield from unpack_round(*previous_round, dtypes, version)
        group.wait()
        previous_round = current_round


def pack_round(
    transfer_round: TransferRound,
    rank: int,
    read_slice: Callable[[SourceSlice], torch.Tensor],
    version: int,
    allocate: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Packs a trainer rank's slices of a round, with a digest of each slice. See `send_rounds` for the arguments."""
    span_start, span_end = transfer_round.spans[rank]
    flat_buffer, named_tensors = allocate(span_end - span_start), list[tuple[str, torch.Tensor]]()
    for source_slice, offset in transfer_round.slices_of(rank):
        tensor = read_slice(source_slice)
        flat_buffer[offset - span_start :][: source_slice.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        named_tensors.append((source_slice.label, tensor))
    digests_by_label = _digests(named_tensors, version)
    packed_digests = np.array([digests_by_label[label] for label, _ in named_tensors], np.uint64).view(np.uint8)
    flat_buffer[: len(packed_digests)].copy_(torch.from_numpy(packed_digests))
    return flat_buffer


def unpack_round(
    transfer_round: TransferRound, flat_buffer: torch.Tensor, dtypes: Mapping[str, str], version: int
) -> Iterator[tuple[SourceSlice, torch.Tensor]]:
    """Verifies the slices of a round and yields them (see `receive_rounds`).

    Raises:
        WeightsDiffer: A slice differs from the one that was sent.
    """
    tensors = [
        (
            source_slice,
            flat_buffer[offset:][: source_slice.nbytes]
            .view(getattr(torch, dtypes[source_slice.name]))
            .view(source_slice.tensor_slice.sizes),
        )
        for source_slice, offset in zip(transfer_round.slices, transfer_round.offsets, strict=True)
    ]
    digests_by_label = _digests([(source_slice.label, tensor) for source_slice, tensor in tensors], version)
    for source_rank, (span_start, _) in transfer_round.spans.items():
        source_slices = transfer_round.slices_of(source_rank)
        sent_digests = flat_buffer[span_start:][: DIGEST_BYTES * len(source_slices)].cpu().numpy().view(np.uint64)
        for (source_slice, _), sent_digest in zip(source_slices, sent_digests, strict=True):
            if digests_by_label[source_slice.label] != int(sent_digest):
                raise WeightsDiffer(
                    f"weights of version {version}: {source_slice.label} is another than that which rank {source_rank} of the "
                    "trainer handed over: nobody acts with it"
                )
    yield from tensors


@COST.measure()
def _digests(tensors: Sequence[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    return digests(tensors, version)


#: Slices that an engine rank requests of each tensor; None requests all tensors.
RequestedSlices = Mapping[str, Sequence[TensorSlice]] | None


@dataclass(frozen=True)
class ShardLayouts:
    """Shard layouts from which the transfer plans follow.

    Attributes:
        shards: Slices that each trainer rank holds.
        requested_slices: Distinct tables of requested slices.
        request_index: Index into `requested_slices` for each receiver.
        delta: `rollout.weight_delta`.
        transport: Transport of the slices that are not retained.
        name: Unique name of these layouts.
    """

    shards: list[list[ShardMetadata]]
    requested_slices: list[RequestedSlices]
    request_index: Mapping[RankAddress, int]
    delta: str
    transport: str = HOST
    name: str = ""

    def plans(self) -> list[TransferPlan]:
        """Returns the transfer plan for each table of requested slices, with the work balanced over all plans."""
        transfer_plans, bytes_by_rank = list[TransferPlan](), Counter[int]()
        for table in self.requested_slices:
            transfer_plans.append(plan_transfer(self.shards, table, bytes_by_rank))
            bytes_by_rank.update(transfer_plans[-1].bytes_by_rank())
        return transfer_plans

    def is_retained(self, plan: TransferPlan, source_slice: SourceSlice) -> bool:
        """Returns whether a slice is retained for receivers that join later."""
        return self.delta == "elements" or (self.delta != "off" and source_slice.name in plan.frozen_names)

    def ordered_slices(self, plan: TransferPlan) -> list[SourceSlice]:
        """Returns a plan's slices in the order in which receivers get them; retained slices come last."""
        return sorted(plan.slices, key=lambda source_slice: self.is_retained(plan, source_slice))

    def readers(self, index: int, plan: TransferPlan, max_bytes: int) -> SliceReaders:
        """Returns the receivers of a table and their rounds over a group, each of at most `max_bytes` bytes."""
        ranks = [
            len(self.shards) + rank
            for rank, table_index in enumerate(self.request_index.values())
            if table_index == index
        ]
        return SliceReaders(
            plan_rounds(
                [
                    source_slice
                    for source_slice in self.ordered_slices(plan)
                    if not self.is_retained(plan, source_slice)
                ],
                max_bytes,
            ),
            tuple(ranks),
        )

    def open_collective(self, trainer: str, local_address: RankAddress) -> CollectiveReshard | None:
        """Returns a rank's end of the collective reshard; None if the host transport is used."""
        if self.transport == HOST:
            return None
        senders = [(trainer, rank) for rank in range(len(self.shards))]
        return CollectiveReshard(
            self.transport, (*senders, *self.request_index), len(senders), local_address, self.name
        )


@dataclass(frozen=True)
class Header:
    """Message that precedes a version.

    Attributes:
        version: Version of the weights.
        layouts: New layouts; None if they have not changed. The first version with new layouts uses the host transport.
    """

    version: int
    layouts: ShardLayouts | None
