"""Small programming tasks that are made rather than read: a function over a list of numbers, with its unit tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rlhpc.data.parts import arguments, belongs, choose, locate, procedural_fraction
from rlhpc.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError

_STEPS: list[tuple[str, str]] = [
    ("keep only the even numbers", "numbers = [n for n in numbers if n % 2 == 0]"),
    ("keep only the odd numbers", "numbers = [n for n in numbers if n % 2 == 1]"),
    *((f"keep only the numbers greater than {k}", f"numbers = [n for n in numbers if n > {k}]") for k in range(10)),
    *((f"keep only the numbers less than {k}", f"numbers = [n for n in numbers if n < {k}]") for k in range(1, 11)),
    *((f"add {k} to every number", f"numbers = [n + {k} for n in numbers]") for k in range(1, 10)),
    *((f"multiply every number by {k}", f"numbers = [n * {k} for n in numbers]") for k in range(2, 10)),
    ("square every number", "numbers = [n * n for n in numbers]"),
    ("change the sign of every number", "numbers = [-n for n in numbers]"),
    ("sort the numbers from least to greatest", "numbers = sorted(numbers)"),
    ("reverse the order of the numbers", "numbers = numbers[::-1]"),
    ("drop the first number", "numbers = numbers[1:]"),
    ("drop repeated numbers, keeping the first of each", "numbers = list(dict.fromkeys(numbers))"),
]
_RESULTS: list[tuple[str, str]] = [
    ("the list", "numbers"),
    ("the sum", "sum(numbers)"),
    ("how many numbers there are", "len(numbers)"),
    ("the greatest number, or 0 if there is none", "max(numbers, default=0)"),
    ("the least number, or 0 if there is none", "min(numbers, default=0)"),
]
_rng = random.Random("code")
_LISTS = [[], *([_rng.randint(-12, 12) for _ in range(length)] for length in (1, 3, 4, 5, 6, 7, 8))]
"""What the functions are tried with."""


class CodeProblems:
    """Tasks such as: write `solve(numbers)`, which squares every number, then sorts, and returns the greatest.

    The level is the number of steps. `meta` has `tests`, a list of assert statements (as in MBPP), and `entry_point`;
    `response` is a solution in a fenced block. A hash of what the tests expect decides the part, so that two ways to say
    the same are in the same one: `eval_fraction` of all, or a fifth where it is 0, belong to evaluation. Tasks whose
    tests a constant would pass are left out.

    Args:
        cfg: A section `data.train` or `data.eval[i]`. `kwargs`: `steps`, a number or a list of them (default [1, 2]).
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: Unknown arguments, or more tasks wanted than there are.
    """

    def __init__(self, cfg: Any, *, part: str, key: str) -> None:
        self._levels = _arguments(arguments(cfg), key)
        self._sizes = [len(_STEPS) ** level * len(_RESULTS) for level in self._levels]
        fraction = procedural_fraction(cfg)

        def keep(number: int) -> bool:
            results = [repr(result) for _, result in _examples(self._program(number)[1])]
            return len(set(results)) > 1 and belongs("\n".join(results), part, fraction)

        self._numbers = choose(cfg, self._sizes, keep, part=part, key=key)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        number = self._numbers[index]
        task, solution = self._program(number)
        tests = [f"assert solve({numbers}) == {result}" for numbers, result in _examples(solution)]
        level = self._levels[locate(number, self._sizes)[0]]
        return Prompt(
            id=number,
            messages=({"role": "user", "content": task},),
            meta={"tests": tests, "entry_point": "solve"},
            response=f"```python\n{solution}```",
            level=f"{level} step" + "s" * (level > 1),
        )

    def _program(self, number: int) -> tuple[str, str]:
        """The task in words, and a solution."""
        level, inside = locate(number, self._sizes)
        inside, result = divmod(inside, len(_RESULTS))
        steps = []
        for _ in range(self._levels[level]):
            inside, step = divmod(inside, len(_STEPS))
            steps.append(_STEPS[step])
        wanted, expression = _RESULTS[result]
        said = ", then ".join(words for words, _ in steps)
        task = (
            "Write a Python function solve(numbers), where numbers is a list of integers. "
            f"It should do this: {said}; and return {wanted}. Answer with the code in a ```python block."
        )
        body = "\n".join(f"    {code}" for _, code in steps)
        return task, f"def solve(numbers):\n{body}\n    return {expression}\n"


def _examples(solution: str) -> list[tuple[list[int], Any]]:
    """Arguments and results."""
    names: dict[str, Callable[[list[int]], Any]] = {}
    exec(solution, names)  # text of this file's making
    return [(numbers, names["solve"](list(numbers))) for numbers in _LISTS]


def _arguments(kwargs: dict[str, Any], key: str) -> list[int]:
    given = kwargs.pop("steps", [1, 2])
    if kwargs:
        raise ConfigError(f"{key}.kwargs has {', '.join(kwargs)}; source code takes steps")
    steps = list(dict.fromkeys(given)) if isinstance(given, list) else [given]
    if not steps or not all(isinstance(step, int) and 1 <= step <= 6 for step in steps):
        raise ConfigError(f"{key}.kwargs.steps is {given!r}; allowed: a number from 1 to 6, or a list of them")
    return sorted(steps)
