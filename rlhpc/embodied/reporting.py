"""Report of a run with simulators: charts, cards and tables, among them success rates in the form in which the papers
of LIBERO and MetaWorld print them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths, step_name
from rlhpc.metrics.charts import CHART, TALL, Line, Size, line_chart, number, stacked_bar_chart
from rlhpc.metrics.curves import Metric, color_of, draw_metric_charts, evaluation_chart, hollow_points
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, card, render_figures, render_placeholder, table, time_unit
from rlhpc.metrics.phase_times import Rows, bin_rows, phase_columns
from rlhpc.metrics.provenance import (
    evaluations_by_suite,
    interval_of,
    judging_suite,
    scored_results,
    select_suite,
    typed_results,
)
from rlhpc.runs.task_type import Parts
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.text import format_duration, interval_text, parenthesized_interval

#: Columns of LIBERO's table, by suite. `libero_10` has the long tasks.
_LIBERO = {
    "libero_spatial": "Spatial", "libero_object": "Object", "libero_goal": "Goal", "libero_10": "Long", "libero_90": "90",
}  # fmt: skip
#: Suites of LIBERO whose mean is the benchmark's average.
_LIBERO_AVERAGED = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
_MT50, _MT10 = ("mt50", "metaworld_50"), ("mt10",)
#: Columns of ML45's table, by suite.
_ML45 = {"metaworld_45_ind": "train (45 tasks)", "metaworld_45_ood": "test (5 tasks)"}
#: Difficulty of MetaWorld's tasks after Seo et al., "Masked World Models for Visual Control" (2022), which LeRobot uses, too.
#: All other tasks are easy.
_MEDIUM = frozenset({
    "basketball", "bin-picking", "box-close", "coffee-pull", "coffee-push", "hammer", "peg-insert-side", "push-wall", "soccer",
    "sweep", "sweep-into",
})  # fmt: skip
_HARD = frozenset({"assembly", "hand-insert", "pick-out-of-hole", "pick-place", "push", "push-back"})
_VERY_HARD = frozenset({"disassemble", "pick-place-wall", "shelf-place", "stick-pull", "stick-push"})
_DIFFICULTIES = ("easy", "medium", "hard", "very hard")
#: Name of the column with the mean of the others.
AVERAGE = "average"

_Result = Mapping[str, Any]
#: Success rates by column; a column without a rate is missing.
_Rates = dict[str, float]


@dataclass(frozen=True)
class BenchmarkTable:
    """Success rates of a run's checkpoints in a benchmark.

    Attributes:
        benchmark: Name of the benchmark.
        columns: Names of the columns.
        rows: Global step → success rate of each column, 0 to 1; None where the checkpoint was not evaluated.
        note: Sentence about how the average is computed.
    """

    benchmark: str
    columns: tuple[str, ...]
    rows: dict[int, tuple[float | None, ...]]
    note: str


def difficulty(task: str) -> str:
    """Returns the difficulty of a task of MetaWorld, such as `push-wall-v3`."""
    name = task.rpartition("-v")[0] or task
    if name in _MEDIUM:
        return "medium"
    return "hard" if name in _HARD else "very hard" if name in _VERY_HARD else "easy"


def benchmark_tables(evaluations: Sequence[_Result]) -> list[BenchmarkTable]:
    """Returns the tables of the benchmarks that a run was evaluated in, in the order LIBERO, MT50, MT10, ML45.

    Args:
        evaluations: Results of evaluations, with `env_id`, `global_step`, `success_once` and, for suites, `tasks`. Of several
            results of a checkpoint in one suite of a benchmark, the last one counts.
    """
    by_step: dict[int, dict[str, _Result]] = {}
    for evaluation in evaluations:
        if isinstance(evaluation.get("success_once"), (int, float)):
            by_step.setdefault(evaluation["global_step"], {})[str(evaluation.get("env_id"))] = evaluation
    tables = [
        _table("LIBERO", by_step, _libero_rates, (*_LIBERO.values(), AVERAGE),
               "The average is that of the suites Spatial, Object, Goal and Long."),
        _table("MetaWorld MT50", by_step, _mt50_rates, (*_DIFFICULTIES, AVERAGE),
               "The average is that of the four difficulties, not of the 50 tasks."),
        _table("MetaWorld MT10", by_step, lambda results: _rates_of(results, dict.fromkeys(_MT10, AVERAGE)), (AVERAGE,),
               "The average is that of all episodes."),
        _table("MetaWorld ML45", by_step, lambda results: _rates_of(results, _ML45), tuple(_ML45.values()),
               "Each rate is that of all episodes."),
    ]  # fmt: skip
    return [table for table in tables if table is not None]


def _table(
    benchmark: str,
    by_step: Mapping[int, Mapping[str, _Result]],
    rates_of: Callable[[Mapping[str, _Result]], _Rates],
    columns: Sequence[str],
    note: str,
) -> BenchmarkTable | None:
    """Builds a table of the columns that have a rate at any step; None without any."""
    rates_by_step = {step: rates for step in sorted(by_step) if (rates := rates_of(by_step[step]))}
    used_columns = tuple(column for column in columns if any(column in rates for rates in rates_by_step.values()))
    rows = {step: tuple(rates.get(column) for column in used_columns) for step, rates in rates_by_step.items()}
    return BenchmarkTable(benchmark, used_columns, rows, note) if rows else None


def _rates_of(results: Mapping[str, _Result], columns: Mapping[str, str]) -> _Rates:
    return {column: results[suite]["success_once"] for suite, column in columns.items() if suite in results}


def _libero_rates(results: Mapping[str, _Result]) -> _Rates:
    rates = _rates_of(results, _LIBERO)
    averaged_columns = [_LIBERO[suite] for suite in _LIBERO_AVERAGED]
    if all(column in rates for column in averaged_columns):
        rates[AVERAGE] = fmean(rates[column] for column in averaged_columns)
    return rates


def _mt50_rates(results: Mapping[str, _Result]) -> _Rates:
    """Returns the rate of each difficulty, which is the mean over its tasks, and the mean of the four."""
    result = next((results[suite] for suite in _MT50 if suite in results), None)
    tasks = result.get("tasks") if result is not None else None
    if not isinstance(tasks, Mapping):
        return {}
    rates_by_difficulty: dict[str, list[float]] = {}
    for name, task in tasks.items():
        if isinstance(rate := task.get("success_once"), (int, float)):
            rates_by_difficulty.setdefault(difficulty(name), []).append(rate)
    rates = {name: fmean(task_rates) for name, task_rates in rates_by_difficulty.items()}
    if len(rates) == len(_DIFFICULTIES):
        rates[AVERAGE] = fmean(rates.values())
    return rates


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


def learning_curves(rows: Rows, shown_metrics: Container[str]) -> dict[str, str]:
    """Draws return (and success, if known) against env steps and wall time, and losses, entropy, KL and other logged metrics.
    For behaviour cloning, draws the loss. Returns the charts by name.
    """
    if not series(rows, "train/episode_return")[0] and series(rows, "train/demonstrations")[0]:
        return _imitation_curves(rows)
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))
    x_name, x_label = _steps_axis(rows)
    quantities = [("return", "train/episode_return", "Return", "episode return")]
    if series(rows, _SUCCESS)[0]:
        quantities.append(("success", _SUCCESS, "Success (once)", "share of episodes"))
    charts: dict[str, str] = {}
    for curve_name, name, title, label in quantities:
        wall_times, values = series(rows, name, "time/wall_s")
        color = color_of(name)
        over_steps = Line("", *series(rows, name, x_name), color=color, smooth=True)
        over_time = Line("", [t / seconds for t in wall_times], values, color=color, smooth=True)
        charts[f"{curve_name}_vs_env_steps"] = line_chart(f"{title} over experience", x_label, label, [over_steps])
        charts[f"{curve_name}_vs_time"] = line_chart(
            f"{title} over wall time", f"wall time ({unit})", label, [over_time]
        )
    return charts | draw_metric_charts(rows, _DIAGNOSTICS, shown_metrics, (x_name, x_label))


def _imitation_curves(rows: Rows) -> dict[str, str]:
    """Draws the loss of behaviour cloning against demonstrated steps and wall time, and the gradient norm."""
    unit, seconds = time_unit(max(series(rows, "time/wall_s")[1], default=0.0))

    def lines(against: str, scale: float = 1.0) -> list[Line]:
        lines_with_data = []
        for color, (name, label) in enumerate(
            (("train/loss", "trained on"), ("train/holdout_loss", "held out")), start=1
        ):
            x_values, y_values = series(rows, name, against)
            if x_values:
                lines_with_data.append(
                    Line(label, [x_value / scale for x_value in x_values], y_values, color=color, smooth=True)
                )
        return lines_with_data

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


def _time_curves(rows: Rows) -> dict[str, str]:
    """Draws env steps (behaviour cloning: demonstrated steps) per second, and the stacked phases of a step."""
    is_cloning = bool(series(rows, "train/demonstrations")[0])
    rate_name, unit = ("samples", "demonstrated steps") if is_cloning else ("env_steps", "environment steps")
    bins, seconds_by_phase = bin_rows(rows, phase_columns(rows))
    return {
        "throughput": line_chart(
            "Throughput",
            "global step",
            f"{unit} / s",
            [Line("", *series(rows, f"time/{rate_name}_per_s"), color=5, smooth=True)],
        ),
        "time_per_phase": stacked_bar_chart(
            "Time per phase", "global step", "seconds per step", bins, seconds_by_phase
        ),
    }


def read_evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    """Reads every valid eval/global_step_<N>/<suite>.json that has a mean return, ordered by suite and step.

    Adds `suite`, and the bounds `low` and `high` of the 95 % interval.
    """
    evaluations = typed_results(paths, "return_mean")
    for evaluation in evaluations:
        evaluation["low"], evaluation["high"] = interval_of(evaluation, "return_mean")
    return evaluations


def read_judged(paths: RunPaths) -> list[dict[str, Any]]:
    """Reads the evaluations of a success model (`rlhpc.embodied.evaluation.evaluate`), ordered by suite and step."""
    return typed_results(paths, "accuracy")


def _evaluation_curves(paths: RunPaths, rows: Rows, size: Size = CHART) -> dict[str, str]:
    """Draws success (if known) and mean return of all evaluations, during training and of checkpoints, with 95 % intervals.
    Returns the charts by file name.
    """
    evaluations = read_evaluations(paths)
    charts = {}
    for file, name, title, label in (
        ("evaluation_success", "success_once", "Success (once) in evaluations", "share of episodes, 95 % interval"),
        ("evaluation", "return_mean", "Return in evaluations", "mean return, 95 % interval"),
    ):
        suites = evaluations_by_suite(paths, rows, evaluations, name)
        if suites or name == "return_mean":
            charts[file] = evaluation_chart(title, label, suites, name, size)
    return charts


def all_curves(paths: RunPaths, rows: Rows, shown_metrics: Container[str]) -> dict[str, str]:
    """Draws all charts of the run, and returns them by file name."""
    return {**learning_curves(rows, shown_metrics), **_evaluation_curves(paths, rows), **_time_curves(rows)}


#: Maximum number of suites whose video the page shows.
_MAX_VIDEOS = 6


def parts(paths: RunPaths, rows: Sequence[Mapping[str, Any]], *, shown_metrics: Container[str], linked: bool) -> Parts:
    """Builds the parts of the report (`Reporting.parts`); `always` names curves that are drawn even without data."""
    evaluations, judgements = read_evaluations(paths), read_judged(paths)
    suite = judging_suite(paths, [*evaluations, *judgements])
    text_by_step: dict[int, str] = {}
    for evaluation in select_suite(judgements, suite):
        text_by_step[evaluation["global_step"]] = f"{evaluation['accuracy']:.1%}"
    for evaluation in select_suite(evaluations, suite):
        rate = evaluation.get("success_once")
        evaluation_text = (
            f"{evaluation['return_mean']:.1f}" if rate is None else f"{rate:.0%}, {evaluation['return_mean']:.1f}"
        )
        text_by_step.setdefault(evaluation["global_step"], evaluation_text)
    return Parts(
        subject=_env_id(paths),
        cards=_key_figures(
            rows, scored_results(paths, rows, evaluations, suite, "return_mean"), select_suite(judgements, suite), suite
        ),
        curves=list(learning_curves(rows, shown_metrics).values()),
        evaluation=_success_model_table(judgements)
        if judgements
        else _evaluation_section(paths, rows, evaluations, has_videos=linked),
        times=list(_time_curves(rows).values())[::-1],
        evaluated=text_by_step,
        trained=("train/episode_return", "training return"),
    )


def _env_id(paths: RunPaths) -> str:
    try:
        return str(read_yaml(paths.config.read_bytes())["env"]["train"]["env_id"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return ""


def _last_value(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = series(rows, name)[1]
    return values[-1] if values else None


def _key_figures(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    evaluation_rows: Sequence[Mapping[str, Any]],
    suite: str,
) -> str:
    """Builds the cards at the top of the page from the results of one suite."""
    best_evaluation = max(evaluations, key=lambda r: (r.get("success_once") or 0.0, r["return_mean"]), default=None)
    last_evaluation = max(evaluations, key=lambda result: result["global_step"], default=None)
    env_steps, wall_s, episode_return = (
        _last_value(rows, column) for column in ("rollout/env_steps", "time/wall_s", "train/episode_return")
    )
    demonstrations, loss = _last_value(rows, "train/demonstrations"), _last_value(rows, "train/loss")
    rates = series(rows, "time/env_steps_per_s")[1]
    rate = env_steps / wall_s if env_steps and wall_s else (sum(rates) / len(rates) if rates else None)

    suite_text = f"suite {suite}"

    def evaluated(title: str, result: Mapping[str, Any] | None) -> str:
        if evaluation_rows:
            judgement = {
                "Best evaluation": max(evaluation_rows, key=lambda result: result["accuracy"]),
                "Last evaluation": evaluation_rows[-1],
            }[title]
            return card(
                title,
                f"{judgement['accuracy']:.1%}",
                f"of steps judged rightly, step {judgement['global_step']}, {suite_text}",
            )
        if result is None:
            return card(title, "–", "not evaluated yet")
        if isinstance(result.get("success_once"), (int, float)):
            return card(
                title, f"{result['success_once']:.0%}", f"success (once), step {result['global_step']}, {suite_text}"
            )
        return card(title, f"{result['return_mean']:.1f}", f"mean return, step {result['global_step']}, {suite_text}")

    return (
        '<div class="cards">'
        + evaluated("Best evaluation", best_evaluation)
        + evaluated("Last evaluation", last_evaluation)
        + (
            card("Training return", "–" if episode_return is None else f"{episode_return:.1f}", "at the last step")
            + card("Environment steps", "–" if env_steps is None else number(env_steps), f"{len(rows)} training steps")
            if demonstrations is None
            else card("Demonstrations", number(demonstrations), f"{len(rows)} training steps")
            + card("Imitation loss", "–" if loss is None else f"{loss:.3g}", "at the last step")
        )
        + card("Wall time", "–" if wall_s is None else format_duration(wall_s), "training")
        + (
            card("Env steps / s", "–" if rate is None else f"{rate:,.0f}", "mean over the run")
            if demonstrations is None
            else ""
        )
        + _robot_card(rows)
        + "</div>"
    )


def _robot_card(rows: Sequence[Mapping[str, Any]]) -> str:
    """Builds the card with a robot's timing; empty for runs without a robot."""
    latency = _last_value(rows, "env/robot_latency_ms_p50")
    if latency is None:
        return ""
    counts = {name: sum(series(rows, f"env/robot_{name}")[1]) for name in ("late", "dropped", "lost")}
    counts_text = ", ".join(f"{count:.0f} {name}" for name, count in counts.items())
    return card("Robot", f"{latency:.1f} ms", f"to a command, median of the last step; {counts_text} in all")


def _evaluation_section(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], *, has_videos: bool
) -> str:
    """Builds HTML with the charts of all evaluations and a table of the checkpoints' evaluations. The most important chart
    comes first and is wide.
    """
    charts = _evaluation_curves(paths, rows, TALL)
    first_chart, *further_charts = charts
    html = render_figures(
        [charts[file] for file in further_charts], lambda size: _evaluation_curves(paths, rows, size)[first_chart]
    )
    html += hollow_points(evaluations_by_suite(paths, rows, evaluations, "return_mean"))
    if not evaluations and html:
        return html
    if not evaluations:
        return render_placeholder(
            "No evaluation yet: <code>rlhpc eval</code> on a checkpoint, or the workflow's eval rule."
        )
    best_returns: dict[str, float] = {}
    for evaluation in evaluations:
        best_returns[str(evaluation["suite"])] = max(
            evaluation["return_mean"], best_returns.get(str(evaluation["suite"]), evaluation["return_mean"])
        )
    rates = [
        name for name in ("success_once", "success_at_end") if any(name in evaluation for evaluation in evaluations)
    ]
    body: list[list[Cell]] = [
        [
            str(evaluation["suite"]),
            evaluation["global_step"],
            evaluation.get("episodes", "–"),
            *(_format_rate(evaluation, name) for name in rates),
            f"{evaluation['return_mean']:.2f}"
            + (" ★" if evaluation["return_mean"] == best_returns[str(evaluation["suite"])] else ""),
            f"{evaluation['return_std']:.2f}" if isinstance(evaluation.get("return_std"), (int, float)) else "–",
            interval_text((evaluation["low"], evaluation["high"]), ".2f") or "–",
        ]
        for evaluation in evaluations
    ]
    head = [
        "suite",
        "step",
        "episodes",
        *(name.replace("_", " ") for name in rates),
        "mean return",
        "std",
        "95 % interval",
    ]
    html += f'<div class="scroll">{table(head, body, text_columns={0})}</div>'
    html += _benchmark_section(evaluations) + _tasks_table(evaluations)
    return html + (_video_figures(evaluations) if has_videos else "")


def _benchmark_section(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Builds the tables of LIBERO and MetaWorld as their papers print them; empty for other environments."""
    html = ""
    for benchmark in benchmark_tables(evaluations):
        head = [benchmark.benchmark, *benchmark.columns]
        body: list[list[Cell]] = [
            [f"step {step}", *("–" if rate is None else f"{rate:.1%}" for rate in rates)]
            for step, rates in benchmark.rows.items()
        ]
        html += f'<div class="scroll">{table(head, body, text_columns={0})}</div><p class="legend">{benchmark.note}</p>'
    return html


def _tasks_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Builds the table of the tasks in the last evaluation of each suite; empty for environments of one task."""
    last_by_suite = {str(result["suite"]): result for result in evaluations if isinstance(result.get("tasks"), dict)}
    rows: list[list[Cell]] = [
        [
            suite, result["global_step"], name, task.get("episodes", "–"), _format_rate(task, "success_once"),
            f"{task['return_mean']:.2f}" if "return_mean" in task else "–",
        ]
        for suite, result in last_by_suite.items()
        for name, task in result["tasks"].items()
    ]  # fmt: skip
    head = ["suite", "step", "task", "episodes", "success once", "mean return"]
    return f'<div class="scroll">{table(head, rows, text_columns={0, 2})}</div>' if rows else ""


def _success_model_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Builds the table of a success model's accuracy on all steps, on steps with success, and on the other steps."""
    figures_of = ("accuracy", "recall", "specificity")
    rows: list[list[Cell]] = [
        [
            str(judgement["suite"]), judgement["global_step"],
            judgement.get("episodes", "–"), judgement.get("steps", "–"), judgement.get("successes", "–"),
            *(f"{judgement[name]:.1%}" if isinstance(judgement.get(name), (int, float)) else "–" for name in figures_of),
        ]
        for judgement in results
    ]  # fmt: skip
    head = ["suite", "step", "episodes", "steps", "with success", "judged rightly", "of success", "of the others"]
    return f'<div class="scroll">{table(head, rows, text_columns={0})}</div>'


def _format_rate(result: Mapping[str, Any], name: str) -> str:
    """Formats a success rate with its interval."""
    if not isinstance(result.get(name), (int, float)):
        return "–"
    return f"{result[name]:.1%}" + parenthesized_interval(result.get(f"{name}_ci95"), ".1%", separator=" … ")


def _video_figures(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Builds HTML with the newest video of each suite. The video files are next to the evaluations' results."""
    newest_by_suite = {str(evaluation["suite"]): evaluation for evaluation in evaluations if evaluation.get("video")}
    video_figures = [
        f'<figure><video controls muted loop preload="metadata" width="100%" '
        f'src="../eval/{step_name(evaluation["global_step"])}/{escape(str(evaluation["video"]), quote=True)}"></video>'
        f"<figcaption>{escape(suite)}, step {evaluation['global_step']}: first episodes; a green frame means success"
        "</figcaption></figure>"
        for suite, evaluation in list(newest_by_suite.items())[:_MAX_VIDEOS]
    ]
    return f'<div class="figures videos">{"".join(video_figures)}</div>' if video_figures else ""
