"""Whether a mathematical answer is right, as a number or as an expression."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from rlhpc.language.rewards.answers import check_ways, extract
from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.notation import MAX_CHARACTERS, parse_number, parse_word, to_latex
from rlhpc.runtime.plugins import required


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

    needs_answer = True
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


def equal(reference: str, answer: str) -> bool:
    """Returns whether two answers are the same number, expression, set, interval, matrix or text, as math-verify says.

    Identical texts, plain numbers of one value and identical words need no parser; every other pair goes to it.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    reference, answer = to_latex(reference), to_latex(answer)
    if reference == answer:
        return True
    number = parse_number(reference)
    if number is not None and number == parse_number(answer):
        return True
    word = parse_word(reference)
    if word is not None and word == parse_word(answer):
        return True
    # The caller's deadline ends what takes too long; alarms of the library's own would need the main thread.
    library = importlib.import_module("math_verify")
    return bool(library.verify(_parsed(reference), _parsed(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> list[Any]:
    library = importlib.import_module("math_verify")
    kinds = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]
    parsed: list[Any] = library.parse(f"${answer}$", kinds, parsing_timeout=None)
    return parsed
