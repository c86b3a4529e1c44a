"""How a simulator and the policy that acts on it exchange arrays: a mailbox on one host, a channel between hosts.

On one accelerator observations are tensors that stay there, which is what a channel does with them: a mailbox has memory of
the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhpc.embodied.envs.observations import row_bytes
from rlhpc.embodied.roles.slots import ACTIONS, OBSERVATIONS, SlotMap
from rlhpc.runtime.comm.devices import address
from rlhpc.runtime.comm.mailbox import Mailbox, available
from rlhpc.runtime.comm.queues import Taker
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.worker import Worker

#: Largest message that goes through a mailbox. Above it copying costs more than a channel's hand-over.
_LARGEST = 1 << 20
#: Room for one slot's actions.
_ACTION_BYTES = 16 << 10
#: How often somebody who waits for an env rank looks whether it has gone.
_LOOK_S = 0.5
#: How long the driver may take to notice that a rank has ended which cannot be reached.
_NOTICE_S = 5.0


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


def get_until_left(channel: Any, key: str, check: Callable[[], None]) -> Any:
    """What a rank has sent, by a channel that this process keeps.

    Args:
        channel: The channel.
        key: The key.
        check: See `until_left`.

    Raises:
        PeerLeft: The rank has gone, and has sent nothing.
        DeadlineExceeded: It has sent nothing for too long.
    """
    deadline = time.monotonic() + current().wait_deadline
    while True:
        try:
            return channel.get(key=key, timeout=_LOOK_S)
        except DeadlineExceeded:
            check()
            if time.monotonic() > deadline:
                raise


class Lane(Protocol):
    """Both directions between one env rank and one rollout rank, for one stage."""

    def put(self, array: Any) -> None:
        """Sends to the other end: actions, or an observation."""

    def get(self) -> Any:
        """Receives from the other end."""


class ChannelLane:
    """A lane over two channels.

    Args:
        out, out_key: Where to send.
        inbound, in_key: Where to receive.
        peer: Group and rank of the other end, if it may go.
    """

    def __init__(self, out: Any, out_key: str, inbound: Any, in_key: str, peer: tuple[str, int] | None = None) -> None:
        self._out, self._out_key, self._in, self._in_key = out, out_key, inbound, in_key
        self._peer, self._check = peer, None if peer is None else until_left(*peer)

    def put(self, array: Any) -> None:
        """Sends to the other end (`Lane.put`)."""
        try:
            self._out.put(array, key=self._out_key)
        except ChannelError:
            if self._peer is None or not current().has_left(*self._peer, _NOTICE_S):
                raise
            raise PeerLeft(f"{self._peer[0]}-{self._peer[1]}") from None

    def get(self) -> Any:
        """Waits for what the other end sent (`Lane.get`)."""
        if self._check is not None:
            return get_until_left(self._in, self._in_key, self._check)
        return self._in.get(key=self._in_key)


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


class MailboxLane:
    """A lane over a mailbox for each part of an observation; actions travel in the first one's other direction."""

    def __init__(self, boxes: dict[str, Mailbox], is_env: bool) -> None:
        self._boxes, self._is_env, self._first = boxes, is_env, next(iter(boxes.values()))

    def put(self, array: Any) -> None:
        """Sends to the other end (`Lane.put`)."""
        if not self._is_env:
            self._first.put(array)
            return
        for key, box in self._boxes.items():
            box.put(array[key])

    def get(self) -> Any:
        """Waits for what the other end sent (`Lane.get`)."""
        return self._first.get() if self._is_env else {key: box.get() for key, box in self._boxes.items()}


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
            told = [actions.get(key=slots.to_env_key(stage, peer, rank)) for peer in peers]
            near = bool(here.device and made_there[stage] and all(Taker(*one) == here for one in told))
            for peer in peers:
                observations.put(near, key=slots.to_rollout_key(stage, rank, peer))
            found.append([near] * len(peers))
        return found
    asked = [[peer for peer, _ in slots.envs_of(stage, rank)] for stage in stages]
    for stage in stages:
        for peer in asked[stage]:
            if peer not in slots.absent:
                actions.put((current().host, address()), key=slots.to_env_key(stage, rank, peer))

    def together(stage: int, peer: int) -> bool:
        try:
            key = slots.to_rollout_key(stage, peer, rank)
            if peer in slots.absent:
                return False
            return bool(get_until_left(observations, key, until_left(slots.env_name, peer)))
        except PeerLeft:
            return False  # the lane notices it, too

    return [[together(stage, peer) for peer in asked[stage]] for stage in stages]


def open_lanes(
    worker: Worker, slots: SlotMap, observation_space: Any, near: list[list[bool]]
) -> list[list[tuple[Lane, range]]]:
    """This rank's lanes: for each stage its peers in slot order, each with the slots in common.

    Args:
        worker: This rank.
        slots: Which slot lives where.
        observation_space: Of one slot.
        near: See `agree_on_device`.
    """
    is_env = worker.group_name == slots.env_name
    observations, actions = worker.connect_channel(OBSERVATIONS), worker.connect_channel(ACTIONS)
    bytes_a_slot = row_bytes(observation_space)
    found: list[list[tuple[Lane, range]]] = []
    for stage in range(slots.stages):
        peers = slots.rollouts_of(stage, worker.rank) if is_env else slots.envs_of(stage, worker.rank)
        lanes: list[tuple[Lane, range]] = []
        for (rank, common), together in zip(peers, near[stage], strict=True):
            env, rollout = (worker.rank, rank) if is_env else (rank, worker.rank)
            if env in slots.absent:
                lanes.append((NoLane(), common))
                continue
            lane = None if together else _mailbox(slots, stage, env, rollout, len(common), bytes_a_slot, is_env)
            if lane is None:
                to_rollout = (observations, slots.to_rollout_key(stage, env, rollout))
                to_env = (actions, slots.to_env_key(stage, env, rollout))
                lane = (
                    ChannelLane(*to_rollout, *to_env)
                    if is_env
                    else ChannelLane(*to_env, *to_rollout, (slots.env_name, env))
                )
            lanes.append((lane, common))
        found.append(lanes)
    return found


def _mailbox(
    slots: SlotMap, stage: int, env: int, rollout: int, size: int, bytes_a_slot: dict[str, int], is_env: bool
) -> Lane | None:
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
            path, capacity, first=is_env, peer=name, deadline=context.wait_deadline,
            check=context.check if is_env else until_left(*peer),
        )  # fmt: skip
    return boxes[""] if "" in boxes else MailboxLane(boxes, is_env)
