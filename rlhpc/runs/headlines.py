"""Headline numbers of runs, as columns for HTML pages, `rlhpc status` and other tables in a terminal."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.charts import number, running_mean
from rlhpc.metrics.logger import read_last_metrics, series
from rlhpc.metrics.page import decimals
from rlhpc.metrics.provenance import (
    PASS_AT_K,
    EvaluationPoint,
    evaluations_of,
    judging_suite,
    largest_pass_at,
    metric_title,
    read_all_results,
    read_results,
)
from rlhpc.runs.task_type import Headline, task_type_of_run
from rlhpc.runtime.text import parenthesized_interval

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class RunMetrics:
    """Metrics and evaluations of one run.

    Attributes:
        paths: Files of the run.
        rows: Metrics of the run, one row per step.
        evaluations: Results of the run's evaluations on one suite.
    """

    paths: RunPaths
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def curve(self, name: str, against: str) -> Curve:
        """Returns (x values, y values) of a metric over another metric: a training metric, smoothed as in reports, or an
        evaluation metric (`eval/`).
        """
        if name.startswith("eval/"):
            x_by_step = dict(zip(*series(self.rows, against), strict=True))  # step → x
            chart_points = [
                (x_by_step[evaluation.step], evaluation.value)
                for evaluation in self.evaluated(name)
                if evaluation.step in x_by_step
            ]
            return [x for x, _ in chart_points], [y for _, y in chart_points]
        x, y = series(self.rows, name, against)
        return x, running_mean(y) if len(y) >= 60 else y

    def evaluated(self, name: str) -> list[EvaluationPoint]:
        """Returns one metric of all evaluations: evaluations during training and evaluations of checkpoints."""
        return evaluations_of(self.rows, self.evaluations, name.removeprefix("eval/"))

    def final(self, name: str) -> EvaluationPoint | None:
        """Returns the last value of a metric; for an evaluation metric, the value of the best checkpoint if the run tracks the
        best checkpoint. Returns None if there is no value.
        """
        if name.startswith("eval/"):
            evaluations = self.evaluated(name)
            best_step = self.paths.best_step()
            return next(
                (evaluation for evaluation in evaluations if evaluation.step == best_step),
                evaluations[-1] if evaluations else None,
            )
        x, y = series(self.rows, name)
        return EvaluationPoint(int(x[-1]), y[-1], y[-1], y[-1], 0, True) if x else None


def read_run(paths: RunPaths) -> RunMetrics:
    """Reads a run's last rows of metrics, and the results of its checkpoints on the suite that chooses the best one."""
    suite_results = read_all_results(paths)
    suites = {str(suite_result["suite"]) for suite_result in suite_results}
    suite = next(iter(suites)) if len(suites) == 1 else judging_suite(paths, suite_results)
    return RunMetrics(paths, read_last_metrics(paths.metrics), read_results(paths, suite))


def run_headlines(folders: Sequence[RunPaths]) -> dict[str, list[str]]:
    """Returns the headline numbers of single runs as columns: title → one text for each run."""
    return headline_columns({str(index): [read_run(paths)] for index, paths in enumerate(folders)})


def headline_columns(groups: Mapping[str, Sequence[RunMetrics]]) -> dict[str, list[str]]:
    """Returns the headline numbers of groups of runs as columns: title → one text for each group.

    The task types of the runs determine the columns. Columns without any number are omitted.

    Args:
        groups: Runs by label. Runs of one label are seeds of one configuration; their numbers are averaged.
    """
    runs = [run for group in groups.values() for run in group]
    headlines: dict[Headline, None] = {}
    for run in runs:
        task_type = task_type_of_run(run.paths)
        candidates = task_type.reporting.headlines or [
            Headline(name, title.lower()) for name, title, _ in task_type.reporting.compared
        ]
        headlines |= dict.fromkeys(
            resolved_headline for headline in candidates if (resolved_headline := _insert_k(headline, runs)) is not None
        )
    columns = {
        resolved_headline.title: [_format_group(resolved_headline, group) for group in groups.values()]
        for resolved_headline in headlines
    }
    return {title: cells for title, cells in columns.items() if any(cell != NO_VALUE for cell in cells)}


#: Placeholder in a table for a missing number.
NO_VALUE = "–"


def _insert_k(headline: Headline, runs: Sequence[RunMetrics]) -> Headline | None:
    """Replaces the k in a pass@k headline by the largest k of the runs; None if no run has several samples per problem.

    Returns other headlines unchanged.
    """
    if headline.metric != f"eval/{PASS_AT_K}":
        return headline
    result_names = {name for run in runs for evaluation in run.evaluations for name in evaluation}
    logged_names = {name for run in runs for row in run.rows for name in row if name.startswith("eval/pass_at_")}
    name = largest_pass_at(result_names | logged_names)
    return dataclasses.replace(headline, metric=f"eval/{name}", title=metric_title(name)) if name else None


def _format_group(headline: Headline, runs: Sequence[RunMetrics]) -> str:
    """Formats the number of a group: the mean over its runs.

    A share has a 95 % interval, over seeds or, for one run, from its evaluation. Another number has the minimum and the
    maximum, if they differ.
    """
    final_results = [final_result for run in runs if (final_result := run.final(headline.metric)) is not None]
    if not final_results:
        return NO_VALUE
    final_values = [final_result.value for final_result in final_results]
    if headline.form == "share":
        interval = parenthesized_interval(_share_interval(final_results), ".1%", separator=" … ")
        return f"{statistics.fmean(final_values):.1%}{interval}"
    return mean_text(final_values, number if headline.form == "count" else decimals)


def _share_interval(final_results: Sequence[EvaluationPoint]) -> tuple[float, float]:
    if len(final_results) == 1:
        return final_results[0].low, final_results[0].high
    from rlhpc.metrics.statistics import mean  # imports numpy

    # The interval is over seeds, as in the table of scores, because the episodes of one seed are not independent.
    _, low_bound, high_bound = mean([final_result.value for final_result in final_results]).of_share()
    return low_bound, high_bound


def mean_text(optional_values: Sequence[float | None], format_number: Callable[[float], str]) -> str:
    """Formats the mean of numbers, with the minimum and the maximum if they differ."""
    finite_values = [optional_value for optional_value in optional_values if optional_value is not None]
    if not finite_values:
        return NO_VALUE
    formatted_mean, min_text, max_text = (
        format_number(statistics.fmean(finite_values)),
        format_number(min(finite_values)),
        format_number(max(finite_values)),
    )
    return formatted_mean if min_text == max_text else f"{formatted_mean} ({min_text} … {max_text})"
