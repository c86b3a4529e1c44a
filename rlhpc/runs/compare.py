"""Comparison page of several runs: curves with mean and spread over seeds, and a table of final results."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlhpc.config.yaml_files import UniqueKeys
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.charts import Line, line_chart
from rlhpc.metrics.energy import EnergyFigures, energy_figures, format_joules
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import Cell, page, render_figures, render_placeholder, section, table, time_unit, write_page
from rlhpc.metrics.provenance import (
    judging_suite,
    read_all_results,
    read_provenance,
    read_results,
    resumes_with_changes,
)
from rlhpc.runs.config_changes import training_changes
from rlhpc.runs.headlines import NO_VALUE, Curve, RunMetrics, headline_columns, mean_text
from rlhpc.runs.seed_scores import ConfigScores, goal_of, render_scores, scores_at
from rlhpc.runs.task_type import task_type_of_run
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_file, read_yaml
from rlhpc.runtime.text import format_duration

#: Number of points to which the curves of several seeds are interpolated.
_NUM_GRID_POINTS = 120
_SEED_SUFFIX = re.compile(r"[-_.]?(?:seed|s)?[-_.]?\d+$", re.IGNORECASE)


def label_of(name: str) -> str:
    """Returns a run's name without its seed: push-s3, push_seed3 and push3 have the label push."""
    return _SEED_SUFFIX.sub("", name) or name


def labels_of(labelled_runs: Sequence[tuple[str | None, RunPaths]]) -> list[tuple[str, RunPaths]]:
    """Returns (label, run) for each run. Without a user's label, the label is the run's name without the seed, if all runs
    with this label differ only in their seeds; otherwise it is the complete name.

    Args:
        labelled_runs: Pairs of the user's label, or None, and the run.

    Raises:
        ConfigError: Runs with the same user-given label differ in more than their seeds.
    """
    members: dict[str, list[RunPaths]] = {}
    for label, paths in labelled_runs:
        members.setdefault(label if label is not None else label_of(paths.root.name), []).append(paths)
    differing_keys = {label: key for label, runs in members.items() if (key := _find_first_difference(runs))}
    for label, _ in labelled_runs:
        if label is not None and label in differing_keys:
            raise ConfigError(
                f"runs of label {label!r} differ in {differing_keys[label]}: they are no seeds of one configuration; "
                "give each configuration a label of its own (LABEL=FOLDER)"
            )
    return [
        (label if label is not None else paths.root.name if shared_label in differing_keys else shared_label, paths)
        for label, paths in labelled_runs
        for shared_label in [label_of(paths.root.name)]
    ]


def seed_groups(runs: Mapping[str, RunPaths], labels: Mapping[str, str]) -> dict[str, list[str]]:
    """Groups runs that differ only in their seeds: they have one label, and equal configurations apart from `runner.seed`,
    from their start on.

    Args:
        runs: Name → files of each run.
        labels: Labels of runs, by name; by default, a run's label is its name without the seed.

    Returns:
        Names of the runs of each group, by title. The title is the label if only one group has this label; otherwise it is
        the label with the names, or the name of a single run. A run with an unreadable configuration is a group by itself.
    """
    by_label: dict[str, list[list[str]]] = {}
    for name, paths in runs.items():
        groups = by_label.setdefault(labels.get(name) or label_of(name), [])
        group = next((group for group in groups if not _find_first_difference([runs[group[0]], paths])), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    runs_by_title = {}
    for label, groups in by_label.items():
        for group_labels in groups:
            names_text = f"{group_labels[0]} … {group_labels[-1]}" if len(group_labels) > 2 else ", ".join(group_labels)
            title = (
                label if len(groups) == 1 else group_labels[0] if len(group_labels) == 1 else f"{label} ({names_text})"
            )
            runs_by_title[title if title not in runs_by_title else f"{label} ({names_text})"] = group_labels
    return runs_by_title


def _find_first_difference(runs: Sequence[RunPaths]) -> str:
    """Returns the first key other than the seed in which runs differ, or that a resume changed in some of them only; "" if
    there is no such difference.
    """
    try:
        first_config, *other_configs = [read_yaml(read_file(run.config), UniqueKeys) for run in runs]
    except (OSError, ValueError, yaml.YAMLError, RlhpcError):
        return "what their config.yaml, which cannot be read, would say" if len(runs) > 1 else ""
    key_changes = [
        key_change
        for other_config in other_configs
        for key_change in training_changes(first_config, other_config)
        if key_change.key != "runner.seed"
    ]
    if key_changes:
        return key_changes[0].key
    first_resumes, *other_resumes = [resumes_with_changes(read_provenance(run)) for run in runs]
    if all(resumes == first_resumes for resumes in other_resumes):
        return ""
    step, changes = next(iter([*first_resumes, *(resume for resumes in other_resumes for resume in resumes)]))
    return f"what a resume at step {step} changed ({changes})"


def read_runs(labelled_runs: Sequence[tuple[str, RunPaths]], suite: str) -> dict[str, list[RunMetrics]]:
    """Returns the metrics of the runs by label, in the order of `labelled_runs`.

    Raises:
        RlhpcError: A run has no metrics.
    """
    groups: dict[str, list[RunMetrics]] = {}
    for label, paths in labelled_runs:
        rows = read_metrics(paths.metrics)
        if not rows:
            state_text = (
                "cannot be read" if paths.metrics.is_file() and paths.metrics.stat().st_size else "has no row yet"
            )
            raise RlhpcError(f"{paths.metrics} {state_text}; see rlhpc status {paths.root}")
        groups.setdefault(label, []).append(RunMetrics(paths, rows, read_results(paths, suite)))
    return groups


def interpolate_seeds(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates the curves of several seeds to common x values, linearly between points.

    Returns:
        x values `[N]` over the range that all seeds cover, and the values `[seeds, N]`. Without a common range, such as one
        evaluation each, the last points of the curves. A single curve is unchanged.
    """
    if len(curves) == 1:
        x, y = curves[0]
        return np.array(x, np.float64), np.array([y], np.float64)
    start_x, end_x = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if end_x <= start_x:
        last_x, last_y = (np.array([curve[i][-1] for curve in curves], np.float64) for i in (0, 1))
        return last_x.mean(keepdims=True), last_y[:, None]
    grid = np.unique(np.linspace(start_x, end_x, min(_NUM_GRID_POINTS, max(len(x) for x, _ in curves))))
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Combines the curves of several seeds into one curve.

    Returns:
        x values, means, minima and maxima (`interpolate_seeds`). Minima and maxima are empty for a single seed.
    """
    x, seed_values = interpolate_seeds(curves)
    min_and_max = (seed_values.min(0).tolist(), seed_values.max(0).tolist()) if len(curves) > 1 else ([], [])
    return x.tolist(), seed_values.mean(0).tolist(), *min_and_max


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
                [x_value / scale for x_value in x_values],
                means,
                minima,
                maxima,
                color=color,
                band=len(x_values) > 1,
                markers=len(x_values) <= 12,
            )
        )
    title += " over wall time" if x_metric == "time/wall_s" else " over experience"
    return line_chart(title, x_label, y_label, lines, has_key=len(groups) > 1) if lines else ""


def charts(groups: Mapping[str, list[RunMetrics]]) -> list[str]:
    """Draws each logged comparison metric over environment steps (or global steps) and over wall time, as SVG."""
    runs = [run for group in groups.values() for run in group]
    steps = all(series(run.rows, "rollout/env_steps")[0] for run in runs)
    unit_name, unit_s = time_unit(max(max(series(run.rows, "time/wall_s")[1], default=0.0) for run in runs))
    axes = [
        ("rollout/env_steps", "environment steps", 1.0) if steps else ("step", "global step", 1.0),
        ("time/wall_s", f"wall time ({unit_name})", unit_s),
    ]
    charts_html = []
    for name, title, label in dict.fromkeys(
        chart_spec for run in runs for chart_spec in task_type_of_run(run.paths).reporting.compared
    ):
        charts_html += [
            _draw_chart(groups, title, label, axis, lambda run, x, n=name: run.curve(n, x)) for axis in axes
        ]
    return [chart_svg for chart_svg in charts_html if chart_svg]


def final_table(groups: Mapping[str, list[RunMetrics]]) -> str:
    """Returns an HTML table of the final results of each label over its seeds: wall time and headline metrics."""
    results_by_group = [
        [eval_result for run in runs if (eval_result := _last_result(run)) is not None] for runs in groups.values()
    ]
    columns: dict[str, list[Cell]] = {
        "runs": list(groups),
        "seeds": [len(runs) for runs in groups.values()],
        "wall time": [
            mean_text([next(reversed(series(run.rows, "time/wall_s")[1]), None) for run in runs], format_duration)
            for runs in groups.values()
        ],
    }
    columns |= {title: [*cells] for title, cells in headline_columns(groups).items()}
    columns |= _make_energy_columns(groups)
    for key, count_noun_text in (("episodes", "episodes"), ("n", "problems")):
        sample_counts = [
            sum(int(eval_result.get(key, 0)) for eval_result in group_results) for group_results in results_by_group
        ]
        if any(sample_counts):
            results = itertools.chain.from_iterable(results_by_group)
            title = next(
                (str(result["unit"]) for result in results if key in result and "unit" in result), count_noun_text
            )
            columns[title] = [num_samples or NO_VALUE for num_samples in sample_counts]
    table_rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return f'<div class="scroll">{table([*columns], table_rows, text_columns={0})}</div>'


def _make_energy_columns(groups: Mapping[str, list[RunMetrics]]) -> dict[str, list[Cell]]:
    """Returns columns with the accelerators' energy and hours; {} if no run has measured them.

    A mean over seeds of which some have no figure would be of other runs, so it is left out.
    """
    figures_by_label = {label: [energy_figures(run.paths, run.rows) for run in runs] for label, runs in groups.items()}
    if all(run.joules is None for runs in figures_by_label.values() for run in runs):
        return {}

    def column(get_value: Callable[[EnergyFigures], float | None], format_value: Callable[[float], str]) -> list[Cell]:
        values_by_run = [[get_value(run) for run in runs] for runs in figures_by_label.values()]
        return [
            "not measured" if None in group_values else mean_text(group_values, format_value)
            for group_values in values_by_run
        ]

    unit_names = {run.unit for runs in figures_by_label.values() for run in runs if run.per_thousand is not None}
    columns = {
        "GPU energy": column(lambda run: run.joules, format_joules),
        "GPU-hours": column(lambda run: run.hours, "{:.3g}".format),
    }
    if len(unit_names) == 1:  # otherwise the figures cannot be compared
        [sample_unit] = unit_names
        columns[f"per 1000 {sample_unit}"] = column(lambda run: run.per_thousand, format_joules)
        columns[f"GPU-hours per 1000 {sample_unit}"] = column(lambda run: run.hours_per_thousand, "{:.3g}".format)
    return columns


def _last_result(run: RunMetrics) -> dict[str, Any] | None:
    best_step = run.paths.best_step()
    return max(
        run.evaluations, key=lambda result: (result["global_step"] == best_step, result["global_step"]), default=None
    )


def _resumes_text(paths: RunPaths) -> str:
    resumes = resumes_with_changes(read_provenance(paths))
    return "; ".join(f"from step {step} on: {changes}" for step, changes in resumes)


def write_comparison(labelled_runs: Sequence[tuple[str, RunPaths]], output: Path, suite: str | None = None) -> Path:
    """Writes the comparison page; returns its path.

    Args:
        labelled_runs: Pairs of label and run; runs with the same label are seeds of one configuration.
        output: The HTML file.
        suite: Evaluation suite to compare. None selects the judging suite if all runs have the same one, else `default`.

    Raises:
        RlhpcError: A run has no metrics, or the page cannot be written.
    """
    if suite is None:
        suites = {judging_suite(paths, read_all_results(paths)) for _, paths in labelled_runs}
        suite = suites.pop() if len(suites) == 1 else "default"
    groups = read_runs(labelled_runs, suite)
    folders: list[list[Cell]] = [
        [label, str(run.paths.root), _resumes_text(run.paths)] for label, runs in groups.items() for run in runs
    ]
    titles = ["label", "folder", "resumed with another configuration"]
    if not any(row[2] for row in folders):
        titles, folders = titles[:2], [row[:2] for row in folders]
    runs_text = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    html = page(
        title="Comparison of " + " · ".join(groups),
        subtitle=f"{runs_text}, evaluation suite {suite}, written {time.strftime('%Y-%m-%d %H:%M')}",
        body=[
            section("How they ended", final_table(groups)),
            *_score_sections(groups),
            section("Curves", render_curves(groups)),
            section("Runs", f'<div class="scroll">{table(titles, folders, text_columns={0, 1, 2})}</div>'),
        ],
    )
    return write_page(html, output)


def _score_sections(groups: Mapping[str, list[RunMetrics]]) -> list[str]:
    """Returns HTML sections with statistics over seeds, one for each evaluation metric that all runs have. Returns [] if each
    label has a single run.
    """
    runs = [run for group in groups.values() for run in group]
    metric_names = dict.fromkeys(name for run in runs for name, _, _ in task_type_of_run(run.paths).reporting.compared)
    sections = []
    if len(runs) > len(groups):
        for metric in (name for name in metric_names if name.startswith("eval/")):
            step, score_values = scores_at(runs, metric)
            if step is not None:
                remaining_scores = iter(score_values)
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
        return render_placeholder("No curve that these runs have in common.")
    is_selection = num_labels is not None and num_labels > len(groups)
    selection_note = f" The {len(groups)} best of {num_labels} configurations." if is_selection else ""
    legend = f"<p>Lines are means over seeds, bands and error bars go from the lowest seed to the highest.{selection_note}</p>"
    return legend + render_figures(charts_html)
