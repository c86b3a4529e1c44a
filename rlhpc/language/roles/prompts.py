"""Who has which prompt of a step, and what travels between rollout ranks and actors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass
class Group:
    """All responses to one prompt.

    Attributes:
        step, position: Of the prompt.
        prompt_ids: `[P]` int32.
        responses: Token ids of each, int32.
        logprobs: One a token, float32: of the policy that drew it; anything where the mask is False.
        versions: One a token, int32; -1 where the mask is False.
        masks: One a token, bool: written by the model, rather than by a tool.
        rewards: `[G]` float32.
        finished: `[G]` bool: ended by itself, not at the length limit.
    """

    step: int
    position: int
    prompt_ids: np.ndarray
    responses: list[np.ndarray]
    logprobs: list[np.ndarray]
    versions: list[np.ndarray]
    masks: list[np.ndarray]
    rewards: np.ndarray
    finished: np.ndarray

    def pack(self) -> dict[str, Any]:
        """Few arrays, whatever G is: what goes through the channel."""
        joined = {name: np.concatenate(getattr(self, name)) for name in ("responses", "logprobs", "versions", "masks")}
        lengths = np.asarray([len(response) for response in self.responses], np.int32)
        head = {"step": self.step, "position": self.position, "lengths": lengths}
        return {**head, **joined, "prompt_ids": self.prompt_ids, "rewards": self.rewards, "finished": self.finished}

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> Group:
        """The group in a message that `pack` made."""
        cuts = np.cumsum(message["lengths"])[:-1]
        fields: dict[str, Any] = {
            name: message[name] for name in ("step", "position", "prompt_ids", "rewards", "finished")
        }
        for name in ("responses", "logprobs", "versions", "masks"):
            fields[name] = np.split(message[name], cuts)
        return cls(**fields)
