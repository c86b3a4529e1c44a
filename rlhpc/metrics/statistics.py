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


def student_quantile(num_degrees: int) -> float:
    """Returns the 0.975 quantile of Student's t (Abramowitz & Stegun 26.7.5 for many degrees of freedom)."""
    if num_degrees <= len(_T):
        return _T[num_degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * num_degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * num_degrees**2)


def wilson_interval(num_successes: float, n: float, z: float = _Z) -> Interval:
    """Returns Wilson's 95 % score interval of a proportion, without continuity correction (Newcombe 1998, method 3).

    Args:
        num_successes: Number of successes.
        n: Number of independent trials; an effective number need not be an integer.
        z: The quantile.
    """
    proportion, z2 = num_successes / n, z * z
    centre = (proportion + z2 / (2 * n)) / (1 + z2 / n)
    half_width = z * math.sqrt(proportion * (1 - proportion) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends of the range, rounding would give 1e-17 where the formula gives 0.
    return (0.0 if num_successes == 0 else centre - half_width, 1.0 if num_successes == n else centre + half_width)


def share_interval(
    sample_values: Numbers, clusters: Sequence[Hashable] | None = None, influence: float = 1.0
) -> Interval:
    """Returns the 95 % interval of the mean of numbers from 0 to 1, by Wilson's formula for the effective number of trials.

    Values of one cluster, such as pairs of one prompt, may depend on each other in any way. The variance is that of the
    clusters' sums plus one cluster of 0s and 1s, so that the interval of equal values has a width.

    Args:
        sample_values: Numbers.
        clusters: The cluster of each number; None if all are independent.
        influence: Weight of one value in the mean: 2 for the mean of a statistic of pairs of values.
    """
    array = np.asarray(sample_values, np.float64)
    mean = float(array.mean())
    cluster_ids = np.arange(len(array))
    if clusters is not None:
        cluster_ids = np.unique([str(key) for key in clusters], return_inverse=True)[1]
    num_clusters = int(cluster_ids.max()) + 1
    are_trials = num_clusters == len(array) and influence == 1.0 and bool(np.isin(array, (0.0, 1.0)).all())
    if are_trials or mean in (0.0, 1.0) or num_clusters == 1:
        return wilson_interval(mean * num_clusters, num_clusters)
    sums = np.bincount(cluster_ids, weights=array - mean)
    sample_variance = mean * (1 - mean)
    variance = (influence**2 * float((sums**2).sum()) + (len(array) / num_clusters) ** 2 * sample_variance) / len(
        array
    ) ** 2
    trials = sample_variance / variance
    return wilson_interval(mean * trials, trials, student_quantile(num_clusters - 1))


def mean_interval(sample_values: Numbers) -> Interval:
    """Returns the 95 % interval of the mean of independent numbers, by Student's t; both ends of one number are the number."""
    array = np.asarray(sample_values, np.float64)
    mean, num_values = float(array.mean()), len(array)
    half_width = (
        student_quantile(num_values - 1) * float(array.std(ddof=1)) / math.sqrt(num_values) if num_values > 1 else 0.0
    )
    return mean - half_width, mean + half_width


def interval(sample_values: Numbers) -> Interval:
    """Returns the 95 % interval of the mean of independent numbers.

    It is `share_interval` if all numbers are from 0 to 1, otherwise `mean_interval`.
    """
    return (
        share_interval(sample_values)
        if all(0.0 <= number <= 1.0 for number in sample_values)
        else mean_interval(sample_values)
    )


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
    sorted_scores = np.sort(np.asarray(scores, np.float64))
    num_scores = len(sorted_scores)
    num_trimmed = int(_TRIM_SHARE * num_scores)
    if not num_trimmed:
        return mean(scores)
    num_middle = num_scores - 2 * num_trimmed
    iqm = float(sorted_scores[num_trimmed : num_scores - num_trimmed].mean())
    winsorized_scores = np.clip(sorted_scores, sorted_scores[num_trimmed], sorted_scores[num_scores - num_trimmed - 1])
    half_width = (
        student_quantile(num_middle - 1)
        * float(winsorized_scores.std(ddof=1))
        * math.sqrt(num_scores - 1)
        / math.sqrt(num_middle * (num_middle - 1))
    )
    return Estimate(iqm, iqm - half_width, iqm + half_width)


def improvement(scores: Sequence[float], other_scores: Sequence[float]) -> float:
    """Returns the probability that a run of one configuration has a higher score than a run of another configuration.

    The probability is the share of pairs with a higher score, with ties counted half (Mann-Whitney's U over the number of
    pairs).
    """
    score_differences = np.asarray(scores, np.float64)[:, None] - np.asarray(other_scores, np.float64)[None, :]
    return float(((score_differences > 0) + 0.5 * (score_differences == 0)).mean())
