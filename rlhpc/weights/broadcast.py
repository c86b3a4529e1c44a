"""Weight sync through shared memory: one copy per host, written from the sender's tensors and mapped by all receivers."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from rlhpc.weights import transport_select
from rlhpc.weights.base import NamedTensors, Update
from rlhpc.weights.sender import PART_BYTES
from rlhpc.weights.transport import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


class BroadcastSync:
    """The built-in strategy.

    Args:
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        whole: Make every update complete, with tensors only.

    Attributes:
        road: Transport, one of those of `transport_select`.
        part_bytes: Size of a part.
    """

    road = transport_select.AUTO
    part_bytes = PART_BYTES

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        whole: bool = False,
    ) -> None:
        sends = (worker.group_name, worker.rank) == tuple(src)
        self._sender = WeightSender(worker, receivers, delta, self.part_bytes, self.road) if sends else None
        self._receiver = None if sends else WeightReceiver(worker, src, whole=whole, road=self.road)

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends a version to all receivers (`WeightSync.send`)."""
        assert self._sender is not None
        self._sender.send(version, tensors, frozen=frozen)

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`)."""
        assert self._receiver is not None
        return self._receiver.receive()

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`)."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.forget()


class HostSync(BroadcastSync):
    """Through shared memory and TCP alone."""

    road = transport_select.HOST


class IpcSync(BroadcastSync):
    """Between processes that compute on one accelerator."""

    road = transport_select.IPC


class NcclSync(BroadcastSync):
    """Between accelerators, by NCCL."""

    road = transport_select.NCCL


class GlooSync(BroadcastSync):
    """As `NcclSync`, through the host's memory."""

    road = transport_select.GLOO
