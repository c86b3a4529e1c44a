"""Whether a mathematical answer is right, as a number or as an expression."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rlhpc.language.rewards.answers import check_ways, extract
from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.lookup import required

_MOST_CHARACTERS = 1000
_PLAIN = re.compile(r"([-+]?)(\d+(?:,\d{3})*|\d*)(\.\d+)?(?:[eE]([-+]?\d{1,3}))?(?:/(\d+))?")
_UNIT = re.compile(r"\s+[A-Za-z]{2,}$")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")


class MathReward:
    """1 where the answer equals the reference, else 0: numbers by value, expressions by algebra (math-verify).

    The answer is taken from the last `\\boxed{...}`, else from behind the last `####`; a reference that is a worked
    solution with one of these, as in GSM8K and MATH, is read the same way.

    Args:
        extract: Where the answer is looked for, in this order: `boxed`, `####`, `tag` (`<answer>…</answer>`),
            `last_number`, `whole`.
        last_number: Takes the last number of a response in which nothing else is found. Lenient: it rewards answers
            that a reader has to guess.
    """

    preload = ("math_verify",)
    memory_mb = 4096

    def __init__(self, extract: Sequence[str] = ("boxed", "####"), last_number: bool = False) -> None:
        required("math_verify", "reward 'math' needs math-verify")
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about deadlines, which are kept here
        self._ways = check_ways(extract, "extract of 'math'") + (("last_number",) if last_number else ())

    def __call__(self, sample: Sample) -> float:
        wanted = extract(sample.answer, ("boxed", "####", "whole"))
        if wanted is None:
            raise ValueError("the problem has no answer to compare with")
        given = extract(sample.response, self._ways)
        return float(given is not None and equal(wanted, given))


def equal(wanted: str, given: str) -> bool:
    """Whether two answers are the same number, expression, set, interval or text. The reference comes first."""
    if len(given) > _MOST_CHARACTERS:
        return False
    wanted, given = _tidy(wanted), _tidy(given)
    if wanted == given:
        return True
    number = _number(wanted)
    if number is not None and (found := _number(_UNIT.sub("", given))) is not None:  # 18, where it says 18 dollars
        return number == found
    # The caller's deadline ends what takes too long; alarms of the library's own would need the main thread.
    library = importlib.import_module("math_verify")
    return bool(library.verify(_parsed(wanted), _parsed(given), timeout_seconds=None))


def _tidy(answer: str) -> str:
    answer = answer.strip().strip("$").strip()
    for spaced in ("\\!", "\\,", "\\;", "\\ "):
        answer = answer.replace(spaced, "")
    return answer.removesuffix(".").strip()


def _number(text: str) -> Fraction | None:
    text = re.sub(r"^([-+])\s+", r"\1", text.removeprefix("\\$").removeprefix("$").strip())
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    match = _PLAIN.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    below = int(match[5] or 1)
    if below == 0:
        return None
    value = Fraction((match[2].replace(",", "") or "0") + (match[3] or "") + f"e{match[4] or 0}") / below
    return -value if match[1] == "-" else value


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> list[Any]:
    library = importlib.import_module("math_verify")
    kinds = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]
    parsed: list[Any] = library.parse(f"${answer}$", kinds, parsing_timeout=None)
    return parsed
