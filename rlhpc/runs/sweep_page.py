"""The page of a sweep: which values are better, by how much and how surely; and how each run ended."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.jobs.state import states
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import card, missing, page, section, write_page
from rlhpc.metrics.results import read_results
from rlhpc.metrics.svg import number
from rlhpc.runs.compare import Run, curves_part, final_table
from rlhpc.runs.kinds import kind_of_run
from rlhpc.runs.scores import MOST_DRAWN, Scored, metric_of, ranked, score_of, scores_part
from rlhpc.runs.sweeps import read_sweep

_BAD = ("failed", "dead", "cancelled")


def write_sweep_page(sweep: SweepPaths, output: Path, suite: str | None = None, metric: str | None = None) -> Path:
    """Writes the page of the runs that a sweep names now, of those that have something to show.

    Args:
        sweep: Its files.
        output: The HTML file.
        suite: Evaluation suite that is compared; None for that of the sweep.
        metric: What is compared; None for what the sweep says, or what its kind of run is compared by.

    Raises:
        RlhpcError: `sweep.json` cannot be read, or the page cannot be written.
    """
    record = read_sweep(sweep)
    named = record["runs"]
    suite = suite or str(record.get("suite") or "default")
    found = [found for _, found in states([sweep.run(run["name"]) for run in named])]
    state = {run["name"]: one for run, one in zip(named, found, strict=True)}
    runs = {run["name"]: _read(sweep.run(run["name"]), suite) for run in named}
    ended = [run for run in named if state[run["name"]].state == "finished" and runs[run["name"]] is not None]
    metric = metric or record.get("metric") or _compared([runs[run["name"]] for run in ended])
    goal = str(record.get("goal") or "maximize")
    scores = {run["name"]: _score(runs[run["name"]], metric) for run in ended}
    labels = list(dict.fromkeys(str(run["label"]) for run in named))
    scored = [Scored(label, _of(label, named, scores), sum(run["label"] == label for run in named)) for label in labels]
    best = ranked(scored, goal)
    shown = [one.label for one in best] + [label for label in labels if label not in {one.label for one in best}]
    groups = {
        label: [run for one in named if one["label"] == label and (run := runs[one["name"]]) is not None]
        for label in shown
    }
    groups = {label: group for label, group in groups.items() if group}
    drawn = dict(list(groups.items())[:MOST_DRAWN])
    failed = [run["name"] for run in named if state[run["name"]].state in _BAD]
    finished = sum(one.state == "finished" for one in found)
    cards = [
        card("runs finished", f"{finished} of {len(named)}", f"{len(labels)} configurations"),
        card("failed", str(len(failed)), "named below" if failed else "none"),
    ]
    if best and metric:
        cards.append(
            card("best so far" if len(scores) < len(named) else "best", best[0].label, f"by the IQM of {metric}")
        )
    over = scores_part(sorted(scored, key=lambda one: shown.index(one.label)), metric, goal) if metric else ""
    subtitle = f"{len(named)} runs, evaluation suite {suite}, written {time.strftime('%Y-%m-%d %H:%M')}"
    html = page(
        title=f"Sweep {record.get('name', sweep.root.name)}",
        subtitle=subtitle,
        body=[
            f'<div class="cards sweep">{"".join(cards)}</div>',
            section("Scores", over or missing(_nothing(metric, [run for run in runs.values() if run], len(ended)))),
            section("Curves", curves_part(drawn, of=len(groups)) if groups else missing("No run has a step yet.")),
            section("How they ended", final_table(groups) if groups else missing("No run has a step yet.")),
            section("Runs", _runs_table(sweep, output, named, state, runs, scores, metric)),
        ],
        css=".sweep .card b{white-space:normal;font-size:22px}td.bad{color:var(--c3)}",
    )
    return write_page(html, output)


def _read(paths: RunPaths, suite: str) -> Run | None:
    rows = read_metrics(paths.metrics)
    return Run(paths, rows, read_results(paths, suite)) if rows else None


def _compared(runs: Sequence[Run | None]) -> str | None:
    there = [run for run in runs if run is not None]
    if not there:
        return None
    kind = kind_of_run(there[0].paths)
    names = [name for name, _, _ in kind.compared]
    return metric_of(kind, [{n: s for n in names if (s := _score(run, n)) is not None} for run in there])


def _score(run: Run | None, metric: str | None) -> float | None:
    return None if run is None or metric is None else score_of(run.rows, run.evaluations, metric)


def _of(label: str, named: Sequence[Mapping[str, Any]], scores: Mapping[str, float | None]) -> list[float]:
    return [score for run in named if run["label"] == label and (score := scores.get(run["name"])) is not None]


def _nothing(metric: str | None, runs: Sequence[Run], ended: int) -> str:
    if not ended:
        return "No run has finished yet."
    if metric is None:
        return "The runs have no metric in common by which they are compared; name one: sweep.metric."
    there = sorted(
        {f"eval/{name}" for run in runs for e in run.evaluations for name, v in e.items() if isinstance(v, float)}
    )
    logged = sorted({name for run in runs for name in run.rows[-1] if "/" in name})
    return f"No run has {escape(metric)}; there are: {escape(', '.join([*there, *logged]) or 'none')}."


def _runs_table(
    sweep: SweepPaths,
    output: Path,
    named: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    runs: Mapping[str, Run | None],
    scores: Mapping[str, float | None],
    metric: str | None,
) -> str:
    """Every run with its state; those that have a report lead to it."""
    head = ["run", "state", "step", metric or "score", ""]
    lines = []
    for run in named:
        name, found, read = str(run["name"]), state[run["name"]], runs[run["name"]]
        begun = sweep.run(name).root.is_dir()
        report, steps = sweep.run(name).report, series(read.rows, "step")[1] if read else []
        link = os.path.relpath(report, output.absolute().parent)
        shown = f'<a href="{escape(link, quote=True)}">{escape(name)}</a>' if report.is_file() else escape(name)
        score = scores.get(name)
        words = found.state if begun else "not started"
        lines.append(
            f'<tr><td class="t">{shown}</td><td class="t{" bad" if words in _BAD else ""}">{escape(words)}</td>'
            f"<td>{f'{steps[-1]:.0f}' if steps else '–'}</td><td>{'–' if score is None else number(score)}</td>"
            f'<td class="t">{escape(found.why if begun else "")}</td></tr>'
        )
    cells = "".join(f"<th{'' if i in (2, 3) else ' class=t'}>{escape(title)}</th>" for i, title in enumerate(head))
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
