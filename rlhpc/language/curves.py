"""Curves and tables of language-model runs, for the report and for Snakemake's."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.bars import stacked_bars
from rlhpc.metrics.logger import series
from rlhpc.metrics.phases import STAGES, Rows, binned, phase_columns
from rlhpc.metrics.svg import LARGE, SMALL, Line, Size, line_chart
from rlhpc.runtime.plain import read_json

Evaluation = Mapping[str, Any]

# File → metric, title, y axis.
_LARGE = {
    "reward": ("train/reward", "Reward", "mean reward"),
    "accuracy": ("train/accuracy", "Accuracy on training prompts", "share of right samples"),
    "loss": ("train/loss", "Loss", "cross entropy (nats per token)"),
    "preference_loss": ("train/loss", "Loss", "mean over pairs or responses"),
}
_SMALL = {
    "response_length": ("train/response_tokens", "Response length", "tokens, mean"),
    "truncated": ("train/truncated", "Cut off at the length limit", "share of responses"),
    "kl": ("train/ref_kl", "Distance from the reference", "KL (nats per token)"),
    "entropy": ("train/entropy", "Entropy", "nats per token"),
    "approx_kl": ("train/approx_kl", "Policy change per update", "approximate KL (nats)"),
    "clip_fraction": ("train/clip_fraction", "Clipped ratios", "share of tokens"),
    "mismatch": ("train/mismatch_kl", "Trainer against rollout engine", "KL (nats per token)"),
    "staleness": ("rollout/staleness", "Staleness", "policy versions, mean"),
    "varied_groups": ("train/varied_groups", "Groups that teach", "share with different rewards"),
    "reward_std": ("train/reward_std", "Spread of the reward", "standard deviation"),
    "policy_loss": ("train/policy_loss", "Policy loss", "loss"),
    "explained_variance": ("critic/explained_variance", "What the critic explains", "share of the returns' variance"),
    "critic_loss": ("critic/loss", "Critic's loss", "loss"),
    "teacher": ("train/teacher_divergence", "Distance from the teacher", "divergence (nats per token)"),
    "grad_norm": ("train/grad_norm", "Gradient norm", "L2 norm before clipping"),
    "lr": ("train/lr", "Learning rate", "learning rate"),
}
_COUNTERS = {"rollout/samples", "train/tokens_total"}
_RATES = {"rollout": "time/tokens_per_s", "training": "time/train_tokens_per_s"}


def learning_curves(rows: Rows, always: Container[str]) -> dict[str, str]:
    """Reward and accuracy (of demonstrations: loss) large, then what else was logged: known metrics with their titles,
    others too.

    Args:
        rows: The run's metrics.
        always: Curves that are drawn whether something was logged or not.
    """
    large = {file: chart for file, chart in _LARGE.items() if file in always}
    known = {**large, **_SMALL}
    charts = {}
    for color, (file, (name, title, y_label)) in enumerate(known.items()):
        if file in always or series(rows, name)[0]:
            charts[file] = _chart(rows, name, title, y_label, color, LARGE if file in large else SMALL)
    names = {key for row in rows for key in row}
    if tested := sorted(name for name in names if name.startswith("eval/") and name.endswith("/accuracy")):
        labels = {name: name.removeprefix("eval/").rpartition("/")[0] for name in tested}
        lines = [Line(labels[name], *series(rows, name), color=i, markers=True) for i, name in enumerate(tested)]
        charts["eval_accuracy"] = line_chart("Evaluation during training", "global step", "accuracy", lines, SMALL)
    if len(terms := sorted(name for name in names if name.startswith("reward/"))) > 1:
        lines = [Line(name[7:], *series(rows, name), color=i, smooth=True) for i, name in enumerate(terms)]
        charts["reward_terms"] = line_chart("Terms of the reward", "global step", "mean", lines, SMALL)
    drawn = {name for name, _, _ in known.values()} | _COUNTERS
    for name in sorted({name for name in names if name.startswith(("train/", "rollout/"))} - drawn):
        if len(set(series(rows, name)[1])) > 1:  # a constant is no curve
            charts[name.replace("/", "_")] = _chart(rows, name, name, "", len(charts), SMALL)
    return charts


def _chart(rows: Rows, name: str, title: str, y_label: str, color: int, size: Size) -> str:
    return line_chart(title, "global step", y_label, [Line("", *series(rows, name), color=color, smooth=True)], size)


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
    found = []
    for path in paths.eval_results():
        try:
            result = read_json(path.read_bytes())
            result = {**result, "suite": str(result.get("suite", path.stem)), "global_step": int(result["global_step"])}
            result["accuracy"], result["n"] = float(result["accuracy"]), int(result["n"])
            low, high = result.get("accuracy_ci95") or (result["accuracy"],) * 2
            result["low"], result["high"] = float(low), float(high)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        found.append(result)
    return sorted(found, key=lambda result: (result["suite"], result["global_step"]))


def by_suite(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """The evaluations of each suite."""
    suites: dict[str, list[Evaluation]] = {}
    for result in evaluations:
        suites.setdefault(str(result["suite"]), []).append(result)
    return suites


def evaluation_curve(evaluations: Sequence[Evaluation]) -> str:
    """Accuracy by checkpoint with 95 % intervals, one line per suite."""
    lines = []
    for color, (suite, own) in enumerate(by_suite(evaluations).items()):
        x, y, low, high = ([result[key] for result in own] for key in ("global_step", "accuracy", "low", "high"))
        lines.append(Line(suite, x, y, low, high, color=color, markers=True))
    return line_chart("Evaluation by checkpoint", "global step", "accuracy, 95 % interval", lines)


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
    return line_chart("pass@k", "k", "pass@k, 95 % interval", lines) if lines else None


def all_curves(paths: RunPaths, rows: Rows, always: Container[str]) -> dict[str, str]:
    """Every chart of the run by file name."""
    evaluations = read_evaluations(paths)
    charts = {**learning_curves(rows, always), "evaluation": evaluation_curve(evaluations), **time_curves(rows)}
    passed = pass_at_k_curve(evaluations)
    return charts | ({"pass_at_k": passed} if passed else {})
