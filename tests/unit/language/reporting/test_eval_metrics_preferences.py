"""What an evaluation of a reward model says, computed by hand; and pairs out of judged answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhpc.language.reporting.eval_metrics import calibration, describe, spearman, summarize_preferences
from tests.unit.language.reporting.compared import pairs


def test_pairs_and_ties() -> None:
    found = summarize_preferences(pairs((1, 0), (0, 1), (2, 2), (3, 1)), "pairs")
    assert (found["n"], found["accuracy"], found["margin"], found["unit"]) == (4, 0.5, 0.5, "pairs")  # a tie is wrong
    assert found["levels"]["level 0"]["accuracy"] == 0.5 and found["levels"]["level 1"]["n"] == 2
    low, high = found["accuracy_ci95"]
    assert low == pytest.approx(0.15004, abs=1e-4) and high == pytest.approx(0.84996, abs=1e-4)  # Wilson's
    line = describe({**found, "suite": "a", "global_step": 3})
    assert (
        line.startswith("accuracy 50.0 % (95 %".replace(" %", "%", 1)) and "on 4 pairs, margin 0.5, calibration" in line
    )


def test_calibration_by_hand() -> None:
    """Two pairs at σ(1) = 0.731 of which one is right; one at σ(−4) wrong, that is 0.982 sure and wrong; a tie is as said."""
    error, parts = calibration(np.array([1.0, -1.0, -4.0, 0.0]))
    sure, very = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-4))
    assert error == pytest.approx((2 * abs(0.5 - sure) + very + 0.0) / 4)
    assert [part["n"] for part in parts] == [1, 2, 1] and parts[0]["said"] == parts[0]["was"] == 0.5
    assert calibration(np.full(3, 100.0))[0] == pytest.approx(0)  # sure and right, in the last tenth


def test_a_model_that_says_what_is_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 2, 40_000)
    right = rng.random(40_000) < 1 / (1 + np.exp(-np.abs(margins)))
    assert calibration(np.where(right, np.abs(margins), -np.abs(margins)))[0] < 0.01
    assert calibration(3 * np.where(right, np.abs(margins), -np.abs(margins)))[0] > 0.1


def test_labels_by_hand() -> None:
    rows = [{"rewards": [r], "target": t, "level": ""} for r, t in ((0.0, 0.0), (1.0, 2.0), (3.0, 1.0), (2.0, 2.0))]
    found = summarize_preferences(rows, "labels")
    assert found["mse"] == pytest.approx((0 + 1 + 4 + 0) / 4)
    assert found["r2"] == pytest.approx(1 - 5 / 2.75)
    # Rewards rank 0 1 3 2, labels 0 2.5 1 2.5 (ties share): Pearson of those.
    assert found["spearman"] == pytest.approx(float(np.corrcoef([0, 1, 3, 2], [0, 2.5, 1, 2.5])[0, 1]))
    # Right comparisons: three of three with the first, one of two with the second, one of three, one of two.
    assert found["accuracy"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    same = summarize_preferences([{"rewards": [1.0], "target": 2.0, "level": ""}] * 3, "labels")
    assert same["r2"] is None and same["spearman"] is None and same["accuracy"] == 0.5
    assert spearman(np.array([1.0, 2, 4]), np.array([3.0, 5, 100])) == pytest.approx(1)
    assert "Spearman" in describe({**found, "suite": "a", "global_step": 0})
