"""Sweep page: ranking of the configurations with statistics over seeds, and the state of each run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.jobs.state import RunState, states
from rlhpc.metrics.charts import number
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import card, page, render_placeholder, section, write_page
from rlhpc.metrics.provenance import read_results
from rlhpc.metrics.statistics import interquartile_mean
from rlhpc.runs.compare import final_table, render_curves
from rlhpc.runs.headlines import RunMetrics
from rlhpc.runs.seed_scores import (
    MAX_DRAWN,
    ConfigScores,
    estimate_text,
    goal_of,
    metric_of,
    rank_configurations,
    render_scores,
    scores_at,
)
from rlhpc.runs.sweep import read_sweep
from rlhpc.runs.task_type import task_type_of_run

_FAILED_STATES = ("failed", "dead", "cancelled")


@dataclass(frozen=True)
class SweepRanking:
    """Configurations of a sweep, ranked by their scores.

    Attributes:
        record: Content of `sweep.json`.
        suite: Evaluation suite of the comparison.
        states: Name of a run → state of the run.
        runs: Name of a run → metrics of the run; None for a run without a step.
        metric: Metric of the comparison; None if finished runs have no metric in common.
        goal: `maximize` or `minimize`.
        step: Step of the scores; None without scores.
        scores: Name of a run → score of the run.
        configurations: Configurations with the scores of their seeds, in the order of the record.
    """

    record: dict[str, Any]
    suite: str
    states: dict[str, RunState]
    runs: dict[str, RunMetrics | None]
    metric: str | None
    goal: str
    step: int | None
    scores: dict[str, float]
    configurations: list[ConfigScores]


def rank_sweep(sweep: SweepPaths, suite: str | None = None, metric: str | None = None) -> SweepRanking:
    """Scores the finished runs of a sweep at their last common step.

    Args:
        sweep: Files of the sweep.
        suite: Evaluation suite of the comparison; None for the suite of the sweep.
        metric: Metric of the comparison; None for the metric of the sweep or the first common metric of the task type.

    Raises:
        RlhpcError: `sweep.json` cannot be read.
    """
    record = read_sweep(sweep)
    run_records = record["runs"]
    suite = suite or str(record.get("suite") or "default")
    run_states = states([sweep.run(run["name"]) for run in run_records])
    state_by_name = {run["name"]: run_state for run, (_, run_state) in zip(run_records, run_states, strict=True)}
    runs = {run["name"]: _read_run(sweep.run(run["name"]), suite) for run in run_records}
    finished_runs = {
        name: run for name, run in runs.items() if state_by_name[name].state == "finished" and run is not None
    }
    compared_runs = [*finished_runs.values()]
    metric = metric or record.get("metric")
    if metric is None and compared_runs:
        metric = metric_of(task_type_of_run(compared_runs[0].paths), compared_runs)
    goal = str(record.get("goal") or goal_of(metric or ""))
    step, score_values = scores_at(compared_runs, metric) if metric else (None, [])
    scores: dict[str, float] = dict(zip(finished_runs, score_values, strict=False))
    names_by_label: dict[str, list[str]] = {}
    for run in run_records:
        names_by_label.setdefault(str(run["label"]), []).append(run["name"])
    config_scores = [
        ConfigScores(label, [scores[name] for name in run_names if name in scores], len(run_names))
        for label, run_names in names_by_label.items()
    ]
    return SweepRanking(record, suite, state_by_name, runs, metric, goal, step, scores, config_scores)


def render_ranking(ranking: SweepRanking) -> list[str]:
    """Renders the configurations with scores as lines for a terminal, the best first."""
    ranked_scores = rank_configurations(ranking.configurations, ranking.goal)
    if not ranked_scores:
        return []
    width = max(len(config_scores.label) for config_scores in ranked_scores)
    order_word = "highest" if ranking.goal == "maximize" else "lowest"
    lines = [f"  {ranking.metric} at step {ranking.step}, interquartile mean over seeds, {order_word} first:"]
    for config_scores in ranked_scores:
        seeds_text = f"{config_scores.seeds_text} seed{'s' * (config_scores.planned > 1)}"
        score_text = estimate_text(interquartile_mean(config_scores.scores))
        lines.append(f"    {config_scores.label:<{width}}  {score_text}, {seeds_text}")
    return lines


def write_sweep_page(sweep: SweepPaths, output: Path, suite: str | None = None, metric: str | None = None) -> Path:
    """Writes the page of a sweep; returns its path. Scores and curves cover the runs with metrics.

    Args:
        sweep: Files of the sweep.
        output: The HTML file.
        suite: Evaluation suite of the comparison; None for the suite of the sweep.
        metric: Metric of the comparison; None for the metric of the sweep or the first common metric of the task type.

    Raises:
        RlhpcError: `sweep.json` cannot be read, or the page cannot be written.
    """
    ranking = rank_sweep(sweep, suite, metric)
    run_records, metric = ranking.record["runs"], ranking.metric
    ranked_scores = rank_configurations(ranking.configurations, ranking.goal)
    ordered_scores = [
        *ranked_scores,
        *(config_scores for config_scores in ranking.configurations if config_scores not in ranked_scores),
    ]
    groups: dict[str, list[RunMetrics]] = {}
    for config_scores in ordered_scores:
        run_names = [run["name"] for run in run_records if run["label"] == config_scores.label]
        if group := [run for name in run_names if (run := ranking.runs[name]) is not None]:
            groups[config_scores.label] = group
    states_of_runs = [run_state.state for run_state in ranking.states.values()]
    num_finished, failed_runs = (
        states_of_runs.count("finished"),
        sum(run_state_name in _FAILED_STATES for run_state_name in states_of_runs),
    )
    cards = [
        card("runs finished", f"{num_finished} of {len(run_records)}", f"{len(ordered_scores)} configurations"),
        card("failed", str(failed_runs), "named below" if failed_runs else "none"),
    ]
    title = f"{metric} at step {ranking.step}"
    if ranked_scores and metric:
        cards.append(
            card(
                "best so far" if len(ranking.scores) < len(run_records) else "best", ranked_scores[0].label,
                f"{'highest' if ranking.goal == 'maximize' else 'lowest'} IQM of {title}",
            )
        )  # fmt: skip
    scores_html = metric and render_scores(ordered_scores, title, ranking.goal, metric)
    no_step = render_placeholder("No run has a step yet.")
    html = page(
        title=f"Sweep {ranking.record.get('name', sweep.root.name)}",
        subtitle=f"{len(run_records)} runs, evaluation suite {ranking.suite}, written {time.strftime('%Y-%m-%d %H:%M')}",
        body=[
            f'<div class="cards sweep">{"".join(cards)}</div>',
            section("Scores", scores_html or render_placeholder(_format_no_scores(ranking))),
            section(
                "Curves",
                render_curves(dict(list(groups.items())[:MAX_DRAWN]), len(groups)) if groups else no_step,
            ),
            section("How they ended", final_table(groups) if groups else no_step),
            section("Runs", _render_runs_table(sweep, output, ranking)),
        ],
        css=".sweep .card b{white-space:normal;overflow-wrap:anywhere;font-size:22px}td.bad{color:var(--c3)}",
    )
    return write_page(html, output)


def _read_run(paths: RunPaths, suite: str) -> RunMetrics | None:
    rows = read_metrics(paths.metrics)
    return RunMetrics(paths, rows, read_results(paths, suite)) if rows else None


def _format_no_scores(ranking: SweepRanking) -> str:
    if not any(run and ranking.states[name].state == "finished" for name, run in ranking.runs.items()):
        return "No run has finished yet."
    if ranking.metric is None:
        return "The runs have no metric in common by which they are compared; name one: sweep.metric."
    runs = [run for run in ranking.runs.values() if run]
    eval_metrics = sorted(
        {f"eval/{name}" for run in runs for e in run.evaluations for name, v in e.items() if isinstance(v, float)}
    )
    metric_names = sorted({name for run in runs for name in run.rows[-1] if "/" in name})
    available_text = escape(", ".join([*eval_metrics, *metric_names]) or "none")
    return (
        f"The runs that finished do not have {escape(ranking.metric)} at a step in common; there are: {available_text}."
    )


def _render_runs_table(sweep: SweepPaths, output: Path, ranking: SweepRanking) -> str:
    """Renders a table of all runs with their states; the name of a run links to its report, if the report exists."""
    head = ["run", "state", "step", ranking.metric or "score", "note"]
    lines = []
    for name, run_metrics in ranking.runs.items():
        run_state, score = ranking.states[name], ranking.scores.get(name)
        has_started = sweep.run(name).root.is_dir()
        report, steps = sweep.run(name).report, series(run_metrics.rows, "step")[1] if run_metrics else []
        link = os.path.relpath(report, output.absolute().parent)
        run_cell = f'<a href="{escape(link, quote=True)}">{escape(name)}</a>' if report.is_file() else escape(name)
        state_text = run_state.state if has_started else "not started"
        lines.append(
            f'<tr><td class="t">{run_cell}</td>'
            f'<td class="t{" bad" if state_text in _FAILED_STATES else ""}">{escape(state_text)}</td>'
            f"<td>{f'{steps[-1]:.0f}' if steps else '–'}</td><td>{'–' if score is None else number(score)}</td>"
            f'<td class="t">{escape(run_state.reason if has_started else "")}</td></tr>'
        )
    cells = "".join(f"<th{'' if i in (2, 3) else ' class=t'}>{escape(title)}</th>" for i, title in enumerate(head))
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
