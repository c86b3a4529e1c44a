"""Math reward: comparison of an answer with the reference, as a number or as an expression."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package

_NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_TEX_BRACE = re.compile(
    r"\\.|[{}]", re.DOTALL
)  # a backslash escapes the next character, so "\\\\}" is a line break and a brace


def references_of(answer: str) -> list[str]:
    """Returns the reference answers, any of which is right: the texts of `answer` if it is a JSON list of texts, and `answer`
    itself.
    """
    if not answer.startswith('["'):
        return [answer]
    try:
        reference_texts = json.loads(answer)
    except ValueError:
        return [answer]
    is_list = isinstance(reference_texts, list) and all(
        isinstance(reference_text, str) for reference_text in reference_texts
    )
    return [*reference_texts, answer] if is_list else [answer]


def squeeze(text: str) -> str:
    """Replaces each run of white space by one space, and strips white space from both ends."""
    return " ".join(text.split())


def extract_boxed(text: str) -> str | None:
    """Returns the content of the last `\\boxed{...}`, which may contain nested braces."""
    box_start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box_start < 0:
        return None
    brace_start = text.find("{", box_start)
    if brace_start < 0 or text[box_start:brace_start].strip() not in ("\\boxed", "\\fbox"):
        boxed_words = text[box_start:].removeprefix("\\boxed").removeprefix("\\fbox").split()
        return boxed_words[0].strip("$.,") if boxed_words else None  # \boxed 5
    depth = 0
    for token in _TEX_BRACE.finditer(text, brace_start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[brace_start + 1 : token.start()].strip()
    return None


def _extract_hashed(answer_text: str) -> str | None:
    """Returns the rest of the line after the last `####`."""
    _, separator, suffix = answer_text.rpartition("####")
    answer = suffix.split("\n", 1)[0].strip() if separator else ""
    return answer or None


def extract_tagged(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`."""
    tag_end = text.rfind("</answer>")
    tag_start = text.rfind("<answer>", 0, max(tag_end, 0))
    return text[tag_start + len("<answer>") : tag_end].strip() if 0 <= tag_start < tag_end else None


def last_number(text: str) -> str | None:
    """Returns the last number of a text."""
    number_matches = _NUMBER.findall(text)
    return number_matches[-1] if number_matches else None


_EXTRACTION_METHODS: dict[str, Callable[[str], str | None]] = {
    "boxed": extract_boxed, "####": _extract_hashed, "tag": extract_tagged, "last_number": last_number,
    "whole": lambda answer_text: answer_text.strip() or None,
}  # fmt: skip


def check_extraction_methods(methods: Sequence[str], option: str) -> tuple[str, ...]:
    """Checks the names of extraction methods.

    Raises:
        ConfigError: A name is unknown.
    """
    unknown_methods = [method for method in methods if method not in _EXTRACTION_METHODS]
    if unknown_methods or isinstance(methods, str):
        unknown_method = methods if isinstance(methods, str) else unknown_methods[0]
        raise ConfigError(
            f"reward.terms: {option} has {unknown_method!r}; allowed: a list of {', '.join(_EXTRACTION_METHODS)}"
        )
    return tuple(methods)


def extract(text: str, methods: Sequence[str]) -> str | None:
    """Returns the answer of the first extraction method that finds one; None if no method does."""
    return next((answer for method in methods if (answer := _EXTRACTION_METHODS[method](text)) is not None), None)


_MAX_CHARACTERS = 1000
"""Maximum length of an answer that is parsed or read as a number."""

_DOLLARS = re.compile(r"\$+([^$]*[^$\\])\$+")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:\\[,;:! ]\d{3})+(?!\d)")  # 1\,000
_THIN_SPACE = re.compile(r"\\[,;:! ]")
_EXPONENT = re.compile(
    r"([-+]?(?:\d+\.?\d*|\.\d+))e([-+]?\d{1,3})"
)  # math-verify reads e as Euler's number, and E as a power of ten
_MIXED = re.compile(r"([-+]?\d+)\s+(\d+)/(\d+)")  # 3 1/2
_CURRENCY = re.compile(r"(.*[\d}])\s*\b(dollars?|euros?|yen|yuan)", re.IGNORECASE | re.DOTALL)

_WORD = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{\s*([A-Za-z]{2,})\s*\}|([A-Za-z]{2,})")
_DECIMAL = re.compile(r"(\d+(?:,\d{3})+|\d*)(\.\d*)?(?:E([-+]?\d{1,3}))?")
_PERCENT = re.compile(r"([-+]?[\d.,]+)\s*\\?%")
_RATIO = re.compile(r"(\d+)/(\d+)")
_FRACTION = re.compile(r"(\d*)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")


def to_latex(answer: str) -> str:
    """Converts an answer to LaTeX for math-verify; removes surrounding `$` and a final full stop."""
    ascii_text = " ".join(
        "".join(_to_ascii(character) for character in answer).split()
    )  # a line end in a matrix is white space
    if dollars_match := _DOLLARS.fullmatch(ascii_text):
        ascii_text = dollars_match[1].strip()
    ascii_text = ascii_text.removesuffix(".").strip()
    ascii_text = _THOUSANDS.sub(lambda thousands_match: _THIN_SPACE.sub("", thousands_match[0]), ascii_text)
    if dollars_match := _EXPONENT.fullmatch(ascii_text):
        return f"{dollars_match[1]}E{dollars_match[2]}"
    if (dollars_match := _MIXED.fullmatch(ascii_text)) and int(dollars_match[2]) < int(dollars_match[3]):
        return rf"{dollars_match[1]}\frac{{{dollars_match[2]}}}{{{dollars_match[3]}}}"
    if dollars_match := _CURRENCY.fullmatch(ascii_text):
        return rf"{dollars_match[1]}\text{{ {dollars_match[2]}}}"
    return ascii_text


def _parse_word(latex: str) -> str | None:
    """Returns the word of an answer that is a single word, also within `\\text{}`; None for other texts. math-verify reads
    some words as expressions.

    Args:
        latex: Result of `to_latex`.
    """
    word_match = _WORD.fullmatch(latex)
    return (word_match[1] or word_match[2]) if word_match else None


def parse_number(latex: str) -> Fraction | None:
    """Returns the value of a plain number: an integer, a decimal, a ratio, a fraction or a mixed number.

    math-verify reads these numbers as the same values. Returns None for other texts, which math-verify has to parse.

    Args:
        latex: Result of `to_latex`.
    """
    if len(latex) > _MAX_CHARACTERS:
        return None
    number_text = latex.removeprefix("\\$").removeprefix("$").removesuffix("\\$").removesuffix("$").strip()
    sign_factor = -1 if number_text[:1] == "-" else 1
    number_text = number_text[number_text[:1] in ("-", "+") :].strip()
    if fraction_match := _FRACTION.fullmatch(number_text):
        whole_number, numerator, denominator = (
            int(fraction_match[1] or 0),
            int(fraction_match[2] or fraction_match[3]),
            int(fraction_match[4] or fraction_match[5]),
        )
        if denominator == 0 or (whole_number and numerator >= denominator):
            return None
        return sign_factor * (whole_number + Fraction(numerator, denominator))
    if fraction_match := _RATIO.fullmatch(number_text):
        return (
            sign_factor * Fraction(int(fraction_match[1]), int(fraction_match[2])) if int(fraction_match[2]) else None
        )
    if (fraction_match := _DECIMAL.fullmatch(number_text)) and (
        fraction_match[1] or (fraction_match[2] or "").strip(".")
    ):
        digits = (fraction_match[1].replace(",", "") or "0") + (fraction_match[2] or "").rstrip(".")
        return sign_factor * Fraction(f"{digits}E{fraction_match[3] or 0}")
    return None


def normalize_answer(answer: str) -> str:
    """Returns a key for the majority vote. 1,200.0 and $1200$ have the same key, and so have 1/2 and 0.5, Paris. and paris.

    Answers with the same key are equal for the reward `math`, but equal answers may have different keys.
    """
    latex = to_latex(answer)
    percent_match = _PERCENT.fullmatch(latex)
    parsed_number = parse_number(percent_match[1] if percent_match else latex)
    return " ".join(latex.split()).casefold() if parsed_number is None else str(parsed_number)


def _to_ascii(character: str) -> str:
    """Converts full-width forms, the digits of any script, and the minus sign to ASCII."""
    if character < "\x80":
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    return {"\u2212": "-", "\u3000": " "}.get(character, character)


class MathReward:
    """Reward of 1 if the answer equals the reference, and 0 otherwise. Numbers are compared by value, and expressions by
    algebra (math-verify).

    The answer is the last `\\boxed{...}`, or the text after the last `####` if there is no box. A reference that is a worked
    solution, as in GSM8K and MATH, is read the same way.

    Args:
        extract: Extraction methods in the order of their use: `boxed`, `####`, `tag` (`<answer>…</answer>`), `last_number`,
            `whole`.
        last_number: Whether the last number of a response is its answer if no other method finds an answer. This is lenient:
            it rewards responses that do not mark their answer.
    """

    needs_answer = True
    preload = ("math_verify",)
    memory_mb = 4096

    def __init__(self, extract: Sequence[str] = ("boxed", "####"), last_number: bool = False) -> None:
        require_package("math_verify", "reward 'math' needs math-verify")
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warnings about timeouts, which the pool enforces
        self._methods = check_extraction_methods(extract, "extract of 'math'") + (
            ("last_number",) if last_number else ()
        )

    def __call__(self, sample: Sample) -> float:
        expected_answers = [
            extract(reference, ("boxed", "####", "whole")) for reference in references_of(sample.answer)
        ]
        reference_answers = [reference for reference in expected_answers if reference is not None]
        if not reference_answers:
            raise ValueError("the problem has no answer to compare with")
        answer = extract(sample.response, self._methods)
        return float(answer is not None and any(equal(reference, answer) for reference in reference_answers))


def equal(reference: str, answer: str) -> bool:
    """Returns whether two answers are the same number, expression, set, interval, matrix or text, according to math-verify.

    Identical texts, plain numbers with the same value and identical words need no parser; math-verify parses other pairs.
    """
    if len(answer) > _MAX_CHARACTERS:
        return False
    reference, answer = to_latex(reference), to_latex(answer)
    for parse in (str, parse_number, _parse_word):
        parsed_reference = parse(reference)
        if parsed_reference is not None and parsed_reference == parse(answer):
            return True
    # The pool limits the time. The timeouts of math-verify would require the main thread.
    library = importlib.import_module("math_verify")
    return bool(library.verify(_parse(reference), _parse(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parse(answer: str) -> list[Any]:
    library = importlib.import_module("math_verify")
    extraction_configs = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]
    expressions: list[Any] = library.parse(f"${answer}$", extraction_configs, parsing_timeout=None)
    return expressions
