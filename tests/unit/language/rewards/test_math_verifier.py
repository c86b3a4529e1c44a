"""Final answers in many notations: the math reward and the majority's key against math-verify itself."""

from __future__ import annotations

import logging
from itertools import combinations
from typing import Any

import pytest

from rlhpc.language.rewards.math_verifier import normalize_answer, parse_number, to_latex
from tests.extras import need_extra

need_extra("llm")
import math_verify

from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.math_verifier import MathReward, equal

# Groups of one value each; within a kind, different groups have different values.
NOTATIONS: dict[str, list[list[str]]] = {
    "fraction": [
        [r"\frac{1}{2}", "1/2", r"\dfrac12", "0.5", ".5", r"\frac{2}{4}", r"\tfrac{1}{2}", "+1/2"],
        [r"-\frac{3}{4}", "-3/4", r"\frac{-3}{4}", "-0.75", r"- \frac{3}{4}", "-.75"],
        [r"\frac{21}{2}", "21/2", "10.5"],
    ],
    "decimal": [
        ["3.14", "3.140", "314/100", "+3.14"],
        ["0.314", ".314", "314/1000"],
        ["12", "12.0", "12.", "012", "$12$", r"\(12\)"],
    ],
    "mixed": [
        [
            r"3\frac{1}{2}",
            "7/2",
            "3.5",
            r"3\frac12",
            r"3 \frac{1}{2}",
            r"3\dfrac{1}{2}",
            r"3\,\frac{1}{2}",
            "3 1/2",
            r"\frac{7}{2}",
        ],
        [r"2\frac{1}{2}", "2.5", r"\frac52", "2 1/2"],
        [r"-1\frac{1}{4}", "-5/4", "-1.25", "-1 1/4", r"-\frac{5}{4}"],
        [r"31\frac{1}{2}", "63/2", "31.5"],
        ["31/2", "15.5", r"15\frac{1}{2}"],
    ],
    "percent": [[r"50\%", "50%", r"50 \%", "50 percent"], [r"5\%", "5%"], [r"12.5\%", r"\frac{25}{2}\%", "12.5%"]],
    "unit": [
        [
            "18",
            r"18\text{ cm}",
            "18 cm",
            r"\$18",
            "18 dollars",
            "$18",
            r"18 \text{ dollars}",
            "18 apples",
            r"18^\circ",
            r"18\,\text{cm}^2",
        ],
        ["17", "17 hours", r"17 \mathrm{kg}", "17 euros"],
        [r"\frac{1}{2}", r"\frac{1}{2} dollars", r"\frac{1}{2}\text{ cups}"],
    ],
    "thousands": [
        ["1000", "1,000", "1{,}000", r"1\,000", r"1\ 000", r"1\!000", "1,000.0", "1000.", r"1,\!000"],
        ["1234567", "1,234,567", r"1\,234\,567", "1{,}234{,}567", "1,234,567.00"],
        ["100", "100.00"],
    ],
    "matrix": [
        [
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}",
            r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}",
            "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}",
            r"\left( \begin{array}{c} 1 \\ 2 \end{array} \right)",
        ],
        [
            r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}",
            r"\begin{pmatrix}1\\3\end{pmatrix}",
            r"\begin{pmatrix} 1 \\[2pt] 3 \end{pmatrix}",
        ],
        [
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        ],
        [r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & \frac{10}{2} \end{pmatrix}"],
        [r"\begin{pmatrix} -2 \\ \, 1/2 \end{pmatrix}", r"\begin{pmatrix}-2\\0.5\end{pmatrix}"],
    ],
    "interval": [
        ["[0,1]", "[0, 1]", r"\left[0,1\right]", r"[0,\,1]"],
        ["[0,1)", "[0, 1)", r"\left[0, 1\right)"],
        ["(0,1)", r"(0,\;1)"],
        [r"(-\infty, 2]", r"(-\infty,2]", r"x \le 2"],
        [r"[0,1] \cup [2,3]", r"[0, 1]\cup[2, 3]"],
    ],
    "set": [
        [r"\{1,2,3\}", r"\{3,2,1\}", r"\{1,\,2,\,3\}", "1,2,3", "1, 2 and 3"],
        [r"\{1,2\}", r"\{2, 1\}"],
        [r"\emptyset", r"\{\}"],
    ],
    "tuple": [
        ["(1,2,3)", "(1, 2, 3)", r"\left(1,2,3\right)", r"(1,\ 2,\ 3)"],
        ["(3,2,1)", r"(3,\!2,1)"],
        [r"(\frac12, 2, 3)", "(0.5,2,3)"],
    ],
    "scientific": [
        ["1500", r"1.5 \times 10^3", r"1.5\times10^{3}", r"1.5 \cdot 10^{3}", "1.5e3", "1.5E3", "1.5e+3"],
        ["0.001", "10^{-3}", r"1 \times 10^{-3}", "1e-3", "1E-3"],
        [r"2 \times 10^6", "2e6", "2000000", "2,000,000"],
    ],
    "text": [
        [r"\text{Monday}", "Monday", "monday", "Monday.", r"\textbf{Monday}"],
        ["Tuesday", r"\text{Tuesday}"],
        [r"\text{north}", "north"],
        ["A", r"\text{A}", "(A)", "A."],
        ["B", "(B)"],
    ],
    "word": [
        ["18", "+18"],
        ["18 million"],
        ["5 thousand"],
        ["3 dozen"],
        ["2 thirds"],
        ["5 squared"],
        ["7 pi"],
        ["12 minus"],
        ["12"],
        ["5"],
        ["7"],
        ["2"],
        ["3"],
    ],
    "root": [
        [r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt8", r"\frac{4}{\sqrt{2}}", r"2 \sqrt{2}"],
        [r"\sqrt{2}", r"\frac{2}{\sqrt2}", "2^{1/2}"],
        [r"\sqrt[3]{8}", "2"],
    ],
    "pi": [
        [r"2\pi", r"2 \pi", "2π", r"\frac{4\pi}{2}"],
        [r"\frac{\pi}{2}", r"\pi/2", r"0.5\pi", r"\frac{1}{2}\pi"],
        [r"\pi"],
    ],
    "unicode": [["-5", "\u22125", "- 5", "\uff0d\uff15"], ["5", "\uff15", "\u0665"], ["1/2", "\uff11\uff0f\uff12"]],
    "algebra": [
        ["x^2+1", "1+x^{2}", r"x^2\,+\,1", r"x^{2} + 1"],
        ["x^2-1", "(x-1)(x+1)"],
        ["x=5", "5", "x = 5"],
        [r"3 + 4i", "4i+3"],
    ],
}

# Each pair on which the reward and math-verify may differ has one of these spellings in it.
REWRITTEN = {
    "3 1/2": "math-verify reads the last ratio of it alone",
    "2 1/2": "likewise",
    "-1 1/4": "likewise",
    "18 dollars": "math-verify multiplies the letters; it knows \\$18 and other units",
    "17 euros": "likewise",
    r"\frac{1}{2} dollars": "likewise",
    r"1\,000": "a thin space between thousands is a product to math-verify",
    r"1\ 000": "likewise",
    r"1\,234\,567": "likewise",
    "1.5e3": "e is Euler's number to math-verify, E a power of ten",
    "1.5e+3": "likewise",
    "1e-3": "likewise",
    "2e6": "likewise",
    "Monday.": "with its full stop a word is no expression to math-verify",
    "A.": "likewise",
    "north": "some words are expressions to math-verify",
    "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}": "math-verify does not find an answer of several lines",
    "\uff0d\uff15": "math-verify reads ASCII digits only",
    "\uff15": "likewise",
    "\u0665": "likewise",
    "\uff11\uff0f\uff12": "likewise",
}

# What math-verify says of pairs that a reader might judge otherwise; the reward follows it.
AS_MATH_VERIFY = {
    r"\frac{25}{2}\%": "unequal to 12.5\\%: 25/2·1/100 is not compared with 12.5/100",
    r"\begin{pmatrix} 1 \\[2pt] 3 \end{pmatrix}": "the distance of rows is not read",
    r"x \le 2": "a relation answers an interval only where the reference is the relation",
}


def pairs() -> list[tuple[str, str, bool]]:
    """Returns (reference, answer, equal): each spelling with its group's first, both ways, and with other groups."""
    rows = []
    for groups in NOTATIONS.values():
        rows += [pair for first, *others in groups for x in others for pair in ((first, x, True), (x, first, True))]
        rows += [pair for a, b in combinations(groups, 2) for pair in ((a[0], b[-1], False), (b[0], a[-1], False))]
    return rows


@pytest.fixture(scope="module")
def verdict() -> Any:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    kinds = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    parsed: dict[str, Any] = {}

    def judge(reference: str, answer: str) -> bool:
        for text in (reference, answer):
            if text not in parsed:
                parsed[text] = math_verify.parse(f"${text}$", kinds, parsing_timeout=None)
        return math_verify.verify(parsed[reference], parsed[answer], timeout_seconds=None)

    return judge


@pytest.mark.long
def test_the_reward_judges_as_math_verify(verdict: Any) -> None:
    """Several hundred pairs: the reward differs only for spellings that are rewritten, and then it is right."""
    assert len(pairs()) >= 300
    differ = [(a, b) for a, b, _ in pairs() if equal(a, b) != verdict(a, b)]
    assert [pair for pair in differ if not REWRITTEN.keys() & set(pair)] == []
    assert {text for pair in differ for text in pair} >= REWRITTEN.keys()  # each line is needed
    wrong = [(a, b) for a, b, same in pairs() if equal(a, b) != same]
    assert [pair for pair in wrong if not AS_MATH_VERIFY.keys() & set(pair)] == []
    assert {text for pair in wrong for text in pair} >= AS_MATH_VERIFY.keys()


def test_plain_numbers_of_one_value_are_equal_to_math_verify(verdict: Any) -> None:
    """The shortcut for numbers, and the key of a vote, never call two answers equal that math-verify tells apart."""
    spellings = [to_latex(text) for groups in NOTATIONS.values() for group in groups for text in group]
    numbers = {text: value for text in dict.fromkeys(spellings) if (value := parse_number(text)) is not None}
    assert len(numbers) > 50
    same = [(a, b) for a, b in combinations(numbers, 2) if numbers[a] == numbers[b]]
    assert [pair for pair in same if not verdict(*pair)] == []
    one_key = [(a, b) for a, b, _ in pairs() if normalize_answer(a) == normalize_answer(b)]
    assert len(one_key) > 100
    assert [pair for pair in one_key if not equal(*pair)] == []


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (["1200", "1,200", " 1200.0", "$1200$", "\\$1,200", "+1200", "2400/2"], "120"),
        (["0.5", "1/2", ".5", "\\frac{1}{2}", "$\\dfrac{1}{2}$", "0.50"], "2"),
        (["Paris", "paris.", " PARIS "], "London"),
        (["x + 1", "x  + 1"], "x - 1"),
    ],
)
def test_normalized_answers(same: list[str], other: str) -> None:
    assert len({normalize_answer(text) for text in same}) == 1
    assert normalize_answer(other) != normalize_answer(same[0])


def test_normalizing_survives_what_models_write() -> None:
    for text in (
        "1/0",
        "",
        ".",
        "-",
        "1e999999999",
        "9" * 5000,
        "\\frac{1}{0}",
        "²",
        "½",
        "1\\,000",
        "3\\frac{1}{0}",
        "1,2,3",
        "1,23",
    ):
        assert isinstance(normalize_answer(text), str)
    assert normalize_answer("1,2") != normalize_answer("12")  # a pair, not a number


def test_any_of_several_references_is_right() -> None:
    references = '["1", "\\\\boxed{42}"]'
    assert [MathReward()(Sample("", f"It is \\boxed{{{text}}}.", references, {})) for text in ("42", "1", "41")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert MathReward()(Sample("", "\\boxed{[1, 2]}", "[1, 2]", {})) == 1.0
