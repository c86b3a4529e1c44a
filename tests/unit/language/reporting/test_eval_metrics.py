"""pass@k, majority vote and intervals, against published numbers and simulation."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from rlhpc.language.reporting.eval_metrics import ks, level_order, majority, pass_at_k, summarize
from rlhpc.metrics.statistics import interval, share_interval, wilson_interval


def row(problem: int, sample: int, right: bool, vote: str = "x", **more: Any) -> dict[str, Any]:
    fields = {"level": "", "reward": float(right), "terms": {"math": float(right)}, "tokens": 10, "finished": True}
    return {"id": problem, "sample": sample, "right": right, "vote": vote, "failed": False, **fields, **more}


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for n, right, k in ((10, 3, 1), (10, 3, 5), (6, 2, 4), (5, 0, 3), (5, 5, 1), (7, 6, 2)):
        outcomes = [1] * right + [0] * (n - right)
        drawn = [any(outcomes[i] for i in chosen) for chosen in combinations(range(n), k)]
        assert pass_at_k(n, right, k) == pytest.approx(sum(drawn) / len(drawn), abs=1e-12)


def test_pass_at_k_numbers() -> None:
    # Chen et al. 2021, equation 1, and the product that their listing computes.
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(200, 7, 100) == pytest.approx(1 - np.prod(1 - 100 / np.arange(200 - 7 + 1, 200 + 1)), abs=1e-12)
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)  # no overflow
    for wrong in ((5, 6, 1), (5, 2, 6), (5, 2, 0), (5, -1, 1)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*wrong)


def test_ks() -> None:
    assert ks(1) == [1] and ks(8) == [1, 2, 4, 8] and ks(10) == [1, 2, 4, 8, 10]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_newcombe_1998_table_1(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_interval_is_that_of_the_mean_over_problems() -> None:
    values = np.random.default_rng(3).beta(0.5, 0.5, 400)
    low, high = interval(list(values))
    half = 1.96 * values.std() / np.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_intervals_cover_the_truth_although_samples_of_a_problem_are_alike() -> None:
    """Problems differ, samples of one do not much: an interval over samples would be far too narrow."""
    rng, problems, samples, replications = np.random.default_rng(0), 40, 16, 150
    covered = naive = 0
    for _ in range(replications):
        difficulty = rng.beta(0.3, 0.3, problems)  # mean 0.5
        right = rng.random((problems, samples)) < difficulty[:, None]
        rows = [row(i, j, bool(right[i, j])) for i in range(problems) for j in range(samples)]
        low, high = summarize(rows)["accuracy_ci95"]
        covered += low <= 0.5 <= high
        low, high = wilson_interval(int(right.sum()), right.size)
        naive += low <= 0.5 <= high
    assert 0.90 <= covered / replications <= 0.99
    assert naive / replications < 0.6


def test_interval_takes_wilson_for_proportions() -> None:
    assert interval([1.0, 0.0, 1.0]) == wilson_interval(2, 3)
    assert interval([0.0] * 20) == wilson_interval(0, 20)  # a bootstrap would say that the truth is 0
    assert interval([0.5, 0.0, 1.0]) == share_interval([0.5, 0.0, 1.0])


def test_majority() -> None:
    assert majority(["4", "5", "4"], [True, False, True]) == 1.0
    assert majority(["4", "5", "5"], [True, False, False]) == 0.0
    assert majority(["4", "5"], [True, False]) == 0.5  # tied
    assert majority(["", "", "4"], [False, False, True]) == 1.0  # no answer, no vote
    assert majority(["", ""], [False, False]) == 0.0


def test_summary() -> None:
    """Two problems of four samples: 3 and 1 right."""
    rows = [
        *(row(0, j, j < 3, "7" if j < 3 else "8", level="1 digit", tokens=10) for j in range(4)),
        *(row(1, j, j == 0, "5" if j == 0 else "6", level="2 digits", tokens=20, finished=j < 2) for j in range(4)),
    ]
    result = summarize(reversed(rows))
    assert (result["n"], result["samples"], result["accuracy"]) == (2, 4, 0.5)
    # By hand: pass@2 is 1 − C(1,2)/C(4,2) = 1 and 1 − C(3,2)/C(4,2) = 1/2.
    assert result["pass_at_k"] == pytest.approx({"1": 0.5, "2": 0.75, "4": 1.0})
    assert result["pass_at_k_ci95"]["4"] == list(wilson_interval(2, 2))
    assert result["majority"] == 0.5 and result["majority_ci95"] == list(wilson_interval(1, 2))
    assert result["reward_mean"] == 0.5 and result["reward_terms"] == {"math": 0.5}
    assert result["response_tokens"] == {"mean": 15.0, "median": 15.0, "p95": 20.0, "max": 20}
    assert result["truncated"] == 0.25 and result["failed"] == 0
    assert list(result["levels"]) == ["1 digit", "2 digits"]
    assert result["levels"]["1 digit"]["accuracy"] == 0.75 and result["levels"]["2 digits"]["n"] == 1
    assert result == summarize(rows)


def test_summary_without_levels_or_votes() -> None:
    result = summarize([row(i, 0, i < 15, vote="") for i in range(148)])
    assert result["levels"] == {} and result["majority"] is None
    assert result["accuracy_ci95"] == pytest.approx([0.0624, 0.1605], abs=5e-5)
    assert result["pass_at_k"] == {"1": result["accuracy"]}


def test_uneven_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"problems have \[1, 2\] samples"):
        summarize([row(0, 0, True), row(1, 0, True), row(1, 1, True)])
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_levels_are_in_the_order_a_person_expects() -> None:
    assert sorted(["10", "2", "easy", "1"], key=level_order) == ["easy", "1", "2", "10"]
    assert sorted(["level 10", "level 2"], key=level_order) == ["level 2", "level 10"]
