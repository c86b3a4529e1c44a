"""How a simulator and the policy that acts on it exchange arrays: a mailbox on one host, a channel between hosts.

On one accelerator observations are tensors that stay there, which is what a channel does with them: a mailbox has memory of
the host.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from rlhpc.embodied.envs.observations import row_bytes
from rlhpc.embodied.rollout.slot_map import ACTIONS, OBSERVATIONS, SlotMap
from rlhpc.runtime.comm.device_memory import address
from rlhpc.runtime.comm.mailbox import Mailbox, available
from rlhpc.runtime.comm.queues import Taker
from rlhpc.runtime.comm.shared_memory import SegmentGone
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.worker import Worker

#: Largest message that goes through a mailbox. Above it copying costs more than a channel's hand-over.
_LARGEST = 1 << 20
#: Room for one slot's actions.
_ACTION_BYTES = 16 << 10
#: How often somebody who waits for a rank looks whether it has gone.
_LOOK_S = 0.5
#: Who waits for several looks again and again for so long before it naps, and naps for so long at most.
_SPIN_S, _NAP_S = 0.0005, 0.001
#: How long the driver may take to notice that a rank has ended which cannot be reached.
_NOTICE_S = 5.0


#: A group and a rank of it.
Peer = tuple[str, int]


class PeerLeft(Exception):
    """The rank at the other end has gone, and the run goes on without it."""


def until_left(group: str, rank: int) -> Callable[[], None]:
    """A function to call while waiting for a rank.

    It raises:
        PeerLeft: The rank has gone.
    """
    context = current()
    context.member(group, rank)  # whose incarnation is meant
    looked = time.monotonic()

    def check() -> None:
        nonlocal looked
        context.check()
        if time.monotonic() - looked > _LOOK_S:
            looked = time.monotonic()
            if context.has_left(group, rank):
                raise PeerLeft(f"{group}-{rank}")

    return check


def get_until_left(channel: Any, key: str, peer: Peer, check: Callable[[], None]) -> Any:
    """What a rank has sent, by a channel that this process keeps.

    Args:
        channel: The channel.
        key: The key.
        peer: The rank.
        check: See `until_left`.

    Raises:
        PeerLeft: The rank has gone, and has sent nothing, or what it has sent went with it.
        DeadlineExceeded: It has sent nothing for too long.
    """
    deadline = time.monotonic() + current().wait_deadline
    while True:
        try:
            with _noticed(peer):
                return channel.get(key=key, timeout=_LOOK_S)
        except DeadlineExceeded:
            check()
            if time.monotonic() > deadline:
                raise


def put_until_left(channel: Any, item: Any, key: str, peer: Peer) -> None:
    """Sends a rank something by a channel that it keeps.

    Raises:
        PeerLeft: The rank has gone.
    """
    with _noticed(peer):
        channel.put(item, key=key, gone=lambda: current().has_left(*peer))


@contextlib.contextmanager
def _noticed(peer: Peer) -> Iterator[None]:
    """Makes an error of what is exchanged with a rank that has gone a `PeerLeft`."""
    try:
        yield
    except (ChannelError, SegmentGone) as error:
        if not current().has_left(*peer, _NOTICE_S):
            raise
        raise PeerLeft(f"{peer[0]}-{peer[1]}") from error


class EnvLink(Protocol):
    """Both directions between one env rank and one rollout rank, for one stage. Both methods raise `PeerLeft` where the other
    end has gone."""

    def put(self, array: Any) -> None:
        """Sends to the other end: actions, or an observation."""

    def get(self) -> Any:
        """Receives from the other end."""

    def ready(self) -> bool:
        """Whether `get` would not wait."""


class Lanes:
    """A rank's lanes, by stage, each to one of its peers there, in slot order.

    Args:
        worker: This rank.
        group: The peers' group.
        stages: Of each stage the peers, the slots in common, and the lanes.
    """

    def __init__(self, worker: Worker, group: str, stages: list[list[tuple[int, range, EnvLink]]]) -> None:
        self._log, self._group, self._stages = worker.log, group, stages

    def put(self, stage: int, part_of: Callable[[range], Any]) -> None:
        """Sends each peer what concerns the slots in common; one that has gone gets nothing."""
        for index, (_, common, _) in enumerate(self._stages[stage]):
            self.put_to(stage, index, part_of(common))

    def put_to(self, stage: int, index: int, part: Any) -> None:
        """Sends one peer, by its place among those of the stage, what concerns the slots in common."""
        try:
            self._stages[stage][index][2].put(part)
        except PeerLeft:
            self.lose(stage, index)

    def get(self, stage: int) -> list[tuple[range, Any]]:
        """The slots in common with each peer, and what it has sent; None of one that has gone."""
        return [(common, self.get_from(stage, index)) for index, (_, common, _) in enumerate(self._stages[stage])]

    def get_from(self, stage: int, index: int) -> Any:
        """What one peer has sent; None if it has gone."""
        try:
            return self._stages[stage][index][2].get()
        except PeerLeft:
            self.lose(stage, index)
            return None

    def first(self, among: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Waits until something has come from one of several peers, or one has gone.

        Args:
            among: The peers, each by stage and place.

        Returns:
            Those from which `get_from` gets something at once, or None, in the order of the argument.

        Raises:
            DeadlineExceeded: Nothing came; says from whom.
        """
        begun = looked = time.monotonic()
        while not (found := [at for at in among if self._stages[at[0]][at[1]][2].ready()]):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                current().check()
                for stage, index in among:
                    if current().has_left(self._group, self._stages[stage][index][0]):
                        self.lose(stage, index)
                if now - begun > current().wait_deadline:
                    ranks = sorted({self._stages[stage][index][0] for stage, index in among})
                    whom = ", ".join(f"{self._group}-{rank}" for rank in ranks)
                    raise DeadlineExceeded(f"waited {current().wait_deadline:.0f} s for observations from {whom}")
            if (waited := now - begun) < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(min(waited / 20, _NAP_S))
        return found

    def has_gone(self, stage: int, index: int) -> bool:
        """Whether a peer has gone, by its place among those of the stage."""
        return isinstance(self._stages[stage][index][2], NoLane)

    def lose(self, stage: int, index: int) -> None:
        """A peer has gone: nothing comes from it any more, and it gets nothing."""
        rank, common, lane = self._stages[stage][index]
        if not isinstance(lane, NoLane):
            self._log.warning("%s-%d has gone: its slots %s bring nothing", self._group, rank, common)
            self._stages[stage][index] = rank, common, NoLane()


class ChannelLane:
    """A lane over two channels.

    Args:
        out, out_key: Where to send.
        inbound, in_key: Where to receive.
        peer: The rank at the other end.
    """

    def __init__(self, out: Any, out_key: str, inbound: Any, in_key: str, peer: Peer) -> None:
        self._out, self._out_key, self._in, self._in_key = out, out_key, inbound, in_key
        self._peer, self._check = peer, until_left(*peer)

    def put(self, array: Any) -> None:
        """Sends to the other end (`EnvLink.put`)."""
        put_until_left(self._out, array, self._out_key, self._peer)

    def get(self) -> Any:
        """Waits for what the other end sent (`EnvLink.get`)."""
        return get_until_left(self._in, self._in_key, self._peer, self._check)

    def ready(self) -> bool:
        """Whether something has come (`EnvLink.ready`)."""
        return not self._in.empty(self._in_key)


class NoLane:
    """In place of a lane to a rank that has gone."""

    def put(self, array: Any) -> None:
        """Nobody gets it."""

    def get(self) -> Any:
        """Nothing comes.

        Raises:
            PeerLeft: Always.
        """
        raise PeerLeft("it has gone")

    def ready(self) -> bool:
        """Nobody need wait (`EnvLink.ready`)."""
        return True


class MailboxLane:
    """A lane over a mailbox for each part of an observation; actions travel in the first one's other direction."""

    def __init__(self, boxes: dict[str, Mailbox], is_env: bool) -> None:
        self._boxes, self._is_env, self._first = boxes, is_env, next(iter(boxes.values()))

    def put(self, array: Any) -> None:
        """Sends to the other end (`EnvLink.put`)."""
        if not self._is_env:
            self._first.put(array)
            return
        for key, box in self._boxes.items():
            box.put(array[key])

    def get(self) -> Any:
        """Waits for what the other end sent (`EnvLink.get`)."""
        return self._first.get() if self._is_env else {key: box.get() for key, box in self._boxes.items()}

    def ready(self) -> bool:
        """Whether all of it has come (`EnvLink.ready`)."""
        return self._first.ready() if self._is_env else all(box.ready() for box in self._boxes.values())


def agree_on_device(worker: Worker, slots: SlotMap, made_there: Sequence[bool] = ()) -> list[list[bool]]:
    """Where observations stay on the accelerator: for each stage, the same for all its peers in slot order.

    Rollout ranks tell where they compute, and env ranks decide: for all rollout ranks of a stage alike, because observations
    are made once for them all.

    Args:
        worker: This rank.
        slots: Which slot lives where.
        made_there: Of an env rank, for each stage whether its observations are made on the accelerator.
    """
    is_env = worker.group_name == slots.env_name
    observations, actions = worker.connect_channel(OBSERVATIONS), worker.connect_channel(ACTIONS)
    found, rank, stages = [], worker.rank, range(slots.stages)
    if is_env:
        here = Taker(current().host, address())
        for stage in stages:
            peers = [peer for peer, _ in slots.rollouts_of(stage, rank)]
            told = [_told(actions, slots.to_env_key(stage, peer, rank), (slots.rollout_name, peer)) for peer in peers]
            near = bool(here.device and made_there[stage] and all(one and Taker(*one) == here for one in told))
            for peer in peers:
                with contextlib.suppress(PeerLeft):  # the lane notices it, too
                    key = slots.to_rollout_key(stage, rank, peer)
                    put_until_left(observations, near, key, (slots.rollout_name, peer))
            found.append([near] * len(peers))
        return found
    asked = [[peer for peer, _ in slots.envs_of(stage, rank)] for stage in stages]
    for stage in stages:
        for peer in asked[stage]:
            if peer not in slots.absent:
                key = slots.to_env_key(stage, rank, peer)
                with contextlib.suppress(PeerLeft):
                    put_until_left(actions, (current().host, address()), key, (slots.env_name, peer))

    def together(stage: int, peer: int) -> bool:
        key = slots.to_rollout_key(stage, peer, rank)
        return peer not in slots.absent and bool(_told(observations, key, (slots.env_name, peer)))

    return [[together(stage, peer) for peer in asked[stage]] for stage in stages]


def _told(channel: Any, key: str, peer: Peer) -> Any:
    """What a rank has sent; None if it has gone, which the lane notices, too."""
    try:
        return get_until_left(channel, key, peer, until_left(*peer))
    except PeerLeft:
        return None


def open_lanes(worker: Worker, slots: SlotMap, observation_space: Any, near: list[list[bool]]) -> Lanes:
    """This rank's lanes.

    Args:
        worker: This rank.
        slots: Which slot lives where.
        observation_space: Of one slot.
        near: See `agree_on_device`.
    """
    is_env = worker.group_name == slots.env_name
    observations, actions = worker.connect_channel(OBSERVATIONS), worker.connect_channel(ACTIONS)
    bytes_a_slot = row_bytes(observation_space)
    other = slots.rollout_name if is_env else slots.env_name
    found: list[list[tuple[int, range, EnvLink]]] = []
    for stage in range(slots.stages):
        peers = slots.rollouts_of(stage, worker.rank) if is_env else slots.envs_of(stage, worker.rank)
        lanes: list[tuple[int, range, EnvLink]] = []
        for (rank, common), together in zip(peers, near[stage], strict=True):
            env, rollout = (worker.rank, rank) if is_env else (rank, worker.rank)
            if env in slots.absent:
                lanes.append((rank, common, NoLane()))
                continue
            lane: EnvLink | None = (
                None if together else _mailbox(slots, stage, env, rollout, len(common), bytes_a_slot, is_env)
            )
            if lane is None:
                to_rollout = (observations, slots.to_rollout_key(stage, env, rollout))
                to_env = (actions, slots.to_env_key(stage, env, rollout))
                ways = (*to_rollout, *to_env) if is_env else (*to_env, *to_rollout)
                lane = ChannelLane(*ways, (other, rank))
            lanes.append((rank, common, lane))
        found.append(lanes)
    return Lanes(worker, other, found)


def _mailbox(
    slots: SlotMap, stage: int, env: int, rollout: int, size: int, bytes_a_slot: dict[str, int], is_env: bool
) -> EnvLink | None:
    """A mailbox for the pair where both can have one; both ends come to the same answer."""
    context = current()
    peer = (slots.rollout_name, rollout) if is_env else (slots.env_name, env)
    if not available() or context.member(*peer)["host"] != context.host or size * sum(bytes_a_slot.values()) > _LARGEST:
        return None
    boxes: dict[str, Mailbox] = {}
    for index, (key, count) in enumerate(bytes_a_slot.items()):
        path = context.service.scratch.shm / f"mailbox-{slots.token}-{stage}-{env}-{rollout}{f'-{index}' * bool(key)}"
        capacity = size * max(count, 0 if index else _ACTION_BYTES)
        name = f"{peer[0]}-{peer[1]}"
        boxes[key] = Mailbox(
            path, capacity, first=is_env, peer=name, deadline=context.wait_deadline, check=until_left(*peer),
        )  # fmt: skip
    return boxes[""] if "" in boxes else MailboxLane(boxes, is_env)
