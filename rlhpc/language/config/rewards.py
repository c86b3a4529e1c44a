"""Rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlhpc.config.constraints import ANY, COUNT, FREE, POSITIVE, Registered


@dataclass
class RewardTermConfig:
    """One term of the reward."""

    name: Annotated[str, Registered("rlhpc.language.rewards.registry:REWARDS")] = MISSING
    """`math`, `exact`, `code`, `format`, `length`, `reasoning_gym`, `http`, a registered name, `module:function`, or the name
    of a group that rates answers, such as `reward` or `judge`."""
    weight: Annotated[float, ANY] = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""


@dataclass
class RewardConfig:
    """Rewards of responses: the weighted sum of the terms."""

    terms: list[RewardTermConfig] = field(default_factory=list)
    """Terms; the first one's value also says whether an answer is right in evaluation (1 is right)."""
    timeout_s: Annotated[float, POSITIVE, FREE] = 10.0
    """Longest time for one sample; a reward that takes longer is ended, and the sample gets `failed`."""
    failed: Annotated[float, ANY] = 0.0
    """Reward of a sample whose judge hung, raised or died."""
    processes: Annotated[int, COUNT, FREE] = 1
    """Judges working side by side on each reward rank."""
