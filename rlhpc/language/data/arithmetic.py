"""Sums that are made rather than read: `12+34=`, whose answer is `46`."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from rlhpc.language.data.parts import arguments, belongs, choose, locate, procedural_fraction
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import DataSourceConfig

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticProblems:
    """Two numbers and an operator; no problem twice, and none in both parts, whatever the seeds.

    A hash of the problem decides its part: `eval_fraction` of all problems, or a fifth where it is 0, belong to
    evaluation. 34+12 goes where 12+34 goes. So what is held out of one run is held out of every other, SFT and RL alike,
    as long as they name the same `eval_fraction`.

    Args:
        cfg: A section `data.train` or `data.eval[i]`. `kwargs`: `digits`, a number or a list of them (default 2; both
            operands have as many, without leading zeros), and `operators`, characters out of `+-*` (default `+`).
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: Unknown arguments, or more problems wanted than there are.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        self._digits, self._operators = _arguments(arguments(cfg), key)
        self._sizes = [len(_operands(digits)) ** 2 * len(self._operators) for digits in self._digits]
        fraction = procedural_fraction(cfg)
        self._numbers = choose(
            cfg, self._sizes, lambda number: belongs(self._canonical(number), part, fraction), part=part, key=key
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        number = self._numbers[index]
        left, sign, right, digits = self._problem(number)
        result = str(_OPERATORS[sign](left, right))
        return Prompt(
            id=number,
            messages=({"role": "user", "content": f"{left}{sign}{right}="},),
            answer=result,
            response=result,
            level=(f"{sign} " if len(self._operators) > 1 else "") + f"{digits} digit{'s' * (digits > 1)}",
        )

    def _problem(self, number: int) -> tuple[int, str, int, int]:
        level, inside = locate(number, self._sizes)
        digits = self._digits[level]
        operands = _operands(digits)
        pair, sign = divmod(inside, len(self._operators))
        left, right = divmod(pair, len(operands))
        return operands[left], self._operators[sign], operands[right], digits

    def _canonical(self, number: int) -> str:
        left, sign, right, _ = self._problem(number)
        if sign != "-":
            left, right = min(left, right), max(left, right)
        return f"{left}{sign}{right}"


def _operands(digits: int) -> range:
    return range(10) if digits == 1 else range(10 ** (digits - 1), 10**digits)


def _arguments(kwargs: dict[str, Any], key: str) -> tuple[list[int], str]:
    given, operators = kwargs.pop("digits", 2), kwargs.pop("operators", "+")
    if kwargs:
        raise ConfigError(f"{key}.kwargs has {', '.join(kwargs)}; source arithmetic takes digits and operators")
    digits = list(dict.fromkeys(given)) if isinstance(given, list) else [given]
    if not digits or not all(isinstance(d, int) and 1 <= d <= 9 for d in digits):
        raise ConfigError(f"{key}.kwargs.digits is {given!r}; allowed: a number from 1 to 9, or a list of them")
    signs = "".join(dict.fromkeys(operators)) if isinstance(operators, (str, list)) else ""
    if not signs or any(sign not in _OPERATORS for sign in signs):
        raise ConfigError(f"{key}.kwargs.operators is {operators!r}; allowed: characters out of {''.join(_OPERATORS)}")
    return sorted(digits), signs
