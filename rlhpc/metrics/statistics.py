"""Confidence intervals of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]
RESAMPLES = 2000
_Z = NormalDist().inv_cdf(0.975)
#: Indices that the bootstrap draws at a time; bounds its memory, whatever the size of the suite.
_CHUNK = 2_000_000


def wilson(successes: float, n: int) -> Interval:
    """Wilson's 95 % score interval of a proportion, without continuity correction (Newcombe 1998, method 3)."""
    share, z2 = successes / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends of the range, rounding would give 1e-17 where the formula gives 0.
    return (0.0 if successes == 0 else middle - half, 1.0 if successes == n else middle + half)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """95 % percentile bootstrap of the mean over problems (`values`: one number each). Deterministic for a given seed."""
    array, rng = np.asarray(values, np.float64), np.random.default_rng(seed)
    at_a_time = max(1, _CHUNK // len(array))
    means = [
        array[rng.integers(0, len(array), (min(at_a_time, RESAMPLES - start), len(array)))].mean(axis=1)
        for start in range(0, RESAMPLES, at_a_time)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of one number per problem: Wilson's if all are 0 or 1, otherwise the bootstrap's."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(values), len(values))
    return bootstrap(values)
