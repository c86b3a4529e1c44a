"""Rules for metrics: what each condition finds in a series, and what it leaves alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlhpc.config.alerts import AlertRuleConfig
from rlhpc.metrics.alert_rules import DEFAULT_RULES, MetricRule, RuleBreach, RuleWatch, rules_of
from tests.recorded_metrics import recorded

ROOT = Path(__file__).resolve().parents[3]
NAN = float("nan")


def found(rule: MetricRule, values: Iterable[float | None], metric: str = "m") -> list[RuleBreach]:
    watch = RuleWatch([rule])
    return [breach for step, value in enumerate(values, 1) for breach in watch.add(step, {metric: value})]


def steps(rule: MetricRule, values: Iterable[float | None]) -> list[int]:
    return [breach.step for breach in found(rule, values)]


def test_a_threshold_that_is_passed_often_enough() -> None:
    rule = MetricRule("r", ("m",), above=1.0, steps=3)
    assert steps(rule, [2, 2, 1, 2, 2, 2, 0]) == [6]
    [breach] = found(rule, [2, 2, 3.5])
    assert (breach.value, breach.threshold, breach.explanation) == (3.5, 1.0, "above 1, 3 times in a row")
    assert steps(MetricRule("r", ("m",), below=-1.0), [0, -1, -2]) == [3]


def test_two_conditions_hold_together() -> None:
    rule = MetricRule("r", ("m",), above=0.0, below=0.1)
    assert steps(rule, [-1, 0, 0.05, 0.1, 5]) == [3]
    assert found(rule, [0.05])[0].explanation == "above 0 and below 0.1"


def test_values_that_are_not_finite() -> None:
    rule = MetricRule("r", ("m",), nonfinite=True)
    assert steps(rule, [1, None, NAN, math.inf, 2]) == [2, 3, 4]
    assert found(rule, [None])[0].value is None and found(rule, [None])[0].threshold is None
    assert steps(MetricRule("r", ("m",), above=1.0), [None, NAN, math.inf]) == []


def test_a_rise_against_the_median_of_the_values_before() -> None:
    rule = MetricRule("r", ("m",), rises=10.0, window=4, steps=2)
    assert steps(rule, [1000, 1, 1, 1, 1, 50, 60, 70]) == [7, 8]
    [breach] = found(rule, [1, 2, 3, 4, 26, 26])
    assert breach.threshold == 25.0 and "10 times the median of the 4 values before" in breach.explanation
    assert steps(rule, [0, 0, 0, 0, 5, 5, 5]) == []  # nothing is 10 times nothing
    assert steps(rule, [1, 1, 50, 50]) == []  # the window is not full


def test_a_fall_by_half_of_what_was_gained() -> None:
    rule = MetricRule("r", ("m",), falls=0.5, window=2)
    assert steps(rule, [-1200, -1200, -200, -200, -650, -650, -740, -760]) == [8]
    [breach] = found(rule, [-1200, -1200, -200, -200, -800, -800])
    assert (breach.value, breach.threshold) == (-800.0, -700.0) and "fallen from -200" in breach.explanation


def test_a_fall_of_what_was_high_from_the_start() -> None:
    assert steps(MetricRule("r", ("m",), falls=0.5, window=2), [0.8, 0.8, 0.8, 0.5, 0.5, 0.3, 0.3]) == [7]


def test_noise_around_a_small_mean_is_no_fall() -> None:
    rule, noise = MetricRule("r", ("m",), falls=0.5, window=10), random.Random(1)
    assert steps(rule, [abs(noise.gauss(0.0, 0.02)) for _ in range(500)]) == []


def test_patterns_and_rows() -> None:
    watch = RuleWatch([MetricRule("r", ("train/*grad_norm", "critic/grad_norm"), above=1.0)])
    row = {"train/grad_norm": 2, "train/q_grad_norm": 2, "critic/grad_norm": 2, "eval/grad_norm": 2, "train/x": "text"}
    assert [breach.metric for breach in watch.add(1, row)] == [
        "train/grad_norm",
        "train/q_grad_norm",
        "critic/grad_norm",
    ]
    assert watch.add(2, {"train/grad_norm": "text", "critic/grad_norm": [3]}) == []


def test_earlier_rows_are_remembered_and_not_reported() -> None:
    rule = MetricRule("r", ("m",), rises=10.0, window=3)
    watch = RuleWatch([rule], [{"step": step, "m": value} for step, value in enumerate([1, 1, 1, 99], 1)])
    assert [breach.step for breach in watch.add(5, {"m": 50})] == [5]


def test_a_rule_of_the_run_replaces_the_default_one() -> None:
    rules = {rule.name: rule for rule in rules_of([AlertRuleConfig("kl", ["train/kl"], above=9.0)], ["entropy"])}
    assert rules["kl"].above == 9.0 and rules["kl"].metrics == ("train/kl",)
    assert "entropy" not in rules and rules.keys() | {"entropy"} == {rule.name for rule in DEFAULT_RULES}


def healthy(step: int) -> dict[str, float]:
    return {"train/loss": 1.0, "train/grad_norm": 0.5, "train/approx_kl": 0.01, "train/ref_kl": 0.1, "train/entropy": 1.0,
            "train/mismatch_kl": 1e-3, "train/reward": 0.7, "train/reward_std": 0.3, "rollout/nonfinite": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "metric", "value"),
    [
        ("nonfinite", "train/loss", None), ("nonfinite_skipped", "rollout/nonfinite", 2.0), ("kl", "train/approx_kl", 3.0),
        ("ref_kl", "train/ref_kl", 9.0), ("grad_norm", "train/grad_norm", 40.0), ("entropy", "train/entropy", 1e-5),
        ("mismatch", "train/mismatch_kl", 0.9), ("reward_fall", "train/reward", 0.1),
        ("equal_rewards", "train/reward_std", 1e-8),
    ],
)  # fmt: skip
def test_each_default_rule_finds_what_it_is_for_and_nothing_else(rule: str, metric: str, value: float | None) -> None:
    watch, names = RuleWatch(DEFAULT_RULES), []
    for step in range(1, 61):
        row = healthy(step) if step <= 30 else healthy(step) | {metric: value}
        names += [(breach.rule, breach.metric) for breach in watch.add(step, row)]
    assert set(names) == {(rule, metric)}
    assert rule in {default.name for default in DEFAULT_RULES}


def test_a_differential_entropy_below_zero_is_no_collapse() -> None:
    rule = next(rule for rule in DEFAULT_RULES if rule.name == "entropy")
    assert found(rule, [-0.5] * 30, "train/entropy") == []
    assert found(rule, [0.0] * 30, "train/entropy")


@pytest.mark.parametrize("config", sorted(recorded()))
def test_default_rules_are_silent_in_runs_of_shipped_configurations(config: str) -> None:
    assert (ROOT / config).is_file()
    rows, watch = recorded()[config], RuleWatch(DEFAULT_RULES)
    assert len(rows) > 15
    assert [breach for row in rows for breach in watch.add(row["step"], row)] == []
    # the rules did look at metrics of this run
    assert len({metric for _, metric in watch._series}) >= 2
