"""Ranges of configuration keys: what they allow, and how they are written."""

from __future__ import annotations

import math

from rlhpc.runtime.key_metadata import Choices, Range


def test_an_interval_in_words() -> None:
    said = {
        Range(0): "it must not be negative", Range(0, above=True): "it must be greater than 0",
        Range(0, 1): "it must lie between 0 and 1", Range(0, 1, below=True): "it must be at least 0 and below 1",
        Range(0, 10, above=True): "it must be above 0 and at most 10", Range(1, above=True): "it must be above 1",
        Range(1, also=(-1, "none")): "it must be at least 1, or -1 for none",
    }  # fmt: skip
    assert {allowed: allowed.rule() for allowed in said} == said
    assert [allowed.short() for allowed in said] == [
        "[0, ∞)",
        "(0, ∞)",
        "[0, 1]",
        "[0, 1)",
        "(0, 10]",
        "(1, ∞)",
        "[1, ∞) or -1 (null)",
    ]
    assert math.inf not in Range(0, 1) and 0 in Range(0) and 0 not in Range(0, above=True)


def test_a_number_of_its_own_meaning_lies_outside_the_interval() -> None:
    interval = Range(1, 5, also=(-1, "none"))
    assert [number for number in range(-2, 7) if number in interval] == [-1, 1, 2, 3, 4, 5]
    assert (
        interval.short() == "[1, 5] or -1 (null)" and interval.rule() == "it must lie between 1 and 5, or -1 for none"
    )


def test_choices_are_words() -> None:
    assert Choices("a", "b") == ("a", "b") and "b" in Choices("a", "b")
