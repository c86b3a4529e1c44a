"""Curves and tables of language-model runs, for the report and for Snakemake's."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.charts import CHART, TALL, Line, Size, is_constant, line_chart, stacked_bars
from rlhpc.metrics.curves import Metric, evaluation_chart, metric_charts
from rlhpc.metrics.logger import series
from rlhpc.metrics.phase_times import STAGES, Rows, binned, phase_columns
from rlhpc.metrics.provenance import evaluations_by_suite, typed_results

Evaluation = Mapping[str, Any]

#: Metrics that come first, where a kind of run has them; and the others.
_FIRST = [
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


def learning_curves(rows: Rows, always: Container[str]) -> dict[str, str]:
    """Draws reward and accuracy (of demonstrations: loss), then what else was logged: known metrics with their titles, others
    too.

    Args:
        rows: The run's metrics.
        always: Curves that are drawn whether something was logged or not.
    """
    known = [*(metric for metric in _FIRST if metric.file in always), *_DIAGNOSTICS]
    names = {key for row in rows for key in row}
    drawn = {metric.name for metric in known} | _COUNTERS
    unknown = [
        Metric(name.replace("/", "_"), name, name, "")
        for name in sorted({name for name in names if name.startswith(("train/", "rollout/"))} - drawn)
        if not is_constant(series(rows, name)[1])
    ]
    charts = metric_charts(rows, [*known, *unknown], always)
    held_out = series(rows, "eval/loss")
    for metric in known:
        if metric.name == "train/loss" and metric.file in charts and held_out[0]:
            lines = [Line("training", *series(rows, metric.name), smooth=True)]
            lines.append(Line("held out", *held_out, color=1, markers=True))
            charts[metric.file] = line_chart(metric.title, "global step", metric.y_label, lines)
    if len(terms := sorted(name for name in names if name.startswith("reward/"))) > 1:
        lines = [Line(name[7:], *series(rows, name), color=i, smooth=True) for i, name in enumerate(terms)]
        charts["reward_terms"] = line_chart("Terms of the reward", "global step", "mean", lines)
    return charts


def time_curves(rows: Rows) -> dict[str, str]:
    """Tokens per second, the work of the stages (which overlaps), and the stacked phases of a step."""
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
    phases = stacked_bars("Time per phase", "global step", "seconds per step", *binned(rows, phase_columns(rows)))
    return charts | {"time_per_phase": phases}


def read_evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    """Every readable eval/global_step_<N>/<suite>.json with an accuracy, by suite and step.

    Each has `suite`, `global_step`, `n`, `accuracy`, `low` and `high` (95 %).
    """
    results = [result for result in typed_results(paths, "accuracy") if "n" in result]
    for result in results:
        result["low"], result["high"] = result.get("accuracy_ci95") or (result["accuracy"],) * 2
    return results


def by_suite(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """The evaluations of each suite."""
    suites: dict[str, list[Evaluation]] = {}
    for result in evaluations:
        suites.setdefault(str(result["suite"]), []).append(result)
    return suites


def evaluation_curve(paths: RunPaths, rows: Rows, evaluations: Sequence[Evaluation], size: Size = CHART) -> str:
    """Accuracy of all evaluations, those in training and those of checkpoints, with 95 % intervals, one line per suite."""
    suites = evaluations_by_suite(paths, rows, evaluations, "accuracy")
    return evaluation_chart("Accuracy in evaluations", "accuracy, 95 % interval", suites, "accuracy", size)


def pass_at_k_curve(evaluations: Sequence[Evaluation]) -> str | None:
    """pass@k over k of each suite's first and last checkpoint; None where no suite has several samples."""
    lines: list[Line] = []
    for suite, own in by_suite(evaluations).items():
        several = [result for result in own if len(result.get("pass_at_k") or {}) > 1]
        for result in several[:1] + several[1:][-1:]:
            ends = result.get("pass_at_k_ci95") or {}
            points = sorted(
                (int(k), float(value), *ends.get(k, (value, value))) for k, value in result["pass_at_k"].items()
            )
            x, y, low, high = (list(column) for column in zip(*points, strict=True))
            name = f"{suite}, step {result['global_step']}"
            lines.append(Line(name, x, y, low, high, color=len(lines), markers=True))
    return line_chart("pass@k", "k", "pass@k, 95 % interval", lines, TALL) if lines else None


def all_curves(paths: RunPaths, rows: Rows, always: Container[str]) -> dict[str, str]:
    """Every chart of the run by file name."""
    evaluations = read_evaluations(paths)
    evaluation = evaluation_curve(paths, rows, evaluations)
    charts = {**learning_curves(rows, always), "evaluation": evaluation, **time_curves(rows)}
    passed = pass_at_k_curve(evaluations)
    return charts | ({"pass_at_k": passed} if passed else {})
