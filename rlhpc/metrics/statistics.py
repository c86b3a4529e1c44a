"""Confidence intervals of measured values. tests/unit/metrics/test_coverage.py simulates the coverage of each interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Interval = tuple[float, float]
Numbers = Sequence[float] | np.ndarray
_Z = NormalDist().inv_cdf(0.975)
#: 0.975 quantiles of Student's t for 1, 2, … degrees of freedom; for more degrees, an expansion has three exact digits.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip


def student(degrees: int) -> float:
    """Returns the 0.975 quantile of Student's t (Abramowitz & Stegun 26.7.5 for many degrees of freedom)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)


def wilson(successes: float, n: float, z: float = _Z) -> Interval:
    """Returns Wilson's 95 % score interval of a proportion, without continuity correction (Newcombe 1998, method 3).

    Args:
        successes: Number of successes.
        n: Number of independent trials; an effective number need not be an integer.
        z: The quantile.
    """
    proportion, z2 = successes / n, z * z
    centre = (proportion + z2 / (2 * n)) / (1 + z2 / n)
    half_width = z * math.sqrt(proportion * (1 - proportion) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends of the range, rounding would give 1e-17 where the formula gives 0.
    return (0.0 if successes == 0 else centre - half_width, 1.0 if successes == n else centre + half_width)


def share_interval(values: Numbers, clusters: Sequence[Hashable] | None = None, influence: float = 1.0) -> Interval:
    """Returns the 95 % interval of the mean of numbers from 0 to 1, by Wilson's formula for the effective number of trials.

    Values of one cluster, such as pairs of one prompt, may depend on each other in any way. The variance is that of the
    clusters' sums plus one cluster of 0s and 1s, so that the interval of equal values has a width.

    Args:
        values: Numbers.
        clusters: The cluster of each number; None if all are independent.
        influence: Weight of one value in the mean: 2 for the mean of a statistic of pairs of values.
    """
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    cluster_ids = np.arange(len(array))
    if clusters is not None:
        cluster_ids = np.unique([str(key) for key in clusters], return_inverse=True)[1]
    count = int(cluster_ids.max()) + 1
    are_trials = count == len(array) and influence == 1.0 and bool(np.isin(array, (0.0, 1.0)).all())
    if are_trials or mean in (0.0, 1.0) or count == 1:
        return wilson(mean * count, count)
    sums = np.bincount(cluster_ids, weights=array - mean)
    spread = mean * (1 - mean)
    variance = (influence**2 * float((sums**2).sum()) + (len(array) / count) ** 2 * spread) / len(array) ** 2
    trials = spread / variance
    return wilson(mean * trials, trials, student(count - 1))


def mean_interval(values: Numbers) -> Interval:
    """Returns the 95 % interval of the mean of independent numbers, by Student's t; both ends of one number are the number."""
    array = np.asarray(values, np.float64)
    mean, count = float(array.mean()), len(array)
    half_width = student(count - 1) * float(array.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return mean - half_width, mean + half_width


def interval(values: Numbers) -> Interval:
    """Returns the 95 % interval of the mean of independent numbers.

    It is `share_interval` if all numbers are from 0 to 1, otherwise `mean_interval`.
    """
    return share_interval(values) if all(0.0 <= number <= 1.0 for number in values) else mean_interval(values)


#: Share of the runs that the interquartile mean omits at each end.
_TRIM_SHARE = 0.25


class Estimate(NamedTuple):
    """Statistic over seeds, with its 95 % interval."""

    value: float
    low: float
    high: float

    def of_share(self) -> Estimate:
        """Returns the estimate with its interval limited to 0 to 1, for a share."""
        return Estimate(self.value, max(0.0, self.low), min(1.0, self.high))


def mean(scores: Sequence[float]) -> Estimate:
    """Returns the mean over seeds."""
    return Estimate(float(np.mean(scores)), *mean_interval(scores))


def interquartile_mean(scores: Sequence[float]) -> Estimate:
    """Returns the interquartile mean over seeds (IQM), the mean of the middle half.

    The IQM omits a quarter of the seeds, rounded down, at each end; with fewer than four seeds it is the mean. The interval
    is that of trimmed means (Tukey and McLaughlin 1963).
    """
    ordered = np.sort(np.asarray(scores, np.float64))
    count = len(ordered)
    num_trimmed = int(_TRIM_SHARE * count)
    if not num_trimmed:
        return mean(scores)
    num_middle = count - 2 * num_trimmed
    iqm = float(ordered[num_trimmed : count - num_trimmed].mean())
    winsorized = np.clip(ordered, ordered[num_trimmed], ordered[count - num_trimmed - 1])
    half_width = (
        student(num_middle - 1)
        * float(winsorized.std(ddof=1))
        * math.sqrt(count - 1)
        / math.sqrt(num_middle * (num_middle - 1))
    )
    return Estimate(iqm, iqm - half_width, iqm + half_width)


def improvement(scores: Sequence[float], other_scores: Sequence[float]) -> float:
    """Returns the probability that a run of one configuration has a higher score than a run of another configuration.

    The probability is the share of pairs with a higher score, with ties counted half (Mann-Whitney's U over the number of
    pairs).
    """
    difference = np.asarray(scores, np.float64)[:, None] - np.asarray(other_scores, np.float64)[None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())
