"""Curves and tables of language-model runs, for the report and for Snakemake's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.pass_at_k import level_order
from rlhpc.metrics.bars import stacked_bars
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, card, duration, figures, missing, table
from rlhpc.metrics.phases import STAGES, Rows, binned, phase_columns
from rlhpc.metrics.svg import LARGE, SMALL, Line, Size, line_chart, number
from rlhpc.runtime.plain import read_json, read_yaml

TASKS = ("reasoning", "sft")
Evaluation = Mapping[str, Any]

# File → metric, title, y axis.
_LARGE = {
    "reward": ("train/reward", "Reward", "mean reward"),
    "accuracy": ("train/accuracy", "Accuracy on training prompts", "share of right samples"),
}
_SFT = {"loss": ("train/loss", "Loss", "cross entropy (nats per token)")}
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
    "grad_norm": ("train/grad_norm", "Gradient norm", "L2 norm before clipping"),
    "lr": ("train/lr", "Learning rate", "learning rate"),
}
_COUNTERS = {"rollout/samples", "train/tokens_total"}
_RATES = {"rollout": "time/tokens_per_s", "training": "time/train_tokens_per_s"}
#: Curves that are written whether something was logged or not, with their titles in Snakemake's report.
ALWAYS = {
    "reasoning": {
        "reward": "Reward",
        "accuracy": "Accuracy on training prompts",
        "evaluation": "Evaluation per checkpoint",
        "response_length": "Response length",
        "kl": "Distance from the reference",
        "entropy": "Entropy",
        "clip_fraction": "Clipped ratios",
        "throughput": "Tokens per second",
        "time_per_phase": "Time per phase",
    },
    "sft": {
        "loss": "Loss",
        "evaluation": "Evaluation per checkpoint",
        "throughput": "Tokens per second",
        "time_per_phase": "Time per phase",
    },
}


def language_task(paths: RunPaths) -> str | None:
    """`reasoning` or `sft`; None for other runs, and where config.yaml cannot be read."""
    try:
        task = str(read_yaml(paths.config.read_bytes())["runner"]["task_type"]).lower()
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return task if task in TASKS else None


def data_name(paths: RunPaths) -> str:
    """Model and data of the run, for its subtitle."""
    try:
        cfg = read_yaml(paths.config.read_bytes())
        train, model = cfg["data"]["train"], str(cfg["actor"]["model"]["model_path"] or "")
        task = (train.get("kwargs") or {}).get("task") or train.get("path") or train["source"]
        return f"{Path(model).name} on {Path(str(task)).name}" if model else str(task)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return ""


def learning_curves(rows: Rows, task: str) -> dict[str, str]:
    """Reward and accuracy (sft: loss) large, then what else was logged: known metrics with their titles, others too."""
    large = _SFT if task == "sft" else _LARGE
    known = {**large, **_SMALL}
    charts = {}
    for color, (file, (name, title, y_label)) in enumerate(known.items()):
        if file in ALWAYS[task] or series(rows, name)[0]:
            charts[file] = _chart(rows, name, title, y_label, color, LARGE if file in large else SMALL)
    names = {key for row in rows for key in row}
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
    for path in sorted(paths.eval.glob("global_step_*/*.json")):
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


def _suites(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    suites: dict[str, list[Evaluation]] = {}
    for result in evaluations:
        suites.setdefault(str(result["suite"]), []).append(result)
    return suites


def evaluation_curve(evaluations: Sequence[Evaluation]) -> str:
    """Accuracy by checkpoint with 95 % intervals, one line per suite."""
    lines = []
    for color, (suite, own) in enumerate(_suites(evaluations).items()):
        x, y, low, high = ([result[key] for result in own] for key in ("global_step", "accuracy", "low", "high"))
        lines.append(Line(suite, x, y, low, high, color=color, markers=True))
    return line_chart("Evaluation by checkpoint", "global step", "accuracy, 95 % interval", lines)


def pass_at_k_curve(evaluations: Sequence[Evaluation]) -> str | None:
    """pass@k over k of each suite's first and last checkpoint; None where no suite has several samples."""
    lines: list[Line] = []
    for suite, own in _suites(evaluations).items():
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


def all_curves(paths: RunPaths, rows: Rows, task: str) -> dict[str, str]:
    """Every chart of the run by file name."""
    evaluations = read_evaluations(paths)
    charts = {**learning_curves(rows, task), "evaluation": evaluation_curve(evaluations), **time_curves(rows)}
    passed = pass_at_k_curve(evaluations)
    return charts | ({"pass_at_k": passed} if passed else {})


def key_figures(rows: Rows, evaluations: Sequence[Evaluation], task: str) -> str:
    """The cards on top of the page: of the first suite, where there are several."""
    own = next(iter(_suites(evaluations).values()), [])
    best, last = max(own, key=lambda result: result["accuracy"], default=None), own[-1] if own else None

    def of(name: str) -> float | None:
        return next(iter(series(rows, name)[1][-1:]), None)

    def evaluated(title: str, result: Evaluation | None) -> str:
        if result is None:
            return card(title, "–", "not evaluated yet")
        return card(title, f"{result['accuracy']:.1%}", f"accuracy, {result['suite']}, step {result['global_step']}")

    name, label = ("train/loss", "Training loss") if task == "sft" else ("train/reward", "Training reward")
    value, wall = of(name), of("time/wall_s")
    rates = series(rows, _RATES["training" if task == "sft" else "rollout"])[1]
    return (
        '<div class="cards">'
        + evaluated("Best evaluation", best)
        + evaluated("Last evaluation", last)
        + card(label, "–" if value is None else f"{value:.3f}", "at the last step")
        + card("Training steps", str(rows[-1]["step"]) if rows else "–", "")
        + card("Wall time", "–" if wall is None else duration(wall), "training")
        + card("Tokens / s", number(sum(rates) / len(rates)) if rates else "–", "mean over the run")
        + "</div>"
    )


def evaluation_section(evaluations: Sequence[Evaluation], samples_page: str | None) -> str:
    """Plot and table of the evaluations, accuracy by level, and the way to the page of samples."""
    if not evaluations:
        return missing("No evaluation yet: <code>rlhpc eval</code> on a checkpoint, or the workflow's eval rule.")
    charts = [evaluation_curve(evaluations)]
    if passed := pass_at_k_curve(evaluations):
        charts.append(passed)
    html = figures(charts)
    if samples_page:
        html += f'<p><a href="{escape(samples_page)}">What the model wrote, checkpoint beside checkpoint</a></p>'
    html += f'<div class="scroll">{_table(evaluations)}</div>'
    for suite, own in _suites(evaluations).items():
        if any(result.get("levels") for result in own):
            html += f'<h3>{escape(suite)}: accuracy by level</h3><div class="scroll">{_levels(own)}</div>'
    return html


def _table(evaluations: Sequence[Evaluation]) -> str:
    best = {suite: max(result["accuracy"] for result in own) for suite, own in _suites(evaluations).items()}
    several = any(len(result.get("pass_at_k") or {}) > 1 for result in evaluations)
    rows: list[list[Cell]] = []
    for result in evaluations:
        passed = result.get("pass_at_k") or {}
        k = max(passed, key=int, default="1")
        sampled = [f"{_percent(passed[k])} @{k}", _percent(result.get("majority"))] if k != "1" else ["–", "–"]
        rows.append(
            [
                str(result["suite"]),
                result["global_step"],
                result["n"],
                _percent(result["accuracy"]) + (" ★" if result["accuracy"] == best[str(result["suite"])] else ""),
                f"{_percent(result['low'])} … {_percent(result['high'])}",
                *(sampled if several else []),
                _digits(result.get("reward_mean"), 3),
                _digits((result.get("response_tokens") or {}).get("mean"), 1),
                _percent(result.get("truncated")),
                str(result.get("backend", "–")),
            ]
        )
    more = ["pass@k", "majority"] if several else []
    head = ["suite", "step", "n", "accuracy", "95 % interval", *more, "reward", "tokens", "cut off", "backend"]
    return table(head, rows, text_columns={0, len(head) - 1})


def _levels(own: Sequence[Evaluation]) -> str:
    """A row a level, a column a checkpoint."""
    levels = sorted({level for result in own for level in result.get("levels") or {}}, key=level_order)
    sizes = own[-1].get("levels") or {}
    body: list[list[Cell]] = []
    for level in levels:
        cells: list[Cell] = []
        for result in own:
            scores = (result.get("levels") or {}).get(level) or {}
            low, high = scores.get("accuracy_ci95") or (None, None)
            ends = f" ({_percent(low)} … {_percent(high)})" if low is not None else ""
            cells.append(_percent(scores.get("accuracy")) + ends)
        body.append([level or "–", sizes.get(level, {}).get("n", "–"), *cells])
    return table(["level", "n", *(f"step {result['global_step']}" for result in own)], body, text_columns={0})


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, (int, float)) else "–"


def _digits(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "–"
