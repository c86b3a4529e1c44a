"""Which rank has which prompt of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.language.scoring.groups import CRITIC
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.run import GrpoConfig

#: Channels: finished groups, and what others say of them, kept by the actors; returns, kept by the critics.
GROUPS, RETURNS = "groups", "returns"
#: What rollout ranks are told of new weights (`Worker.notify`).
VERSIONS = "versions"
#: Kept by the driver: prompts to be taken, and what it is told of those whose answers an actor has (`work.py`).
WORK, DELIVERED = "work", "delivered"
#: Kept by the driver: episodes for ranks of the group `agent`. What these are told, and what they tell (`Worker.notify`).
EPISODES, TICKETS, TOLD = "episodes", "tickets", "told by agents"


def channel_to(group: str) -> str:
    """The channel for what a group is to score."""
    return f"to-{group}"


def ratings_of(group: str) -> str:
    """What rollout ranks are told of by a group that rates answers (`Worker.notify`)."""
    return f"ratings of {group}"


def training_phase(step: int) -> str:
    """What rollout ranks and raters call the answers of a step."""
    return f"step {step}"


def evaluation_phase(step: int) -> str:
    """What they call those of an evaluation."""
    return f"evaluation at step {step}"


@dataclass(frozen=True)
class PromptMap:
    """P prompts a step, G responses each, over rollout ranks and actors. Pure: the same on every rank.

    Prompts of a step have positions 0 to P − 1. Rollout ranks take them as they have room (`work.py`); an actor trains on a
    run of neighbours.

    Attributes:
        prompts, group_size: P and G.
        rollout_ranks, actor_ranks, rollout_name, actor_name: The two groups that every run has. Ranks of a trainer that see
            the same samples count as one here, and have its key: `Sizes.data_of`.
        scoring: Ranks of each group that scores tokens, the critic included.
        rating: Ranks of each group that rates answers.
    """

    prompts: int
    group_size: int
    rollout_ranks: int
    actor_ranks: int
    rollout_name: str = "rollout"
    actor_name: str = "actor"
    scoring: Mapping[str, int] = field(default_factory=dict)
    rating: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_config(cls, cfg: GrpoConfig, *, rollout: int, actor: int, **more: Any) -> PromptMap:
        """The map of a configuration.

        Raises:
            ConfigError: Prompts cannot be shared out evenly.
        """
        prompts, size = cfg.data.prompts_per_step, cfg.algorithm.group_size
        if prompts % actor:
            raise ConfigError(f"data.prompts_per_step({prompts}) % actor ranks with other samples({actor}) != 0")
        return cls(prompts, size, rollout, actor, **more)

    def of_actor(self, rank: int) -> range:
        """Positions that an actor trains on."""
        share = self.prompts // self.actor_ranks
        return range(rank * share, (rank + 1) * share)

    def actor_of(self, position: int) -> int:
        """The actor that trains on a position."""
        return position * self.actor_ranks // self.prompts

    def share_of(self, group: str, rank: int) -> range:
        """Positions that a rank of a group scores, of those in `scoring`."""
        return range(rank, self.prompts, self.scoring[group])

    def scorer_of(self, group: str, position: int) -> int:
        """The rank of such a group that scores a position."""
        return position % self.scoring[group]

    def channels(self) -> dict[str, str]:
        """Channels and the group that keeps them."""
        found = {GROUPS: self.actor_name}
        found |= {channel_to(group): group for group in (*self.scoring, *self.rating)}
        if CRITIC in self.scoring:
            found[RETURNS] = CRITIC
        return found


def seed_of(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts."""
    digest = hashlib.blake2b(np.asarray(parts, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
