"""The curves of runs with simulators, drawn from rows and evaluations."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.charts import CHART, Line, Size, line_chart, stacked_bars
from rlhpc.metrics.curves import Metric, color_of, evaluation_chart, metric_charts
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import time_unit
from rlhpc.metrics.phase_times import Rows, binned, phase_columns
from rlhpc.metrics.provenance import evaluations_by_suite, interval_of, typed_results

_DIAGNOSTICS = [
    Metric("policy_loss", "train/policy_loss", "Policy loss", "loss"),
    Metric("value_loss", "train/value_loss", "Value loss", "loss"),
    Metric("entropy", "train/entropy", "Policy entropy", "entropy (nats)"),
    Metric("kl", "train/approx_kl", "Policy change per update", "approximate KL (nats)"),
    Metric("clip_fraction", "train/clip_fraction", "Clipped ratios", "fraction of samples"),
    Metric("explained_variance", "train/explained_variance", "Value function", "explained variance"),
    Metric("grad_norm", "train/grad_norm", "Gradient norm", "L2 norm before clipping"),
    Metric("lr", "train/lr", "Learning rate", "learning rate"),
    Metric("q_loss", "train/q_loss", "Critics' loss", "loss"),
    Metric("actor_loss", "train/actor_loss", "Actor's loss", "loss"),
    Metric("alpha", "train/alpha", "Temperature", "α"),
    Metric("q_value", "train/q_value", "Critics' values", "value"),
    Metric("episode_length", "train/episode_length", "Episode length", "environment steps"),
]
_SUCCESS = "train/success_once"


def learning_curves(rows: Rows, always: Container[str]) -> dict[str, str]:
    """Return (and success, where it is known) against env steps and against wall time, then losses, entropy, KL and what
    else was logged. Of behaviour cloning: the loss."""
    if not series(rows, "train/episode_return")[0] and series(rows, "train/demonstrations")[0]:
        return imitation_curves(rows)
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))
    x_name, x_label = _steps_axis(rows)
    quantities = [("return", "train/episode_return", "Return", "episode return")]
    if series(rows, _SUCCESS)[0]:
        quantities.append(("success", _SUCCESS, "Success (once)", "share of episodes"))
    charts: dict[str, str] = {}
    for word, name, title, label in quantities:
        when, values = series(rows, name, "time/wall_s")
        color = color_of(name)
        over_steps = Line("", *series(rows, name, x_name), color=color, smooth=True)
        over_time = Line("", [t / seconds for t in when], values, color=color, smooth=True)
        charts[f"{word}_vs_env_steps"] = line_chart(f"{title} over experience", x_label, label, [over_steps])
        charts[f"{word}_vs_time"] = line_chart(f"{title} over wall time", f"wall time ({unit})", label, [over_time])
    return charts | metric_charts(rows, _DIAGNOSTICS, always, (x_name, x_label))


def imitation_curves(rows: Rows) -> dict[str, str]:
    """Loss of behaviour cloning against passes over the demonstrations and against wall time, and its evaluations."""
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))

    def lines(against: str, scale: float = 1.0) -> list[Line]:
        found = []
        for color, (name, label) in enumerate(
            (("train/loss", "trained on"), ("train/holdout_loss", "held out")), start=1
        ):
            x, y = series(rows, name, against)
            if x:
                found.append(Line(label, [value / scale for value in x], y, color=color, smooth=True))
        return found

    return {
        "loss": line_chart("Imitation loss", "demonstrated steps seen", "loss", lines("train/samples")),
        "loss_vs_time": line_chart(
            "Imitation loss over wall time", f"wall time ({unit})", "loss", lines("time/wall_s", seconds)
        ),
        "grad_norm": line_chart(
            "Gradient norm",
            "global step",
            "L2 norm before clipping",
            [Line("", *series(rows, "train/grad_norm"), color=color_of("train/grad_norm"))],
        ),
    }


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
    results = typed_results(paths, "return_mean")
    for result in results:
        result["low"], result["high"] = interval_of(result, "return_mean")
    return results


def read_judged(paths: RunPaths) -> list[dict[str, Any]]:
    """The evaluations of a model of success (`rlhpc.embodied.judging`), ordered by suite and step."""
    return typed_results(paths, "accuracy")


def evaluation_curves(paths: RunPaths, rows: Rows, size: Size = CHART) -> dict[str, str]:
    """Draws the success (where it is known) and the mean return of all evaluations, those in training and those of
    checkpoints, with 95 % intervals; by file name."""
    results = read_evaluations(paths)
    charts = {}
    for file, name, title, label in (
        ("evaluation_success", "success_once", "Success (once) in evaluations", "share of episodes, 95 % interval"),
        ("evaluation", "return_mean", "Return in evaluations", "mean return, 95 % interval"),
    ):
        suites = evaluations_by_suite(paths, rows, results, name)
        if suites or name == "return_mean":
            charts[file] = evaluation_chart(title, label, suites, name, size)
    return charts


def all_curves(paths: RunPaths, rows: Rows, always: Container[str]) -> dict[str, str]:
    """Every chart of the run by file name."""
    return {**learning_curves(rows, always), **evaluation_curves(paths, rows), **time_curves(rows)}
