"""What several seeds say together, with its uncertainty: the aggregates that Agarwal et al. 2021 (Deep Reinforcement Learning
at the Edge of the Statistical Precipice) recommend, by the definitions of their library `rliable`.

The library itself does not import beside a pandas of today, and gets no more releases; the tests hold these numbers to its
definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhpc.metrics.statistics import RESAMPLES

#: Part of the runs that the interquartile mean leaves out at each end.
_CUT = 0.25
Array = Any


class Estimate(NamedTuple):
    """A number over seeds, with its 95 % interval."""

    value: float
    low: float
    high: float


def mean(scores: Sequence[float]) -> Estimate:
    """The mean over seeds."""
    return _estimate(lambda runs: runs.mean(axis=-1), scores)


def interquartile_mean(scores: Sequence[float]) -> Estimate:
    """The mean of the middle half of the seeds (IQM): a quarter, rounded down, is left out at each end, so that of fewer than
    four seeds it is the mean."""
    return _estimate(_middle, scores)


def improvement(better: Sequence[float], other: Sequence[float]) -> Estimate:
    """The probability that a run of one configuration has a higher score than a run of another: the share of pairs in which it
    has, with ties counted half (Mann-Whitney's U over the number of pairs)."""
    return _estimate(_wins, better, other)


def _middle(runs: Array) -> Array:
    count = runs.shape[-1]
    cut = int(_CUT * count)
    return np.sort(runs, axis=-1)[..., cut : count - cut].mean(axis=-1)


def _wins(x: Array, y: Array) -> Array:
    difference = x[..., :, None] - y[..., None, :]
    return ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))


def _estimate(of: Callable[..., Array], *scores: Sequence[float]) -> Estimate:
    """A statistic with its percentile bootstrap interval: each configuration's runs are drawn anew, with replacement, by
    themselves (they are the strata). The same scores always give the same interval."""
    rng = np.random.default_rng(0)
    samples = [np.asarray(values, np.float64) for values in scores]
    drawn = [values[rng.integers(0, len(values), (RESAMPLES, len(values)))] for values in samples]
    low, high = np.quantile(of(*drawn), (0.025, 0.975))
    return Estimate(float(of(*samples)), float(low), float(high))
