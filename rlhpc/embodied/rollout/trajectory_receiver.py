"""Trajectory receiver of an actor rank: the trajectories of its slots, and masks of transitions that do not train."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.embodied.envs.observations import bad_rows, is_finite
from rlhpc.embodied.rollout.env_link import Peer, PeerLeft, get_until_left, until_left
from rlhpc.embodied.rollout.slot_map import Acted, SlotMap, Source
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.comm.shared_memory import SegmentGone
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoConfig, SacConfig
    from rlhpc.runtime.channel import Channel


#: Time that a message may take to arrive that a rank sent before it left.
_LAST_S = 0.5


def joined(parts: Sequence[dict[str, Any]], axis: int = 0) -> dict[str, np.ndarray]:
    """Concatenates columns of consecutive slots (axis 0) or decisions (axis 1)."""
    return {name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]}


class TrajectoryReceiver:
    """Receiving end of the trajectories.

    Args:
        cfg: Configuration.
        slots: Slot map.
        rank: Rank of the trainer.
    """

    def __init__(self, cfg: PpoConfig | SacConfig, slots: SlotMap, rank: int) -> None:
        self.share, self._rank, self._skip = slots.actor_share(rank), rank, skips(cfg)
        #: Messages of later turns, by number of the turn.
        self._early: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        #: Shape of a slot's row and dtype, by column.
        self._like: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def connect(self, trajectories: Channel, parts: Channel) -> None:
        """Connects to the channels that it receives from."""
        self._trajectories, self._parts = trajectories, parts
        self._early.clear()

    def columns(self, step: int, source: Source) -> tuple[dict[str, np.ndarray], int]:
        """Returns this step's trajectories of the rank's slots `[n, T, ...]`, and the oldest version that acted.

        `lost [n, T]` is included if env or rollout ranks have gone.
        """
        slots = source.slots
        self._drop(slots, source.useless)
        numbers = [acted.turn.number for acted in source.acted]
        parts_by_turn = [
            self._turn(acted, source.later.union(numbers[at + 1 :])) for at, acted in enumerate(source.acted)
        ]
        if source.units is not None:
            parts_by_turn.append([self._unit(slots, source.units[unit]) for unit in slots.units_of(self._rank)])
        parts = [part for parts in parts_by_turn for part in parts]
        version = min((part.pop("version") for part in parts if "version" in part), default=step - 1)
        if any("lost" in part for part in parts):
            for part in parts:
                part.setdefault("lost", np.zeros(part["rewards"].shape[:2], bool))
        return joined([joined(parts) for parts in parts_by_turn], axis=1), version

    def _turn(self, acted: Acted, later: frozenset[int]) -> list[dict[str, Any]]:
        """Returns the rollout ranks' messages of a turn, in slot order."""
        sources = acted.slots.sources_of(self._rank)
        messages = [(common, self._from(acted, later, stage, rank)) for stage, rank, common in sources]
        decisions = acted.turn.decisions
        return [self._missing_columns(len(common), decisions) if part is None else part for common, part in messages]

    def _from(self, acted: Acted, later: frozenset[int], stage: int, rank: int) -> dict[str, Any] | None:
        """Returns a rollout rank's message of a turn's stage; None if it has gone without sending it."""
        slots, turn_number = acted.slots, acted.turn.number
        key, peer = slots.to_actor_key(stage, rank, self._rank), (slots.rollout_name, rank)
        early = self._early[key] = {
            number: received for number, received in self._early[key].items() if number in {turn_number, *later}
        }
        message = early.pop(turn_number, None)
        try:
            while message is None:
                # such a message is from the rank that replaced one that has gone
                if any(number > turn_number for number in early):
                    return None
                received = self._next(key, peer, has_left=rank in acted.lost_ranks)
                if (number := received.pop("turn")) == turn_number:
                    message = received
                elif number in later:
                    early[number] = received
                # else it belongs to a turn that is already over
        except PeerLeft:
            return None
        self._like = {name: (column.shape[2:], column.dtype) for name, column in message.items() if name != "version"}
        return message

    def _next(self, key: str, peer: Peer, *, has_left: bool) -> dict[str, Any]:
        if not has_left:
            message: dict[str, Any] = get_until_left(self._trajectories, key, peer, until_left(*peer))
            return message
        try:
            message = self._trajectories.get(key=key, timeout=_LAST_S)
        except (ChannelError, DeadlineExceeded, SegmentGone) as error:
            raise PeerLeft(f"{peer[0]}-{peer[1]}") from error
        return message

    def _missing_columns(self, count: int, decisions: int) -> dict[str, Any]:
        """Returns columns for slots and decisions of which no message has arrived.

        Raises:
            ChannelError: The columns are unknown, because no message has ever arrived.
        """
        if not self._like:
            raise ChannelError(
                "all rollout ranks of this actor rank's slots ended in the first step of the run's start"
            )
        columns = {name: np.zeros((count, decisions, *shape), dtype) for name, (shape, dtype) in self._like.items()}
        return {**columns, "lost": np.ones(columns["rewards"].shape[:2], bool)}

    def _unit(self, slots: SlotMap, keys: Sequence[int]) -> dict[str, Any]:
        """Returns this rank's slots of a unit: its shards, concatenated."""
        parts = [self._parts.get(key=slots.part_key(key, self._rank)) for key in keys]
        version = min(part.pop("version") for part in parts)
        return {**joined(parts, axis=1), "version": version}

    def _drop(self, slots: SlotMap, keys: Sequence[int]) -> None:
        """Removes shards that will not be used from the channel, if they have arrived."""
        for key in keys:
            with contextlib.suppress(QueueEmpty):
                self._parts.get_nowait(key=slots.part_key(key, self._rank))

    def pop_lost(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Removes `lost` from a step's columns: the transitions that were lost with ranks, bool `[n, T]`."""
        shape = columns["rewards"].shape[:2]
        is_lost: np.ndarray = columns.pop("lost", np.zeros(shape, bool))
        return is_lost

    def pop_failed(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Removes `env_failed` from a step's columns: transitions whose simulator or robot failed, bool `[n, T]`."""
        shape = columns["rewards"].shape[:2]
        failed: np.ndarray = columns.pop("env_failed", np.zeros(shape, bool))
        return failed

    def pop_nonfinite(self, step: int, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Removes `nonfinite` from a step's columns; returns all transitions that are not finite, bool `[n, T]`: those that
        the env ranks report, and those with non-finite values.

        Raises:
            NonFinite: There is one, and `runner.on_nonfinite` is stop.
        """
        bad: np.ndarray = columns.pop("nonfinite")
        names = [name for name, column in columns.items() if not is_finite(column)]
        if names and not self._skip:
            rows = [bad_rows(columns[name], 2) for name in names]
            slot, t = (int(index[0]) for index in np.nonzero(np.logical_or.reduce(rows)))
            raise nonfinite(
                f"step {step}, decision {t}: of slot {self.share.start + slot} (actor-{self._rank}) {', '.join(names)} "
                f"{'is' if len(names) == 1 else 'are'} not finite"
            )
        for name in names:
            bad = bad | bad_rows(columns[name], 2)
        return bad
