"""Sweep page: ranking of the values with statistics over seeds, and the state of each run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.jobs.state import RunState, states
from rlhpc.metrics.charts import number
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import card, missing, page, section, write_page
from rlhpc.metrics.provenance import read_results
from rlhpc.metrics.statistics import interquartile_mean
from rlhpc.runs.compare import curves_part, final_table
from rlhpc.runs.headlines import RunMetrics
from rlhpc.runs.seed_scores import (
    MAX_DRAWN,
    ConfigScores,
    estimate_text,
    goal_of,
    metric_of,
    ranked,
    scores_at,
    scores_part,
)
from rlhpc.runs.sweep import read_sweep
from rlhpc.runs.task_type import kind_of_run

_BAD = ("failed", "dead", "cancelled")


@dataclass(frozen=True)
class SweepRanking:
    """Configurations of a sweep, ranked by their scores.

    Attributes:
        record: Content of `sweep.json`.
        states: Name of a run → its state.
        runs: Name of a run → its metrics; None for a run without a step.
        metric: The metric that is compared; None if finished runs have no metric in common.
        goal: `maximize` or `minimize`.
        step: The step of the scores; None without any.
        scores: Name of a run → its score.
        configurations: Configurations with the scores of their seeds, in the order of the record.
    """

    record: dict[str, Any]
    states: dict[str, RunState]
    runs: dict[str, RunMetrics | None]
    metric: str | None
    goal: str
    step: int | None
    scores: dict[str, float]
    configurations: list[ConfigScores]


def rank_sweep(sweep: SweepPaths, suite: str | None = None, metric: str | None = None) -> SweepRanking:
    """Scores the finished runs of a sweep at one step.

    Args:
        sweep: Its files.
        suite: Evaluation suite that is compared; None for that of the sweep.
        metric: The metric that is compared; None for the sweep's, or the first of its task type.

    Raises:
        RlhpcError: `sweep.json` cannot be read.
    """
    record = read_sweep(sweep)
    run_records = record["runs"]
    suite = suite or str(record.get("suite") or "default")
    run_states = [run_states for _, run_states in states([sweep.run(run["name"]) for run in run_records])]
    state = {run["name"]: run_state for run, run_state in zip(run_records, run_states, strict=True)}
    runs = {run["name"]: _read(sweep.run(run["name"]), suite) for run in run_records}
    finished_runs = {name: run for name, run in runs.items() if state[name].state == "finished" and run is not None}
    metric = metric or record.get("metric") or _compared([*finished_runs.values()])
    goal = str(record.get("goal") or goal_of(metric or ""))
    step, values = scores_at([*finished_runs.values()], metric) if metric else (None, [])
    scores: dict[str, float] = dict(zip(finished_runs, values, strict=False))
    labels = list(dict.fromkeys(str(run["label"]) for run in run_records))
    config_scores = [
        ConfigScores(label, _of(label, run_records, scores), sum(run["label"] == label for run in run_records))
        for label in labels
    ]
    return SweepRanking(record, state, runs, metric, goal, step, scores, config_scores)


def render_ranking(ranking: SweepRanking) -> list[str]:
    """Renders the configurations that have scores, the best first, as lines for a terminal."""
    best = ranked(ranking.configurations, ranking.goal)
    if not best:
        return []
    width = max(len(config_scores.label) for config_scores in best)
    order = "highest" if ranking.goal == "maximize" else "lowest"
    lines = [f"  {ranking.metric} at step {ranking.step}, interquartile mean over seeds, {order} first:"]
    for config_scores in best:
        seeds = (
            f"{len(config_scores.scores)} of {config_scores.planned} seeds"
            if len(config_scores.scores) < config_scores.planned
            else f"{config_scores.planned} seeds"
        )
        score_text = estimate_text(interquartile_mean(config_scores.scores))
        lines.append(
            f"    {config_scores.label:<{width}}  {score_text}, {seeds if config_scores.planned > 1 else '1 seed'}"
        )
    return lines


def write_sweep_page(sweep: SweepPaths, output: Path, suite: str | None = None, metric: str | None = None) -> Path:
    """Writes the page of the runs that a sweep currently names and that have metrics.

    Args:
        sweep: Its files.
        output: The HTML file.
        suite: Evaluation suite that is compared; None for that of the sweep.
        metric: Metric that is compared; None for that of the sweep or of its task type.

    Raises:
        RlhpcError: `sweep.json` cannot be read, or the page cannot be written.
    """
    ranking = rank_sweep(sweep, suite, metric)
    record, run_records, state, runs = ranking.record, ranking.record["runs"], ranking.states, ranking.runs
    metric, goal, configurations, scores = ranking.metric, ranking.goal, ranking.configurations, ranking.scores
    labels = [config_scores.label for config_scores in configurations]
    suite = suite or str(record.get("suite") or "default")
    finished_runs = [
        run for run in run_records if state[run["name"]].state == "finished" and runs[run["name"]] is not None
    ]
    best = ranked(configurations, goal)
    ordered_labels = [config_scores.label for config_scores in best] + [
        label for label in labels if label not in {config_scores.label for config_scores in best}
    ]
    groups = {
        label: [
            run
            for run_record in run_records
            if run_record["label"] == label and (run := runs[run_record["name"]]) is not None
        ]
        for label in ordered_labels
    }
    groups = {label: group for label, group in groups.items() if group}
    drawn_groups = dict(list(groups.items())[:MAX_DRAWN])
    failed_names = [run["name"] for run in run_records if state[run["name"]].state in _BAD]
    finished = sum(run_state.state == "finished" for run_state in state.values())
    cards = [
        card("runs finished", f"{finished} of {len(run_records)}", f"{len(labels)} configurations"),
        card("failed", str(len(failed_names)), "named below" if failed_names else "none"),
    ]
    if best and metric:
        cards.append(
            card(
                "best so far" if len(scores) < len(run_records) else "best", best[0].label,
                f"{'highest' if goal == 'maximize' else 'lowest'} IQM of {metric} at step {ranking.step}",
            )
        )  # fmt: skip
    title = f"{metric} at step {ranking.step}"
    scores_html = (
        scores_part(sorted(configurations, key=lambda one: ordered_labels.index(one.label)), title, goal, metric)
        if metric
        else ""
    )
    subtitle = f"{len(run_records)} runs, evaluation suite {suite}, written {time.strftime('%Y-%m-%d %H:%M')}"
    html = page(
        title=f"Sweep {record.get('name', sweep.root.name)}",
        subtitle=subtitle,
        body=[
            f'<div class="cards sweep">{"".join(cards)}</div>',
            section(
                "Scores",
                scores_html
                or missing(_no_scores_text(metric, [run for run in runs.values() if run], len(finished_runs))),
            ),
            section(
                "Curves", curves_part(drawn_groups, of=len(groups)) if groups else missing("No run has a step yet.")
            ),
            section("How they ended", final_table(groups) if groups else missing("No run has a step yet.")),
            section("Runs", _runs_table(sweep, output, run_records, state, runs, scores, metric)),
        ],
        css=".sweep .card b{white-space:normal;overflow-wrap:anywhere;font-size:22px}td.bad{color:var(--c3)}",
    )
    return write_page(html, output)


def _read(paths: RunPaths, suite: str) -> RunMetrics | None:
    rows = read_metrics(paths.metrics)
    return RunMetrics(paths, rows, read_results(paths, suite)) if rows else None


def _compared(runs: Sequence[RunMetrics]) -> str | None:
    return metric_of(kind_of_run(runs[0].paths), runs) if runs else None


def _of(label: str, named: Sequence[Mapping[str, Any]], scores: Mapping[str, float]) -> list[float]:
    return [scores[run["name"]] for run in named if run["label"] == label and run["name"] in scores]


def _no_scores_text(metric: str | None, runs: Sequence[RunMetrics], num_finished: int) -> str:
    if not num_finished:
        return "No run has finished yet."
    if metric is None:
        return "The runs have no metric in common by which they are compared; name one: sweep.metric."
    eval_metrics = sorted(
        {f"eval/{name}" for run in runs for e in run.evaluations for name, v in e.items() if isinstance(v, float)}
    )
    logged = sorted({name for run in runs for name in run.rows[-1] if "/" in name})
    available = escape(", ".join([*eval_metrics, *logged]) or "none")
    return f"The runs that finished do not have {escape(metric)} at a step in common; there are: {available}."


def _runs_table(
    sweep: SweepPaths,
    output: Path,
    named: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    runs: Mapping[str, RunMetrics | None],
    scores: Mapping[str, float],
    metric: str | None,
) -> str:
    """Renders every run with its state, as a table; runs with a report link to it."""
    head = ["run", "state", "step", metric or "score", "note"]
    lines = []
    for run in named:
        name, run_state, run_metrics = str(run["name"]), state[run["name"]], runs[run["name"]]
        has_started = sweep.run(name).root.is_dir()
        report, steps = sweep.run(name).report, series(run_metrics.rows, "step")[1] if run_metrics else []
        link = os.path.relpath(report, output.absolute().parent)
        run_cell = f'<a href="{escape(link, quote=True)}">{escape(name)}</a>' if report.is_file() else escape(name)
        score = scores.get(name)
        state_text = run_state.state if has_started else "not started"
        lines.append(
            f'<tr><td class="t">{run_cell}</td><td class="t{" bad" if state_text in _BAD else ""}">{escape(state_text)}</td>'
            f"<td>{f'{steps[-1]:.0f}' if steps else '–'}</td><td>{'–' if score is None else number(score)}</td>"
            f'<td class="t">{escape(run_state.reason if has_started else "")}</td></tr>'
        )
    cells = "".join(f"<th{'' if i in (2, 3) else ' class=t'}>{escape(title)}</th>" for i, title in enumerate(head))
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
