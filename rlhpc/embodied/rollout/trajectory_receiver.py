"""Intake of a trainer's rank: the trajectories of its slots, and which of their transitions train nothing."""

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


#: How long what a rank had sent before it went may take to be there.
_LAST_S = 0.5


def joined(parts: Sequence[dict[str, Any]], axis: int = 0) -> dict[str, np.ndarray]:
    """Columns of slots (axis 0) or decisions (axis 1) that follow one another."""
    return {name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]}


class Intake:
    """The receiving end of the trajectories.

    Args:
        cfg: Configuration.
        slots: Which rank has which slots.
        rank: Rank of the trainer.
    """

    def __init__(self, cfg: PpoConfig | SacConfig, slots: SlotMap, rank: int) -> None:
        self.share, self._rank, self._skip = slots.actor_share(rank), rank, skips(cfg)
        #: What came of turns that are not due yet, by their number.
        self._early: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        #: Shape of a slot's row, and dtype, by column.
        self._like: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def connect(self, trajectories: Channel, parts: Channel) -> None:
        """Connects to the channels that it takes from."""
        self._trajectories, self._parts = trajectories, parts
        self._early.clear()

    def columns(self, step: int, source: Source) -> tuple[dict[str, np.ndarray], int]:
        """This step's trajectories of the rank's slots `[n, T, ...]`, and the oldest version that acted. `lost [n, T]` is
        among them where env or rollout ranks have gone.
        """
        slots = source.slots
        self._drop(slots, source.useless)
        numbers = [acted.turn.number for acted in source.acted]
        whole = [self._turn(acted, source.later.union(numbers[at + 1 :])) for at, acted in enumerate(source.acted)]
        if source.units is not None:
            whole.append([self._unit(slots, source.units[unit]) for unit in slots.units_of(self._rank)])
        parts = [part for parts in whole for part in parts]
        version = min((part.pop("version") for part in parts if "version" in part), default=step - 1)
        if any("lost" in part for part in parts):
            for part in parts:
                part.setdefault("lost", np.zeros(part["rewards"].shape[:2], bool))
        return joined([joined(parts) for parts in whole], axis=1), version

    def _turn(self, acted: Acted, later: frozenset[int]) -> list[dict[str, Any]]:
        """What rollout ranks have sent of a turn, in slot order."""
        sources = acted.slots.sources_of(self._rank)
        came = [(common, self._from(acted, later, stage, rank)) for stage, rank, common in sources]
        decisions = acted.turn.decisions
        return [self._nothing(len(common), decisions) if part is None else part for common, part in came]

    def _from(self, acted: Acted, later: frozenset[int], stage: int, rank: int) -> dict[str, Any] | None:
        """What a rollout rank has sent of a turn's stage; None if it has gone without."""
        slots, wanted = acted.slots, acted.turn.number
        key, peer = slots.to_actor_key(stage, rank, self._rank), (slots.rollout_name, rank)
        early = self._early[key] = {
            number: found for number, found in self._early[key].items() if number in {wanted, *later}
        }
        message = early.pop(wanted, None)
        try:
            while message is None:
                # it is from the rank that was started in place of one that has gone
                if any(number > wanted for number in early):
                    return None
                found = self._next(key, peer, gone=rank in acted.gone)
                if (number := found.pop("turn")) == wanted:
                    message = found
                elif number in later:
                    early[number] = found
                # else it came too late in its own time
        except PeerLeft:
            return None
        self._like = {name: (column.shape[2:], column.dtype) for name, column in message.items() if name != "version"}
        return message

    def _next(self, key: str, peer: Peer, *, gone: bool) -> dict[str, Any]:
        if not gone:
            found: dict[str, Any] = get_until_left(self._trajectories, key, peer, until_left(*peer))
            return found
        try:
            found = self._trajectories.get(key=key, timeout=_LAST_S)
        except (ChannelError, DeadlineExceeded, SegmentGone) as error:
            raise PeerLeft(f"{peer[0]}-{peer[1]}") from error
        return found

    def _nothing(self, count: int, decisions: int) -> dict[str, Any]:
        """Columns of so many slots and decisions of which nothing has come.

        Raises:
            ChannelError: What there would be is not known, because there has never been anything.
        """
        if not self._like:
            raise ChannelError(
                "all rollout ranks of this actor rank's slots ended in the first step of the run's start"
            )
        found = {name: np.zeros((count, decisions, *shape), dtype) for name, (shape, dtype) in self._like.items()}
        return {**found, "lost": np.ones(found["rewards"].shape[:2], bool)}

    def _unit(self, slots: SlotMap, keys: Sequence[int]) -> dict[str, Any]:
        """This rank's slots of a unit: its parts one after the other."""
        parts = [self._parts.get(key=slots.part_key(key, self._rank)) for key in keys]
        version = min(part.pop("version") for part in parts)
        return {**joined(parts, axis=1), "version": version}

    def _drop(self, slots: SlotMap, keys: Sequence[int]) -> None:
        """Lets go of parts that will not be taken in, as far as they have come."""
        for key in keys:
            with contextlib.suppress(QueueEmpty):
                self._parts.get_nowait(key=slots.part_key(key, self._rank))

    def lost(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Takes `lost` out of a step's columns: which transitions went with ranks, bool `[n, T]`."""
        shape = columns["rewards"].shape[:2]
        found: np.ndarray = columns.pop("lost", np.zeros(shape, bool))
        return found

    def failed(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Takes `env_failed` out of a step's columns: transitions whose simulator or robot failed, bool `[n, T]`."""
        shape = columns["rewards"].shape[:2]
        failed: np.ndarray = columns.pop("env_failed", np.zeros(shape, bool))
        return failed

    def spoiled(self, step: int, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Which of a step's transitions are not finite, bool `[n, T]`: by what the env ranks say, and by what came.

        Raises:
            NonFinite: There is one, and `runner.on_nonfinite` is stop.
        """
        bad: np.ndarray = columns.pop("nonfinite")
        found = [name for name, column in columns.items() if not is_finite(column)]
        if found and not self._skip:
            rows = [bad_rows(columns[name], 2) for name in found]
            slot, t = (int(index[0]) for index in np.nonzero(np.logical_or.reduce(rows)))
            raise nonfinite(
                f"step {step}, decision {t}: of slot {self.share.start + slot} (actor-{self._rank}) {', '.join(found)} "
                f"{'is' if len(found) == 1 else 'are'} not finite"
            )
        for name in found:
            bad = bad | bad_rows(columns[name], 2)
        return bad
