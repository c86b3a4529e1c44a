"""Slot map: assignment of environment slots to ranks, and the keys of the messages between them.

A slot is one environment of the run; slots are numbered 0 … num_envs-1 for any placement. Stage s of S holds the slots
[s·n, (s+1)·n), where n = num_envs / S. Within a stage, each env rank and each rollout rank owns a contiguous share; the sizes
of shares differ by at most one group of slots. A message contains the slots that an env rank and a rollout rank have in
common. The actor ranks divide all slots of the run into equal contiguous shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rlhpc.embodied.config import PlayingConfig
from rlhpc.embodied.rollout.work_sharing import PARTS, FullRollout
from rlhpc.runtime.errors import ConfigError

OBSERVATIONS, ACTIONS, OUTCOMES, TRAJECTORIES = "observations", "actions", "outcomes", "trajectories"
Owner = TypeVar("Owner")


def overlap(a: range, b: range) -> range:
    """Returns the slots that two contiguous shares have in common."""
    overlap_start = max(a.start, b.start)
    return range(overlap_start, max(overlap_start, min(a.stop, b.stop)))


def _find_overlaps(slot_share: range, slots_by_owner: Mapping[Owner, range]) -> list[tuple[Owner, range]]:
    """Returns the owners with shares that overlap `slot_share`, each with the common slots."""
    return [
        (owner, slots) for owner, owner_slots in slots_by_owner.items() if (slots := overlap(slot_share, owner_slots))
    ]


class HomeRanks(NamedTuple):
    """Ranks of a group that store a channel's messages."""

    group: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SlotMap:
    """Assignment of a run's slots to stages and ranks.

    Attributes:
        num_envs: Number of slots of the run.
        num_stages: `rollout.pipeline_stage_num`.
        num_env_ranks, num_rollout_ranks, num_actor_ranks: World sizes of the groups.
        group_size: Number of consecutive slots that share a reset and therefore a rank.
        actor_name, rollout_name, env_name: Names of the launched groups.
        token: Random token that distinguishes the shared memory of successive connections.
        absent: Env ranks that have left; the run continues without them.
        acting: Rollout ranks that act, in slot order, if rollout ranks have joined or left; empty for all ranks.
        weight_sources: For each rollout rank, the actor rank that sends it the weights (`device_sharing.weight_sources`);
            empty if rank 0 sends them to all.
    """

    num_envs: int
    num_stages: int = 1
    num_env_ranks: int = 1
    num_rollout_ranks: int = 1
    num_actor_ranks: int = 1
    group_size: int = 1
    actor_name: str = "actor"
    rollout_name: str = "rollout"
    env_name: str = "env"
    token: str = ""
    absent: frozenset[int] = frozenset()
    acting: tuple[int, ...] = ()
    weight_sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key, num_ranks in (
            ("env.train.num_envs", self.num_envs),
            ("rollout.pipeline_stage_num", self.num_stages),
            ("env.train.group_size", self.group_size),
        ):
            if num_ranks < 1:
                raise ConfigError(f"{key} is {num_ranks}; it must be at least 1")
        envs_text = f"env.train.num_envs({self.num_envs})"
        stages_text = f"rollout.pipeline_stage_num({self.num_stages})"
        if self.num_envs % self.num_stages:
            raise ConfigError(f"{envs_text} % {stages_text} != 0: every stage needs the same number of environments")
        if self.per_stage % self.group_size:
            raise ConfigError(
                f"{envs_text} / {stages_text} = {self.per_stage}, which env.train.group_size({self.group_size}) does not "
                "divide: a group must not be split"
            )
        for group_name, ranks in (("env", self.num_env_ranks), ("rollout", self.num_rollout_ranks)):
            if ranks > self.max_ranks:
                raise ConfigError(
                    f"a stage has {envs_text} / {stages_text} / env.train.group_size({self.group_size}) = {self.max_ranks} "
                    f"shares to give, and there are {group_name} ranks({ranks}): raise env.train.num_envs or change "
                    f"cluster.component_placement.{group_name}"
                )
        if self.num_envs % self.num_actor_ranks:
            raise ConfigError(
                f"{envs_text} % actor ranks({self.num_actor_ranks}) != 0: every actor rank needs the same share; change "
                "env.train.num_envs or cluster.component_placement.actor"
            )
        if (self.num_envs // self.num_actor_ranks) % self.group_size:
            raise ConfigError(
                f"actor ranks({self.num_actor_ranks}) hold {self.num_envs // self.num_actor_ranks} environments, which "
                f"env.train.group_size({self.group_size}) does not divide: a group must not be split"
            )

    @classmethod
    def from_config(
        cls, cfg: PlayingConfig, *, num_env_ranks: int, num_rollout_ranks: int, num_actor_ranks: int, **options: Any
    ) -> SlotMap:
        """Builds the map from a configuration and the world sizes of the three groups.

        Raises:
            ConfigError: The numbers are incompatible; the message shows them.
        """
        return cls(
            num_envs=cfg.env.train.num_envs,
            num_stages=cfg.rollout.pipeline_stage_num,
            group_size=cfg.env.train.group_size,
            num_env_ranks=num_env_ranks,
            num_rollout_ranks=num_rollout_ranks,
            num_actor_ranks=num_actor_ranks,
            **options,
        )

    @property
    def per_stage(self) -> int:
        """Number of slots per stage."""
        return self.num_envs // self.num_stages

    def env_share(self, stage: int, rank: int) -> range:
        """Returns the global slots that env rank `rank` simulates in `stage`."""
        return self._share(stage, rank, self.num_env_ranks)

    @property
    def acting_ranks(self) -> tuple[int, ...]:
        """Rollout ranks that act, in slot order."""
        return self.acting or tuple(range(self.num_rollout_ranks))

    @property
    def max_ranks(self) -> int:
        """Maximum number of rollout ranks, or env ranks, that get slots in every stage."""
        return self.per_stage // self.group_size

    def rollout_share(self, stage: int, rank: int) -> range:
        """Returns the global slots that rollout rank `rank` serves in `stage`; empty if it does not act."""
        acting_ranks = self.acting_ranks
        return self._share(stage, acting_ranks.index(rank), len(acting_ranks)) if rank in acting_ranks else range(0)

    def actor_share(self, rank: int) -> range:
        """Returns the global slots of the transitions that actor rank `rank` trains on."""
        slots_per_rank = self.num_envs // self.num_actor_ranks
        return range(rank * slots_per_rank, (rank + 1) * slots_per_rank)

    def rollouts_of(self, stage: int, env_rank: int) -> list[tuple[int, range]]:
        """Returns the rollout ranks that act on an env rank's share of a stage, each with the common slots, in slot order."""
        share_by_rank = {rank: self.rollout_share(stage, rank) for rank in self.acting_ranks}
        return _find_overlaps(self.env_share(stage, env_rank), share_by_rank)

    def envs_of(self, stage: int, rollout_rank: int) -> list[tuple[int, range]]:
        """Returns the env ranks that simulate a rollout rank's share of a stage, each with the common slots, in slot order."""
        share_by_rank = {rank: self.env_share(stage, rank) for rank in range(self.num_env_ranks)}
        return _find_overlaps(self.rollout_share(stage, rollout_rank), share_by_rank)

    def actors_of(self, stage: int, rollout_rank: int) -> list[tuple[int, range]]:
        """Returns the actor ranks that train on a rollout rank's share of a stage, each with the common slots in order."""
        share_by_rank = {rank: self.actor_share(rank) for rank in range(self.num_actor_ranks)}
        return _find_overlaps(self.rollout_share(stage, rollout_rank), share_by_rank)

    def sources_of(self, actor_rank: int) -> list[tuple[int, int, range]]:
        """Returns (stage, rollout rank, slots) of each message of a rollout that an actor rank receives, in slot order."""
        share_by_source = {
            (stage, rank): self.rollout_share(stage, rank)
            for stage in range(self.num_stages)
            for rank in self.acting_ranks
        }
        slot_sources = [
            (*source_rank, slots)
            for source_rank, slots in _find_overlaps(self.actor_share(actor_rank), share_by_source)
        ]
        return sorted(slot_sources, key=lambda slot_source: slot_source[2].start)

    @property
    def unit(self) -> int:
        """Number of slots of a joined env rank, which is the size of the largest unit."""
        return max(len(self.unit_share(unit_index)) for unit_index in range(self.num_env_ranks))

    def unit_share(self, unit: int) -> range:
        """Returns the global slots of a unit. Units are contiguous; their number is the number of env ranks."""
        num_groups = self.num_envs // self.group_size
        first_slot, stop_slot = (
            num_groups * unit_bound // self.num_env_ranks * self.group_size for unit_bound in (unit, unit + 1)
        )
        return range(first_slot, stop_slot)

    def unit_for(self, unit: int, actor_rank: int) -> slice:
        """Returns the slots of a unit that an actor rank trains on."""
        unit_slots = self.unit_share(unit)
        return relative_slice(overlap(unit_slots, self.actor_share(actor_rank)), unit_slots)

    def units_of(self, actor_rank: int) -> list[int]:
        """Returns the units that contain slots of an actor rank, in slot order."""
        share_by_unit = {unit_index: self.unit_share(unit_index) for unit_index in range(self.num_env_ranks)}
        return [unit_index for unit_index, _ in _find_overlaps(self.actor_share(actor_rank), share_by_unit)]

    # Keys are numbers whose remainder is the consumer's rank: a distributed channel keeps key k at rank k % size of its
    # home group, so the consumer's `get` needs no socket. The actors' keys do not depend on which ranks act, because a step
    # may be received after ranks have joined or left.

    def to_rollout_key(self, stage: int, env_rank: int, rollout_rank: int) -> str:
        """Returns the key of a message from an env rank to a rollout rank."""
        acting_ranks = self.acting_ranks
        return str((stage * self.num_env_ranks + env_rank) * len(acting_ranks) + acting_ranks.index(rollout_rank))

    def to_env_key(self, stage: int, env_rank: int, rollout_rank: int) -> str:
        """Returns the key of a message from a rollout rank to an env rank."""
        return str((rollout_rank * self.num_stages + stage) * self.num_env_ranks + env_rank)

    def to_actor_key(self, stage: int, rollout_rank: int, actor_rank: int) -> str:
        """Returns the key of a message from a rollout rank to an actor rank."""
        return str((rollout_rank * self.num_stages + stage) * self.num_actor_ranks + actor_rank)

    def shard_key(self, key: int, actor_rank: int) -> str:
        """Returns the key of a rollout shard's message from a joined rank to an actor rank."""
        return str(key * self.num_actor_ranks + actor_rank)

    def channels(self) -> dict[str, HomeRanks]:
        """Returns the channels of a run, each with the ranks that store it."""
        actors = HomeRanks(self.actor_name, tuple(range(self.num_actor_ranks)))
        return {**self.playing_channels(), TRAJECTORIES: actors, PARTS: actors}

    def playing_channels(self) -> dict[str, HomeRanks]:
        """Returns the channels between env and rollout ranks, each with the ranks that store it. The lowest present env rank
        stores the keys of absent env ranks.
        """
        rollout = HomeRanks(self.rollout_name, self.acting_ranks)
        present_ranks = {*range(self.num_env_ranks)} - self.absent
        home_ranks = tuple(rank if rank in present_ranks else min(present_ranks) for rank in range(self.num_env_ranks))
        return {
            OBSERVATIONS: rollout,
            OUTCOMES: rollout,
            ACTIONS: HomeRanks(self.env_name, home_ranks if present_ranks else ()),
        }

    def _share(self, stage: int, index: int, count: int) -> range:
        # Different ranks get the remainder in each stage, so that ranks have equal work over all stages.
        groups_per_rank, remainder = divmod(self.per_stage // self.group_size, count)
        group_counts = [groups_per_rank + ((rank - stage * remainder) % count < remainder) for rank in range(index + 1)]
        stop_slot = stage * self.per_stage + sum(group_counts) * self.group_size
        return range(stop_slot - group_counts[-1] * self.group_size, stop_slot)


@dataclass(frozen=True)
class PlayedRollout:
    """Rollout of the original ranks, as the actors receive it.

    Attributes:
        full_rollout: The rollout.
        slots: Slot map of the rollout.
        lost_ranks: Rollout ranks that were lost after the assignment.
    """

    full_rollout: FullRollout
    slots: SlotMap
    lost_ranks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Source:
    """Sources of a step's transitions on the actors: the rollouts of the original ranks, then the shards of joined ranks.

    Attributes:
        slots: Slot map of the run.
        played_rollouts: Rollouts of the step by the original ranks.
        later_rollouts: Numbers of the rollouts in progress, which are received later.
        units: Keys of each unit's shards, in order, if joined env ranks have played a part of the step.
        useless_keys: Keys of shards that must be dropped.
    """

    slots: SlotMap
    played_rollouts: tuple[PlayedRollout, ...] = ()
    later_rollouts: frozenset[int] = frozenset()
    units: list[list[int]] | None = None
    useless_keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitMap(SlotMap):
    """Slot map of a joined rank, which simulates and acts in one process.

    Attributes:
        first_slot: Number of the first slot; slot numbers are unique in the run.
    """

    first_slot: int = 0

    def rollout_share(self, stage: int, rank: int) -> range:
        """Returns all slots of this rank."""
        return self._share(stage, 0, 1)

    def _share(self, stage: int, index: int, count: int) -> range:
        return range(self.first_slot, self.first_slot + self.num_envs)


def relative_slice(part_range: range, full_range: range) -> slice:
    """Returns the slice that selects the slots `part_range` from an array of the slots `full_range`."""
    return slice(part_range.start - full_range.start, part_range.stop - full_range.start)
