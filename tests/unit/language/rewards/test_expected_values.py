"""Values that a sandbox returns, and claims about them that are evaluated outside of it."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from rlhpc.language.rewards import expected_values
from rlhpc.language.rewards.expected_values import Approximation, decode, has_raised, holds, value_of

ONE = {"i": "0x1"}


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (None, None),
        (True, True),
        ("text", "text"),
        ({"i": "-0xff"}, -255),
        ({"f": (0.1).hex()}, 0.1),
        ({"c": [(1.0).hex(), (-2.0).hex()]}, 1 - 2j),
        ({"b": "00ff"}, b"\x00\xff"),
        ({"l": [ONE, "a"]}, [1, "a"]),
        ({"t": [ONE, {"t": []}]}, (1, ())),
        ({"s": [ONE, ONE]}, {1}),
        ({"d": [["a", ONE], [ONE, {"l": []}]]}, {"a": 1, 1: []}),
        ({"q": ["0x1", "0x3"]}, Fraction(1, 3)),
        ({"n": "1.50"}, Decimal("1.50")),
        ({"m": ["timedelta", [1, 2, 3]]}, datetime.timedelta(1, 2, 3)),
        ({"m": ["date", "2020-02-29"]}, datetime.date(2020, 2, 29)),
    ],
)
def test_values_are_decoded_with_their_types(encoded: Any, value: Any) -> None:
    result = decode(encoded)
    assert result == value and type(result) is type(value)


def test_a_generator_is_decoded_as_an_iterator() -> None:
    assert list(decode({"g": [ONE, "b"]})) == [1, "b"]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (1, "no value: a int"),
        ({}, "no value: a dict"),
        ({"i": "0x1", "f": "0x1"}, "no value: a dict"),
        ({"x": 1}, "no value of kind 'x'"),
        ({"i": "seven"}, "invalid literal"),
        ({"c": [1]}, "no value of kind 'c'"),
        ({"q": ["0x1", "0x0"]}, "no value of kind 'q'"),
        ({"d": [[{"l": []}, ONE]]}, "no value of kind 'd'"),
        ({"m": ["year", "2020"]}, "no value of kind 'm'"),
        ({"n": "1e99999"}, "an exponent of 99999"),
        ({"s": [{"i": hex(n * (2**61 - 1))} for n in range(40)]}, "members that share their hash"),
    ],
)
def test_what_a_program_writes_in_the_place_of_a_value_is_refused(encoded: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(encoded)


def test_nesting_is_bounded() -> None:
    value: Any = None
    for _ in range(70):
        value = {"l": [value]}
    with pytest.raises(ValueError, match="nested too deep"):
        decode(value)


@pytest.mark.parametrize(
    ("expected", "options", "value", "near"),
    [
        (1.0, {}, 1.0 + 1e-7, True),
        (1.0, {}, 1.0 + 1e-5, False),
        (0.0, {}, 1e-13, True),
        (1.0, {"abs": 0.1}, 1.05, True),
        (100.0, {"rel": 0.1}, 109.0, True),
        (100.0, {"abs": 0.1}, 100.00005, True),
        (100.0, {"abs": 1e-9}, 100.00005, False),  # an absolute tolerance alone leaves no relative one
        ([1.0, (2.0,)], {}, [1.0, (2.0 + 1e-8,)], True),
        ([1.0], {}, [1.0, 2.0], False),
        ({"a": 1.0}, {}, {"a": 1.0 + 1e-8}, True),
        ({"a": 1.0}, {}, {"b": 1.0}, False),
        (1.0, {}, "1.0", False),
        (1, {}, True, False),
        ("x", {}, "x", True),
        (math.inf, {}, math.inf, True),
        (1.0, {"rel": math.inf}, 5.0, False),
    ],
)
def test_approximations_are_those_of_pytest(expected: Any, options: dict[str, float], value: Any, near: bool) -> None:
    assert (Approximation(expected, **options) == value) == near


def test_a_claim_that_cannot_be_evaluated_does_not_hold() -> None:
    answers = [{"value": ONE}]
    assert holds(lambda given: value_of(given, 0) == 1, answers)
    assert not holds(lambda given: value_of(given, 0) == 2, answers)
    assert not holds(lambda given: value_of(given, 1), answers)


@pytest.mark.parametrize(
    ("classes", "names", "pattern", "result"),
    [
        (["KeyError", "LookupError"], ["LookupError"], None, True),
        (["KeyError", "LookupError"], ["ValueError"], None, False),
        (["ValueError"], ["ValueError"], "neg.tive", True),
        (["ValueError"], ["ValueError"], "^positive", False),
        (["NameError", "Exception"], ["Exception"], None, False),  # the program lacks the function
        (["NameError"], ["NameError"], None, True),
    ],
)
def test_exceptions_of_a_program(classes: list[str], names: list[str], pattern: str | None, result: bool) -> None:
    answer = {"value": {"t": ["ValueError: negative", {"l": list(classes)}]}}
    assert has_raised([answer], 0, names, pattern) == result


def test_computations_outside_are_bounded() -> None:
    length = expected_values.FUNCTIONS["range"][0]
    assert list(length(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="too large"):
        length(1 << 21)
    factorial = expected_values.KNOWN_FUNCTIONS["math.factorial"][0]
    assert factorial(5) == 120
    with pytest.raises(ValueError, match="too large"):
        factorial(5001)
