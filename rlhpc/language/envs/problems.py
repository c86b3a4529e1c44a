"""Data source `environment`: problems of an environment, and demonstrations."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlhpc.config.options import check_options
from rlhpc.language.data.procedural import choose, is_in_part, procedural_fraction, section_kwargs
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import Conversations, Environment, step_of
from rlhpc.language.envs.registry import find_environment
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig

_MAX_TURNS = 100


class EnvironmentProblems:
    """Problems of an environment. A hash of `meta["part"]`, or by default of the question, assigns each problem to training or
    evaluation. With `demonstrations`, each turn of a demonstrated episode is a row: the conversation and the reply.

    Args:
        cfg: A section `data.train` or `data.eval[i]`. Its `kwargs` are `name`, the name of the environment; `demonstrations`
            (default false); and the environment's arguments.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: The environment is unknown, does not take these arguments, or has too few problems.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        kwargs = section_kwargs(cfg)
        name, has_demonstrations = kwargs.pop("name", None), bool(kwargs.pop("demonstrations", False))
        if not isinstance(name, str):
            raise ConfigError(f"{key}.kwargs.name is {name!r}; name an environment, such as search")
        self._environment = find_environment(name, {}, f"{key}.kwargs.name")
        self._kwargs = check_options(self._environment.problem, kwargs, f"{key}.kwargs", f"environment {name}", 1)
        fraction = procedural_fraction(cfg)

        def is_selected(problem_number: int) -> bool:
            problem = self._make_problem(problem_number)
            return is_in_part(str(problem.meta.get("part", problem.question)), part, fraction)

        try:
            num_problems = self._environment.count(**kwargs)
            self._make_problem(max(num_problems - 1, 0))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{key}.kwargs: {name} makes no problem of {kwargs}: {error}") from error
        self._numbers = choose(cfg, [num_problems], is_selected, part=part, key=key)
        self._rows: list[Prompt] | None = None
        if has_demonstrations:
            self._rows = [
                row
                for problem_number in self._numbers
                for row in demonstrations(self._environment(), self._make_problem(problem_number))
            ]

    def _make_problem(self, number: int) -> Prompt:
        return self._environment.problem(number, **self._kwargs)

    def __len__(self) -> int:
        return len(self._numbers if self._rows is None else self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._make_problem(self._numbers[index]) if self._rows is None else self._rows[index]


def demonstrations(environment: Environment, problem: Prompt) -> list[Prompt]:
    """Returns a row for each turn of the environment's demonstration of a problem.

    Raises:
        ConfigError: The demonstration is longer than `_MAX_TURNS` turns.
    """
    task: Any = SimpleNamespace(
        messages=problem.messages, question=problem.question, answer=problem.answer, meta=problem.meta, seed=problem.id
    )
    conversations, rng, rows = Conversations(task), random.Random(problem.id), list[Prompt]()
    step = step_of(environment.reset(task))
    while not step.done:
        if len(rows) >= _MAX_TURNS:
            raise ConfigError(f"{type(environment).__name__}: its demonstration of problem {problem.id} has no end")
        messages = conversations.next_messages(step)
        reply = environment.demonstrate(rng)
        rows.append(dataclasses.replace(problem, messages=tuple(messages), response=reply))
        messages.append({"role": "assistant", "content": reply})
        step = step_of(environment.step(messages[-1]))
    environment.close()
    return rows
