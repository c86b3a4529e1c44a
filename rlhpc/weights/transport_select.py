"""Transport selection for the chunks of a version.

    host    shared memory on one host, TCP to other hosts (`transport`): for retained chunks, and while receivers are not ready
    ipc     all ends compute on the sender's accelerator or on its peers: a device buffer that receivers open and copy from
            (`comm.device_memory`)
    nccl    each end computes on its own accelerator: buckets, over a process group of sender and receivers
    gloo    like nccl, but through host memory; only by explicit request

Receivers publish in the registry which device they compute on, as soon as they compute. The sender reads this before each
version, without a request to the receivers. A version uses the host transport until all receivers have published their device,
and if only some ends share an accelerator.

A collective operation needs all ranks of a group, and a receiver may be busy with a call that waits for the sender. So a
version starts on the host transport, and buckets are sent after all receivers have started to read the version.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlhpc.runtime.comm import device_memory
from rlhpc.runtime.comm.context import Context, current
from rlhpc.runtime.comm.device_memory import DeviceMessage, current_device, dtype_name
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.registry import WEIGHTS
from rlhpc.weights.process_group import GroupLost, RankAddress, WeightProcessGroup

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

AUTO, HOST, IPC, NCCL, GLOO = "auto", "host", "ipc", "nccl", "gloo"
#: Like `AUTO`, for one of several streams: a rank's NCCL groups must not wait for each other.
SEVERAL = "several"


class EndpointDevice(NamedTuple):
    """Device that one end computes on.

    Attributes:
        incarnation: Incarnation of the process.
        host: Host of the process.
        card: Accelerator that the process uses; empty for the CPU.
        nccl: Whether the process has NCCL.
        reads: Accelerators of the host whose memory the process can open.
    """

    incarnation: str
    host: str
    card: str
    nccl: bool
    reads: tuple[str, ...] = ()

    @classmethod
    def of_process(cls, context: Context, address: RankAddress) -> EndpointDevice:
        """Returns the device of this process."""
        device = current_device()
        card, reads = ("", ()) if device is None else (device.address, device.reads)
        return cls(context.rank_record(*address)["incarnation"], context.host, card, bool(card) and _has_nccl(), reads)


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


class Bucket(NamedTuple):
    """Chunk of a version that is sent over a process group.

    Attributes:
        group: Name of the group.
        kind: `nccl` or `gloo`.
        addresses: Addresses of the group's ranks; the sender is the first.
        size: Size in bytes.
        views: Layout of the tensors.
    """

    group: str
    kind: str
    addresses: tuple[RankAddress, ...]
    size: int
    views: list[device_memory.TensorView]

    def tensors(self, bucket_memory: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the tensors in the bucket's memory."""
        import torch

        return [
            bucket_memory[view.offset : view.offset + view.nbytes].view(getattr(torch, view.dtype)).reshape(view.shape)
            for view in self.views
        ]


#: Location of a chunk that is in no segment, as an announcement gives it.
DevicePayload = DeviceMessage | Bucket


def choose(
    sender: EndpointDevice, receivers: Sequence[EndpointDevice | None], requested_transport: str = AUTO
) -> tuple[str, str]:
    """Returns the transport of a version, and the reason.

    Args:
        sender: Device of the sender.
        receivers: Devices of the receivers; None for a receiver that has not published its device.
        requested_transport: `AUTO`, `SEVERAL`, or the configured transport.

    Raises:
        ConfigError: The configured transport is not possible between these ends.
    """
    ends = [end for end in receivers if end is not None]
    if requested_transport == HOST or len(ends) < len(receivers) or not ends:
        return HOST, "it is asked for" if requested_transport == HOST else "not all have said where they compute"
    if requested_transport == GLOO:
        return GLOO, "it is asked for"
    cards = [(end.host, end.card) for end in (sender, *ends)]
    if not all(card for _, card in cards):
        transport, reason = HOST, "not all compute on an accelerator"
    elif len({*cards}) == 1:
        transport, reason = IPC, "all compute on one accelerator"
    elif all(end.host == sender.host and sender.card in (end.card, *end.reads) for end in ends):
        transport, reason = IPC, "all can read the sender's accelerator"
    elif len({*cards}) < len(cards):
        transport, reason = HOST, "some share an accelerator, and others do not"
    elif requested_transport == SEVERAL:
        transport, reason = HOST, "shards go to several at once"
    elif not all(end.nccl for end in (sender, *ends)):
        transport, reason = HOST, "not all have NCCL"
    else:
        transport, reason = NCCL, "each computes on an accelerator of its own"
    if requested_transport not in (AUTO, SEVERAL, transport):
        raise ConfigError(
            f"rollout.weight_sync is {requested_transport!r}, and {reason}: take auto, which takes {transport} here"
        )
    return transport, reason


class TransportSender:
    """Sending side of the transport.

    Args:
        local_address: Group and rank of the sender.
        requested_transport: See `choose`.

    Attributes:
        transport: Transport of the current version.
        num_staged: Number of chunks that were sent without a segment.
        lost_bucket: The last bucket and its memory, if some receivers did not get it.
    """

    def __init__(self, local_address: RankAddress, requested_transport: str) -> None:
        self._local_address, self._requested_transport = local_address, requested_transport
        self._receivers: tuple[RankAddress, ...] = ()
        self._have_all_started: Callable[[], bool] = lambda: False
        self.transport, self._reason, self.num_staged = HOST, "", 0
        self._group: WeightProcessGroup | None = None
        self._ends: list[EndpointDevice | None] = []
        self._staged_bucket: tuple[Bucket, torch.Tensor] | None = None
        self._is_unsent = False
        self.lost_bucket: tuple[Bucket, torch.Tensor] | None = None

    def begin_version(self, receivers: Sequence[RankAddress], have_all_started: Callable[[], bool]) -> None:
        """Chooses the transport of a version, since receivers may have joined or changed.

        Args:
            receivers: Addresses in the order of the reader numbers.
            have_all_started: Returns whether all receivers have started to read the version.
        """
        context = current()
        self._receivers, self._have_all_started = tuple(receivers), have_all_started
        if self._requested_transport == HOST or (
            current_device() is None and self._requested_transport in (AUTO, SEVERAL)
        ):
            return
        ends = [find_device(context, receiver) for receiver in self._receivers]
        transport, reason = choose(
            EndpointDevice.of_process(context, self._local_address), ends, self._requested_transport
        )
        if (transport, reason) != (self.transport, self._reason):
            log.info("weights of %s-%d take the transport %s: %s", *self._local_address, transport, reason)
            self.transport, self._reason = transport, reason
        if ends != self._ends or transport not in (NCCL, GLOO):
            self.forget()
        self._ends = ends

    @property
    def device_budget(self) -> int:
        """Bytes of accelerator memory for the chunks of the current version; 0 if they do not stay on the accelerator."""
        device = current_device()
        return device.budget if self.transport == IPC and device is not None else 0

    def stage(self, tensors: Sequence[torch.Tensor]) -> DevicePayload | None:
        """Copies the tensors of a chunk to a device buffer or a bucket, and returns their location; returns None if the chunk
        must be written to a segment.
        """
        payload: DevicePayload | None = None
        device = current_device()
        if self.transport == IPC and device is not None and all(map(device.holds, tensors)):
            payload = current().service.device_channel.pool.write(tensors, len(self._receivers))
        elif self.transport in (NCCL, GLOO) and self._have_all_started():
            self.wait_delivered()  # at most one bucket is in transit while the next is gathered
            payload = self._gather_bucket(tensors) if self.transport != HOST else None
        self.num_staged += payload is not None
        return payload

    def _gather_bucket(self, tensors: Sequence[torch.Tensor]) -> Bucket:
        if self._group is None:
            self._group = WeightProcessGroup(
                self.transport, (self._local_address, *self._receivers), self._local_address
            )
        views, size = device_memory.layout_tensors(
            [(dtype_name(source.dtype), tuple(source.shape), source.element_size()) for source in tensors]
        )
        bucket = Bucket(self._group.name, self.transport, self._group.addresses, size, views)
        bucket_memory = self._group.memory(size)
        for target, tensor in zip(bucket.tensors(bucket_memory), tensors, strict=True):
            target.copy_(tensor.detach())
        self._staged_bucket, self._is_unsent = (bucket, bucket_memory), True
        return bucket

    def broadcast_bucket(self) -> None:
        """Starts the broadcast of the bucket, after the bucket was announced to all receivers."""
        if self._staged_bucket is not None and self._group is not None and self._is_unsent:
            self._is_unsent = False
            with self._fall_back_if_lost():
                self._group.broadcast(self._staged_bucket[1])

    def wait_delivered(self) -> None:
        """Waits until all receivers have the last bucket. If a receiver was lost, later chunks use the host transport."""
        if self._group is not None and self._staged_bucket is not None and not self._is_unsent:
            with self._fall_back_if_lost():
                self._group.wait()
                self._group.confirm()
                self._group.wait()
                self._staged_bucket = None

    @contextlib.contextmanager
    def _fall_back_if_lost(self) -> Iterator[None]:
        try:
            yield
        except GroupLost as error:
            log.warning("%s; what is left of this version goes through the host", error)
            self.transport, self._reason, self._group = HOST, "the group has ended", None
            self.lost_bucket, self._staged_bucket = self._staged_bucket, None

    def pop_lost_bucket(self) -> tuple[Bucket, torch.Tensor] | None:
        """Removes and returns the last bucket and its memory if some receivers did not get the bucket."""
        lost_bucket, self.lost_bucket = self.lost_bucket, None
        return lost_bucket

    def forget(self, *, notifies: bool = False) -> None:
        """Ends the process group, since its members may change. With `notifies`, the other members abort their operation."""
        group, self._group, self._staged_bucket, self.lost_bucket = self._group, None, None, None
        if group is not None:
            group.end(notifies=notifies)


class TransportReceiver:
    """Receiving side of the transport.

    Args:
        local_address: Group and rank of the receiver.
        requested_transport: See `choose`.
    """

    def __init__(self, local_address: RankAddress, requested_transport: str) -> None:
        self._local_address, self._requested_transport, self._published = local_address, requested_transport, False
        self._group: WeightProcessGroup | None = None
        self._left_group = ""  # the group that this process has left

    def publish_device(self) -> None:
        """Publishes the device of this process in the registry, once the process uses a device."""
        if (
            self._published
            or self._requested_transport == HOST
            or (current_device() is None and self._requested_transport != GLOO)
        ):
            return
        context = current()
        context.registry.put(
            WEIGHTS,
            _format_address(self._local_address),
            EndpointDevice.of_process(context, self._local_address)._asdict(),
        )
        self._published = True

    def receive(self, payload: DevicePayload, origin: Origin, reader: int) -> list[torch.Tensor]:
        """Returns the tensors of a chunk, copied to memory of this process.

        Raises:
            GroupLost: The chunk did not arrive. If the other ranks continue, the sender announces the chunk again.
        """
        if isinstance(payload, DeviceMessage):
            return current().service.device_channel.land(payload, origin, reader)
        if payload.group == self._left_group:
            self.refuse(payload)
            raise GroupLost(f"{_format_address(self._local_address)} has left the group {payload.group}")
        if self._group is None or self._group.name != payload.group:
            self._leave_group()
            self._group = WeightProcessGroup(payload.kind, payload.addresses, self._local_address, payload.group)
        bucket_memory = self._group.memory(payload.size)
        try:
            self._group.broadcast(bucket_memory)
            self._group.wait()
        except GroupLost:
            self._group, self._left_group = None, payload.group
            raise
        with contextlib.suppress(GroupLost):  # it has arrived here; others get it again
            self._group.confirm()
        return payload.tensors(bucket_memory)

    def refuse(self, payload: DevicePayload) -> None:
        """Declines a chunk of a version that this process has aborted."""
        if isinstance(payload, Bucket):
            WeightProcessGroup(payload.kind, payload.addresses, self._local_address, payload.group).end(notifies=True)

    def forget(self) -> None:
        """Ends the process group. A rank in the middle of a version aborts that version."""
        self._leave_group(notifies=True)

    def _leave_group(self, *, notifies: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left_group = group.name
            group.end(notifies=notifies)


def find_device(context: Context, receiver: RankAddress) -> EndpointDevice | None:
    """Returns the device that a receiver has published; None if it has published no device or was restarted since."""
    record = context.registry.get(WEIGHTS, _format_address(receiver))
    if record is None or record["incarnation"] != context.rank_record(*receiver)["incarnation"]:
        return None
    return EndpointDevice(*(record[field] for field in EndpointDevice._fields))


def _format_address(address: RankAddress) -> str:
    return f"{address[0]}-{address[1]}"
