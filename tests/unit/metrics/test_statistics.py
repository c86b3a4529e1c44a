"""Aggregates over seeds: the numbers of rliable's definitions."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.metrics.statistics import improvement, interquartile_mean, mean


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_the_numbers_are_those_of_rliable(count: int) -> None:
    from rliable import metrics

    rng = np.random.default_rng(count)
    x, y = rng.normal(size=count).round(1), rng.normal(size=count + 1).round(1)
    assert mean(x).value == pytest.approx(metrics.aggregate_mean(x[:, None]))
    assert interquartile_mean(x).value == pytest.approx(metrics.aggregate_iqm(x[:, None]))
    assert improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x[:, None], y[:, None]))


def test_ties_count_half() -> None:
    from rliable import metrics

    assert improvement([1.0, 1.0], [1.0, 1.0]) == metrics.probability_of_improvement(*[np.ones((2, 1))] * 2) == 0.5
    assert improvement([2.0, 1.0], [1.0]) == 0.75
