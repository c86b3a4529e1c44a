"""Env links, which exchange arrays between env and rollout ranks: small arrays on one host by mailbox, others by channel.

If both ranks use the same accelerator, observations stay on it as tensors. They are sent by channel, because mailboxes
use host memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rlhpc.embodied.envs.observations import row_bytes
from rlhpc.embodied.rollout.slot_map import ACTIONS, OBSERVATIONS, SlotMap
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.comm.device_memory import address
from rlhpc.runtime.comm.mailbox import Mailbox, available
from rlhpc.runtime.comm.queues import ConsumerLocation
from rlhpc.runtime.comm.shared_memory import SegmentGone
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.worker import Worker

#: Maximum bytes of a message by mailbox. For larger messages, a copy costs more than a channel.
_MAX_MAILBOX_BYTES = 1 << 20
#: Capacity of a mailbox for one slot's actions, in bytes.
_ACTION_BYTES = 16 << 10
#: Seconds between checks of a waiting rank that its peer is still present.
_CHECK_INTERVAL_S = 0.5
#: Seconds of polling without sleep while waiting for several peers, and maximum seconds of a sleep afterwards.
_SPIN_S, _MAX_SLEEP_S = 0.0005, 0.001
#: Seconds within which the driver notices that an unreachable rank has ended.
_NOTICE_S = 5.0


#: Group name and rank.
Peer = tuple[str, int]


class PeerLeft(Exception):
    """Error raised when the peer of an exchange has left. The run continues without the peer."""


def leave_check(group: str, rank: int) -> Callable[[], None]:
    """Returns a function to call repeatedly while waiting for a rank. The function raises `PeerLeft` once the rank has
    left.
    """
    context = current()
    context.rank_record(group, rank)  # fixes the incarnation
    last_check = time.monotonic()

    def check() -> None:
        nonlocal last_check
        context.check()
        if time.monotonic() - last_check > _CHECK_INTERVAL_S:
            last_check = time.monotonic()
            if context.has_left(group, rank):
                raise PeerLeft(f"{group}-{rank}")

    return check


def get_until_left(channel: Any, key: str, peer: Peer, check_alive: Callable[[], None]) -> Any:
    """Receives an item from a rank through a channel stored by this process.

    Args:
        channel: Channel.
        key: Key of the item.
        peer: Sending rank.
        check_alive: Function from `leave_check`.

    Raises:
        PeerLeft: The rank has gone without sending the item, or the item was lost with it.
        DeadlineExceeded: Nothing arrived before the deadline.
    """
    deadline = time.monotonic() + current().wait_deadline
    while True:
        try:
            with _raise_peer_left(peer):
                return channel.get(key=key, timeout=_CHECK_INTERVAL_S)
        except DeadlineExceeded:
            check_alive()
            if time.monotonic() > deadline:
                raise


def put_until_left(channel: Any, sent_item: Any, key: str, peer: Peer) -> None:
    """Sends an item to a rank through a channel that this rank stores.

    Raises:
        PeerLeft: The rank has gone.
    """
    with _raise_peer_left(peer):
        channel.put(sent_item, key=key, has_home_left=lambda: current().has_left(*peer))


@contextlib.contextmanager
def _raise_peer_left(peer: Peer) -> Iterator[None]:
    """Converts errors of an exchange with a lost rank to `PeerLeft`."""
    try:
        yield
    except (ChannelError, SegmentGone) as error:
        if not current().has_left(*peer, _NOTICE_S):
            raise
        raise PeerLeft(f"{peer[0]}-{peer[1]}") from error


class EnvLinks:
    """Links of one rank to its peers, by stage and in slot order.

    Args:
        worker: Worker of this rank.
        group: Group of the peers.
        stages: For each stage, tuples of peer, common slots and link.
    """

    def __init__(self, worker: Worker, group: str, stages: list[list[tuple[int, range, EnvLink]]]) -> None:
        self._log, self._group, self._stages = worker.log, group, stages

    def put(self, stage: int, select: Callable[[range], Any]) -> None:
        """Sends each peer the rows that `select` returns for the common slots. Skips peers that have left."""
        for index, (_, peer_slots, _) in enumerate(self._stages[stage]):
            self.put_to(stage, index, select(peer_slots))

    def put_to(self, stage: int, index: int, rows: Any) -> None:
        """Sends rows of the common slots to one peer, given by its index in the stage."""
        try:
            self._stages[stage][index][2].put(rows)
        except PeerLeft:
            self.lose(stage, index)

    def get(self, stage: int) -> list[tuple[range, Any]]:
        """Receives an array from each peer. Returns pairs of common slots and array; the array is None if the peer has
        left.
        """
        return [
            (peer_slots, self.get_from(stage, index)) for index, (_, peer_slots, _) in enumerate(self._stages[stage])
        ]

    def get_from(self, stage: int, index: int) -> Any:
        """Receives an array from one peer; returns None if the peer has gone."""
        try:
            return self._stages[stage][index][2].get()
        except PeerLeft:
            self.lose(stage, index)
            return None

    def first(self, peers: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Waits until at least one of several peers has sent an array or has left.

        Args:
            peers: Peers, each by stage and index.

        Returns:
            Peers for which `get_from` returns at once, in the order of the argument.

        Raises:
            DeadlineExceeded: Nothing arrived in time; the message names the peers.
        """
        start_time = last_check = time.monotonic()
        while not (ready_peers := [peer for peer in peers if self._stages[peer[0]][peer[1]][2].ready()]):
            now = time.monotonic()
            if now - last_check > _CHECK_INTERVAL_S:
                last_check = now
                current().check()
                for stage, index in peers:
                    if current().has_left(self._group, self._stages[stage][index][0]):
                        self.lose(stage, index)
                if now - start_time > current().wait_deadline:
                    ranks = sorted({self._stages[stage][index][0] for stage, index in peers})
                    peer_names = ", ".join(f"{self._group}-{rank}" for rank in ranks)
                    raise DeadlineExceeded(f"waited {current().wait_deadline:.0f} s for observations from {peer_names}")
            if (waited_s := now - start_time) < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(min(waited_s / 20, _MAX_SLEEP_S))
        return ready_peers

    def has_gone(self, stage: int, index: int) -> bool:
        """Returns whether a peer, by its index in the stage, has left or was lost."""
        return isinstance(self._stages[stage][index][2], ClosedLink)

    def lose(self, stage: int, index: int) -> None:
        """Marks a peer as lost. Messages to the peer are dropped from then on, and no messages are expected from it."""
        rank, peer_slots, link = self._stages[stage][index]
        if not isinstance(link, ClosedLink):
            self._log.warning("%s-%d has gone: its slots %s bring nothing", self._group, rank, peer_slots)
            self._stages[stage][index] = rank, peer_slots, ClosedLink()


class ChannelLink:
    """Link through two channels, one in each direction.

    Args:
        out, out_key: Channel and key to send to.
        inbound, in_key: Channel and key to receive from.
        peer: Rank at the other end.
    """

    def __init__(self, out: Any, out_key: str, inbound: Any, in_key: str, peer: Peer) -> None:
        self._out, self._out_key, self._in, self._in_key = out, out_key, inbound, in_key
        self._peer, self._check = peer, leave_check(*peer)

    def put(self, array: Any) -> None:
        """Sends an array to the other end."""
        put_until_left(self._out, array, self._out_key, self._peer)

    def get(self) -> Any:
        """Waits for an array from the other end and returns it."""
        return get_until_left(self._in, self._in_key, self._peer, self._check)

    def ready(self) -> bool:
        """Returns whether an array has arrived."""
        return not self._in.empty(self._in_key)


class ClosedLink:
    """Link to a rank that has left or was lost."""

    def put(self, array: Any) -> None:
        """Drops the array."""

    def get(self) -> Any:
        """Raises an error, because nothing can arrive.

        Raises:
            PeerLeft: Always.
        """
        raise PeerLeft("it has gone")

    def ready(self) -> bool:
        """Returns True, because `get` does not wait."""
        return True


class MailboxLink:
    """Link through one mailbox per entry of an observation. Actions use the other direction of the first mailbox."""

    def __init__(self, boxes: dict[str, Mailbox], is_env: bool) -> None:
        self._boxes, self._is_env, self._first_box = boxes, is_env, next(iter(boxes.values()))

    def put(self, array: Any) -> None:
        """Sends actions or an observation to the other end."""
        if not self._is_env:
            self._first_box.put(array)
            return
        for key, mailbox in self._boxes.items():
            mailbox.put(array[key])

    def get(self) -> Any:
        """Waits for an array or a dict of arrays from the other end and returns it."""
        return self._first_box.get() if self._is_env else {key: mailbox.get() for key, mailbox in self._boxes.items()}

    def ready(self) -> bool:
        """Returns whether all entries have arrived."""
        return self._first_box.ready() if self._is_env else all(mailbox.ready() for mailbox in self._boxes.values())


#: Two-way link between one env rank and one rollout rank, for one stage. `put` and `get` raise `PeerLeft` if the other end has
#: gone; `ready` returns whether `get` would return at once.
EnvLink = ChannelLink | ClosedLink | Mailbox | MailboxLink


def agree_on_device(worker: Worker, slots: SlotMap, can_stay: Sequence[bool] = ()) -> list[list[bool]]:
    """Agrees with the peers on whether observations stay on the accelerator. Returns for each stage a list with one value per
    peer, in slot order.

    Rollout ranks send their device to the env ranks, which decide. The decision is the same for all rollout ranks of a stage,
    because observations are produced once for all of them.

    Args:
        worker: Worker of this rank.
        slots: Slot map.
        can_stay: On an env rank: for each stage, whether its observations are produced on the accelerator.
    """
    is_env = worker.group_name == slots.env_name
    observations, actions = worker.connect_channel(OBSERVATIONS), worker.connect_channel(ACTIONS)
    near_by_stage, rank, stages = [], worker.rank, range(slots.num_stages)
    if is_env:
        local_device = ConsumerLocation(current().host, address())
        for stage in stages:
            peers = [peer for peer, _ in slots.rollouts_of(stage, rank)]
            devices = [
                _receive(actions, slots.to_env_key(stage, peer, rank), (slots.rollout_name, peer)) for peer in peers
            ]
            is_near = bool(
                local_device.device
                and can_stay[stage]
                and all(peer_device and ConsumerLocation(*peer_device) == local_device for peer_device in devices)
            )
            for peer in peers:
                with contextlib.suppress(PeerLeft):  # the link detects it, too
                    key = slots.to_rollout_key(stage, rank, peer)
                    put_until_left(observations, is_near, key, (slots.rollout_name, peer))
            near_by_stage.append([is_near] * len(peers))
        return near_by_stage
    env_peers = [[peer for peer, _ in slots.envs_of(stage, rank)] for stage in stages]
    for stage in stages:
        for peer in env_peers[stage]:
            if peer not in slots.absent:
                key = slots.to_env_key(stage, rank, peer)
                with contextlib.suppress(PeerLeft):
                    put_until_left(actions, (current().host, address()), key, (slots.env_name, peer))

    return [
        [
            peer not in slots.absent
            and bool(_receive(observations, slots.to_rollout_key(stage, peer, rank), (slots.env_name, peer)))
            for peer in env_peers[stage]
        ]
        for stage in stages
    ]


def _receive(channel: Any, key: str, peer: Peer) -> Any:
    """Receives a value from a rank; returns None if the rank has left, which the link detects, too."""
    try:
        return get_until_left(channel, key, peer, leave_check(*peer))
    except PeerLeft:
        return None


def open_links(worker: Worker, slots: SlotMap, observation_space: Any, on_device: list[list[bool]]) -> EnvLinks:
    """Opens this rank's links to its peers.

    Args:
        worker: Worker of this rank.
        slots: Slot map.
        observation_space: Observation space of one slot.
        on_device: Result of `agree_on_device`.
    """
    is_env = worker.group_name == slots.env_name
    observations, actions = worker.connect_channel(OBSERVATIONS), worker.connect_channel(ACTIONS)
    bytes_a_slot = row_bytes(observation_space)
    peer_group = slots.rollout_name if is_env else slots.env_name
    links_by_stage: list[list[tuple[int, range, EnvLink]]] = []
    for stage in range(slots.num_stages):
        peers = slots.rollouts_of(stage, worker.rank) if is_env else slots.envs_of(stage, worker.rank)
        links: list[tuple[int, range, EnvLink]] = []
        for (rank, peer_slots), stays_on_device in zip(peers, on_device[stage], strict=True):
            env_rank, rollout_rank = (worker.rank, rank) if is_env else (rank, worker.rank)
            link: EnvLink | None = None
            if env_rank in slots.absent:
                link = ClosedLink()
            elif not stays_on_device:
                link = _open_mailboxes(slots, stage, env_rank, rollout_rank, len(peer_slots), bytes_a_slot, is_env)
            if link is None:
                to_rollout = (observations, slots.to_rollout_key(stage, env_rank, rollout_rank))
                to_env = (actions, slots.to_env_key(stage, env_rank, rollout_rank))
                link = ChannelLink(*((*to_rollout, *to_env) if is_env else (*to_env, *to_rollout)), (peer_group, rank))
            links.append((rank, peer_slots, link))
        links_by_stage.append(links)
    return EnvLinks(worker, peer_group, links_by_stage)


def _open_mailboxes(
    slots: SlotMap,
    stage: int,
    env_rank: int,
    rollout_rank: int,
    num_slot_bytes: int,
    bytes_a_slot: dict[str, int],
    is_env: bool,
) -> EnvLink | None:
    """Opens the mailboxes of a pair of ranks. Returns None if the ranks are on different hosts or messages are too large; both
    ends come to the same decision.
    """
    context = current()
    peer = (slots.rollout_name, rollout_rank) if is_env else (slots.env_name, env_rank)
    if (
        not available()
        or context.rank_record(*peer)["host"] != context.host
        or num_slot_bytes * sum(bytes_a_slot.values()) > _MAX_MAILBOX_BYTES
    ):
        return None
    mailboxes: dict[str, Mailbox] = {}
    for index, (key, num_arrays) in enumerate(bytes_a_slot.items()):
        path = (
            context.service.scratch.shm
            / f"mailbox-{slots.token}-{stage}-{env_rank}-{rollout_rank}{f'-{index}' * bool(key)}"
        )
        mailboxes[key] = Mailbox(
            path,
            num_slot_bytes * max(num_arrays, 0 if index else _ACTION_BYTES),
            is_first=is_env,
            peer=f"{peer[0]}-{peer[1]}",
            deadline=context.wait_deadline,
            check=leave_check(*peer),
        )
    return mailboxes[""] if "" in mailboxes else MailboxLink(mailboxes, is_env)
