"""Statistics over seeds for the comparison of configurations by one score per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.metrics.charts import ChartRow, interval_chart, number
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, render_figures, table
from rlhpc.metrics.provenance import is_share
from rlhpc.metrics.statistics import Estimate, improvement, interquartile_mean, mean
from rlhpc.runs.headlines import RunMetrics
from rlhpc.runs.task_type import TaskType

#: Maximum number of configurations in one chart; a reader could not distinguish more.
MAX_DRAWN = 8
#: Minimum number of seeds for the share of pairs: for two and two seeds without overlap, it would be 100 %.
_MIN_SEEDS = 5
_METHOD = (
    "Intervals are 95 % intervals by Student's t over seeds, within each configuration, and wide where there are few "
    "seeds; IQM is the mean of the middle half of the seeds (of fewer than four seeds, all of them), and P(best &gt; this) "
    "is the share of pairs in which a run of the best configuration has a better score than one of this (Agarwal et al. "
    "2021), of five seeds or more."
)


@dataclass(frozen=True)
class ConfigScores:
    """Scores of the seeds of one configuration.

    Attributes:
        label: Label of the configuration.
        scores: Scores of the runs that have a score.
        planned: Number of runs of the configuration, with and without a score.
    """

    label: str
    scores: Sequence[float]
    planned: int

    @property
    def seeds_text(self) -> str:
        """Number of seeds with a score, such as "3"; with the number of all seeds if some have no score: "3 of 5"."""
        return f"{len(self.scores)} of {self.planned}" if len(self.scores) < self.planned else str(self.planned)


#: Words in the name of a metric that is better if smaller.
_LESS_IS_BETTER = frozenset(
    {
        "loss",
        "perplexity",
        "error",
        "kl",
        "mse",
        "mae",
        "nll",
        "exploitability",
        "failed",
        "lost",
        "truncated",
        "s",
        "seconds",
    }
)


def goal_of(metric: str) -> str:
    """Returns the better direction of a metric, by its name: `maximize` or `minimize`."""
    name_words = metric.rpartition("/")[2].split("_")
    return "maximize" if _LESS_IS_BETTER.isdisjoint(name_words) or "per" in name_words else "minimize"


def scores_at(runs: Sequence[RunMetrics], metric: str) -> tuple[int | None, list[float]]:
    """Returns the scores of runs at their last common step. Reads evaluations of checkpoints or, if these have no common step,
    the training metrics of all runs.

    Returns:
        The step, and a score for each run; (None, []) without a common step.
    """
    logged_scores = [dict(zip(*series(run.rows, metric), strict=True)) for run in runs]
    for scores in ([_eval_scores(run, metric) for run in runs], logged_scores):
        if common_steps := set.intersection(*map(set, scores)) if scores else set():
            step = max(common_steps)
            return int(step), [by_step[step] for by_step in scores]
    return None, []


def _eval_scores(run: RunMetrics, metric: str) -> dict[float, float]:
    name = metric.removeprefix("eval/")
    if name == metric:
        return {}
    return {float(e["global_step"]): float(e[name]) for e in run.evaluations if isinstance(e.get(name), int | float)}


def metric_of(task_type: TaskType[Any], runs: Sequence[RunMetrics]) -> str | None:
    """Returns the first comparison metric of the task type that all runs have at a common step; None if no metric fits."""
    metric_names = list(dict.fromkeys(name for name, _, _ in task_type.reporting.compared))
    return next((name for name in metric_names if runs and scores_at(runs, name)[0] is not None), None)


def rank_configurations(configurations: Sequence[ConfigScores], goal: str) -> list[ConfigScores]:
    """Returns the configurations with scores, sorted by interquartile mean, the best first."""
    goal_sign = -1 if goal == "maximize" else 1
    return sorted(
        (config_scores for config_scores in configurations if config_scores.scores),
        key=lambda config_scores: goal_sign * interquartile_mean(config_scores.scores).value,
    )


def render_scores(configurations: Sequence[ConfigScores], title: str, goal: str, metric: str) -> str:
    """Renders a table and a chart of the scores as HTML, the best configuration first.

    Args:
        configurations: Configurations in the order of their curves, which determines their colors.
        title: Title of the scores.
        goal: `maximize` or `minimize`.
        metric: Name of the metric.
    """
    ranked_scores = rank_configurations(configurations, goal)
    if not ranked_scores:
        return ""
    colors = {config_scores.label: index for index, config_scores in enumerate(configurations)}  # as in the curves
    best_scores, goal_sign = ranked_scores[0], 1 if goal == "maximize" else -1
    iqms = [interquartile_mean(config_scores.scores) for config_scores in ranked_scores]
    means = [mean(config_scores.scores) for config_scores in ranked_scores]
    if is_share(metric.rpartition("/")[2]):
        iqms, means = ([estimate.of_share() for estimate in estimates] for estimates in (iqms, means))
    table_rows: list[list[Cell]] = []
    for config_scores, average, iqm in zip(ranked_scores, means, iqms, strict=True):
        comparison_text = "–"
        if config_scores is not best_scores and min(len(config_scores.scores), len(best_scores.scores)) < _MIN_SEEDS:
            comparison_text = "too few seeds"
        elif config_scores is not best_scores:
            best_signed, compared_signed = (
                [goal_sign * s for s in config_score.scores] for config_score in (best_scores, config_scores)
            )
            comparison_text = f"{improvement(best_signed, compared_signed):.0%}"
        cells = [estimate_text(average), estimate_text(iqm), comparison_text]
        table_rows.append([config_scores.label, config_scores.seeds_text, *cells])
    unscored_labels = [config_scores.label for config_scores in configurations if not config_scores.scores]
    unscored_text = (
        f"<p>Without a score yet: {len(unscored_labels)} of {len(configurations)} configurations.</p>"
        if unscored_labels
        else ""
    )
    rows = [
        ChartRow(config_scores.label, *iqm, dots=config_scores.scores, color=colors[config_scores.label])
        for config_scores, iqm in zip(ranked_scores[:MAX_DRAWN], iqms, strict=False)
    ]
    selection_note = f", the best {MAX_DRAWN} of {len(ranked_scores)}" if len(ranked_scores) > MAX_DRAWN else ""
    interval_svg = interval_chart(f"IQM over seeds{selection_note}", f"{title} (dots: single runs)", rows)
    head = ["configuration", "seeds", "mean", "IQM", "P(best > this)"]
    return (
        f'<div class="scroll">{table(head, table_rows, text_columns={0})}</div>{unscored_text}{render_figures([interval_svg])}'
        f'<p class="legend">{_METHOD}</p>'
    )


def estimate_text(estimate: Estimate) -> str:
    """Formats a number with its interval; omits an interval of zero width, which results from one seed or equal values."""
    value_text, low_text, high_text = map(number, estimate)
    return f"{value_text} ({low_text} … {high_text})" if estimate.low < estimate.high else value_text
