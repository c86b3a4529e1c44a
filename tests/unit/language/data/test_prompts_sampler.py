"""Order in which problems are trained on."""

from __future__ import annotations

import pytest

from rlhpc.language.data import PromptSampler
from rlhpc.runtime.errors import ConfigError


def test_every_epoch_has_every_problem_once_in_another_order() -> None:
    sampler = PromptSampler(10, 4, seed=3)
    positions = [position for step in range(1, 6) for position in sampler.of_step(step)]
    assert sorted(positions[:10]) == sorted(positions[10:20]) == list(range(10))
    assert positions[:10] != positions[10:20]


def test_the_order_is_the_same_for_ever() -> None:
    # Pinned: a run that is resumed under another version must go on in the same order.
    assert PromptSampler(8, 16, seed=1).of_step(1) == [2, 5, 7, 4, 6, 0, 3, 1, 3, 2, 4, 1, 7, 0, 5, 6]


def test_problem_i_does_not_depend_on_batches_or_on_earlier_problems() -> None:
    one, two = PromptSampler(5, 1, seed=2), PromptSampler(5, 6, seed=2)
    assert [one.of_step(step)[0] for step in range(1, 13)] == two.of_step(1) + two.of_step(2)
    assert [one.at(i) for i in (11, 0, 7)] == [PromptSampler(5, 4, seed=2).at(i) for i in (11, 0, 7)]


def test_ranks_share_the_batch_of_a_step() -> None:
    sampler = PromptSampler(7, 6, seed=5)
    shares = [sampler.of_step(3, rank, 2) for rank in range(2)]
    assert [position for pair in zip(*shares, strict=True) for position in pair] == sampler.of_step(3)


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert sorted(PromptSampler(2, 6).of_step(1)) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("problems", "batch"), [(0, 3), (3, 0)])
def test_no_problems_and_an_empty_batch_are_refused(problems: int, batch: int) -> None:
    with pytest.raises(ConfigError, match=f"it was given {problems} and {batch}"):
        PromptSampler(problems, batch)
