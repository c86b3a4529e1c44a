"""Registry of rewards: built in, registered, an entry point of group `rlhpc.text_rewards`, or `module:name`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from rlhpc.config.options import check_options
from rlhpc.language.data.prompts import Located, WordedDataset
from rlhpc.language.data.registry import _require_answers
from rlhpc.language.rewards.base import ChecksProblems, Comparing, Reward
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

#: Classes whose objects are called with a `Sample`, and functions of one.
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
    """Checks that a reward takes these arguments.

    Raises:
        ConfigError: It does not take them; the message names the arguments that it takes.
    """
    num_positional = 0 if isinstance(factory, type) else 1  # the sample
    check_options(factory, kwargs, f"reward.terms[{name}].kwargs", f"reward {name}", num_positional)


def build_reward(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Reward:
    """Builds a reward: a class is called with `kwargs`; a function gets them in addition to the sample.

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
    """Rejects problems that a term of the reward cannot score.

    These are programs without tests, and problems without the reference answer that the term compares with. Files are
    read to their end; of any other source only the first problem is checked.

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
        if isinstance(reward, Comparing) and reward.needs_answer:
            _require_answers(dataset, f"the reward {name!r}", key)
        if not isinstance(reward, ChecksProblems):
            continue
        for index in range(len(problems) if isinstance(problems, Located) else 1):
            try:
                reward.check_problem(problems[index].meta)
            except ValueError as error:
                problem_place = problems.place(index) if isinstance(problems, Located) else f"its problem {index}"
                raise ConfigError(
                    f"{key}: {problem_place}: reward.terms has {name!r}, which cannot judge this problem: {error}. "
                    "Mend the row or leave it out; docs/how-to/rewards.md says which tests are read"
                ) from None
