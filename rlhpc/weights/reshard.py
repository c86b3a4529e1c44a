"""Reshard: each trainer rank sends the tensor slices that it holds to the engine ranks that request them, without a gather.

Trainer ranks publish the slices that they hold, and engine ranks the slices that they request. The transfer plan is computed
from both (`transfer_plan`) and is valid as long as the same ranks take part. A slice is sent like any other tensor
(`transport`), with versions, digests, deltas and flow control: through the sender's shared memory on one host, and over TCP
between hosts, where hosts forward data to other hosts. A receiver assembles a tensor from its slices as they arrive, passes
it to the engine's loader and releases it.

Receivers that request the same slices (ranks of several engines with the same position in their engine) share one stream
from each trainer rank, and all streams run at the same time. All chunks arrive in one order, and every receiver waits only
for its first missing chunk, so that no two ranks wait for each other.

If every rank has its own accelerator, slices that are not retained for later receivers are sent over a process group of all
ranks (`reshard_collective`). The streams then carry retained slices, the first version of each plan, and slices that the
group could not deliver.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from rlhpc.checkpoint.tensor_slice import TensorSlice, cut
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.comm.device_memory import dtype_name
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.base import NamedTensors, NamedUpdates, Transfer, Update
from rlhpc.weights.device_sharing import CHUNK_BYTES
from rlhpc.weights.process_group import RankAddress, group_ranks
from rlhpc.weights.receiver import note_announcement
from rlhpc.weights.reshard_collective import (
    CollectiveReshard,
    Header,
    RequestedSlices,
    ShardLayouts,
    receive_rounds,
    send_rounds,
)
from rlhpc.weights.transfer_metrics import SHARDS_PREFIX
from rlhpc.weights.transfer_plan import ShardMetadata, SliceReaders, SourceSlice, TransferPlan
from rlhpc.weights.transport import WeightReceiver, WeightSender
from rlhpc.weights.transport_select import (
    AUTO,
    GLOO,
    HOST,
    NCCL,
    SEVERAL,
    EndpointDevice,
    TransportReceiver,
    choose,
    find_device,
)
from rlhpc.weights.verification import UpdateVerification

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

log = logging.getLogger(__name__)

_REQUESTS = "wants"
#: Minimum size of a stream's chunk, in bytes.
_MIN_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Shard:
    """Slice of a tensor that this trainer rank holds.

    Attributes:
        name: The tensor's name in the model's files.
        shape: Shape of the full tensor.
        dtype: Dtype in which the slice is sent.
        tensor_slice: Ranges of the slice.
        values: Returns the values of the slice, in the slice's shape and the stored dtype.
        frozen: Whether the slice never changes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_slice: TensorSlice
    values: Callable[[], torch.Tensor]
    frozen: bool = False

    @property
    def metadata(self) -> ShardMetadata:
        """Description of the slice for other ranks."""
        return ShardMetadata(
            self.name, self.shape, self.dtype.itemsize, self.tensor_slice, self.frozen, dtype_name(self.dtype)
        )


@runtime_checkable
class SendsShards(Protocol):
    """`WeightSync` in which every trainer rank sends the slices that it holds."""

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """Sends one version; all trainer ranks call it.

        Args:
            version: Version of the weights.
            shards: Slices of this rank; the same slices in every version.
        """

    def want(self, requested_slices: RequestedSlices) -> None:
        """Requests the slices that this engine rank needs, once, before the first version arrives."""


@dataclass
class _SliceStream:
    """Stream of slices from this trainer rank to the receivers that request the same slices.

    Attributes:
        sender: Sender of the slices.
        slices: All slices sent to these receivers.
        retained_slices: Slices that are retained for receivers that join later.
        frozen_labels: Labels of frozen slices that have been sent.
    """

    sender: WeightSender
    slices: list[SourceSlice]
    retained_slices: list[SourceSlice]
    frozen_labels: set[str] = field(default_factory=set)


class ShardSync:
    """Weight sync strategy `shards`: trainer ranks send slices, without gathering full tensors.

    Args:
        worker: Worker of a trainer rank or an engine rank.
        src: Group and rank of the first trainer rank.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        complete_updates: Ignored, because a version is always complete.

    Attributes:
        transport: Transport to request from `transport_select.choose`.
        sent_bytes: Bytes of weights that this rank sent, or forwarded over a group, in the last version.
    """

    transport = AUTO

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        complete_updates: bool = False,
    ) -> None:
        self._worker, self._src, self._delta = worker, (src[0], src[1]), delta
        self._address, self._receivers = (worker.group_name, worker.rank), receivers
        self._layouts: ShardLayouts | None = None
        self._collective: CollectiveReshard | None = None
        self.sent_bytes = 0
        # state of a trainer rank
        self._streams: list[_SliceStream] = []
        self._shard_index: dict[str, int] = {}
        self._reader_groups: list[SliceReaders] = []
        # state of an engine rank
        self._sources: dict[int, WeightReceiver] = {}
        self._ordered_slices: list[SourceSlice] = []
        self._retained_slices: list[SourceSlice] = []
        self._moving_slices: list[SourceSlice] = []
        self._plan = TransferPlan((), {})
        self._has_requested = False
        self._requested_slices: RequestedSlices = None

    # -- the trainer's ranks --------------------------------------------------------------------------------------------

    def send_shards(self, version: int, shards: Sequence[Shard]) -> None:
        """Sends one version (`SendsShards.send_shards`)."""
        if has_new_layouts := self._layouts is None:
            self._layouts = self._agree_on_plan(shards)
        if self._address == self._src:
            p2p.begin_broadcast(
                Header(version, self._layouts if has_new_layouts else None), *self._src, self._receivers
            )()
        self.sent_bytes = 0
        sent_over_group = not has_new_layouts and self._send_over_group(version, shards)
        streams = [(stream, stream.retained_slices if sent_over_group else stream.slices) for stream in self._streams]
        self.sent_bytes += sum(
            source_slice.nbytes
            for stream, slices in streams
            for source_slice in slices
            if source_slice.label not in stream.frozen_labels
        )
        async_works = [
            in_background(f"shards-{index}", functools.partial(self._send_stream, *stream, version, shards))
            for index, stream in enumerate(streams)
            if stream[1]
        ]
        with contextlib.ExitStack() as stack:  # waits for all streams, whatever fails; the first failure is raised
            for async_work in async_works:
                stack.callback(async_work.wait)

    def _send_over_group(self, version: int, shards: Sequence[Shard]) -> bool:
        """Sends the slices that are not retained over the process group; returns whether all ranks have received them."""
        if self._collective is None:
            return False
        rank, slice_values = self._worker.rank, functools.partial(self._slice_values, shards)
        for _ in self._collective.run(
            version, lambda group: send_rounds(group, self._reader_groups, rank, slice_values, version)
        ):
            pass
        sent_slices = (
            source_slice
            for readers in self._reader_groups
            for transfer_round in readers.rounds
            for source_slice, _ in transfer_round.slices_of(rank)
        )
        self.sent_bytes += (
            sum(source_slice.nbytes for source_slice in sent_slices) if self._collective.has_succeeded else 0
        )
        return self._collective.has_succeeded

    def _send_stream(
        self, stream: _SliceStream, slices: list[SourceSlice], version: int, shards: Sequence[Shard]
    ) -> None:
        """Sends the slices of a version that belong to one stream."""
        frozen_labels = {
            source_slice.label for source_slice in slices if shards[self._shard_index[source_slice.label]].frozen
        }
        unsent_slices = (source_slice for source_slice in slices if source_slice.label not in stream.frozen_labels)
        stream.sender.send(
            version,
            ((source_slice.label, self._slice_values(shards, source_slice)) for source_slice in unsent_slices),
            frozen=frozen_labels,
        )
        if self._delta != "off":
            stream.frozen_labels |= frozen_labels

    def _slice_values(self, shards: Sequence[Shard], source_slice: SourceSlice) -> torch.Tensor:
        """Returns the values of a slice, in the dtype in which they are sent."""
        shard = shards[self._shard_index[source_slice.label]]
        slice_values = cut(shard.values(), source_slice.tensor_slice.within(shard.tensor_slice)).detach()
        return slice_values.to(shard.dtype) if slice_values.is_floating_point() else slice_values

    def _agree_on_plan(self, shards: Sequence[Shard]) -> ShardLayouts:
        """Computes the transfer plans with the other trainer ranks, opens the streams and returns the shard layouts. Only the
        first rank receives the requests; it broadcasts the layouts.
        """
        worker, first_rank = self._worker, self._src[1]
        reports = worker.all_gather_object(
            ([shard.metadata for shard in shards], EndpointDevice.of_process(current(), self._address))
        )
        new_layouts = self._collect_requests(*zip(*reports, strict=True)) if worker.rank == first_rank else None
        ranks = [(worker.group_name, list(range(worker.world_size)))]
        layouts: ShardLayouts = worker.broadcast(new_layouts, ranks, (self._src[0], first_rank))
        chunk_bytes, num_requests = (
            max(_MIN_CHUNK_BYTES, CHUNK_BYTES // worker.world_size),
            len(layouts.requested_slices),
        )
        self._streams, self._shard_index, transfer_plans = [], {}, layouts.plans()
        for request_index in range(num_requests):
            local_slices = [
                source_slice
                for source_slice in transfer_plans[request_index].slices
                if source_slice.source == worker.rank
            ]
            self._shard_index |= {
                source_slice.label: _index_of_shard(shards, source_slice) for source_slice in local_slices
            }
            receivers = group_ranks(
                [receiver for receiver, index in layouts.request_index.items() if index == request_index]
            )
            sender = WeightSender(worker, receivers, self._delta, chunk_bytes, SEVERAL)
            self._streams.append(
                _SliceStream(
                    sender,
                    local_slices,
                    [s for s in local_slices if layouts.is_retained(transfer_plans[request_index], s)],
                )
            )
        self._collective = layouts.open_collective(self._src[0], self._address)
        self._reader_groups = [
            layouts.readers(request_index, transfer_plans[request_index], _round_bytes())
            for request_index in range(num_requests if self._collective else 0)
        ]
        return layouts

    def _collect_requests(
        self, shards: Sequence[list[ShardMetadata]], endpoints: Sequence[EndpointDevice]
    ) -> ShardLayouts:
        """Receives the receivers' requests, groups receivers with equal requests, and chooses the transport."""
        context = current()
        requests: dict[RankAddress, tuple[str, RequestedSlices]] = _received_requests(self._worker)
        requested_slices, request_index = list[RequestedSlices](), dict[RankAddress, int]()
        for group, ranks in self._receivers:
            for rank in ranks:
                record = context.rank_record(group, rank)
                while requests.get((group, rank), ("", None))[0] != record["incarnation"]:
                    requests[group, rank] = p2p.recv(group, rank, tag=_REQUESTS)
                table = requests[group, rank][1]
                if table not in requested_slices:
                    requested_slices.append(table)
                request_index[group, rank] = requested_slices.index(table)
        transport, reason = choose(
            endpoints[0],
            [*endpoints[1:], *(find_device(context, receiver) for receiver in request_index)],
            self.transport,
        )
        if transport not in (NCCL, GLOO) or self._delta == "elements":  # with delta "elements" every chunk is retained
            transport = HOST
        log.info("shards take the transport %s: %s", transport, reason)
        return ShardLayouts([*shards], requested_slices, request_index, self._delta, transport, uuid.uuid4().hex)

    # -- an engine's ranks ----------------------------------------------------------------------------------------------

    def want(self, requested_slices: RequestedSlices) -> None:
        """Requests slices (`SendsShards.want`)."""
        rank_record = current().rank_record(self._worker.group_name, self._worker.rank)
        self._has_requested, self._requested_slices = True, requested_slices
        table = (
            None
            if requested_slices is None
            else {name: tuple(tensor_slices) for name, tensor_slices in requested_slices.items()}
        )
        group, rank = self._src
        TransportReceiver(self._address, self.transport).publish_device()
        p2p.send(
            (rank_record["incarnation"], table),
            self._worker.group_name,
            self._worker.rank,
            group,
            rank,
            tag=_REQUESTS,
        )

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`). Each tensor has its full shape, but only its requested
        slices are filled.
        """
        header: Header = p2p.follow_broadcast(self._src, lambda: None)
        transfer = Transfer()
        note_announcement(transfer, 0.0)
        if header.layouts is not None:
            self._set_plan(header.layouts)
        tensors = self._iter_tensors(header.version, header.layouts is not None, transfer)
        return Update(header.version, True, tensors, proven=True, transfer=transfer)

    def _set_plan(self, layouts: ShardLayouts) -> None:
        request_index = layouts.request_index[self._address]
        self._plan = plan = layouts.plans()[request_index]
        self._ordered_slices = layouts.ordered_slices(plan)
        self._retained_slices = [
            source_slice for source_slice in self._ordered_slices if layouts.is_retained(plan, source_slice)
        ]
        self._moving_slices = self._ordered_slices[: len(self._ordered_slices) - len(self._retained_slices)]
        for rank in {source_slice.source for source_slice in self._ordered_slices}:
            if rank not in self._sources:
                self._sources[rank] = WeightReceiver(
                    self._worker, (self._src[0], rank), complete_updates=True, transport=SEVERAL
                )
        if self._collective is not None:
            self._collective.end()
        self._collective = layouts.open_collective(self._src[0], self._address)
        self._reader_groups = [layouts.readers(request_index, plan, _round_bytes())] if self._collective else []

    def _iter_tensors(self, version: int, is_new: bool, transfer: Transfer) -> NamedUpdates:
        """Yields the name and the full tensor as soon as all slices of the tensor have arrived."""
        yielded_names = set[str]()
        if collective_reshard := None if is_new else self._collective:
            readers, dtypes = self._reader_groups[0], self._plan.dtypes
            rounds = functools.partial(
                receive_rounds, readers=readers, rank=collective_reshard.rank, dtypes=dtypes, version=version
            )
            for name, tensor in self._assemble(self._moving_slices, collective_reshard.run(version, rounds)):
                yielded_names.add(name)
                yield name, tensor
        is_received = collective_reshard is not None and collective_reshard.has_succeeded
        if collective_reshard is not None and is_received:
            transport = SHARDS_PREFIX + collective_reshard.kind
            transfer.bytes_by_transport[transport] += sum(source_slice.nbytes for source_slice in self._moving_slices)
        is_last = collective_reshard is None or self._reader_groups[0].ranks[-1] == collective_reshard.rank
        self.sent_bytes = (
            sum(source_slice.nbytes for source_slice in self._moving_slices) if is_received and not is_last else 0
        )
        slice_order = self._retained_slices if is_received else self._ordered_slices
        for name, tensor in self._assemble(slice_order, self._iter_streamed(version, slice_order, transfer)):
            if name not in yielded_names:
                yield name, tensor

    def _iter_streamed(
        self, version: int, slice_order: Sequence[SourceSlice], transfer: Transfer
    ) -> Iterator[tuple[SourceSlice, torch.Tensor]]:
        """Yields the slices in `slice_order`, each from the stream of the trainer rank that holds it; counts their bytes.

        Raises:
            RlhpcError: A stream has a different version, lacks a slice or contains an unrequested slice.
        """
        updates = {
            rank: self._sources[rank].receive()
            for rank in sorted({source_slice.source for source_slice in slice_order})
        }
        other_versions = {update.version for update in updates.values()} - {version}
        if other_versions:
            raise RlhpcError(f"parts of version {version} of the weights came with parts of {sorted(other_versions)}")
        verifications = {rank: UpdateVerification(update, f"{self._src[0]}-{rank}") for rank, update in updates.items()}
        streams = {rank: verification.complete_tensors() for rank, verification in verifications.items()}
        early_tensors = {rank: dict(itertools.islice(stream, 1)) for rank, stream in streams.items()}
        for source_slice in slice_order:
            yield (
                source_slice,
                _take_slice(streams[source_slice.source], early_tensors[source_slice.source], source_slice),
            )
        for rank, stream in streams.items():
            for label, _ in stream:
                raise RlhpcError(f"{label} of the weights came from rank {rank}, and is not wanted")
        for verification in verifications.values():
            verification.check()
        for update in updates.values():
            if update.transfer is not None:
                for transport, num_transported in update.transfer.bytes_by_transport.items():
                    transfer.bytes_by_transport[SHARDS_PREFIX + transport] += num_transported

    def _assemble(
        self, order: Sequence[SourceSlice], slices: Iterator[tuple[SourceSlice, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Builds tensors from slices, and yields the name and the tensor as soon as all its slices have arrived."""
        num_missing, shapes = collections.Counter(source_slice.name for source_slice in order), self._plan.shapes
        tensors = dict[str, torch.Tensor]()
        for (name, tensor_slice, *_), slice_values in slices:
            num_missing[name] -= 1
            if tensor_slice.sizes == shapes[name]:
                yield name, slice_values
                continue
            if name not in tensors:
                # Pages of an empty tensor use no memory until they are written.
                tensors[name] = torch.empty(shapes[name], dtype=slice_values.dtype, device=slice_values.device)
            cut(tensors[name], tensor_slice).copy_(slice_values)
            del slice_values
            if not num_missing[name]:
                yield name, tensors.pop(name)

    # -- both -----------------------------------------------------------------------------------------------------------

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Rejects full tensors: this strategy sends shards (`send_shards`).

        Raises:
            RlhpcError: Always; this strategy sends with `send_shards`.
        """
        raise RlhpcError("the strategy shards sends what each rank holds (send_shards)")

    def forget(self) -> None:
        """Makes the next version complete (`WeightSync.forget`), with a new plan, because receivers may have changed."""
        self._layouts = None
        if self._collective is not None:
            self._collective.end()
        for stream in self._streams:
            stream.sender.forget()
        for receiver in self._sources.values():
            receiver.forget()
        if self._has_requested:
            self.want(self._requested_slices)  # the request may have been lost


def _take_slice(
    stream: Iterator[tuple[str, torch.Tensor]], early_tensors: dict[str, torch.Tensor], source_slice: SourceSlice
) -> torch.Tensor:
    """Returns a slice from its stream. Stores slices that arrive earlier in `early_tensors`; only retained slices, which stay
    mapped, may arrive earlier.

    Raises:
        RlhpcError: The stream ended without the slice.
    """
    while source_slice.label not in early_tensors:
        label_and_tensor = next(stream, None)
        if label_and_tensor is None:
            raise RlhpcError(
                f"{source_slice.label} of the weights did not come from rank {source_slice.source} of the trainer"
            )
        early_tensors[label_and_tensor[0]] = label_and_tensor[1]
    return early_tensors.pop(source_slice.label)


def _round_bytes() -> int:
    """Returns the maximum bytes of one round over a process group, summed over all trainer ranks."""
    return max(_MIN_CHUNK_BYTES, CHUNK_BYTES // 4)


def _index_of_shard(shards: Sequence[Shard], source_slice: SourceSlice) -> int:
    """Returns the index of the shard that contains a slice."""
    return next(
        index
        for index, shard in enumerate(shards)
        if shard.name == source_slice.name
        and shard.tensor_slice.meet(source_slice.tensor_slice) == source_slice.tensor_slice
    )


def _received_requests(worker: Worker) -> dict[RankAddress, tuple[str, RequestedSlices]]:
    """Returns the requests that this rank has received. They are stored on the worker, so that all its strategy objects
    share them."""
    requests: dict[RankAddress, tuple[str, RequestedSlices]] = worker.__dict__.setdefault("_rlhpc_wanted", {})
    return requests
