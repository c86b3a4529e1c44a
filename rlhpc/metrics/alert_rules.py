"""Rules for metrics that show that a training diverges, and their evaluation on the rows of a run (`runner.alerts.rules`)."""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.config.alerts import AlertRuleConfig

#: A fall counts if it exceeds this number of standard deviations of single values.
_MIN_DEVIATIONS = 3.0


@dataclass(frozen=True)
class MetricRule:
    """Rule for metrics; `AlertRuleConfig` describes the fields."""

    name: str
    metrics: tuple[str, ...]
    above: float | None = None
    below: float | None = None
    rises: float | None = None
    falls: float | None = None
    nonfinite: bool = False
    window: int = 20
    steps: int = 1

    @classmethod
    def from_config(cls, cfg: AlertRuleConfig) -> MetricRule:
        return cls(
            cfg.name, tuple(cfg.metrics), cfg.above, cfg.below, cfg.rises, cfg.falls, cfg.nonfinite, cfg.window, cfg.steps
        )  # fmt: skip


#: Rules of every run. They are silent in runs of the shipped configurations that train as intended.
DEFAULT_RULES = (
    MetricRule(
        "nonfinite", ("train/*loss", "train/*grad_norm", "train/q_value", "critic/loss", "critic/grad_norm"), nonfinite=True
    ),
    MetricRule("nonfinite_skipped", ("*/nonfinite", "*/nonfinite_skipped"), above=0.0),
    MetricRule(
        "reward_fall",
        (
            "train/episode_return", "train/reward", "train/success_once", "eval/return_mean", "eval/accuracy", "eval/reward",
            "eval/success_once",
        ),
        falls=0.5, window=10,
    ),
    MetricRule("equal_rewards", ("train/reward_std",), below=1e-6, steps=10),
    MetricRule("kl", ("train/approx_kl",), above=0.5, steps=3),
    MetricRule("ref_kl", ("train/ref_kl",), above=5.0, steps=3),
    MetricRule("grad_norm", ("train/*grad_norm", "critic/grad_norm"), rises=50.0, steps=3),
    MetricRule("entropy", ("train/entropy",), above=-1e-9, below=1e-3, steps=5),
    MetricRule("mismatch", ("train/mismatch_kl",), above=0.5, steps=3),
)  # fmt: skip


def rules_of(configs: Iterable[AlertRuleConfig], silenced_rules: Iterable[str] = ()) -> list[MetricRule]:
    """Returns the default rules and a run's configured rules, without silenced ones. A run's rule replaces a
    default rule of the same name.
    """
    rules = {rule.name: rule for rule in DEFAULT_RULES} | {
        rule.name: rule for rule in map(MetricRule.from_config, configs)
    }
    return [rule for name, rule in rules.items() if name not in [*silenced_rules]]


@dataclass(frozen=True)
class RuleBreach:
    """Rule whose conditions hold for a metric.

    Attributes:
        value: Value, or mean of the last values; None if it is not finite.
        threshold: Number that the value has passed; None for a value that is not finite.
        explanation: The condition in words, with its numbers.
    """

    rule: str
    metric: str
    step: int
    value: float | None
    threshold: float | None
    explanation: str


class RuleWatch:
    """Evaluation of rules on the rows of a run, in the order of the steps.

    Args:
        rules: The rules.
        history: Earlier rows of the run; nothing is reported about them.
    """

    def __init__(self, rules: Sequence[MetricRule], history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rules = rules
        self._series: dict[tuple[str, str], _Series] = {}
        for row in history:
            self.add(int(row.get("step") or 0), row)

    def add(self, step: int, row: Mapping[str, Any]) -> list[RuleBreach]:
        """Adds a row of metrics; returns the breaches of the rules. None stands for a non-finite value."""
        breaches = []
        for rule in self._rules:
            for metric in _iter_matching(rule, row):
                with contextlib.suppress(TypeError, ValueError):  # an entry that is no number
                    metric_value = None if row[metric] is None else float(row[metric])
                    breaches.append(self._add_value(rule, metric, step, metric_value))
        return [breach for breach in breaches if breach is not None]

    def _add_value(self, rule: MetricRule, metric: str, step: int, metric_value: float | None) -> RuleBreach | None:
        series = self._series.setdefault((rule.name, metric), _Series(rule))
        breach_facts = series.add(metric_value)
        if breach_facts is None:
            return None
        shown_value, threshold, breach_text = breach_facts
        repetition_text = f", {rule.steps} times in a row" if rule.steps > 1 else ""
        return RuleBreach(rule.name, metric, step, shown_value, threshold, f"{breach_text}{repetition_text}")


def _iter_matching(rule: MetricRule, row: Mapping[str, Any]) -> Iterator[str]:
    for pattern in rule.metrics:
        if "*" not in pattern:
            if pattern in row:
                yield pattern
            continue
        yield from (name for name in row if fnmatch.fnmatchcase(name, pattern))


_Verdict = tuple[float | None, float | None, str]


class _Series:
    """Values of one metric, as far as one rule needs them.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: MetricRule) -> None:
        self._rule = rule
        self._window: collections.deque[float] = collections.deque(maxlen=rule.window)
        self._num_in_a_row = 0
        self._first_mean: float | None = None
        self._best_mean, self._best_deviation = -math.inf, 0.0

    def add(self, value: float | None) -> _Verdict | None:
        """Adds a value; returns value, threshold and explanation if the conditions have held often enough."""
        is_finite = value is not None and math.isfinite(value)
        if self._rule.nonfinite:
            breach_facts: _Verdict | None = None if is_finite else (None, None, "not finite (NaN or infinite)")
        elif not is_finite or value is None:
            return None
        else:
            breach_facts = self._judge(float(value))
        self._num_in_a_row = self._num_in_a_row + 1 if breach_facts is not None else 0
        return breach_facts if self._num_in_a_row >= self._rule.steps else None

    def _judge(self, metric_value: float) -> _Verdict | None:
        """Evaluates the conditions on a finite value, and adds the value to the window."""
        rule = self._rule
        verdicts: list[_Verdict | None] = []
        if rule.above is not None:
            verdicts.append((metric_value, rule.above, f"above {rule.above:g}") if metric_value > rule.above else None)
        if rule.below is not None:
            verdicts.append((metric_value, rule.below, f"below {rule.below:g}") if metric_value < rule.below else None)
        if rule.rises is not None:
            verdicts.append(self._find_rise(metric_value, rule.rises))
        # values for which the conditions hold must not become the measure of the next ones
        if rule.rises is None or verdicts[-1] is None:
            self._window.append(metric_value)
        if rule.falls is not None:
            verdicts.append(self._fall(rule.falls))
        if any(verdict is None for verdict in verdicts):
            return None
        breaches = [verdict for verdict in verdicts if verdict is not None]
        shown_value, threshold, _ = breaches[-1]
        return shown_value, threshold, " and ".join(explanation for _, _, explanation in breaches)

    def _find_rise(self, metric_value: float, rise_factor: float) -> _Verdict | None:
        if len(self._window) < self._rule.window:
            return None
        median = statistics.median(self._window)
        threshold = rise_factor * median
        if median <= 0 or metric_value <= threshold:
            return None
        breach_text = (
            f"above {threshold:.6g}, {rise_factor:g} times the median of the {self._rule.window} values before"
        )
        return metric_value, threshold, breach_text

    def _fall(self, fall_share: float) -> _Verdict | None:
        if len(self._window) < self._rule.window:
            return None
        mean = statistics.fmean(self._window)
        if self._first_mean is None:
            self._first_mean = mean
        if mean > self._best_mean:
            self._best_mean, self._best_deviation = mean, statistics.pstdev(self._window)
            return None
        scale = max(abs(self._best_mean), self._best_mean - self._first_mean)
        deviation = max(self._best_deviation, statistics.pstdev(self._window))
        threshold = self._best_mean - max(fall_share * scale, _MIN_DEVIATIONS * deviation)
        if mean >= threshold:
            return None
        breach_text = (
            f"below {threshold:.6g}: the mean of {self._rule.window} values has fallen from {self._best_mean:.6g} "
            f"by more than {fall_share:.0%}"
        )
        return mean, threshold, breach_text
