"""Report of a language run: curves, evaluations and key figures."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths, model_name
from rlhpc.language.reporting.eval_metrics import level_order
from rlhpc.language.reporting.sample_pages import write_episodes_page, write_samples_page
from rlhpc.metrics.charts import CHART, TALL, Line, Size, is_constant, line_chart, number, stacked_bar_chart
from rlhpc.metrics.curves import Metric, draw_metric_charts, evaluation_chart, hollow_points
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, card, render_figures, render_placeholder, table
from rlhpc.metrics.phase_times import STAGES, Rows, bin_rows, phase_columns
from rlhpc.metrics.provenance import (
    evaluations_by_suite,
    judging_suite,
    largest_pass_at,
    metric_title,
    scored_results,
    select_suite,
    typed_results,
    with_pass_at,
)
from rlhpc.runs.task_type import Parts
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.text import format_duration, interval_text, parenthesized_interval

Evaluation = Mapping[str, Any]

#: Main metrics, which are drawn first if the task type has them.
_MAIN_METRICS = [
    Metric("reward", "train/reward", "Reward", "mean reward"),
    Metric("accuracy", "train/accuracy", "Accuracy on training prompts", "share of right samples"),
    Metric("loss", "train/loss", "Loss", "cross entropy (nats per token)"),
    Metric("preference_loss", "train/loss", "Loss", "mean over pairs or responses"),
    Metric("pair_accuracy", "train/accuracy", "Pairs decided rightly", "share of pairs"),
]
_DIAGNOSTICS = [
    Metric("response_length", "train/response_tokens", "Response length", "tokens, mean"),
    Metric("truncated", "train/truncated", "Cut off at the length limit", "share of responses"),
    Metric("kl", "train/ref_kl", "Distance from the reference", "KL (nats per token)"),
    Metric("entropy", "train/entropy", "Entropy", "nats per token"),
    Metric("approx_kl", "train/approx_kl", "Policy change per update", "approximate KL (nats)"),
    Metric("clip_fraction", "train/clip_fraction", "Clipped ratios", "share of tokens"),
    Metric("mismatch", "train/mismatch_kl", "Trainer against rollout engine", "KL (nats per token)"),
    Metric("staleness", "rollout/staleness", "Staleness", "policy versions, mean"),
    Metric("varied_groups", "train/varied_groups", "Groups that teach", "share with different rewards"),
    Metric("reward_std", "train/reward_std", "Spread of the reward", "standard deviation"),
    Metric("policy_loss", "train/policy_loss", "Policy loss", "loss"),
    Metric(
        "explained_variance", "critic/explained_variance", "What the critic explains", "share of the returns' variance"
    ),
    Metric("critic_loss", "critic/loss", "Critic's loss", "loss"),
    Metric("teacher", "train/teacher_divergence", "Distance from the teacher", "divergence (nats per token)"),
    Metric("grad_norm", "train/grad_norm", "Gradient norm", "L2 norm before clipping"),
    Metric("lr", "train/lr", "Learning rate", "learning rate"),
]
_COUNTERS = {"rollout/samples", "train/tokens_total"}
_RATES = {"rollout": "time/tokens_per_s", "training": "time/train_tokens_per_s"}


def learning_curves(rows: Rows, shown_metrics: Container[str]) -> dict[str, str]:
    """Draws the main metrics of the task type, then the diagnostics, then other logged metrics under their names.

    Args:
        rows: Metrics of the run.
        shown_metrics: Curves that are drawn even without logged values.
    """
    titled_metrics = [*(metric for metric in _MAIN_METRICS if metric.file in shown_metrics), *_DIAGNOSTICS]
    metric_names = {key for row in rows for key in row}
    charted_names = {metric.name for metric in titled_metrics} | _COUNTERS
    unknown_names = [
        name
        for name in sorted({name for name in metric_names if name.startswith(("train/", "rollout/"))} - charted_names)
        if not is_constant(series(rows, name)[1])
    ]
    extra_metrics = [Metric(name.replace("/", "_"), name, name, "") for name in unknown_names if name.count("/") == 1]
    charts = draw_metric_charts(rows, [*titled_metrics, *extra_metrics], shown_metrics)
    # `train/mismatch_abs/<class>` of all classes in one chart, and so `train/policy/<policy>/tokens` of all policies.
    families: dict[tuple[str, ...], dict[str, str]] = {}
    for name in unknown_names:
        section, quantity, *labels = name.split("/")
        if labels:
            families.setdefault((section, quantity, *labels[1:]), {})[labels[0]] = name
    for family, names in families.items():
        charts["_".join(family)] = _family_chart(rows, "/".join(family), names, "")
    held_out_loss = series(rows, "eval/loss")
    for metric in titled_metrics:
        if metric.name == "train/loss" and metric.file in charts and held_out_loss[0]:
            lines = [Line("training", *series(rows, metric.name), smooth=True)]
            lines.append(Line("held out", *held_out_loss, color=1, markers=True))
            charts[metric.file] = line_chart(metric.title, "global step", metric.y_label, lines)
    terms = {name[7:]: name for name in sorted(metric_names) if name.startswith("reward/")}
    if len(terms) > 1:
        charts["reward_terms"] = _family_chart(rows, "Terms of the reward", terms, "mean")
    return charts


def _family_chart(rows: Rows, title: str, names: Mapping[str, str], y_label: str) -> str:
    """Draws several metrics (label → name) of one quantity in one chart with a key."""
    lines = [
        Line(label, *series(rows, name), color=color, smooth=True) for color, (label, name) in enumerate(names.items())
    ]
    return line_chart(title, "global step", y_label, lines, has_key=True)


def time_curves(rows: Rows) -> dict[str, str]:
    """Draws tokens per second, the times of the stages (which overlap), and the stacked phases of a step."""
    lines = [
        Line(label, *series(rows, name), color=color, smooth=True)
        for color, (label, name) in enumerate(_RATES.items(), start=4)
        if series(rows, name)[0]
    ]
    charts = {"throughput": line_chart("Throughput", "global step", "tokens / s", lines)}
    stages = [(name, f"time/{name}_s") for name in (*STAGES, "step") if series(rows, f"time/{name}_s")[0]]
    if len(stages) > 1:
        lines = [
            Line(label.replace("_", " "), *series(rows, name), color=color, smooth=True)
            for color, (label, name) in enumerate(stages)
        ]
        charts["stages"] = line_chart("Work of the stages", "global step", "seconds", lines)
    phases = stacked_bar_chart(
        "Time per phase", "global step", "seconds per step", *bin_rows(rows, phase_columns(rows))
    )
    return charts | {"time_per_phase": phases}


def read_evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    """Returns the contents of all readable eval/global_step_<N>/<suite>.json with an accuracy, by suite and step.

    Each result has `suite`, `global_step`, `n`, `accuracy`, `low` and `high` (95 % interval).
    """
    evaluations = [evaluation for evaluation in typed_results(paths, "accuracy") if "n" in evaluation]
    for evaluation in evaluations:
        evaluation["low"], evaluation["high"] = evaluation.get("accuracy_ci95") or (evaluation["accuracy"],) * 2
    return evaluations


def group_by_suite(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Groups evaluations by suite."""
    suites: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        suites.setdefault(str(evaluation["suite"]), []).append(evaluation)
    return suites


def evaluation_curve(paths: RunPaths, rows: Rows, evaluations: Sequence[Evaluation], size: Size = CHART) -> str:
    """Draws the accuracy of all evaluations, during training and of checkpoints, with 95 % intervals, one line per
    suite.
    """
    suites = evaluations_by_suite(paths, rows, evaluations, "accuracy")
    return evaluation_chart("Accuracy in evaluations", "accuracy, 95 % interval", suites, "accuracy", size)


def pass_at_k_curve(evaluations: Sequence[Evaluation]) -> str | None:
    """Draws pass@k over k for the first and the last checkpoint of each suite; None if no suite has several samples."""
    lines: list[Line] = []
    for suite, results_of_suite in group_by_suite(evaluations).items():
        curve_results = [
            curve_result for curve_result in results_of_suite if len(curve_result.get("pass_at_k") or {}) > 1
        ]
        for curve_result in curve_results[:1] + curve_results[1:][-1:]:
            interval_ends = curve_result.get("pass_at_k_ci95") or {}
            points = sorted(
                (int(k), float(pass_rate), *interval_ends.get(k, (pass_rate, pass_rate)))
                for k, pass_rate in curve_result["pass_at_k"].items()
            )
            k_values, pass_rates, lower_ends, upper_ends = (list(column) for column in zip(*points, strict=True))
            name = f"{suite}, step {curve_result['global_step']}"
            lines.append(Line(name, k_values, pass_rates, lower_ends, upper_ends, color=len(lines), markers=True))
    return line_chart("pass@k", "k", "pass@k, 95 % interval", lines, TALL) if lines else None


def all_curves(paths: RunPaths, rows: Rows, shown_metrics: Container[str]) -> dict[str, str]:
    """Returns all charts of the run by file name."""
    evaluations = read_evaluations(paths)
    evaluation_chart = evaluation_curve(paths, rows, evaluations)
    charts = {**learning_curves(rows, shown_metrics), "evaluation": evaluation_chart, **time_curves(rows)}
    pass_at_k_chart = pass_at_k_curve(evaluations)
    return charts | ({"pass_at_k": pass_at_k_chart} if pass_at_k_chart else {})


def parts(
    paths: RunPaths,
    rows: Rows,
    *,
    shown_metrics: Container[str],
    trained_metric: tuple[str, str],
    rate: str,
    linked: bool,
) -> Parts:
    """Returns the parts of the page (`Reporting.parts`); with `linked`, also writes samples.html and episodes.html if
    evaluations have samples.

    Args:
        paths: Paths of the run.
        rows: Metrics of the run.
        shown_metrics: Curves that are drawn even without logged values.
        trained_metric: Metric of the progress of training, and its title.
        rate: Metric of the tokens per second.
        linked: Whether the page may link to other files of the run.
    """
    evaluations = read_evaluations(paths)
    samples = write_samples_page(paths) if linked else None
    episodes = write_episodes_page(paths) if linked else None
    suite = judging_suite(paths, evaluations)
    suite_evaluations = select_suite(evaluations, suite)
    accuracy_by_step = {
        int(evaluation["global_step"]): f"{evaluation['accuracy']:.1%}" for evaluation in suite_evaluations
    }
    return Parts(
        subject=data_name(paths),
        cards=key_figures(rows, scored_results(paths, rows, evaluations, suite, "accuracy"), trained_metric, rate),
        curves=list(learning_curves(rows, shown_metrics).values()),
        evaluation=evaluation_section(
            paths, rows, evaluations, samples.name if samples else None, episodes.name if episodes else None
        ),
        times=list(time_curves(rows).values())[::-1],
        evaluated=accuracy_by_step,
        trained=trained_metric,
    )


def data_name(paths: RunPaths) -> str:
    """Returns the names of the run's model and data for the subtitle; "" if the configuration cannot be read."""
    try:
        cfg = read_yaml(paths.config.read_bytes())
        train_section, model = cfg["data"]["train"], str(cfg["actor"]["model"]["model_path"] or "")
        task = (train_section.get("kwargs") or {}).get("task") or train_section.get("path") or train_section["source"]
        return f"{model_name(Path(model))} on {Path(str(task)).name}" if model else str(task)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return ""


def key_figures(rows: Rows, evaluations: Sequence[Evaluation], trained_metric: tuple[str, str], rate: str) -> str:
    """Renders the cards at the top of the page: best and last evaluation of a suite, and figures of the run."""
    best_evaluation = max(evaluations, key=lambda result: result["accuracy"], default=None)
    last_evaluation = evaluations[-1] if evaluations else None

    def latest_value(name: str) -> float | None:
        return next(iter(series(rows, name)[1][-1:]), None)

    def evaluation_card(title: str, result: Evaluation | None) -> str:
        if result is None:
            return card(title, "–", "not evaluated yet")
        return card(title, f"{result['accuracy']:.1%}", f"accuracy, {result['suite']}, step {result['global_step']}")

    name, label = trained_metric
    metric_value, wall_s = latest_value(name), latest_value("time/wall_s")
    rate_values = series(rows, rate)[1]
    return (
        '<div class="cards">'
        + evaluation_card("Best evaluation", best_evaluation)
        + evaluation_card("Last evaluation", last_evaluation)
        + card(label.capitalize(), "–" if metric_value is None else f"{metric_value:.3f}", "at the last step")
        + card("Training steps", str(rows[-1]["step"]) if rows else "–", "")
        + card("Wall time", "–" if wall_s is None else format_duration(wall_s), "training")
        + card("Tokens / s", number(sum(rate_values) / len(rate_values)) if rate_values else "–", "mean over the run")
        + "</div>"
    )


def evaluation_section(
    paths: RunPaths,
    rows: Rows,
    evaluations: Sequence[Evaluation],
    samples_page: str | None,
    episodes_page: str | None = None,
) -> str:
    """Renders chart and table of the evaluations, accuracy by level, and links to the pages of samples and episodes."""
    html = render_figures(
        [pass_at_k_chart] if (pass_at_k_chart := pass_at_k_curve(evaluations)) else [],
        lambda size: evaluation_curve(paths, rows, evaluations, size),
    )
    html += hollow_points(evaluations_by_suite(paths, rows, evaluations, "accuracy"))
    if not evaluations:
        return html or render_placeholder(
            "No evaluation yet: <code>rlhpc eval</code> on a checkpoint, or the workflow's eval rule."
        )
    if samples_page:
        html += f'<p><a href="{escape(samples_page)}">What the model wrote, checkpoint beside checkpoint</a></p>'
    if episodes_page:
        html += f'<p><a href="{escape(episodes_page)}">What its episodes left, turn by turn</a></p>'
    html += f'<div class="scroll">{_evaluation_table(evaluations)}</div>'
    for suite, suite_results in group_by_suite(evaluations).items():
        if any(evaluation.get("levels") for evaluation in suite_results):
            html += (
                f'<h3>{escape(suite)}: accuracy by level</h3><div class="scroll">{_level_table(suite_results)}</div>'
            )
    return html


def _evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """Renders a table with one row per evaluation."""
    best_accuracies = {
        suite: max(evaluation["accuracy"] for evaluation in suite_results)
        for suite, suite_results in group_by_suite(evaluations).items()
    }
    named_evaluations = [with_pass_at(evaluation) for evaluation in evaluations]
    pass_metric = largest_pass_at(name for evaluation in named_evaluations for name in evaluation)
    rows: list[list[Cell]] = []
    for evaluation in named_evaluations:
        sample_cells = (
            [_format(evaluation.get(pass_metric), ".1%"), _format(evaluation.get("majority"), ".1%")]
            if pass_metric
            else []
        )
        rows.append(
            [
                str(evaluation["suite"]),
                evaluation["global_step"],
                evaluation["n"],
                _format(evaluation["accuracy"], ".1%")
                + (" ★" if evaluation["accuracy"] == best_accuracies[str(evaluation["suite"])] else ""),
                interval_text((evaluation["low"], evaluation["high"]), ".1%") or "–",
                *sample_cells,
                _format(evaluation.get("reward_mean"), ".3f"),
                _format((evaluation.get("response_tokens") or {}).get("mean"), ".1f"),
                _format(evaluation.get("truncated"), ".1%"),
                str(evaluation.get("backend", "–")),
            ]
        )
    sample_columns = [metric_title(pass_metric), "majority"] if pass_metric else []
    header = [
        "suite",
        "step",
        "n",
        "accuracy",
        "95 % interval",
        *sample_columns,
        "reward",
        "tokens",
        "cut off",
        "backend",
    ]
    return table(header, rows, text_columns={0, len(header) - 1})


def _level_table(evaluations: Sequence[Evaluation]) -> str:
    """Renders a table with one row per level and one column per checkpoint."""
    levels = sorted({level for evaluation in evaluations for level in evaluation.get("levels") or {}}, key=level_order)
    sizes = evaluations[-1].get("levels") or {}
    body: list[list[Cell]] = []
    for level in levels:
        cells: list[Cell] = []
        for evaluation in evaluations:
            scores = (evaluation.get("levels") or {}).get(level) or {}
            cells.append(
                _format(scores.get("accuracy"), ".1%")
                + parenthesized_interval(scores.get("accuracy_ci95"), ".1%", separator=" … ")
            )
        body.append([level or "–", sizes.get(level, {}).get("n", "–"), *cells])
    return table(
        ["level", "n", *(f"step {evaluation['global_step']}" for evaluation in evaluations)], body, text_columns={0}
    )


def _format(value: Any, spec: str) -> str:
    return f"{value:{spec}}" if isinstance(value, (int, float)) else "–"
