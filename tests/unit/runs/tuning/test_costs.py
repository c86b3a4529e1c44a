"""Costs of a run's phases, measured and extrapolated."""

from __future__ import annotations

import json

import pytest

from rlhpc.runs.tuning.costs import Costs, Curve
from tests.unit.runs.tuning.measured import ANSWERS, CROWDED, SIMULATORS


def test_a_curve_goes_on_as_it_was_measured() -> None:
    curve = Curve.through([(1.0, 4.0), (1.0, 4.2), (0.5, 2.1), (0.25, 2.2), (0.25, 1.0)])
    assert curve.seconds_at(1.0) == pytest.approx(4.1)
    assert curve.seconds_at(0.75) == pytest.approx(3.1)
    assert curve.seconds_at(2.0) == pytest.approx(8.1)
    assert curve.seconds_at(0.0) >= 0
    assert Curve(((0.5, 3.0),)).seconds_at(0.25) == pytest.approx(1.5)


def test_costs_outlive_a_file() -> None:
    for _, costs in (SIMULATORS, CROWDED, ANSWERS):
        assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs
