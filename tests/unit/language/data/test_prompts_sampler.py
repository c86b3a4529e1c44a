"""The order in which problems are drawn."""

from __future__ import annotations

import pytest

from rlhpc.language.data import PromptSampler
from rlhpc.runtime.errors import CheckpointError, ConfigError


def test_every_epoch_draws_every_problem_once_in_another_order() -> None:
    sampler = PromptSampler(10, 4, seed=3)
    drawn = [position for _ in range(5) for position in sampler.next()]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))
    assert drawn[:10] != drawn[10:20]
    assert sampler.epoch == 2


def test_the_order_is_the_same_for_ever() -> None:
    # Pinned: a run that is resumed under another version must go on in the same order.
    assert PromptSampler(8, 16, seed=1).next() == [2, 5, 7, 4, 6, 0, 3, 1, 3, 2, 4, 1, 7, 0, 5, 6]


def test_without_shuffle() -> None:
    sampler = PromptSampler(3, 2, shuffle=False)
    assert [sampler.next() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_resuming_goes_on_exactly(stop: int) -> None:
    whole, first = PromptSampler(7, 3, seed=5), PromptSampler(7, 3, seed=5)
    expected = [whole.next() for _ in range(12)]
    assert [first.next() for _ in range(stop)] == expected[:stop]
    second = PromptSampler(7, 3, seed=5)
    second.next()
    second.load_state_dict(first.state_dict())
    assert [second.next() for _ in range(12 - stop)] == expected[stop:]


def test_draw_i_does_not_depend_on_batches() -> None:
    one, two = PromptSampler(5, 1, seed=2), PromptSampler(5, 6, seed=2)
    assert [one.next()[0] for _ in range(12)] == two.next() + two.next()
    assert [one.at(i) for i in (11, 0, 7)] == [PromptSampler(5, 4, seed=2).at(i) for i in (11, 0, 7)]


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert sorted(PromptSampler(2, 6).next()) == [0, 0, 0, 1, 1, 1]


def test_a_position_in_other_data_is_refused() -> None:
    state = PromptSampler(7, 3, seed=5).state_dict()
    with pytest.raises(CheckpointError, match="problems was 7, now 8"):
        PromptSampler(8, 3, seed=5).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the seed was 5, now 6"):
        PromptSampler(7, 3, seed=6).load_state_dict(state)
    with pytest.raises(ConfigError):
        PromptSampler(0, 3)
