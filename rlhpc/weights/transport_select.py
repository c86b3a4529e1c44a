"""By which road a part of a version gets from its sender to those who take it in.

    host    shared memory on one host, TCP to others (`transport`): whatever is kept, and whoever is not at it yet
    ipc     all compute on the sender's accelerator, or on peers of it: a buffer there, which they open and copy from
            (`comm.device_pool`)
    nccl    each computes on an accelerator of its own: buckets, over a process group of sender and receivers
    gloo    the same through the host's memory; taken only if it is asked for

Receivers say in the registry where they compute, once they do; the sender looks before each version, and asks nobody. Until
all have said so, or where some share an accelerator and others do not, a version takes the host's road.

A group's ranks have to come together, and a receiver may be busy with something that waits for the sender. So buckets are sent
only when all receivers have begun with the version, which they then take to its end: its first parts take the host's road.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlhpc.runtime.comm import device_memory as crossings
from rlhpc.runtime.comm.device_memory import Crossing, own
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.context import Context, current
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.registry import WEIGHTS
from rlhpc.weights.process_group import GroupLost, WeightProcessGroup, Who

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

AUTO, HOST, IPC, NCCL, GLOO = "auto", "host", "ipc", "nccl", "gloo"
#: As `AUTO`, for one of several streams: a rank's NCCL groups must not wait for each other.
SEVERAL = "several"


class End(NamedTuple):
    """Where one end computes.

    Attributes:
        incarnation: Of its process.
        host: Its host.
        card: Which accelerator of that host's; empty for the CPU.
        nccl: Whether it has NCCL.
        reads: Accelerators of that host whose memory it can open.
    """

    incarnation: str
    host: str
    card: str
    nccl: bool
    reads: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: Context, who: Who) -> End:
        """This process's."""
        device = own()
        card, reads = ("", ()) if device is None else (device.address, device.reads)
        return cls(context.member(*who)["incarnation"], context.host, card, bool(card) and _has_nccl(), reads)


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


class Bucket(NamedTuple):
    """A part that is sent over a process group.

    Attributes:
        group: Name of the group.
        kind: `nccl` or `gloo`.
        members: Its ranks, the sender first.
        size: Bytes.
        parts: Where the tensors lie.
    """

    group: str
    kind: str
    members: tuple[Who, ...]
    size: int
    parts: list[crossings.TensorView]

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What lies in its memory."""
        import torch

        return [
            flat[part.offset : part.offset + part.nbytes].view(getattr(torch, part.dtype)).reshape(part.shape)
            for part in self.parts
        ]


#: What an announcement says of a part that is in no segment.
Cargo = Crossing | Bucket


class Carries(Protocol):
    """What carries parts for a `Publisher`."""

    def carry(self, tensors: Sequence[torch.Tensor]) -> Cargo | None:
        """Takes the tensors of a part; None where it is to be written to a segment."""


def choose(sender: End, receivers: Sequence[End | None], wanted: str = AUTO) -> tuple[str, str]:
    """The road of a version, and why.

    Args:
        sender: Who sends.
        receivers: Who receive; None of those who have not said where they compute.
        wanted: `AUTO`, `SEVERAL`, or the one that is asked for.

    Raises:
        ConfigError: There is no such way between these.
    """
    known = [one for one in receivers if one is not None]
    if wanted == HOST or len(known) < len(receivers) or not known:
        return HOST, "it is asked for" if wanted == HOST else "not all have said where they compute"
    if wanted == GLOO:
        return GLOO, "it is asked for"
    cards = [(one.host, one.card) for one in (sender, *known)]
    if not all(card for _, card in cards):
        road, why = HOST, "not all compute on an accelerator"
    elif len({*cards}) == 1:
        road, why = IPC, "all compute on one accelerator"
    elif all(one.host == sender.host and sender.card in (one.card, *one.reads) for one in known):
        road, why = IPC, "all can read the sender's accelerator"
    elif len({*cards}) < len(cards):
        road, why = HOST, "some share an accelerator, and others do not"
    elif wanted == SEVERAL:
        road, why = HOST, "shards go to several at once"
    elif not all(one.nccl for one in (sender, *known)):
        road, why = HOST, "not all have NCCL"
    else:
        road, why = NCCL, "each computes on an accelerator of its own"
    if wanted not in (AUTO, SEVERAL, road):
        raise ConfigError(f"rollout.weight_sync is {wanted!r}, and {why}: take auto, which takes {road} here")
    return road, why


class Sending:
    """The sender's side.

    Args:
        me: The sender.
        wanted: See `choose`.

    Attributes:
        road: That of the present version.
        carried: Parts that were in no segment.
        lost: The last bucket, and its memory, if not all have got it.
    """

    def __init__(self, me: Who, wanted: str) -> None:
        self._me, self._wanted = me, wanted
        self._receivers: tuple[Who, ...] = ()
        self._begun: Callable[[], bool] = lambda: False
        self.road, self._why, self.carried = HOST, "", 0
        self._group: WeightProcessGroup | None = None
        self._ends: tuple[End, ...] = ()
        self._sent: tuple[Bucket, torch.Tensor] | None = None
        self._waits = False
        self.lost: tuple[Bucket, torch.Tensor] | None = None

    def open(self, receivers: Sequence[Who], begun: Callable[[], bool]) -> None:
        """Chooses the road of a version: receivers may have come, or be others.

        Args:
            receivers: In the order of their numbers as readers.
            begun: Whether all of them have begun with the version.
        """
        context = current()
        self._receivers, self._begun = tuple(receivers), begun
        if self._wanted == HOST or (own() is None and self._wanted in (AUTO, SEVERAL)):
            return
        me, ends = End.of(context, self._me), [said(context, who) for who in self._receivers]
        road, why = choose(me, ends, self._wanted)
        if (road, why) != (self.road, self._why):
            log.info("weights of %s-%d take the road %s: %s", *self._me, road, why)
            self.road, self._why = road, why
        if tuple(filter(None, ends)) != self._ends or road not in (NCCL, GLOO):
            self.forget()
        self._ends = tuple(filter(None, ends))

    def carry(self, tensors: Sequence[torch.Tensor]) -> Cargo | None:
        """See `Carries.carry`."""
        found: Cargo | None = None
        if self.road == IPC:
            device = own()
            if device is not None and all(map(device.holds, tensors)):
                found = current().service.lane.pool.write(tensors, len(self._receivers))
        elif self.road in (NCCL, GLOO) and self._begun():
            self.settle()  # one is on its way while the next is gathered, and no more
            found = self._bucket(tensors) if self.road != HOST else None
        self.carried += found is not None
        return found

    def _bucket(self, tensors: Sequence[torch.Tensor]) -> Bucket:
        if self._group is None:
            self._group = WeightProcessGroup(self.road, (self._me, *self._receivers), self._me)
        parts, size = crossings.layout_tensors(
            [(_name(one.dtype), tuple(one.shape), one.element_size()) for one in tensors]
        )
        bucket = Bucket(self._group.name, self.road, self._group.members, size, parts)
        flat = self._group.memory(size)
        for into, tensor in zip(bucket.tensors(flat), tensors, strict=True):
            into.copy_(tensor.detach())
        self._sent, self._waits = (bucket, flat), True
        return bucket

    def depart(self) -> None:
        """Sends the bucket, once all have been told of it: they meet there."""
        if self._sent is not None and self._group is not None and self._waits:
            self._waits = False
            with self._or_lost():
                self._group.broadcast(self._sent[1])

    def settle(self) -> None:
        """Waits until all have the last bucket. Where somebody was lost, the rest of the version takes the host's road."""
        if self._group is not None and self._sent is not None and not self._waits:
            with self._or_lost():
                self._group.settle()
                self._group.confirm()
                self._group.settle()
                self._sent = None

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except GroupLost as error:
            log.warning("%s; what is left of this version goes through the host", error)
            self.road, self._why, self._group = HOST, "the group has ended", None
            self.lost, self._sent = self._sent, None

    def forget(self, *, tell: bool = False) -> None:
        """Ends the group: its members may be others, or, where they are told, are to give up what they are at."""
        group, self._group, self._sent, self.lost = self._group, None, None, None
        if group is not None:
            group.end(tell=tell)


class Receiving:
    """A receiver's side.

    Args:
        me: The receiver.
        wanted: See `choose`.
    """

    def __init__(self, me: Who, wanted: str) -> None:
        self._me, self._wanted, self._told = me, wanted, False
        self._group: WeightProcessGroup | None = None
        self._ended = ""  # the group that this process has left

    def tell(self) -> None:
        """Says where this process computes, once it does."""
        if self._told or self._wanted == HOST or (own() is None and self._wanted != GLOO):
            return
        context = current()
        context.registry.put(WEIGHTS, _named(self._me), End.of(context, self._me)._asdict())
        self._told = True

    def take(self, cargo: Cargo, origin: Origin, reader: int) -> list[torch.Tensor]:
        """The tensors of a part; they are this process's own.

        Raises:
            GroupLost: The part has not come. If others go on, it is announced again.
        """
        if isinstance(cargo, Crossing):
            return current().service.lane.land(cargo, origin, reader)
        if cargo.group == self._ended:
            self.refuse(cargo)
            raise GroupLost(f"{_named(self._me)} has left the group {cargo.group}")
        if self._group is None or self._group.name != cargo.group:
            self._leave()
            self._group = WeightProcessGroup(cargo.kind, cargo.members, self._me, cargo.group)
        flat = self._group.memory(cargo.size)
        try:
            self._group.broadcast(flat)
            self._group.settle()
        except GroupLost:
            self._group, self._ended = None, cargo.group
            raise
        with contextlib.suppress(GroupLost):  # it has come here, and the sender announces it again for others
            self._group.confirm()
        return cargo.tensors(flat)

    def refuse(self, cargo: Cargo) -> None:
        """Says that a part is not taken, of a version that this process has broken off."""
        if isinstance(cargo, Bucket):
            WeightProcessGroup(cargo.kind, cargo.members, self._me, cargo.group).end(tell=True)

    def forget(self) -> None:
        """Ends the group. Who is in the middle of a version breaks it off."""
        self._leave(tell=True)

    def _leave(self, *, tell: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._ended = group.name
            group.end(tell=tell)


def said(context: Context, who: Who) -> End | None:
    """What a receiver has said, unless it has been started again since."""
    record = context.registry.get(WEIGHTS, _named(who))
    if record is None or record["incarnation"] != context.member(*who)["incarnation"]:
        return None
    return End(*(record[field] for field in End._fields))


def _named(who: Who) -> str:
    return f"{who[0]}-{who[1]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
