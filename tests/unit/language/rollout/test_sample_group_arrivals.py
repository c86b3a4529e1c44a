"""What an actor makes of a prompt that was drawn twice."""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.language.rollout.sample_group import Arrivals, SampleGroup, column_message
from tests.unit.language.rollout.answers import group


def column(of: SampleGroup, maker: str, value: float) -> dict[str, Any]:
    return column_message(of, maker, torch.full((of.batch.tokens,), value))


def test_columns_stay_with_the_answers_that_they_are_of() -> None:
    arrivals = Arrivals(frozenset({"critic", "reference"}))
    arrivals.begin(1)
    lost, again = group(1, 0, 5, 6), group(1, 0, 7, 8, 9)
    for message in (lost.pack(), column(lost, "critic", 1.0), again.pack(), column(again, "reference", 2.0)):
        arrivals.add(message)
        assert arrivals.find_missing_positions(1, [0]) != {}
    assert arrivals.find_missing_positions(1, [0]) == {"reference": [0]}
    arrivals.add(column(again, "critic", 3.0))
    assert arrivals.find_missing_positions(1, [0]) == {}
    found, columns = arrivals.pop_complete(1, 0)
    assert found.answers_digest == again.answers_digest and {
        name: values.tolist() for name, values in columns.items()
    } == {
        "critic": [3.0] * 5,
        "reference": [2.0] * 5,
    }


def test_what_was_given_away_does_not_come_again() -> None:
    arrivals = Arrivals(frozenset())
    arrivals.begin(1)
    first, second, later = group(1, 0, 5), group(1, 0, 6), group(2, 0, 7)
    for one in (first, second, later):
        arrivals.add(one.pack())
    assert arrivals.pop_complete(1, 0)[0].answers_digest == first.answers_digest
    arrivals.add(second.pack())
    assert arrivals.find_missing_positions(1, [0]) == {"": [0]}
    arrivals.begin(2)
    arrivals.add(second.pack())
    assert arrivals.find_missing_positions(2, [0]) == {} and arrivals.find_missing_positions(1, [0]) == {"": [0]}
