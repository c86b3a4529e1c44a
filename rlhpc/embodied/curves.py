"""The curves of runs with simulators, drawn from rows and evaluations."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.bars import stacked_bars
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import time_unit
from rlhpc.metrics.phases import Rows, binned, phase_columns
from rlhpc.metrics.svg import SMALL, Line, line_chart
from rlhpc.runtime.plain import read_json

# File, metric, title, y axis.
_DIAGNOSTICS = [
    ("policy_loss", "train/policy_loss", "Policy loss", "loss"),
    ("value_loss", "train/value_loss", "Value loss", "loss"),
    ("entropy", "train/entropy", "Policy entropy", "entropy (nats)"),
    ("kl", "train/approx_kl", "Policy change per update", "approximate KL (nats)"),
    ("clip_fraction", "train/clip_fraction", "Clipped ratios", "fraction of samples"),
    ("explained_variance", "train/explained_variance", "Value function", "explained variance"),
    ("grad_norm", "train/grad_norm", "Gradient norm", "L2 norm before clipping"),
    ("lr", "train/lr", "Learning rate", "learning rate"),
    ("q_loss", "train/q_loss", "Critics' loss", "loss"),
    ("actor_loss", "train/actor_loss", "Actor's loss", "loss"),
    ("alpha", "train/alpha", "Temperature", "α"),
    ("q_value", "train/q_value", "Critics' values", "value"),
    ("episode_length", "train/episode_length", "Episode length", "environment steps"),
]
#: What training may log about success; the first that exists is drawn.
_SUCCESS = ("train/success_once", "train/success_rate")


def learning_curves(rows: Rows, always: Container[str]) -> dict[str, str]:
    """Return (and success, where it is known) against env steps and against wall time, then losses, entropy, KL and what
    else was logged. Of behaviour cloning: the loss."""
    if not series(rows, "train/episode_return")[0] and series(rows, "train/demonstrations")[0]:
        return imitation_curves(rows)
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))
    at, returns = series(rows, "train/episode_return", "time/wall_s")
    x_name, x_label = _steps_axis(rows)
    success = next((name for name in _SUCCESS if series(rows, name)[0]), None)
    reached: dict[str, str] = {}
    if success is not None:
        when, rates = series(rows, success, "time/wall_s")
        shown = Line("", *series(rows, success, x_name), color=2, smooth=True)
        over_time = Line("", [t / seconds for t in when], rates, color=2, smooth=True)
        label = "share of episodes"
        reached = {
            "success_vs_env_steps": line_chart("Success over experience", x_label, label, [shown]),
            "success_vs_time": line_chart("Success over wall time", f"wall time ({unit})", label, [over_time]),
        }
    return {
        "return_vs_env_steps": line_chart(
            "Return over experience",
            x_label,
            "episode return",
            [Line("", *series(rows, "train/episode_return", x_name), smooth=True)],
        ),
        "return_vs_time": line_chart(
            "Return over wall time",
            f"wall time ({unit})",
            "episode return",
            [Line("", [t / seconds for t in at], returns, smooth=True)],
        ),
        **reached,
        **{
            file: line_chart(
                title, x_label, y_label, [Line("", *series(rows, name, x_name), color=color, smooth=True)], SMALL
            )
            for color, (file, name, title, y_label) in enumerate(_DIAGNOSTICS, start=1)
            if file in always or series(rows, name)[0]
        },
    }


def imitation_curves(rows: Rows) -> dict[str, str]:
    """Loss of behaviour cloning against passes over the demonstrations and against wall time, and its evaluations."""
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))

    def lines(against: str, scale: float = 1.0) -> list[Line]:
        found = []
        for color, (name, label) in enumerate((("train/loss", "trained on"), ("train/holdout_loss", "held out"))):
            x, y = series(rows, name, against)
            if x:
                found.append(Line(label, [value / scale for value in x], y, color=color, smooth=True))
        return found

    charts = {
        "loss": line_chart("Imitation loss", "demonstrated steps seen", "loss", lines("train/samples")),
        "loss_vs_time": line_chart(
            "Imitation loss over wall time", f"wall time ({unit})", "loss", lines("time/wall_s", seconds)
        ),
        "grad_norm": line_chart(
            "Gradient norm",
            "global step",
            "L2 norm before clipping",
            [Line("", *series(rows, "train/grad_norm"), color=7)],
            SMALL,
        ),
    }
    for name, title in (("return_mean", "Return in evaluations"), ("success_once", "Success in evaluations")):
        x, y = series(rows, f"eval/{name}")
        if x:
            charts[f"eval_{name}"] = line_chart(
                title, "global step", title.split()[0].lower(), [Line("", x, y, markers=True)], SMALL
            )
    return charts


def _steps_axis(rows: Rows) -> tuple[str, str]:
    if series(rows, "rollout/env_steps")[0]:
        return "rollout/env_steps", "environment steps"
    return "step", "global step"


def time_curves(rows: Rows) -> dict[str, str]:
    """Env steps (of behaviour cloning: demonstrated steps) per second, and the stacked phases of a step."""
    cloning = bool(series(rows, "train/demonstrations")[0])
    rate, unit = ("samples", "demonstrated steps") if cloning else ("env_steps", "environment steps")
    phases = phase_columns(rows)
    bins, stacks = binned(rows, phases)
    return {
        "throughput": line_chart(
            "Throughput",
            "global step",
            f"{unit} / s",
            [Line("", *series(rows, f"time/{rate}_per_s"), color=5, smooth=True)],
        ),
        "time_per_phase": stacked_bars("Time per phase", "global step", "seconds per step", bins, stacks),
    }


def read_evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    """Every readable eval/global_step_<N>/<suite>.json that has a mean return, with `suite`, `low` and `high` (95 %).

    Ordered by suite and step.
    """
    found = _results_with("return_mean", paths)
    for result in found:
        result["low"], result["high"] = _interval(result)
    return found


def read_judged(paths: RunPaths) -> list[dict[str, Any]]:
    """The evaluations of a model of success (`rlhpc.embodied.judging`), ordered by suite and step."""
    return _results_with("accuracy", paths)


def _results_with(figure: str, paths: RunPaths) -> list[dict[str, Any]]:
    found = []
    for path in paths.eval_results():
        try:
            result = read_json(path.read_bytes())
            result = {**result, "suite": result.get("suite", path.stem), "global_step": int(result["global_step"])}
            result[figure] = float(result[figure])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        found.append(result)
    return sorted(found, key=lambda result: (str(result["suite"]), result["global_step"]))


def evaluation_curve(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Mean return by checkpoint with 95 % intervals, one line per suite."""
    lines = []
    for color, suite in enumerate(dict.fromkeys(str(result["suite"]) for result in evaluations)):
        own = [result for result in evaluations if str(result["suite"]) == suite]
        columns = [[result[key] for result in own] for key in ("global_step", "return_mean", "low", "high")]
        x, y, low, high = columns
        lines.append(Line(suite, x, y, low, high, color=color, markers=True))
    return line_chart("Evaluation by checkpoint", "global step", "mean return, 95 % interval", lines)


def success_curve(evaluations: Sequence[Mapping[str, Any]], name: str) -> str:
    """A success rate by checkpoint with Wilson's 95 % intervals, one line per suite; "" if no evaluation has one."""
    known = [result for result in evaluations if isinstance(result.get(name), (int, float))]
    lines = []
    for color, suite in enumerate(dict.fromkeys(str(result["suite"]) for result in known)):
        own = [result for result in known if str(result["suite"]) == suite]
        pairs = [result.get(f"{name}_ci95") or [result[name]] * 2 for result in own]
        x, y = ([result[key] for result in own] for key in ("global_step", name))
        lines.append(Line(suite, x, y, [p[0] for p in pairs], [p[1] for p in pairs], color=color, markers=True))
    title = f"{name.replace('_', ' ').capitalize()} by checkpoint"
    return line_chart(title, "global step", "share of episodes, 95 % interval", lines) if lines else ""


def _interval(result: Mapping[str, Any]) -> tuple[float, float]:
    mean, pair = result["return_mean"], result.get("return_ci95")
    low, high = result.get("return_ci95_low"), result.get("return_ci95_high")
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        low, high = pair
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return float(low), float(high)
    std, episodes = result.get("return_std"), result.get("episodes")
    if isinstance(std, (int, float)) and isinstance(episodes, (int, float)) and episodes > 0:
        half = 1.96 * float(std) / math.sqrt(episodes)
        return mean - half, mean + half
    return mean, mean


def all_curves(paths: RunPaths, rows: Rows, always: Container[str]) -> dict[str, str]:
    """Every chart of the run by file name."""
    evaluation = evaluation_curve(read_evaluations(paths))
    return {**learning_curves(rows, always), "evaluation": evaluation, **time_curves(rows)}
