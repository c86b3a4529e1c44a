"""Statistics over seeds: which step and metric runs are compared at, and the order of configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.metrics.statistics import Estimate
from rlhpc.runs.seed_scores import (
    MAX_DRAWN,
    ConfigScores,
    estimate_text,
    goal_of,
    metric_of,
    rank_configurations,
    render_scores,
    scores_at,
)


@dataclass
class Run:
    """A run with metrics and evaluations."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def logged(*values: float | None) -> Run:
    """Returns a run with these returns at steps 1, 2, …."""
    rows = [{"step": step, "env/return": value} for step, value in enumerate(values, 1) if value is not None]
    return Run(rows=rows)


def evaluated(**values: float) -> Run:
    """Returns a run whose checkpoints have these shares of successes: `s10=0.5`."""
    return Run(evaluations=[{"global_step": int(step[1:]), "success": value} for step, value in values.items()])


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        ("env/return", "maximize"),
        ("train/policy_loss", "minimize"),
        ("eval/perplexity", "minimize"),
        ("time/step_s", "minimize"),
        ("env/steps_per_s", "maximize"),
        ("loss/accuracy", "maximize"),
    ],
)
def test_the_direction_follows_from_the_metrics_name(metric: str, goal: str) -> None:
    assert goal_of(metric) == goal


def test_runs_are_compared_at_the_last_step_that_all_have() -> None:
    assert scores_at([logged(1, 2, 3), logged(4, 5)], "env/return") == (2, [2.0, 5.0])
    assert scores_at([logged(1, None, 3), logged(4, 5, 6)], "env/return") == (3, [3.0, 6.0])
    assert scores_at([logged(1), logged(None, 5)], "env/return") == (None, [])
    assert scores_at([], "env/return") == (None, [])


def test_evaluations_of_checkpoints_come_before_rows_of_training() -> None:
    runs = [evaluated(s10=0.1, s20=0.2), evaluated(s10=0.5, s30=0.9)]
    for run in runs:
        run.rows = [{"step": 40, "eval/success": 1.0}]
    assert scores_at(runs, "eval/success") == (10, [0.1, 0.5])
    runs[1].evaluations = [{"global_step": 10, "success": "broken"}]
    assert scores_at(runs, "eval/success") == (40, [1.0, 1.0])


def test_the_metric_is_the_first_that_all_runs_have_at_some_step() -> None:
    compared = [("eval/success", "", ""), ("env/return", "", ""), ("env/return", "", "again")]
    kind: Any = SimpleNamespace(reporting=SimpleNamespace(compared=compared))
    assert metric_of(kind, [logged(1, 2), logged(3)]) == "env/return"
    assert metric_of(kind, [evaluated(s1=0.5)]) == "eval/success"
    assert metric_of(kind, [logged(1), Run()]) is None
    assert metric_of(kind, []) is None


def test_the_best_interquartile_mean_comes_first() -> None:
    outlier = ConfigScores("outlier", [1.0, 1.0, 1.0, 100.0], 4)
    steady = ConfigScores("steady", [2.0, 2.0, 2.0, 2.0], 4)
    empty = ConfigScores("empty", [], 4)
    assert [one.label for one in rank_configurations([outlier, steady, empty], "maximize")] == ["steady", "outlier"]
    assert [one.label for one in rank_configurations([outlier, steady, empty], "minimize")] == ["outlier", "steady"]


def test_the_table_says_how_many_seeds_there_are_and_compares_only_enough() -> None:
    best = ConfigScores("best", [5.0, 6.0, 7.0, 8.0, 9.0], 5)
    worse = ConfigScores("worse", [1.0, 2.0, 3.0, 4.0, 5.5], 6)
    few = ConfigScores("few", [0.0, 0.0], 2)
    page = render_scores([few, worse, best, ConfigScores("none", [], 3)], "Return", "maximize", "env/return")
    assert page.index("best") < page.index("worse") < page.index("few")
    assert "5 of 6" in page and "too few seeds" in page
    assert "96%" in page  # 24 of 25 pairs
    assert "Without a score yet: 1 of 4 configurations." in page
    assert render_scores([ConfigScores("none", [], 3)], "Return", "maximize", "env/return") == ""


def test_of_many_configurations_the_chart_has_the_best() -> None:
    many = [ConfigScores(f"c{n}", [float(n)] * 5, 5) for n in range(MAX_DRAWN + 2)]
    page = render_scores(many, "Return", "maximize", "env/return")
    assert f"the best {MAX_DRAWN} of {MAX_DRAWN + 2}" in page


def test_an_interval_without_width_is_not_written() -> None:
    assert estimate_text(Estimate(0.5, 0.25, 0.75)) == "0.5 (0.25 … 0.75)"
    assert estimate_text(Estimate(0.5, 0.5, 0.5)) == "0.5"
