"""Registry of rewards: built-in names, registered names, entry points of group `rlhpc.text_rewards`, and `module:name`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from rlhpc.config.options import check_options
from rlhpc.language.data.prompts import HasPlaces, TemplatedDataset
from rlhpc.language.data.registry import _require_answers
from rlhpc.language.rewards.base import ChecksProblems, NeedsAnswer, Reward
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

#: Rewards: functions of a `Sample`, or classes with objects that are functions of a `Sample`.
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
    """Checks that a reward accepts its configured arguments.

    Raises:
        ConfigError: An argument is not accepted; the message names the accepted arguments.
    """
    num_positional = 0 if isinstance(factory, type) else 1  # the sample
    check_options(factory, kwargs, f"reward.terms[{name}].kwargs", f"reward {name}", num_positional)


def build_reward(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Reward:
    """Builds a reward: instantiates a class with `kwargs`, or binds `kwargs` to a function of the sample.

    Raises:
        ConfigError: The class does not accept the arguments.
    """
    if not isinstance(factory, type):
        return functools.partial(factory, **kwargs) if kwargs else factory
    try:
        reward: Reward = factory(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms: {name!r} with kwargs {kwargs}: {error}") from None
    return reward


def check_problems(terms: Iterable[str], dataset: TemplatedDataset, key: str) -> None:
    """Rejects problems that a reward term cannot score.

    Examples are programming problems without tests, and problems without the reference answer that the term compares with.
    All problems of files are checked; for any other source only the first problem is checked.

    Args:
        terms: Names of rewards (`reward.terms`).
        dataset: The problems.
        key: Name of the section in messages.

    Raises:
        ConfigError: A problem cannot be scored; the message names its file, row and error.
    """
    problems = dataset.problems
    for name in terms:
        if name.lower() not in REWARDS.names() and ":" not in name:
            continue  # a scoring group
        reward = REWARDS.find(name)
        if isinstance(reward, NeedsAnswer) and reward.needs_answer:
            _require_answers(dataset, f"the reward {name!r}", key)
        if not isinstance(reward, ChecksProblems):
            continue
        for index in range(len(problems) if isinstance(problems, HasPlaces) else 1):
            try:
                reward.check_problem(problems[index].meta)
            except ValueError as error:
                problem_place = problems.place(index) if isinstance(problems, HasPlaces) else f"its problem {index}"
                raise ConfigError(
                    f"{key}: {problem_place}: reward.terms has {name!r}, which cannot judge this problem: {error}. "
                    "Mend the row or leave it out; docs/how-to/rewards.md says which tests are read"
                ) from None
