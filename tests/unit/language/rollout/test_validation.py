"""Evaluation during training has every rank's share, or ends at its deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlhpc.language.rollout.validation import ask_until_complete
from rlhpc.runtime.errors import DeadlineExceeded

Rows = Mapping[str, Sequence[dict[str, Any]]]


def test_all_are_asked_again_when_one_was_lost_with_its_share() -> None:
    alive = iter([[0, 1], [0, 2]])
    said: dict[tuple[int, ...], list[Rows]] = {
        (0, 1): [{"default": []}, {}],
        (0, 2): [{"default": []}, {"default": []}],
    }
    assert ask_until_complete(lambda: next(alive), lambda ranks: said[tuple(ranks)], 60.0) == said[0, 2]


def test_a_share_that_is_always_missing_ends_at_the_deadline_and_says_so() -> None:
    with pytest.raises(DeadlineExceeded, match=r"1 of the 2 rollout ranks \(0, 1\) answered their share within"):
        ask_until_complete(lambda: [0, 1], lambda ranks: [{"default": []}, {}], 0.05)
