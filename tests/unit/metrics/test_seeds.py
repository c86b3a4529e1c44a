"""Aggregates over seeds: the numbers of rliable's definitions, and intervals that cover what they should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlhpc.metrics.seeds import improvement, interquartile_mean, mean


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_the_numbers_are_those_of_rliable(count: int) -> None:
    from rliable import metrics

    rng = np.random.default_rng(count)
    x, y = rng.normal(size=count).round(1), rng.normal(size=count + 1).round(1)
    assert mean(x).value == pytest.approx(metrics.aggregate_mean(x[:, None]))
    assert interquartile_mean(x).value == pytest.approx(metrics.aggregate_iqm(x[:, None]))
    assert improvement(x, y).value == pytest.approx(metrics.probability_of_improvement(x[:, None], y[:, None]))


def test_ties_count_half() -> None:
    from rliable import metrics

    assert (
        improvement([1.0, 1.0], [1.0, 1.0]).value == metrics.probability_of_improvement(*[np.ones((2, 1))] * 2) == 0.5
    )
    assert improvement([2.0, 1.0], [1.0]) == (0.75, 0.5, 1.0)


def test_the_interval_is_that_of_all_resamples() -> None:
    """Five seeds have 3125; the quantiles of their means are the interval, up to which of them were drawn."""
    scores = [1.0, 2.0, 6.0, 3.0, 4.0]
    every = np.sort([np.mean(drawn) for drawn in itertools.product(scores, repeat=5)])
    found = mean(scores)
    assert found == mean(scores)  # drawn alike
    assert [np.searchsorted(every, end) / len(every) for end in found[1:]] == pytest.approx([0.025, 0.975], abs=0.01)


def test_intervals_cover_the_mean() -> None:
    """Of normal samples of ten, a percentile bootstrap of the mean covers it about nine times in ten."""
    rng = np.random.default_rng(0)
    found = [mean(rng.normal(size=10)) for _ in range(200)]
    assert 0.85 < np.mean([one.low <= 0 <= one.high for one in found]) < 0.97
