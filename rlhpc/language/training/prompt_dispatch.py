"""Prompt map: the ranks that process each prompt of a step; names of channels and messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.scoring.groups import CRITIC
from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.device_sharing import receivers_of, source_of

if TYPE_CHECKING:
    from rlhpc.language.config.run import GrpoConfig
    from rlhpc.language.config.training import LanguageActorConfig

#: Channels: finished groups and their columns, in the actors' processes; returns, in the critics' processes.
GROUPS, RETURNS = "groups", "returns"
#: Topic of the announcements of new weights to rollout ranks (`Worker.notify`).
VERSIONS = "versions"
#: Channels of the driver: the prompt queue, and the deliveries of groups to actors (`prompt_queue`).
WORK, DELIVERED = "work", "delivered"
#: Channel of the driver with episodes for ranks of the group `agent`; topics of messages to and from these ranks
#: (`Worker.notify`).
EPISODES, TICKETS, AGENT_MESSAGES = "episodes", "tickets", "told by agents"


def channel_to(group: str) -> str:
    """Returns the name of the channel for a group that scores or rates."""
    return f"to-{group}"


def ratings_of(group: str) -> str:
    """Returns the topic of a rater's messages to rollout ranks (`Worker.notify`)."""
    return f"ratings of {group}"


def training_phase(step: int) -> str:
    """Returns the name of a step's phase, by which rollout ranks and raters refer to the step's answers."""
    return f"step {step}"


def evaluation_phase(step: int) -> str:
    """Returns the name of the phase of an evaluation."""
    return f"evaluation at step {step}"


@dataclass(frozen=True)
class PromptMap:
    """Map of a step's P prompts, with G responses each, to rollout ranks and actors; the map is the same on every rank.

    Prompts of a step have positions 0 to P − 1. Rollout ranks lease prompts when they have capacity (`prompt_queue`); an actor
    trains on consecutive positions.

    Attributes:
        prompts, group_size: P and G.
        rollout_ranks, actor_ranks: Numbers of ranks of the two groups. Actor ranks that train on the same samples count as one
            rank, with the index `MeshSizes.data_of`.
        rollout_name, actor_name: Names of the two groups.
        scoring: Number of ranks of each group that scores tokens, with the critic.
        rating: Number of ranks of each group that rates answers.
        sources: For each rollout rank, the actor rank that sends it the weights (`weight_sources`); empty if rank 0 sends
            them to all, or every rank its shards.
        num_shards: Number of actor ranks over which the weights are sharded (`weight_shards`).
    """

    prompts: int
    group_size: int
    rollout_ranks: int
    actor_ranks: int
    rollout_name: str = "rollout"
    actor_name: str = "actor"
    scoring: Mapping[str, int] = field(default_factory=dict)
    rating: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    num_shards: int = 1

    @classmethod
    def from_config(cls, cfg: GrpoConfig, *, rollout: int, actor: int, **options: Any) -> PromptMap:
        """Builds the map of a configuration.

        Raises:
            ConfigError: The prompts cannot be distributed evenly.
        """
        prompts, size = cfg.data.prompts_per_step, cfg.algorithm.group_size
        if prompts % actor:
            raise ConfigError(f"data.prompts_per_step({prompts}) % actor ranks with other samples({actor}) != 0")
        return cls(prompts, size, rollout, actor, **options)

    def source_of(self, rollout_rank: int) -> int:
        """Returns the actor rank that sends the weights to a rollout rank."""
        return source_of(self.sources, rollout_rank)

    def receivers_of(self, actor_rank: int, rollout_ranks: Sequence[int]) -> list[int]:
        """Returns those of the rollout ranks to which an actor rank sends the weights."""
        return receivers_of(self.sources, actor_rank, rollout_ranks)

    def of_actor(self, rank: int) -> range:
        """Returns the positions that an actor trains on."""
        prompts_per_rank = self.prompts // self.actor_ranks
        return range(rank * prompts_per_rank, (rank + 1) * prompts_per_rank)

    def actor_of(self, position: int) -> int:
        """Returns the actor that trains on a position."""
        return position * self.actor_ranks // self.prompts

    def share_of(self, group: str, rank: int) -> range:
        """Returns the positions that a rank of a scoring group scores."""
        return range(rank, self.prompts, self.scoring[group])

    def scorer_of(self, group: str, position: int) -> int:
        """Returns the rank of a scoring group that scores a position."""
        return position % self.scoring[group]

    def channels(self) -> dict[str, str]:
        """Returns the name of the group that holds each channel, by name of the channel."""
        ranks_by_channel = {GROUPS: self.actor_name}
        ranks_by_channel |= {channel_to(group): group for group in (*self.scoring, *self.rating)}
        if CRITIC in self.scoring:
            ranks_by_channel[RETURNS] = CRITIC
        return ranks_by_channel


def seed_of(*numbers: int) -> int:
    """Returns a seed of 63 bits that depends on all parts."""
    digest = hashlib.blake2b(np.asarray(numbers, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def weight_shards(actor: LanguageActorConfig, num_ranks: int) -> int:
    """Returns the number of ranks over which a training backend shards the weights in slices of tensors; 1 if it does not.

    Args:
        actor: The section `actor`.
        num_ranks: Ranks of the group.
    """
    is_sharded = actor.training_backend == "fsdp"
    return num_ranks // MeshSizes.from_config(actor.parallel, num_ranks).replicate if is_sharded else 1
