"""Work sharing with joined env ranks: assignment of rollout shards, and tracking of their delivery.

The slots of a step are divided into units, each about as large as an original env rank's share. The decisions of a unit are
played in shards, each by one rank. A rank that is told to leave ends its shard early, and another rank plays the remaining
decisions as another shard in its simulators. A shard counts once, when its rank has reported its delivery to all actors. If
the rank is lost before its report, the shard is assigned to another rank, and a later report is ignored.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayingConfig

#: Names of the channels of shards, which the actors store, and of delivery reports to the driver.
PARTS, PLAYED = "parts", "played"
#: Minimum number of decisions in a message.
_MIN_DECISIONS = 4


@dataclass(frozen=True)
class FullRollout:
    """Consecutive decisions of a step that the original env and rollout ranks play in one call. They belong to one part of the
    step (`num_parts_of`).

    Attributes:
        number: Unique number; later rollouts have higher numbers.
        step: Step of the rollout.
        begin: Number of the step's earlier decisions.
        num_decisions: Number of decisions in the rollout.
    """

    number: int
    step: int
    begin: int
    num_decisions: int


@dataclass(frozen=True)
class RolloutShard:
    """Decisions of a unit that one rank plays.

    Attributes:
        number: Number, unique within a driver.
        key: Key under which actors store the shard. It is reused after the shard has been received.
        step, unit: Step and unit of the shard.
        num_decisions: Number of decisions in the shard.
        version: Oldest version of the weights that may act.
    """

    number: int
    key: int
    step: int
    unit: int
    num_decisions: int
    version: int = 0


@dataclass(frozen=True)
class DeliveredShard:
    """Report to the driver that all actors have a shard.

    Attributes:
        number, key: Number and key of the shard.
        rank: Rank that played the shard.
        num_decisions: Number of played decisions, which is lower than requested if the rank was told to leave.
        version: Version of the weights that acted.
        episodes: Report of the episodes, as from `SimulatingWorker.interact`.
    """

    number: int
    key: int
    rank: int
    num_decisions: int
    version: int
    episodes: dict[str, Any]


class ShardTracker:
    """Tracker of assigned and delivered rollout shards, on the driver.

    Args:
        num_units: Number of units per step.
        num_decisions: Number of decisions per unit.

    Attributes:
        num_delivered: Number of delivered decisions that count, by rank.
        useless_keys: Keys of shards that actors may hold but that will never be used.
    """

    def __init__(self, num_units: int, num_decisions: int) -> None:
        self._num_units, self._num_decisions = num_units, num_decisions
        self._last_number = self._num_keys = 0
        self._free_keys: list[int] = []
        self.num_delivered: Counter[int] = Counter()
        self.useless_keys: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Drops all steps and shards in progress. Shard numbers are not reused."""
        #: Unassigned work: step, unit, number of decisions.
        self._unassigned_shards: deque[tuple[int, int, int]] = deque()
        #: Shards in progress with their ranks, by number.
        self._in_progress: dict[int, tuple[RolloutShard, int]] = {}
        self._delivered_shards: dict[int, list[list[DeliveredShard]]] = {}
        #: Number of decisions, summed over units, that are not delivered yet, by step.
        self._num_missing: dict[int, int] = {}

    def add_step(self, step: int, decisions: int | None = None, num_pieces: int = 1) -> None:
        """Adds the units of a step to the unassigned work.

        Args:
            step: The step.
            decisions: Number of decisions of each unit, if other ranks play the remaining decisions; None for all.
            num_pieces: Number of shards of a unit that may be played at the same time.
        """
        num_decisions = self._num_decisions if decisions is None else decisions
        self._delivered_shards[step], self._num_missing[step] = (
            [[] for _ in range(self._num_units)],
            num_decisions * self._num_units,
        )
        piece_sizes = [
            num_decisions * (piece_index + 1) // num_pieces - num_decisions * piece_index // num_pieces
            for piece_index in range(num_pieces)
        ]
        self._unassigned_shards.extend(
            (step, unit_index, piece_size) for piece_size in piece_sizes for unit_index in range(self._num_units)
        )

    @property
    def steps(self) -> list[int]:
        """Steps that were added and not closed yet."""
        return list(self._delivered_shards)

    @property
    def has_unassigned(self) -> bool:
        """True if unassigned work exists."""
        return bool(self._unassigned_shards)

    def num_assigned(self, rank: int) -> int:
        """Returns the number of shards in progress on a rank."""
        return sum(owner == rank for _, owner in self._in_progress.values())

    def assign(self, rank: int, version: int) -> RolloutShard | None:
        """Assigns the next shard to a rank; returns None if no work is left."""
        if not self._unassigned_shards:
            return None
        step, unit_index, decisions = self._unassigned_shards.popleft()
        self._last_number += 1
        if not self._free_keys:
            self._num_keys += 1
            self._free_keys.append(self._num_keys)
        shard = RolloutShard(self._last_number, self._free_keys.pop(), step, unit_index, decisions, version)
        self._in_progress[shard.number] = shard, rank
        return shard

    def accept(self, report: DeliveredShard) -> bool:
        """Records a delivery report, and returns whether the report counts."""
        assignment = self._in_progress.pop(report.number, None)
        if assignment is None:  # the shard was reassigned to another rank, or its step was given up
            self.useless_keys.append(report.key)
            return False
        shard, rank = assignment
        if not report.num_decisions:
            self._free_keys.append(report.key)
        else:
            self._delivered_shards[shard.step][shard.unit].append(report)
            self.num_delivered[rank] += report.num_decisions
            self._num_missing[shard.step] -= report.num_decisions
        if report.num_decisions < shard.num_decisions:
            self._unassigned_shards.appendleft((shard.step, shard.unit, shard.num_decisions - report.num_decisions))
        return True

    def lose(self, rank: int) -> None:
        """Returns the undelivered shards of a lost rank to the unassigned work."""
        shards = [shard for shard, owner in self._in_progress.values() if owner == rank]
        for shard in reversed(shards):
            del self._in_progress[shard.number]
            self.useless_keys.append(shard.key)
            self._unassigned_shards.appendleft((shard.step, shard.unit, shard.num_decisions))

    def is_complete(self, step: int) -> bool:
        """Returns whether all shards of a step have been delivered."""
        return not self._num_missing[step]

    def close(self, step: int) -> list[list[DeliveredShard]]:
        """Closes a complete step, and returns the shards of each unit, in order. Keys are reused, so actors must receive these
        shards before later shards.
        """
        shards_by_unit = self._delivered_shards.pop(step)
        del self._num_missing[step]
        self._free_keys += [shard.key for unit_shards in shards_by_unit for shard in unit_shards]
        return shards_by_unit

    def give_up(self, step: int) -> None:
        """Closes a step that the original ranks will play instead. Its shards, delivered or in progress, are not used."""
        for delivered_shard in (
            delivered_shard for unit_shards in self._delivered_shards.pop(step) for delivered_shard in unit_shards
        ):
            self.useless_keys.append(delivered_shard.key)
            self.num_delivered[delivered_shard.rank] -= delivered_shard.num_decisions
        del self._num_missing[step]
        self._unassigned_shards = deque(open_shard for open_shard in self._unassigned_shards if open_shard[0] != step)
        for shard in [shard for shard, _ in self._in_progress.values() if shard.step == step]:
            del self._in_progress[shard.number]
            self.useless_keys.append(shard.key)

    def pop_useless_keys(self) -> list[int]:
        """Returns `useless` and empties it."""
        useless_keys, self.useless_keys = self.useless_keys, []
        return useless_keys


def divisible(cfg: PlayingConfig) -> bool:
    """Returns whether several ranks may play the decisions of a slot in a step, one after the other.

    This is possible in off-policy runs, because their transitions are independent, and with GAE, because it bootstraps at the
    end of a part.
    """
    ppo: Any = cfg if hasattr(cfg.algorithm, "adv_type") else None
    return ppo is None or (ppo.algorithm.adv_type == "gae" and ppo.env.train.auto_reset)


def num_parts_of(cfg: PlayingConfig) -> int:
    """Returns the number of consecutive parts into which a step's decisions are divided."""
    ppo: Any = cfg
    return int(ppo.algorithm.rollout_parts) if hasattr(cfg.algorithm, "adv_type") else 1


def max_sharing_ranks(num_decisions: int, num_units: int) -> int:
    """Returns the maximum number of joined ranks that can get work in a shared step."""
    return num_units * max(1, num_decisions // _MIN_DECISIONS)


@functools.cache
def shares(num_decisions: int, num_units: int, num_ranks: int) -> tuple[int, int, float]:
    """Divides a step between the original ranks, which play the first decisions of one unit each, and the joined ranks, which
    play the remaining decisions of all units. All ranks are assumed to be equally fast.

    Args:
        num_decisions: Number of decisions of a step.
        num_units: Number of units of a step.
        num_ranks: Number of joined ranks.

    Returns:
        Number of decisions that the original ranks play, number of shards into which the remainder of each unit is
        divided, and duration relative to perfectly divisible work.
    """
    options = [(num_decisions, num_decisions, 1)]
    for remainder in range(1, num_decisions):
        for num_pieces in range(1, min(remainder, num_ranks) + 1):
            joined_decisions = -(-num_units * num_pieces // num_ranks) * -(-remainder // num_pieces)
            options.append((max(num_decisions - remainder, joined_decisions), num_decisions - remainder, num_pieces))
    duration, original_decisions, num_pieces = min(
        options, key=lambda piece_option: (piece_option[0], -piece_option[1], piece_option[2])
    )
    return original_decisions, num_pieces, duration * (num_units + num_ranks) / (num_units * num_decisions)


def keys_of(shards_by_unit: Sequence[Sequence[DeliveredShard]]) -> list[list[int]]:
    """Returns the keys of the shards, by unit."""
    return [[shard.key for shard in unit_shards] for unit_shards in shards_by_unit]
