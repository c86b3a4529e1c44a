"""Rewards by name: built in, registered, an entry point of group `rlhpc.text_rewards`, or `module:name`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rlhpc.language.rewards.base import Reward
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

#: Of classes whose objects take a `Sample`, and functions of one.
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward", "the name of a term of reward.terms", "rlhpc.text_rewards",
    {
        "math": "rlhpc.language.rewards.mathematics:MathReward",
        "exact": "rlhpc.language.rewards.texts:ExactReward",
        "format": "rlhpc.language.rewards.texts:FormatReward",
        "length": "rlhpc.language.rewards.texts:LengthReward",
        "code": "rlhpc.language.rewards.programs:CodeReward",
        "reasoning_gym": "rlhpc.language.rewards.procedural:ReasoningGymReward",
        "http": "rlhpc.language.rewards.service:HTTPReward",
        "agent": "rlhpc.language.agents.judged:AgentReward",
    },
    form="module:function",
)  # fmt: skip
register_reward = REWARDS.register


def check_arguments(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Whether a reward takes these arguments.

    Raises:
        ConfigError: It does not; names those that it takes.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return
    given = [] if isinstance(factory, type) else [None]  # the sample
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values()][len(given) :]
        raise ConfigError(
            f"reward.terms: kwargs of {name!r}: {error}; it takes: {', '.join(names) or 'none'}"
        ) from None


def build_reward(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Reward:
    """A class is built with `kwargs`; a function gets them beside the sample.

    Raises:
        ConfigError: The class does not accept them.
    """
    if not isinstance(factory, type):
        return functools.partial(factory, **kwargs) if kwargs else factory
    try:
        reward: Reward = factory(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms: {name!r} with kwargs {kwargs}: {error}") from None
    return reward
