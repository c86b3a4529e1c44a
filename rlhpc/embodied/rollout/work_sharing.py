"""Work sharing with env ranks that joined: assignment of rollout shards, and tracking of their delivery.

The slots of a step are divided into units, each with as many slots as an env rank of the run. The decisions of a unit are
played in shards. A shard belongs to one rank: a rank that is told to leave ends it early, and another rank plays the rest of
the unit in its own simulators, as a shard that follows. A shard counts once its rank has reported that all actors have it,
and it counts only once: if a rank is lost before this report, the shard is assigned to another rank, even if the report
arrives later.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayingConfig

#: Channels: the shards, stored by the actors, and the reports of their delivery to the driver.
PARTS, PLAYED = "parts", "played"
#: Smallest number of decisions that is worth a message.
_MIN_DECISIONS = 4


@dataclass(frozen=True)
class FullRollout:
    """Turn: decisions of a step, at most one of its parts (`cuts`), that the env and rollout ranks that the run started with
    play in one call.

    Attributes:
        number: Unique number; later turns have higher numbers.
        step: Step that it belongs to.
        begin: Decisions of the step before it.
        decisions: Number of its decisions.
    """

    number: int
    step: int
    begin: int
    decisions: int


@dataclass(frozen=True)
class RolloutShard:
    """Part of a unit that one rank plays.

    Attributes:
        number: Unique number within a driver.
        key: Key under which actors store it. It is used again once the shard has been received.
        step, unit: Step and unit that it belongs to.
        decisions: Number of its decisions.
        version: Oldest weights that may act in it.
    """

    number: int
    key: int
    step: int
    unit: int
    decisions: int
    version: int = 0


@dataclass(frozen=True)
class DeliveredShard:
    """Report to the driver about a shard that all actors have.

    Attributes:
        number, key: Number and key of the shard.
        rank: Rank that played it.
        decisions: Number of decisions made: fewer than requested from a rank that leaves.
        version: Weights that acted.
        episodes: See `SimulatingWorker.interact`.
    """

    number: int
    key: int
    rank: int
    decisions: int
    version: int
    episodes: dict[str, Any]


class ShardTracker:
    """The driver's account of rollout shards.

    Args:
        units: Units of a step.
        decisions: Decisions of a unit.

    Attributes:
        delivered: Decisions of a unit's slots that were delivered and are or will be trained on, by rank.
        useless: Keys of shards that actors may have and that will never be used.
    """

    def __init__(self, units: int, decisions: int) -> None:
        self._units, self._decisions = units, decisions
        self._number = self._keys = 0
        self._free: list[int] = []
        self.delivered: Counter[int] = Counter()
        self.useless: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Drops everything in progress. Numbers are not used again."""
        #: Unassigned work: step, unit, decisions.
        self._open: deque[tuple[int, int, int]] = deque()
        #: Shards in progress with their ranks, by number.
        self._under_way: dict[int, tuple[RolloutShard, int]] = {}
        self._done: dict[int, list[list[DeliveredShard]]] = {}
        #: Decisions of slots that are yet to be delivered, by step.
        self._missing: dict[int, int] = {}

    def add_step(self, step: int, decisions: int | None = None, pieces: int = 1) -> None:
        """Adds the units of a step to the unassigned work.

        Args:
            step: The step.
            decisions: Decisions of each unit, if other ranks play the rest.
            pieces: Shards of a unit that may be played at the same time.
        """
        count = self._decisions if decisions is None else decisions
        self._done[step], self._missing[step] = [[] for _ in range(self._units)], count * self._units
        sizes = [count * (piece + 1) // pieces - count * piece // pieces for piece in range(pieces)]
        self._open.extend((step, unit, size) for size in sizes for unit in range(self._units))

    @property
    def steps(self) -> list[int]:
        """Steps that were added and not closed."""
        return list(self._done)

    @property
    def waiting(self) -> bool:
        """True if there is unassigned work."""
        return bool(self._open)

    def num_assigned(self, rank: int) -> int:
        """Returns the number of shards assigned to a rank."""
        return sum(owner == rank for _, owner in self._under_way.values())

    def assign(self, rank: int, version: int) -> RolloutShard | None:
        """Assigns the next shard to a rank; returns None if no work is left."""
        if not self._open:
            return None
        step, unit, decisions = self._open.popleft()
        self._number += 1
        if not self._free:
            self._keys += 1
            self._free.append(self._keys)
        shard = RolloutShard(self._number, self._free.pop(), step, unit, decisions, version)
        self._under_way[shard.number] = shard, rank
        return shard

    def accept(self, report: DeliveredShard) -> bool:
        """Records a report of delivery; returns whether it counts."""
        assignment = self._under_way.pop(report.number, None)
        if assignment is None:  # it was assigned to another rank by then, or its step was given up
            self.useless.append(report.key)
            return False
        shard, rank = assignment
        if not report.decisions:
            self._free.append(report.key)
        else:
            self._done[shard.step][shard.unit].append(report)
            self.delivered[rank] += report.decisions
            self._missing[shard.step] -= report.decisions
        if report.decisions < shard.decisions:
            self._open.appendleft((shard.step, shard.unit, shard.decisions - report.decisions))
        return True

    def lose(self, rank: int) -> None:
        """Returns the undelivered shards of a rank that has gone to the unassigned work."""
        shards = [shard for shard, owner in self._under_way.values() if owner == rank]
        for shard in reversed(shards):
            del self._under_way[shard.number]
            self.useless.append(shard.key)
            self._open.appendleft((shard.step, shard.unit, shard.decisions))

    def is_complete(self, step: int) -> bool:
        """Returns whether all shards of a step have been delivered."""
        return not self._missing[step]

    def close(self, step: int) -> list[list[DeliveredShard]]:
        """Ends a complete step and returns the shards of each unit in their order. Actors receive them before any later shards
        with the same keys.
        """
        units = self._done.pop(step)
        del self._missing[step]
        self._free += [shard.key for unit in units for shard in unit]
        return units

    def give_up(self, step: int) -> None:
        """Ends a step that is produced without these ranks: their shards of it, delivered or in progress, are not used."""
        for delivered_shard in (delivered_shard for unit in self._done.pop(step) for delivered_shard in unit):
            self.useless.append(delivered_shard.key)
            self.delivered[delivered_shard.rank] -= delivered_shard.decisions
        del self._missing[step]
        self._open = deque(open_shard for open_shard in self._open if open_shard[0] != step)
        for shard in [shard for shard, _ in self._under_way.values() if shard.step == step]:
            del self._under_way[shard.number]
            self.useless.append(shard.key)

    def pop_useless(self) -> list[int]:
        """Returns `useless` and empties it."""
        keys, self.useless = self.useless, []
        return keys


def divisible(cfg: PlayingConfig) -> bool:
    """Returns whether the decisions of a slot in a step may come from several ranks, one after the other.

    Transitions of off-policy runs are independent, and GAE bootstraps where an episode is cut.
    """
    ppo: Any = cfg if hasattr(cfg.algorithm, "adv_type") else None
    return ppo is None or (ppo.algorithm.adv_type.lower() == "gae" and ppo.env.train.auto_reset)


def cuts(cfg: PlayingConfig) -> int:
    """Returns the number of consecutive parts in which the decisions of a step are played."""
    ppo: Any = cfg
    return int(ppo.algorithm.rollout_parts) if hasattr(cfg.algorithm, "adv_type") else 1


def max_sharing_ranks(decisions: int, units: int) -> int:
    """Returns the maximum number of joined ranks that can get work in a shared step."""
    return units * max(1, decisions // _MIN_DECISIONS)


@functools.cache
def shares(decisions: int, units: int, ranks: int) -> tuple[int, int, float]:
    """Divides a step between the ranks that the run started with, which play one unit each, and ranks that joined, which play
    the rest of all units at the same speed.

    Args:
        decisions: Decisions of a step.
        units: Units of a step.
        ranks: Number of ranks that joined.

    Returns:
        The decisions that the original ranks play; the number of pieces into which the rest of each unit is divided; and the
        duration, relative to perfectly divisible work.
    """
    options = [(decisions, decisions, 1)]
    for remainder in range(1, decisions):
        for pieces in range(1, min(remainder, ranks) + 1):
            joined_decisions = -(-units * pieces // ranks) * -(-remainder // pieces)
            options.append((max(decisions - remainder, joined_decisions), decisions - remainder, pieces))
    duration, original_decisions, pieces = min(options, key=lambda way: (way[0], -way[1], way[2]))
    return original_decisions, pieces, duration * (units + ranks) / (units * decisions)


def keys_of(units: Sequence[Sequence[DeliveredShard]]) -> list[list[int]]:
    """Returns the shards' keys, by unit."""
    return [[shard.key for shard in unit] for unit in units]
