"""Comparison page of several runs: curves with mean and spread over seeds, and a table of final results."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.config.yaml_files import UniqueKeys
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.charts import Line, line_chart
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import Cell, duration, figures, missing, page, section, table, time_unit, write_page
from rlhpc.metrics.provenance import judging_suite, read_all_results, read_results
from rlhpc.runs.config_changes import training_changes
from rlhpc.runs.headlines import NO_VALUE, Curve, RunMetrics, headline_columns, mean_text
from rlhpc.runs.seed_scores import ConfigScores, goal_of, render_scores, scores_at
from rlhpc.runs.task_type import task_type_of_run
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_file, read_yaml

#: Number of points to which the curves of several seeds are interpolated.
_NUM_GRID_POINTS = 120
_SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)?[-_.]?\d+$", re.IGNORECASE)


def label_of(name: str) -> str:
    """Returns a run's name without its seed: push-s3, push_seed3 and push3 have the label push."""
    return _SEED_SUFFIX.sub("", name) or name


def labels_of(named: Sequence[tuple[str | None, RunPaths]]) -> list[tuple[str, RunPaths]]:
    """Returns (label, run) for each run. Without a user's label, the label is the run's name without the seed, if all runs
    with this label differ only in their seeds; otherwise it is the complete name.

    Args:
        named: Pairs of the user's label, or None, and the run.

    Raises:
        ConfigError: Runs with the same user-given label differ in more than their seeds.
    """
    members: dict[str, list[RunPaths]] = {}
    for label, paths in named:
        members.setdefault(label if label is not None else label_of(paths.root.name), []).append(paths)
    differing_keys = {label: key for label, runs in members.items() if (key := _first_difference(runs))}
    for label, _ in named:
        if label is not None and label in differing_keys:
            raise ConfigError(
                f"runs of label {label!r} differ in {differing_keys[label]}: they are no seeds of one configuration; "
                "give each configuration a label of its own (LABEL=FOLDER)"
            )
    return [
        (label if label is not None else paths.root.name if shared in differing_keys else shared, paths)
        for label, paths in named
        for shared in [label_of(paths.root.name)]
    ]


def _first_difference(runs: Sequence[RunPaths]) -> str:
    """Returns the first key other than the seed in which runs differ; "" without such a key."""
    try:
        first_config, *other_configs = [read_yaml(read_file(run.config), UniqueKeys) for run in runs]
    except (OSError, ValueError, RlhpcError):
        return "what their config.yaml, which cannot be read, would say" if len(runs) > 1 else ""
    changes = [
        change
        for other_config in other_configs
        for change in training_changes(first_config, other_config)
        if change.key != "runner.seed"
    ]
    return changes[0].key if changes else ""


def read_runs(named: Sequence[tuple[str, RunPaths]], suite: str) -> dict[str, list[RunMetrics]]:
    """Returns the metrics of the runs by label, in the order of `named`.

    Raises:
        RlhpcError: A run has no metrics.
    """
    groups: dict[str, list[RunMetrics]] = {}
    for label, paths in named:
        rows = read_metrics(paths.metrics)
        if not rows:
            state = "cannot be read" if paths.metrics.is_file() and paths.metrics.stat().st_size else "has no row yet"
            raise RlhpcError(f"{paths.metrics} {state}; see rlhpc status {paths.root}")
        groups.setdefault(label, []).append(RunMetrics(paths, rows, read_results(paths, suite)))
    return groups


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Combines the curves of several seeds into one curve.

    Returns:
        x values, means, minima and maxima over the range that all seeds cover, with linear interpolation between points.
        Minima and maxima are empty for a single seed.
    """
    if len(curves) == 1:
        x, y = curves[0]
        return list(x), list(y), [], []
    start, end_x = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if end_x <= start:  # no common range, such as one evaluation each: show how each run ended
        x, y = ([curve[i][-1] for curve in curves] for i in (0, 1))
        return [statistics.fmean(x)], [statistics.fmean(y)], [min(y)], [max(y)]
    grid = np.unique(np.linspace(start, end_x, min(_NUM_GRID_POINTS, max(len(x) for x, _ in curves))))
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid.tolist(), values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()


def _draw_chart(
    groups: Mapping[str, list[RunMetrics]], title: str, y_label: str, x: tuple[str, str, float], get_curve: Any
) -> str:
    """Draws one metric of all groups over one x axis; returns "" if no run has the metric."""
    x_metric, x_label, scale = x
    lines = []
    for color, (label, runs) in enumerate(groups.items()):
        curves = [curve for run in runs if (curve := get_curve(run, x_metric))[0]]
        if not curves:
            continue
        x_values, means, minima, maxima = spread(curves)
        lines.append(
            Line(
                label,
                [value / scale for value in x_values],
                means,
                minima,
                maxima,
                color=color,
                band=len(x_values) > 1,
                markers=len(x_values) <= 12,
            )
        )
    title += " over wall time" if x_metric == "time/wall_s" else " over experience"
    return line_chart(title, x_label, y_label, lines, key=len(groups) > 1) if lines else ""


def charts(groups: Mapping[str, list[RunMetrics]]) -> list[str]:
    """Draws each logged comparison metric over environment steps (or global steps) and over wall time, as SVG."""
    runs = [run for group in groups.values() for run in group]
    steps = all(series(run.rows, "rollout/env_steps")[0] for run in runs)
    unit, length = time_unit(max(max(series(run.rows, "time/wall_s")[1], default=0.0) for run in runs))
    axes = [
        ("rollout/env_steps", "environment steps", 1.0) if steps else ("step", "global step", 1.0),
        ("time/wall_s", f"wall time ({unit})", length),
    ]
    charts_html = []
    for name, title, label in dict.fromkeys(
        chart_spec for run in runs for chart_spec in task_type_of_run(run.paths).reporting.compared
    ):
        charts_html += [
            _draw_chart(groups, title, label, axis, lambda run, x, n=name: run.curve(n, x)) for axis in axes
        ]
    return [chart for chart in charts_html if chart]


def final_table(groups: Mapping[str, list[RunMetrics]]) -> str:
    """Returns an HTML table of the final results of each label over its seeds: wall time and headline metrics."""
    results_by_group = [
        [eval_result for run in runs if (eval_result := _last_result(run)) is not None] for runs in groups.values()
    ]
    columns: dict[str, list[Cell]] = {
        "runs": list(groups),
        "seeds": [len(runs) for runs in groups.values()],
        "wall time": [
            mean_text([next(reversed(series(run.rows, "time/wall_s")[1]), None) for run in runs], duration)
            for runs in groups.values()
        ],
    }
    columns |= {title: [*cells] for title, cells in headline_columns(groups).items()}
    for key, unit in (("episodes", "episodes"), ("n", "problems")):
        counts = [
            sum(int(eval_result.get(key, 0)) for eval_result in group_results) for group_results in results_by_group
        ]
        if any(counts):
            results = itertools.chain.from_iterable(results_by_group)
            title = next((str(result["unit"]) for result in results if key in result and "unit" in result), unit)
            columns[title] = [count or NO_VALUE for count in counts]
    table_rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return f'<div class="scroll">{table([*columns], table_rows, text_columns={0})}</div>'


def _last_result(run: RunMetrics) -> dict[str, Any] | None:
    best = run.paths.best_step()
    return max(run.evaluations, key=lambda result: (result["global_step"] == best, result["global_step"]), default=None)


def write_comparison(named: Sequence[tuple[str, RunPaths]], output: Path, suite: str | None = None) -> Path:
    """Writes the comparison page; returns its path.

    Args:
        named: Pairs of label and run; runs with the same label are seeds of one configuration.
        output: The HTML file.
        suite: Evaluation suite to compare. None selects the judging suite if all runs have the same one, else `default`.

    Raises:
        RlhpcError: A run has no metrics, or the page cannot be written.
    """
    if suite is None:
        suites = {judging_suite(paths, read_all_results(paths)) for _, paths in named}
        suite = suites.pop() if len(suites) == 1 else "default"
    groups = read_runs(named, suite)
    folders: list[list[Cell]] = [[label, str(run.paths.root)] for label, runs in groups.items() for run in runs]
    count = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    html = page(
        title="Comparison of " + " · ".join(groups),
        subtitle=f"{count}, evaluation suite {suite}, written {time.strftime('%Y-%m-%d %H:%M')}",
        body=[
            section("How they ended", final_table(groups)),
            *_score_sections(groups),
            section("Curves", render_curves(groups)),
            section("Runs", f'<div class="scroll">{table(["label", "folder"], folders, text_columns={0, 1})}</div>'),
        ],
    )
    return write_page(html, output)


def _score_sections(groups: Mapping[str, list[RunMetrics]]) -> list[str]:
    """Returns HTML sections with statistics over seeds, one for each evaluation metric that all runs have. Returns [] if each
    label has a single run.
    """
    runs = [run for group in groups.values() for run in group]
    names = dict.fromkeys(name for run in runs for name, _, _ in task_type_of_run(run.paths).reporting.compared)
    sections = []
    if len(runs) > len(groups):
        for metric in (name for name in names if name.startswith("eval/")):
            step, values = scores_at(runs, metric)
            if step is not None:
                remaining_scores = iter(values)
                config_scores = [
                    ConfigScores(label, [next(remaining_scores) for _ in seeds], len(seeds))
                    for label, seeds in groups.items()
                ]
                title = f"{metric} at step {step}"
                sections.append(
                    section(f"Over seeds: {title}", render_scores(config_scores, title, goal_of(metric), metric))
                )
    return sections


def render_curves(groups: Mapping[str, list[RunMetrics]], num_labels: int | None = None) -> str:
    """Draws the charts of some runs, as HTML.

    Args:
        groups: The runs by label.
        num_labels: Total number of labels, if `groups` contains only the best labels.
    """
    charts_html = charts(groups)
    if not charts_html:
        return missing("No curve that these runs have in common.")
    is_selection = num_labels is not None and num_labels > len(groups)
    selection_note = f" The {len(groups)} best of {num_labels} configurations." if is_selection else ""
    legend = f"<p>Lines are means over seeds, bands and error bars go from the lowest seed to the highest.{selection_note}</p>"
    return legend + figures(charts_html)
