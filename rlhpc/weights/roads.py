"""By which road a part of a version gets from its sender to those who take it in.

    host    shared memory on one host, TCP to others (`transport`): whatever is kept, and whoever is not at it yet
    ipc     all compute on the sender's accelerator: a buffer there, which they open and copy from (`comm.device_pool`)
    nccl    each computes on an accelerator of its own: buckets, over a process group of sender and receivers
    gloo    the same through the host's memory; taken only if it is asked for

Receivers say in the registry where they compute, once they do; the sender looks before each version, and asks nobody. Until
all have said so, or where some share an accelerator and others do not, a version takes the host's road.

A group's ranks have to come together, and a receiver may be busy with something that waits for the sender. So buckets are sent
only when all receivers have begun with the version, which they then take to its end: its first parts take the host's road.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlhpc.runtime.comm import crossings
from rlhpc.runtime.comm.crossings import Crossing
from rlhpc.runtime.comm.devices import own
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.context import Context, current
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.registry import WEIGHTS
from rlhpc.weights.group import Group

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

AUTO, HOST, IPC, NCCL, GLOO = "auto", "host", "ipc", "nccl", "gloo"
#: As `AUTO`, for who has several streams: a rank's NCCL groups must not wait for each other.
SEVERAL = "several"
#: Group and rank.
Who = tuple[str, int]


class End(NamedTuple):
    """Where one end computes.

    Attributes:
        incarnation: Of its process.
        host: Its host.
        card: Which accelerator of that host's; empty for the CPU.
        nccl: Whether it has NCCL.
    """

    incarnation: str
    host: str
    card: str
    nccl: bool

    @classmethod
    def of(cls, context: Context, who: Who) -> End:
        """This process's."""
        device = own()
        card = "" if device is None else device.address
        return cls(context.member(*who)["incarnation"], context.host, card, bool(card) and _has_nccl())


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
    parts: list[crossings.Part]

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
    """

    def __init__(self, me: Who, wanted: str) -> None:
        self._me, self._wanted = me, wanted
        self._receivers: tuple[Who, ...] = ()
        self._begun: Callable[[], bool] = lambda: False
        self.road, self._why, self.carried = HOST, "", 0
        self._group: Group | None = None
        self._ends: tuple[End, ...] = ()
        self._flat: torch.Tensor | None = None

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
        me, ends = End.of(context, self._me), [_said(context, who) for who in self._receivers]
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
            found = self._bucket(tensors)
        self.carried += found is not None
        return found

    def _bucket(self, tensors: Sequence[torch.Tensor]) -> Bucket:
        self.settle()  # one is on its way while the next is gathered, and no more
        if self._group is None:
            self._group = Group(self.road, (self._me, *self._receivers))
        parts, size = crossings.layout([(_name(one), tuple(one.shape), one.element_size()) for one in tensors])
        bucket = Bucket(self._group.name, self.road, self._group.members, size, parts)
        self._flat = self._group.memory(size)
        for into, tensor in zip(bucket.tensors(self._flat), tensors, strict=True):
            into.copy_(tensor.detach())
        return bucket

    def depart(self) -> None:
        """Sends the bucket, of which all have been told."""
        if self._flat is not None and self._group is not None:
            flat, self._flat = self._flat, None
            self._group.begin(flat)

    def settle(self) -> None:
        """Waits until all have the last bucket."""
        if self._group is not None:
            self._group.settle()

    def forget(self) -> None:
        """Ends the group: its members may be others."""
        group, self._group, self._flat = self._group, None, None
        if group is not None:
            group.end()


class Receiving:
    """A receiver's side.

    Args:
        me: The receiver.
        wanted: See `choose`.
    """

    def __init__(self, me: Who, wanted: str) -> None:
        self._me, self._wanted, self._told = me, wanted, False
        self._group: Group | None = None

    def tell(self) -> None:
        """Says where this process computes, once it does."""
        if self._told or self._wanted == HOST or (own() is None and self._wanted != GLOO):
            return
        context = current()
        context.registry.put(WEIGHTS, _named(self._me), End.of(context, self._me)._asdict())
        self._told = True

    def take(self, cargo: Cargo, origin: Origin, reader: int) -> list[torch.Tensor]:
        """The tensors of a part; they are this process's own."""
        if isinstance(cargo, Crossing):
            return current().service.lane.land(cargo, origin, reader)
        if self._group is None or self._group.name != cargo.group:
            self.forget()
            self._group = Group(cargo.kind, cargo.members, self._me, cargo.group)
        flat = self._group.memory(cargo.size)
        self._group.begin(flat)
        self._group.settle()
        return cargo.tensors(flat)

    def forget(self) -> None:
        """Ends the group."""
        group, self._group = self._group, None
        if group is not None:
            group.end()


def _said(context: Context, who: Who) -> End | None:
    """What a receiver has said, unless it has been started again since."""
    record = context.registry.get(WEIGHTS, _named(who))
    if record is None or record["incarnation"] != context.member(*who)["incarnation"]:
        return None
    return End(*(record[field] for field in End._fields))


def _named(who: Who) -> str:
    return f"{who[0]}-{who[1]}"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
