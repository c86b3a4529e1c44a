"""Section `reward`: reward terms and their processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlhpc.config.constraints import ANY, COUNT, FREE, POSITIVE, Registered


@dataclass
class RewardTermConfig:
    """One term of the reward."""

    name: Annotated[str, Registered("rlhpc.language.rewards.registry:REWARDS")] = MISSING
    """Reward function: `math`, `exact`, `code`, `format`, `length`, `reasoning_gym`, `http`, a registered name,
    `module:function`, or the name of a group that rates answers, such as `reward` or `judge`."""
    weight: Annotated[float, ANY] = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""


@dataclass
class RewardConfig:
    """Rewards of responses: the weighted sum of the terms."""

    terms: list[RewardTermConfig] = field(default_factory=list)
    """Reward terms. In evaluation, an answer is right if the first term is 1."""
    timeout_s: Annotated[float, POSITIVE, FREE] = 10.0
    """Maximum time in seconds per sample; a reward function that takes longer is terminated, and the sample gets `failed`."""
    failed: Annotated[float, ANY] = 0.0
    """Reward of a sample whose reward function timed out, raised an error or crashed."""
    processes: Annotated[int, COUNT, FREE] = 1
    """Number of parallel processes that compute rewards on each reward rank."""
