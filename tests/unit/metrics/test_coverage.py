"""Coverage of the intervals that pages print: each holds the true value about as often as it claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from rlhpc.language.reporting.eval_metrics import labels_summary, pairs_summary
from rlhpc.metrics.statistics import (
    Interval,
    interquartile_mean,
    interval,
    mean,
    mean_interval,
    share_interval,
    student_quantile,
    wilson_interval,
)

TIMES = 3000
#: Two points, and three standard deviations of the simulation itself.
FAR = 0.02 + 3 * (0.95 * 0.05 / TIMES) ** 0.5


def coverage(truth: float, draw: Callable[[np.random.Generator], Interval]) -> float:
    rng = np.random.default_rng(0)
    intervals = [draw(rng) for _ in range(TIMES)]
    return float(np.mean([low <= truth <= high for low, high in intervals]))


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 8, 10, 20])
@pytest.mark.parametrize("aggregate", [mean, interquartile_mean])
def test_over_seeds(aggregate: Callable[[Sequence[float]], tuple[float, float, float]], seeds: int) -> None:
    assert coverage(0.0, lambda rng: aggregate(rng.normal(size=seeds))[1:]) == pytest.approx(0.95, abs=FAR)


@pytest.mark.parametrize("episodes", [5, 20, 100])
def test_returns_of_episodes(episodes: int) -> None:
    assert coverage(3.0, lambda rng: mean_interval(rng.normal(3.0, 2.0, episodes))) == pytest.approx(0.95, abs=FAR)


@pytest.mark.parametrize("n", [30, 100, 300])
@pytest.mark.parametrize(("share", "samples"), [(0.1, 4), (0.3, 4), (0.5, 8), (0.8, 2)])
def test_shares_of_problems(n: int, share: float, samples: int) -> None:
    """Problems of different difficulty, several samples each."""

    def draw(rng: np.random.Generator) -> Interval:
        return interval(rng.binomial(samples, rng.beta(2 * share, 2 * (1 - share), n)) / samples)

    assert coverage(share, draw) == pytest.approx(0.95, abs=FAR)


@pytest.mark.parametrize("n", [50, 200])
def test_single_trials(n: int) -> None:
    assert coverage(0.3, lambda rng: interval(rng.random(n) < 0.3)) == pytest.approx(0.95, abs=FAR)


@pytest.mark.parametrize("prompts", [30, 60, 200])
def test_pairs_of_prompts(prompts: int) -> None:
    """One to seven pairs of a prompt, of which all are about as hard."""

    def draw(rng: np.random.Generator) -> Interval:
        rows = []
        for prompt in range(prompts):
            right = rng.beta(2, 1)
            for _ in range(rng.integers(1, 8)):
                margin = 1.0 if rng.random() < right else -1.0
                rows.append({"rewards": [margin, 0.0], "target": None, "level": "", "prompt": str(prompt)})
        low, high = pairs_summary(rows)["accuracy_ci95"]
        return low, high

    rng_times = 600
    rng = np.random.default_rng(0)
    covered = np.mean([low <= 2 / 3 <= high for low, high in (draw(rng) for _ in range(rng_times))])
    assert covered == pytest.approx(0.95, abs=0.02 + 3 * (0.95 * 0.05 / rng_times) ** 0.5)


def test_orders_of_labelled_responses() -> None:
    """Each response is in the order with others by its own reward: their shares depend on each other."""
    rng, truth, times = np.random.default_rng(0), 0.5 + np.arcsin(2**-0.5) / np.pi, 600
    intervals = []
    for _ in range(times):
        labels = rng.normal(size=80)
        rows = [
            {"rewards": [reward], "target": label, "level": "", "prompt": ""}
            for label, reward in zip(labels, labels + rng.normal(size=80), strict=True)
        ]
        intervals.append(labels_summary(rows)["accuracy_ci95"])
    covered = np.mean([low <= truth <= high for low, high in intervals])
    assert covered == pytest.approx(0.95, abs=0.02 + 3 * (0.95 * 0.05 / times) ** 0.5)


@pytest.mark.parametrize("value", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 5, 30])
def test_values_that_are_all_alike_are_not_certain(value: float, n: int) -> None:
    low, high = interval([value] * n)
    assert 0.0 <= low < value < high <= 1.0
    assert high - low > 0.5 / n


def test_the_quantiles_of_student() -> None:
    for degrees in (*range(1, 60), 100, 1000):
        assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)


def test_independent_trials_are_wilsons() -> None:
    values = [1.0] * 30 + [0.0] * 70
    assert share_interval(values) == pytest.approx(wilson_interval(30, 100), abs=0.003)
    assert share_interval([1.0] * 20) == wilson_interval(20, 20) and share_interval([0.0] * 20) == wilson_interval(
        0, 20
    )
