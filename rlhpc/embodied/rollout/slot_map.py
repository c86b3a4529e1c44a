"""Which slot lives where, and under which keys the roles exchange messages.

A slot is one environment of the run, numbered 0 … num_envs-1 whatever the placement. Stage s of S holds the slots
[s·n, (s+1)·n), n = num_envs / S. Inside a stage env rank e and rollout rank r each own a contiguous share, of sizes that
differ by one group of slots at most; a message is what one env rank and one rollout rank have in common, whatever the numbers
of ranks are. The actors share all slots of the run, contiguously and equally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlhpc.embodied.config import PlayingConfig
from rlhpc.embodied.rollout.work_sharing import PARTS, FullRollout
from rlhpc.runtime.errors import ConfigError

OBSERVATIONS, ACTIONS, OUTCOMES, TRAJECTORIES = "observations", "actions", "outcomes", "trajectories"


def overlap(a: range, b: range) -> range:
    """The slots two contiguous shares have in common."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


class Homes(NamedTuple):
    """Where a channel's messages are kept: by which ranks of which group, in turn."""

    group: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SlotMap:
    """Slots of a run by stage and rank, and the groups' names.

    Attributes:
        num_envs: Slots of the run.
        stages: `rollout.pipeline_stage_num`.
        env_ranks, rollout_ranks, actor_ranks: World sizes of the groups.
        group_size: Consecutive slots that share a reset, and so must share a rank.
        actor_name, rollout_name, env_name: Names the groups were launched under.
        token: Tells this run's shared memory from that of an earlier run of the same session.
        absent: Env ranks that have gone, without which the others go on.
        acting: Rollout ranks that act, in slot order, where ranks of them have come or gone; all, where it is empty.
    """

    num_envs: int
    stages: int = 1
    env_ranks: int = 1
    rollout_ranks: int = 1
    actor_ranks: int = 1
    group_size: int = 1
    actor_name: str = "actor"
    rollout_name: str = "rollout"
    env_name: str = "env"
    token: str = ""
    absent: frozenset[int] = frozenset()
    acting: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key, count in (
            ("env.train.num_envs", self.num_envs),
            ("rollout.pipeline_stage_num", self.stages),
            ("env.train.group_size", self.group_size),
        ):
            if count < 1:
                raise ConfigError(f"{key} is {count}; it must be at least 1")
        envs = f"env.train.num_envs({self.num_envs})"
        stages = f"rollout.pipeline_stage_num({self.stages})"
        if self.num_envs % self.stages:
            raise ConfigError(f"{envs} % {stages} != 0: every stage needs the same number of environments")
        if self.per_stage % self.group_size:
            raise ConfigError(
                f"{envs} / {stages} = {self.per_stage}, which env.train.group_size({self.group_size}) does not divide: a "
                "group must not be split"
            )
        for role, ranks in (("env", self.env_ranks), ("rollout", self.rollout_ranks)):
            if ranks > self.most_acting:
                raise ConfigError(
                    f"a stage has {envs} / {stages} / env.train.group_size({self.group_size}) = {self.most_acting} shares "
                    f"to give, and there are {role} ranks({ranks}): raise env.train.num_envs or change "
                    f"cluster.component_placement.{role}"
                )
        if self.num_envs % self.actor_ranks:
            raise ConfigError(
                f"{envs} % actor ranks({self.actor_ranks}) != 0: every actor rank needs the same share; change "
                "env.train.num_envs or cluster.component_placement.actor"
            )
        if (self.num_envs // self.actor_ranks) % self.group_size:
            raise ConfigError(
                f"actor ranks({self.actor_ranks}) hold {self.num_envs // self.actor_ranks} environments, which "
                f"env.train.group_size({self.group_size}) does not divide: a group must not be split"
            )

    @classmethod
    def from_config(cls, cfg: PlayingConfig, *, env: int, rollout: int, actor: int, **names: str) -> SlotMap:
        """The map for a configuration and the world sizes of the three groups.

        Raises:
            ConfigError: The counts do not fit one another; shows the numbers.
        """
        return cls(
            num_envs=cfg.env.train.num_envs,
            stages=cfg.rollout.pipeline_stage_num,
            group_size=cfg.env.train.group_size,
            env_ranks=env,
            rollout_ranks=rollout,
            actor_ranks=actor,
            **names,  # type: ignore[arg-type]
        )

    @property
    def per_stage(self) -> int:
        """Slots of one stage."""
        return self.num_envs // self.stages

    def env_share(self, stage: int, rank: int) -> range:
        """Global slots that env rank `rank` simulates in `stage`."""
        return self._share(stage, rank, self.env_ranks)

    @property
    def acting_ranks(self) -> tuple[int, ...]:
        """Rollout ranks that act, in slot order."""
        return self.acting or tuple(range(self.rollout_ranks))

    @property
    def most_acting(self) -> int:
        """Rollout ranks, or env ranks, that there are slots for."""
        return self.per_stage // self.group_size

    def rollout_share(self, stage: int, rank: int) -> range:
        """Global slots that rollout rank `rank` serves in `stage`; none, if it does not act."""
        acting = self.acting_ranks
        return self._share(stage, acting.index(rank), len(acting)) if rank in acting else range(0)

    def actor_share(self, rank: int) -> range:
        """Global slots whose transitions actor rank `rank` trains on."""
        size = self.num_envs // self.actor_ranks
        return range(rank * size, (rank + 1) * size)

    def rollouts_of(self, stage: int, env_rank: int) -> list[tuple[int, range]]:
        """Rollout ranks that serve an env rank's share of a stage, and which slots of it, in slot order."""
        mine = self.env_share(stage, env_rank)
        shares = ((r, overlap(mine, self.rollout_share(stage, r))) for r in self.acting_ranks)
        return [(r, common) for r, common in shares if common]

    def envs_of(self, stage: int, rollout_rank: int) -> list[tuple[int, range]]:
        """Env ranks that simulate a rollout rank's share of a stage, and which slots of it, in slot order."""
        mine = self.rollout_share(stage, rollout_rank)
        shares = ((e, overlap(mine, self.env_share(stage, e))) for e in range(self.env_ranks))
        return [(e, common) for e, common in shares if common]

    def actors_of(self, stage: int, rollout_rank: int) -> list[tuple[int, range]]:
        """Actor ranks that train on a rollout rank's share of a stage, and which slots of it, in slot order."""
        mine = self.rollout_share(stage, rollout_rank)
        shares = ((a, overlap(mine, self.actor_share(a))) for a in range(self.actor_ranks))
        return [(a, common) for a, common in shares if common]

    def sources_of(self, actor_rank: int) -> list[tuple[int, int, range]]:
        """(stage, rollout rank, slots) of all messages an actor rank gets per step, in slot order."""
        mine = self.actor_share(actor_rank)
        found = [
            (s, r, common)
            for s in range(self.stages)
            for r in self.acting_ranks
            if (common := overlap(mine, self.rollout_share(s, r)))
        ]
        return sorted(found, key=lambda source: source[2].start)

    @property
    def unit(self) -> int:
        """Slots that a rank which joins the env group plays: as many as the largest unit has."""
        return max(len(self.unit_share(unit)) for unit in range(self.env_ranks))

    def unit_share(self, unit: int) -> range:
        """Global slots of a unit: there are as many units as env ranks, and they lie one after the other."""
        groups = self.num_envs // self.group_size
        first, last = (groups * bound // self.env_ranks * self.group_size for bound in (unit, unit + 1))
        return range(first, last)

    def unit_for(self, unit: int, actor_rank: int) -> slice:
        """Which slots of the unit `unit` an actor rank trains on."""
        mine = self.unit_share(unit)
        return within(overlap(mine, self.actor_share(actor_rank)), mine)

    def units_of(self, actor_rank: int) -> list[int]:
        """The units of which an actor rank trains on slots, in slot order."""
        parts = ((unit, self.unit_for(unit, actor_rank)) for unit in range(self.env_ranks))
        return [unit for unit, part in parts if part.stop > part.start]

    # Keys are numbers whose remainder is the consumer's rank: a distributed channel keeps key k at rank k % size of its
    # home group, so the consumer's `get` needs no socket. Those that actors look under are the same whoever else acts: a step
    # that is played is taken in after others have come or gone.

    def to_rollout_key(self, stage: int, env_rank: int, rollout_rank: int) -> str:
        """Key of what an env rank sends a rollout rank."""
        acting = self.acting_ranks
        return str((stage * self.env_ranks + env_rank) * len(acting) + acting.index(rollout_rank))

    def to_env_key(self, stage: int, env_rank: int, rollout_rank: int) -> str:
        """Key of what a rollout rank sends an env rank."""
        return str((rollout_rank * self.stages + stage) * self.env_ranks + env_rank)

    def to_actor_key(self, stage: int, rollout_rank: int, actor_rank: int) -> str:
        """Key of what a rollout rank sends an actor rank."""
        return str((rollout_rank * self.stages + stage) * self.actor_ranks + actor_rank)

    def part_key(self, key: int, actor_rank: int) -> str:
        """Key of what a rank that joined sends an actor rank of a part."""
        return str(key * self.actor_ranks + actor_rank)

    def channels(self) -> dict[str, Homes]:
        """Channels of a run."""
        actors = Homes(self.actor_name, tuple(range(self.actor_ranks)))
        return {**self.playing_channels(), TRAJECTORIES: actors, PARTS: actors}

    def playing_channels(self) -> dict[str, Homes]:
        """Those of them that env and rollout ranks speak through. In place of an env rank that has gone another one keeps its
        keys."""
        rollout = Homes(self.rollout_name, self.acting_ranks)
        there = [rank for rank in range(self.env_ranks) if rank not in self.absent]
        keep = tuple(rank if rank in there else there[0] for rank in range(self.env_ranks)) if there else ()
        return {OBSERVATIONS: rollout, OUTCOMES: rollout, ACTIONS: Homes(self.env_name, keep)}

    def _share(self, stage: int, place: int, places: int) -> range:
        # What is left over goes to others in each stage, so that ranks have equally much to do over all of them.
        each, over = divmod(self.per_stage // self.group_size, places)
        sizes = [each + ((other - stage * over) % places < over) for other in range(place + 1)]
        last = stage * self.per_stage + sum(sizes) * self.group_size
        return range(last - sizes[-1] * self.group_size, last)


@dataclass(frozen=True)
class Acted:
    """A turn, as actors take it in.

    Attributes:
        turn: The turn.
        slots: Who acted on which.
        gone: Rollout ranks that have gone since they were asked to act in it.
    """

    turn: FullRollout
    slots: SlotMap
    gone: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Source:
    """Where actors take a step from: its decisions are those of the turns, and then those of the units.

    Attributes:
        slots: Of the run.
        acted: The step's turns.
        later: Numbers of turns that are being played, and are taken in later.
        units: If env ranks that joined have played some of it: the keys of the parts, in order, of each unit.
        useless: Keys of parts that are not taken in.
    """

    slots: SlotMap
    acted: tuple[Acted, ...] = ()
    later: frozenset[int] = frozenset()
    units: list[list[int]] | None = None
    useless: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitMap(SlotMap):
    """The slots of a rank that has joined, which simulates and acts in one process.

    Attributes:
        first: Number of the first slot; no other rank of the run has these numbers.
    """

    first: int = 0

    def rollout_share(self, stage: int, rank: int) -> range:
        """All of them."""
        return self._share(stage, 0, 1)

    def _share(self, stage: int, place: int, places: int) -> range:
        return range(self.first, self.first + self.num_envs)


def within(part: range, whole: range) -> slice:
    """Where the slots `part` lie in an array that holds the slots `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)
