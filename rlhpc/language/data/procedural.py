"""Procedural problems: arithmetic and programming tasks, their sampling, and their train/eval split."""

from __future__ import annotations

import functools
import hashlib
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from rlhpc.config.options import as_list, read_options
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import Range

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig


DEFAULT_SIZE = {"train": 10_000, "eval": 500}
"""Number of procedural problems if `size` is null; all problems if there are fewer."""
_HELD_OUT_FRACTION = 0.2
_MAX_LISTED = 200_000
"""Maximum number of possible problems that are all listed and shuffled; of more problems, a sample is drawn."""


def is_held_out(problem_text: str, fraction: float) -> bool:
    """Returns whether a problem is held out for evaluation, by a machine-independent hash of its text.

    Problems held out at a smaller fraction are also held out at a larger one.
    """
    digest = hashlib.blake2b(problem_text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def is_in_part(problem_text: str, split_part: str, fraction: float) -> bool:
    """Returns whether a problem belongs to `split_part`, "train" or "eval"; with fraction 0, all problems belong to
    both parts.
    """
    return fraction == 0 or is_held_out(problem_text, fraction) == (split_part == "eval")


def procedural_fraction(cfg: DataSourceConfig) -> float:
    """Returns the fraction that a procedural source holds out: `eval_fraction`, or 0.2 if that is 0."""
    return cfg.eval_fraction or _HELD_OUT_FRACTION


def section_kwargs(cfg: DataSourceConfig) -> dict[str, Any]:
    """Returns the `kwargs` of a data section as plain Python objects."""
    from omegaconf import OmegaConf

    kwargs = OmegaConf.to_container(cfg.kwargs, resolve=True) if OmegaConf.is_config(cfg.kwargs) else dict(cfg.kwargs)
    assert isinstance(kwargs, dict)
    return {str(name): argument for name, argument in kwargs.items()}


def choose(
    cfg: DataSourceConfig, level_sizes: Sequence[int], keep: Callable[[int], bool], *, part: str, key: str
) -> list[int]:
    """Draws the numbers of `cfg.size` different problems, in an order determined by `cfg.source` and `cfg.seed`.

    Args:
        cfg: Section `data.train` or `data.eval[i]`.
        level_sizes: Number of problems of each level; problems are numbered consecutively over the levels.
        keep: Function that returns whether a problem is in the part.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: The part has too few problems.
    """
    rng = random.Random(f"{cfg.source} {cfg.seed}")
    num_existing = sum(level_sizes)
    num_problems = cfg.size or DEFAULT_SIZE[part]
    if num_existing <= _MAX_LISTED:
        problem_numbers = [candidate for candidate in range(num_existing) if keep(candidate)]
        rng.shuffle(problem_numbers)
        if cfg.size and cfg.size > len(problem_numbers):
            raise ConfigError(
                f"{key}.size is {cfg.size}, but only {len(problem_numbers)} of all {num_existing} problems are in the "
                f"{part} part; "
                f"leave size out to take up to {DEFAULT_SIZE[part]}, or make kwargs allow more problems"
            )
        return problem_numbers[:num_problems]
    fraction = procedural_fraction(cfg)
    max_count = int(num_existing * (fraction if part == "eval" else 1 - fraction) / 2)
    if num_problems > max_count:
        raise ConfigError(f"{key}.size is {num_problems}; at most {max_count} problems can be drawn of {num_existing}")
    # A dict, unlike a set, keeps the order of insertion.
    drawn_numbers: dict[int, None] = {}
    while len(drawn_numbers) < num_problems:
        # Levels are drawn equally often. Otherwise almost all problems would have the hardest level, which is the largest.
        level_index = rng.randrange(len(level_sizes))
        candidate = sum(level_sizes[:level_index]) + rng.randrange(level_sizes[level_index])
        if candidate not in drawn_numbers and keep(candidate):
            drawn_numbers[candidate] = None
    return list(drawn_numbers)


def choose_contents(
    cfg: DataSourceConfig, level_sizes: Sequence[int], make_content: Callable[[int], str], *, part: str, key: str
) -> list[int]:
    """Draws the numbers of `cfg.size` problems with different contents, for sources that may repeat a content.

    Args:
        cfg: Section `data.train` or `data.eval[i]`.
        level_sizes: Number of problems of each level; problems are numbered consecutively over the levels.
        make_content: Function that returns a description of the complete problem; the description's hash decides
            the part.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: The part has too few different problems.
    """
    rng, fraction = random.Random(f"{cfg.source} {cfg.seed}"), procedural_fraction(cfg)
    num_problems, num_existing = cfg.size or DEFAULT_SIZE[part], sum(level_sizes)
    candidate_numbers = (
        range(num_existing) if num_existing <= _MAX_LISTED else rng.sample(range(num_existing), _MAX_LISTED)
    )
    shuffled_numbers = list(candidate_numbers)
    rng.shuffle(shuffled_numbers)
    number_by_digest: dict[bytes, int] = {}
    for problem_number in shuffled_numbers:
        description = make_content(problem_number)
        if is_in_part(description, part, fraction):
            number_by_digest.setdefault(hashlib.blake2b(description.encode(), digest_size=16).digest(), problem_number)
        if len(number_by_digest) == num_problems:
            break
    if cfg.size and len(number_by_digest) < cfg.size:
        raise ConfigError(
            f"{key}.size is {cfg.size}, but only {len(number_by_digest)} different problems are in the "
            f"{part} part; leave size out to take up to {DEFAULT_SIZE[part]}, or make kwargs allow more problems"
        )
    return list(number_by_digest.values())


def locate(problem_number: int, level_sizes: Sequence[int]) -> tuple[int, int]:
    """Returns the level of a problem, and its number within the level.

    Raises:
        IndexError: There is no such problem.
    """
    for level_index, level_size in enumerate(level_sizes):
        if problem_number < level_size:
            return level_index, problem_number
        problem_number -= level_size
    raise IndexError(problem_number)


_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class ArithmeticOptions:
    """Options of source `arithmetic`."""

    digits: Annotated[int | list[int], Range(1, 9)] = 2
    """Number of digits of both operands, without leading zeros; a number or a list of numbers."""
    operators: str | list[str] = "+"
    """One or more of the characters `+-*`."""

    def __post_init__(self) -> None:
        if not self.operators or not {*"".join(self.operators)} <= {*_OPERATORS}:
            raise ValueError(f"operators is {self.operators!r}; allowed: characters out of {''.join(_OPERATORS)}")


class ArithmeticProblems:
    """Arithmetic problems of two numbers and an operator. No problem occurs twice or in both parts, for any seeds.

    A hash of the problem decides its part: `eval_fraction` of all problems, or a fifth if that is 0, belong to evaluation.
    34+12 is in the same part as 12+34. All SFT and RL runs with the same `eval_fraction` therefore hold out the same problems.

    Args:
        cfg: Section `data.train` or `data.eval[i]`; `kwargs` are `ArithmeticOptions`.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: `kwargs` are invalid, or `size` exceeds the number of problems.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        options = read_options(ArithmeticOptions, cfg.kwargs, f"{key}.kwargs", "source arithmetic")
        self._digits = sorted(as_list(options.digits))
        self._operators = "".join(dict.fromkeys("".join(options.operators)))
        self._sizes = [len(_list_operands(digits)) ** 2 * len(self._operators) for digits in self._digits]
        fraction = procedural_fraction(cfg)
        self._numbers = choose(
            cfg,
            self._sizes,
            lambda problem_number: is_in_part(self._canonicalize(problem_number), part, fraction),
            part=part,
            key=key,
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        problem_number = self._numbers[index]
        left_operand, operator_sign, right_operand, digits = self._select_problem(problem_number)
        answer = str(_OPERATORS[operator_sign](left_operand, right_operand))
        return Prompt(
            id=problem_number,
            messages=({"role": "user", "content": f"{left_operand}{operator_sign}{right_operand}="},),
            answer=answer,
            response=answer,
            level=(f"{operator_sign} " if len(self._operators) > 1 else "") + f"{digits} digit{'s' * (digits > 1)}",
        )

    def _select_problem(self, number: int) -> tuple[int, str, int, int]:
        level_index, number_in_level = locate(number, self._sizes)
        digits = self._digits[level_index]
        operands = _list_operands(digits)
        pair_number, operator_index = divmod(number_in_level, len(self._operators))
        left_index, right_index = divmod(pair_number, len(operands))
        return operands[left_index], self._operators[operator_index], operands[right_index], digits

    def _canonicalize(self, problem_number: int) -> str:
        left_operand, operator_sign, right_operand, _ = self._select_problem(problem_number)
        if operator_sign != "-":
            left_operand, right_operand = min(left_operand, right_operand), max(left_operand, right_operand)
        return f"{left_operand}{operator_sign}{right_operand}"


def _list_operands(num_digits: int) -> range:
    return range(10) if num_digits == 1 else range(10 ** (num_digits - 1), 10**num_digits)


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
"""Description of each step, and the Python expression for the new list."""
_RESULTS: list[tuple[str, str]] = [
    ("the list", "numbers"),
    ("the sum", "sum(numbers)"),
    ("how many numbers there are", "len(numbers)"),
    ("the greatest number, or 0 if there is none", "max(numbers, default=0)"),
    ("the least number, or 0 if there is none", "min(numbers, default=0)"),
]
_rng = random.Random("code")
_TEST_ARGUMENTS = [
    [],
    *([_rng.randint(-12, 12) for _ in range(list_length)] for list_length in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)),
]
"""Arguments of the test cases."""


@dataclass(frozen=True)
class CodeOptions:
    """Options of source `code`."""

    steps: Annotated[int | list[int], Range(1, 6)] = field(default_factory=lambda: [1, 2])
    """Number of steps of a task; a number or a list of numbers."""


class CodeProblems:
    """Programming tasks such as: write `solve(numbers)`, which squares and sorts the numbers and returns the greatest.

    The level is the number of steps. `meta` has `tests`, a list of assert statements (as in MBPP), and `entry_point`;
    `response` is a solution in a fenced block. A hash of the expected results decides the part, so that equivalent tasks are
    in the same part: `eval_fraction` of all tasks, or a fifth if that is 0, belong to evaluation. A task is excluded if a
    constant would pass its tests, or if one of its steps is not needed to pass them.

    Args:
        cfg: Section `data.train` or `data.eval[i]`; `kwargs` are `CodeOptions`.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: `kwargs` are invalid, or `size` exceeds the number of tasks.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        options = read_options(CodeOptions, cfg.kwargs, f"{key}.kwargs", "source code")
        self._levels = sorted(as_list(options.steps))
        self._sizes = [len(_STEPS) ** num_steps * len(_RESULTS) for num_steps in self._levels]
        fraction = procedural_fraction(cfg)

        def is_selected(problem_number: int) -> bool:
            steps, result_form = self._find_steps_and_result(problem_number)
            expected_results = _results(steps, result_form)
            return (
                is_in_part(repr(expected_results), part, fraction)
                and any(other_result != expected_results[0] for other_result in expected_results)
                and all(
                    _results(steps[:i] + steps[i + 1 :], result_form) != expected_results for i in range(len(steps))
                )
            )

        self._numbers = choose(cfg, self._sizes, is_selected, part=part, key=key)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        problem_number = self._numbers[index]
        steps, result_form = self._find_steps_and_result(problem_number)
        task = (
            "Write a Python function solve(numbers), where numbers is a list of integers. It should do this: "
            f"{', then '.join(_STEPS[step][0] for step in steps)}; and return {_RESULTS[result_form][0]}. "
            "Answer with the code in a ```python block."
        )
        body = "".join(f"    numbers = {_STEPS[step][1]}\n" for step in steps)
        tests = [
            f"assert solve({argument_numbers}) == {expected_result}"
            for argument_numbers, expected_result in zip(_TEST_ARGUMENTS, _results(steps, result_form), strict=True)
        ]
        return Prompt(
            id=problem_number,
            messages=({"role": "user", "content": task},),
            meta={"tests": tests, "entry_point": "solve"},
            response=f"```python\ndef solve(numbers):\n{body}    return {_RESULTS[result_form][1]}\n```",
            level=f"{len(steps)} step" + "s" * (len(steps) > 1),
        )

    def _find_steps_and_result(self, problem_number: int) -> tuple[list[int], int]:
        """Returns a task's steps, as indices into `_STEPS`, and its result, as an index into `_RESULTS`."""
        level_index, number_in_level = locate(problem_number, self._sizes)
        number_in_level, result_form = divmod(number_in_level, len(_RESULTS))
        return [
            number_in_level // len(_STEPS) ** step_position % len(_STEPS)
            for step_position in range(self._levels[level_index])
        ], result_form


def _results(steps: list[int], result: int) -> list[Any]:
    """Computes a task's result for each list in `_TEST_ARGUMENTS`."""
    functions = [*(_compile(_STEPS[step][1]) for step in steps), _compile(_RESULTS[result][1])]
    return [
        functools.reduce(lambda step_result, function: function(step_result), functions, argument_numbers)
        for argument_numbers in _TEST_ARGUMENTS
    ]


@functools.cache
def _compile(expression: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda numbers: {expression}")  # expressions are constants of this module
    return function
