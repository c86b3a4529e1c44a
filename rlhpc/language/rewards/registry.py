"""Rewards by name: built in, registered, an entry point of group `rlhpc.text_rewards`, or `module:name`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlhpc.language.data.prompts import Located
from rlhpc.language.rewards.base import ChecksProblems, Comparing, Reward
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    pass
from rlhpc.language.data.registry import WordedDataset, _require_answers

#: Of classes whose objects take a `Sample`, and functions of one.
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward", "the name of a term of reward.terms", "rlhpc.text_rewards",
    {
        "math": "rlhpc.language.rewards.math_verifier:MathReward",
        "exact": "rlhpc.language.rewards.text_rewards:ExactReward",
        "format": "rlhpc.language.rewards.text_rewards:FormatReward",
        "length": "rlhpc.language.rewards.text_rewards:LengthReward",
        "code": "rlhpc.language.rewards.code_reward:CodeReward",
        "reasoning_gym": "rlhpc.language.rewards.text_rewards:ReasoningGymReward",
        "http": "rlhpc.language.rewards.text_rewards:HTTPReward",
        "agent": "rlhpc.language.rewards.text_rewards:AgentReward",
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


def check_problems(terms: Iterable[str], dataset: WordedDataset, key: str) -> None:
    """Refuses problems that a term of the reward cannot judge: programs without tests, problems without the reference answer
    that it compares with. Files are read to their end; of any other source the first problem tells.

    Args:
        terms: Names of rewards (`reward.terms`).
        dataset: The problems.
        key: What messages call the section.

    Raises:
        ConfigError: Names file and row, and what is wrong with the problem.
    """
    problems = dataset.problems
    for name in terms:
        if name.lower() not in REWARDS.names() and ":" not in name:
            continue  # a group that rates answers
        reward = REWARDS.find(name)
        if isinstance(reward, Comparing) and reward.needs_answer:
            _require_answers(dataset, f"the reward {name!r}", key)
        if not isinstance(reward, ChecksProblems):
            continue
        for index in range(len(problems) if isinstance(problems, Located) else 1):
            try:
                reward.check_problem(problems[index].meta)
            except ValueError as error:
                place = problems.place(index) if isinstance(problems, Located) else f"its problem {index}"
                raise ConfigError(
                    f"{key}: {place}: reward.terms has {name!r}, which cannot judge this problem: {error}. Mend the row or "
                    "leave it out; docs/how-to/rewards.md says which tests are read"
                ) from None
