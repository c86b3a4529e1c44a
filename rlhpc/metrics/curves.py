"""Curves of a run: one chart for each metric, in the colour of its quantity, and one chart for all evaluations of a metric."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.metrics.charts import CHART, Line, Size, is_constant, line_chart, stated_chart
from rlhpc.metrics.logger import series
from rlhpc.metrics.provenance import EvaluationPoint

Rows = Sequence[Mapping[str, Any]]
#: Word of a metric's name → colour, in training and evaluation; metrics without such a word have `_DEFAULT_COLOR`.
_COLORS = {"return": 0, "reward": 0, "loss": 1, "accuracy": 2, "success": 2}
_DEFAULT_COLOR = 5


@dataclass(frozen=True)
class Metric:
    """Metric of a report.

    Attributes:
        file: Name of its chart's file.
        name: Name in metrics.jsonl.
        title: Title of the chart.
        y_label: Label of the y axis.
    """

    file: str
    name: str
    title: str
    y_label: str


def color_of(name: str) -> int:
    """Returns the colour of a metric's quantity, as an index into the palette."""
    name_words = name.rpartition("/")[2].split("_")
    return next((_COLORS[name_word] for name_word in name_words if name_word in _COLORS), _DEFAULT_COLOR)


def draw_metric_charts(
    rows: Rows, metrics: Sequence[Metric], shown_metrics: Container[str], x: tuple[str, str] = ("step", "global step")
) -> dict[str, str]:
    """Draws the charts of metrics, by file name.

    If a metric equals an earlier one at all steps, its chart only refers to the earlier chart.

    Args:
        rows: The run's metrics.
        metrics: Metrics in the order of the page.
        shown_metrics: Files of charts that always exist, even if nothing was logged.
        x: Metric of the x axis, and its label.
    """
    charts: dict[str, str] = {}
    points_by_title: dict[str, tuple[list[float], list[float]]] = {}
    for metric in metrics:
        xy_series = series(rows, metric.name, x[0])
        if not xy_series[0] and metric.file not in shown_metrics:
            continue
        equal_title = next(
            (title for title, other_points in points_by_title.items() if _are_equal(xy_series, other_points)), None
        )
        if equal_title is not None:
            charts[metric.file] = stated_chart(metric.title, f"the same as {equal_title}")
            continue
        line = Line("", *xy_series, color=color_of(metric.name), smooth=True)
        charts[metric.file] = line_chart(metric.title, x[1], metric.y_label, [line])
        if xy_series[0] and not is_constant(xy_series[1]):
            points_by_title[metric.title] = xy_series
    return charts


def _are_equal(xy_series: tuple[list[float], list[float]], other_series: tuple[list[float], list[float]]) -> bool:
    return xy_series[0] == other_series[0] and all(
        math.isclose(y, other_y, rel_tol=1e-9, abs_tol=1e-9)
        for y, other_y in zip(xy_series[1], other_series[1], strict=True)
    )


def evaluation_chart(
    title: str, y_label: str, suites: Mapping[str, Sequence[EvaluationPoint]], name: str, size: Size = CHART
) -> str:
    """Draws a metric of all evaluations over steps, with 95 % intervals and a line per suite.

    Points of evaluations during training are hollow.

    Args:
        title: Title of the chart.
        y_label: Label of the y axis.
        suites: Evaluations by suite.
        name: Name of the result, which determines the first suite's colour.
        size: Size of the drawing.
    """
    lines = [
        Line(
            suite,
            [evaluation.step for evaluation in evaluations],
            [evaluation.value for evaluation in evaluations],
            [evaluation.low for evaluation in evaluations],
            [evaluation.high for evaluation in evaluations],
            color=color_of(name) + color_index,
            markers=True,
            hollow=[evaluation.in_training for evaluation in evaluations],
        )
        for color_index, (suite, evaluations) in enumerate(suites.items())
        if evaluations
    ]
    return line_chart(title, "global step", y_label, lines, size)


def hollow_points(suites: Mapping[str, Sequence[EvaluationPoint]]) -> str:
    """Returns a sentence about the points of evaluations in training, as HTML; "" if all points are of one kind."""
    training_flags = {evaluation.in_training for evaluations in suites.values() for evaluation in evaluations}
    if len(training_flags) < 2:
        return ""
    return '<p class="legend">Hollow points: evaluated while the run trained; filled points: checkpoints.</p>'
