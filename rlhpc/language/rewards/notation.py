"""Notations of a final answer: the LaTeX that math-verify reads, the value of a plain number, and the key of a vote.

math-verify decides which answers are equal. This module only rewrites the few notations that math-verify misreads, each
into one that it reads; a line of `REWRITTEN` in tests/unit/language/rewards/test_notation.py explains each of them.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_CHARACTERS = 1000
"""Longer answers are neither parsed nor read as numbers."""

_DOLLARS = re.compile(r"\$+([^$]*[^$\\])\$+")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:\\[,;:! ]\d{3})+(?!\d)")  # 1\,000
_THIN_SPACE = re.compile(r"\\[,;:! ]")
_EXPONENT = re.compile(
    r"([-+]?(?:\d+\.?\d*|\.\d+))e([-+]?\d{1,3})"
)  # e is Euler's number to math-verify, E a power of ten
_MIXED = re.compile(r"([-+]?\d+)\s+(\d+)/(\d+)")  # 3 1/2
_CURRENCY = re.compile(r"(.*[\d}])\s*\b(dollars?|euros?|yen|yuan)", re.IGNORECASE | re.DOTALL)

_WORD = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{\s*([A-Za-z]{2,})\s*\}|([A-Za-z]{2,})")
_DECIMAL = re.compile(r"(\d+(?:,\d{3})+|\d*)(\.\d*)?(?:E([-+]?\d{1,3}))?")
_PERCENT = re.compile(r"([-+]?[\d.,]+)\s*\\?%")
_RATIO = re.compile(r"(\d+)/(\d+)")
_FRACTION = re.compile(r"(\d*)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")


def to_latex(answer: str) -> str:
    """Returns an answer in the LaTeX that math-verify reads, without the `$` and the full stop around it."""
    text = " ".join(
        "".join(_ascii(character) for character in answer).split()
    )  # a line's end in a matrix is white space
    if match := _DOLLARS.fullmatch(text):
        text = match[1].strip()
    text = text.removesuffix(".").strip()
    text = _THOUSANDS.sub(lambda match: _THIN_SPACE.sub("", match[0]), text)
    if match := _EXPONENT.fullmatch(text):
        return f"{match[1]}E{match[2]}"
    if (match := _MIXED.fullmatch(text)) and int(match[2]) < int(match[3]):
        return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if match := _CURRENCY.fullmatch(text):
        return rf"{match[1]}\text{{ {match[2]}}}"
    return text


def parse_word(latex: str) -> str | None:
    """Returns a word, with or without `\\text{}` around it; None is anything else. To math-verify some are expressions.

    Args:
        latex: What `to_latex` returned.
    """
    match = _WORD.fullmatch(latex)
    return (match[1] or match[2]) if match else None


def parse_number(latex: str) -> Fraction | None:
    """Returns the value of a plain number: an integer, a decimal, a ratio, a fraction or a mixed number.

    math-verify reads each of these as the same value. None is anything else, and what math-verify alone can decide.

    Args:
        latex: What `to_latex` returned.
    """
    if len(latex) > MAX_CHARACTERS:
        return None
    text = latex.removeprefix("\\$").removeprefix("$").removesuffix("\\$").removesuffix("$").strip()
    sign = -1 if text[:1] == "-" else 1
    text = text[text[:1] in ("-", "+") :].strip()
    if match := _FRACTION.fullmatch(text):
        integer, above, below = int(match[1] or 0), int(match[2] or match[3]), int(match[4] or match[5])
        if below == 0 or (integer and above >= below):
            return None
        return sign * (integer + Fraction(above, below))
    if match := _RATIO.fullmatch(text):
        return sign * Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    if (match := _DECIMAL.fullmatch(text)) and (match[1] or (match[2] or "").strip(".")):
        digits = (match[1].replace(",", "") or "0") + (match[2] or "").rstrip(".")
        return sign * Fraction(f"{digits}E{match[3] or 0}")
    return None


def normalize_answer(answer: str) -> str:
    """Returns the key by which a majority counts equal answers: 1,200.0 and $1200$; 1/2 and 0.5; Paris. and paris.

    Answers with one key are equal to the reward `math`; equal answers may have several keys.
    """
    latex = to_latex(answer)
    percent = _PERCENT.fullmatch(latex)
    number = parse_number(percent[1] if percent else latex)
    return " ".join(latex.split()).casefold() if number is None else str(number)


def _ascii(character: str) -> str:
    """Full-width forms, the digits of any script, and the minus sign, in ASCII."""
    if character < "\x80":
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    return {"\u2212": "-", "\u3000": " "}.get(character, character)
