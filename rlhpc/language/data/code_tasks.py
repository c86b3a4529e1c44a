"""Small programming tasks that are made rather than read: a function over a list of numbers, with its unit tests."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhpc.language.data.parts import arguments, belongs, choose, locate, procedural_fraction
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import DataSourceConfig

_STEPS: list[tuple[str, str]] = [
    ("keep only the even numbers", "[n for n in numbers if n % 2 == 0]"),
    ("keep only the odd numbers", "[n for n in numbers if n % 2 == 1]"),
    *((f"keep only the numbers greater than {k}", f"[n for n in numbers if n > {k}]") for k in range(10)),
    *((f"keep only the numbers less than {k}", f"[n for n in numbers if n < {k}]") for k in range(1, 11)),
    *((f"add {k} to every number", f"[n + {k} for n in numbers]") for k in range(1, 10)),
    *((f"multiply every number by {k}", f"[n * {k} for n in numbers]") for k in range(2, 10)),
    ("square every number", "[n * n for n in numbers]"),
    ("change the sign of every number", "[-n for n in numbers]"),
    ("sort the numbers from least to greatest", "sorted(numbers)"),
    ("reverse the order of the numbers", "numbers[::-1]"),
    ("drop the first number", "numbers[1:]"),
    ("drop repeated numbers, keeping the first of each", "list(dict.fromkeys(numbers))"),
]
"""Each step in words, and the expression of the new list."""
_RESULTS: list[tuple[str, str]] = [
    ("the list", "numbers"),
    ("the sum", "sum(numbers)"),
    ("how many numbers there are", "len(numbers)"),
    ("the greatest number, or 0 if there is none", "max(numbers, default=0)"),
    ("the least number, or 0 if there is none", "min(numbers, default=0)"),
]
_rng = random.Random("code")
_LISTS = [[], *([_rng.randint(-12, 12) for _ in range(length)] for length in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14))]
"""The lists that the functions are tested with."""


class CodeProblems:
    """Tasks such as: write `solve(numbers)`, which squares every number, then sorts, and returns the greatest.

    The level is the number of steps. `meta` has `tests`, a list of assert statements (as in MBPP), and `entry_point`;
    `response` is a solution in a fenced block. A hash of what the tests expect decides the part, so that two ways to say
    the same are in the same one: `eval_fraction` of all, or a fifth where it is 0, belong to evaluation. Tasks whose
    tests a constant would pass, or whose steps are not all needed for that, are left out.

    Args:
        cfg: A section `data.train` or `data.eval[i]`. `kwargs`: `steps`, a number or a list of them (default [1, 2]).
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: Unknown arguments, or more tasks wanted than there are.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        self._levels = _code_arguments(arguments(cfg), key)
        self._sizes = [len(_STEPS) ** level * len(_RESULTS) for level in self._levels]
        fraction = procedural_fraction(cfg)

        def keep(number: int) -> bool:
            steps, result = self._parts(number)
            results = _results(steps, result)
            return (
                belongs(repr(results), part, fraction)
                and any(other != results[0] for other in results)
                and all(_results(steps[:i] + steps[i + 1 :], result) != results for i in range(len(steps)))
            )

        self._numbers = choose(cfg, self._sizes, keep, part=part, key=key)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        number = self._numbers[index]
        steps, result = self._parts(number)
        task = (
            "Write a Python function solve(numbers), where numbers is a list of integers. It should do this: "
            f"{', then '.join(_STEPS[step][0] for step in steps)}; and return {_RESULTS[result][0]}. "
            "Answer with the code in a ```python block."
        )
        body = "".join(f"    numbers = {_STEPS[step][1]}\n" for step in steps)
        tests = [
            f"assert solve({numbers}) == {expected}"
            for numbers, expected in zip(_LISTS, _results(steps, result), strict=True)
        ]
        return Prompt(
            id=number,
            messages=({"role": "user", "content": task},),
            meta={"tests": tests, "entry_point": "solve"},
            response=f"```python\ndef solve(numbers):\n{body}    return {_RESULTS[result][1]}\n```",
            level=f"{len(steps)} step" + "s" * (len(steps) > 1),
        )

    def _parts(self, number: int) -> tuple[list[int], int]:
        """The steps of a task, and what is returned: places in the lists above."""
        level, inside = locate(number, self._sizes)
        inside, result = divmod(inside, len(_RESULTS))
        return [inside // len(_STEPS) ** place % len(_STEPS) for place in range(self._levels[level])], result


def _results(steps: list[int], result: int) -> list[Any]:
    """What a task gives for each of the lists."""
    functions = [*(_function(_STEPS[step][1]) for step in steps), _function(_RESULTS[result][1])]
    return [functools.reduce(lambda value, function: function(value), functions, numbers) for numbers in _LISTS]


@functools.cache
def _function(expression: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda numbers: {expression}")  # the text comes from this file
    return function


def _code_arguments(kwargs: dict[str, Any], key: str) -> list[int]:
    given = kwargs.pop("steps", [1, 2])
    if kwargs:
        raise ConfigError(f"{key}.kwargs has {', '.join(kwargs)}; source code takes steps")
    steps = list(dict.fromkeys(given)) if isinstance(given, list) else [given]
    if not steps or not all(isinstance(step, int) and 1 <= step <= 6 for step in steps):
        raise ConfigError(f"{key}.kwargs.steps is {given!r}; allowed: a number from 1 to 6, or a list of them")
    return sorted(steps)
