"""Which rank has which prompt of a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import GrpoConfig

#: Channels: finished groups, kept by the actors; notices of new weights, kept by the rollout ranks.
GROUPS, VERSIONS = "groups", "versions"


@dataclass(frozen=True)
class PromptMap:
    """P prompts a step, G responses each, over rollout ranks and actors. Pure: the same on every rank.

    Prompts of a step have positions 0 to P − 1. Rollout ranks take them in turn, so that neighbours in the dataset spread;
    an actor takes a run of neighbours.
    """

    prompts: int
    group_size: int
    rollout_ranks: int
    actor_ranks: int
    rollout_name: str = "rollout"
    actor_name: str = "actor"

    @classmethod
    def from_config(cls, cfg: GrpoConfig, *, rollout: int, actor: int, **names: str) -> PromptMap:
        """The map of a configuration.

        Raises:
            ConfigError: Prompts cannot be shared out evenly.
        """
        prompts, size = cfg.data.prompts_per_step, cfg.algorithm.group_size
        for name, ranks in (("rollout", rollout), ("actor", actor)):
            if prompts % ranks:
                raise ConfigError(f"data.prompts_per_step({prompts}) % {name} ranks({ranks}) != 0")
        return cls(prompts, size, rollout, actor, **names)

    def of_rollout(self, rank: int) -> range:
        """Positions that a rollout rank makes."""
        return range(rank, self.prompts, self.rollout_ranks)

    def of_actor(self, rank: int) -> range:
        """Positions that an actor trains on."""
        share = self.prompts // self.actor_ranks
        return range(rank * share, (rank + 1) * share)

    def actor_of(self, position: int) -> int:
        """The actor that trains on a position."""
        return position * self.actor_ranks // self.prompts

    def channels(self) -> dict[str, str]:
        """Channels and the group that keeps them."""
        return {GROUPS: self.actor_name, VERSIONS: self.rollout_name}


def seed_of(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts."""
    digest = hashlib.blake2b(np.asarray(parts, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
