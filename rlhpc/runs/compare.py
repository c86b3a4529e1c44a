"""One page about several runs: their curves with mean and spread over seeds, and a table of how they ended."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import Cell, duration, figures, missing, page, section, table, time_unit, write_page
from rlhpc.metrics.results import read_results
from rlhpc.metrics.statistics import wilson
from rlhpc.metrics.svg import Line, line_chart, number, running_mean
from rlhpc.runs.kinds import kind_of_run
from rlhpc.runs.scores import Scored, score_of, scores_part
from rlhpc.runtime.errors import RlhpcError

#: Number of points to which the curves of several seeds are interpolated.
_GRID = 120
_SEED = re.compile(r"[-_.]?(?:seed|s)?[-_.]?\d+$", re.IGNORECASE)
Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Run:
    """What is read of one run.

    Attributes:
        paths: Its folder.
        rows: Its metrics.
        evaluations: Its evaluations on the suite that is compared.
    """

    paths: RunPaths
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def curve(self, name: str, against: str) -> Curve:
        """A metric of training, smoothed as reports do, or a result of evaluations (`eval/`)."""
        if name.startswith("eval/"):
            return self._evaluated(name.removeprefix("eval/"), against)
        x, y = series(self.rows, name, against)
        return x, running_mean(y) if len(y) >= 60 else y

    def _evaluated(self, name: str, against: str) -> Curve:
        """A result of evaluations, those in training and those of checkpoints, against steps or time."""
        at = dict(zip(*series(self.rows, against), strict=True))  # step → x
        found = dict(zip(*series(self.rows, f"eval/{name}"), strict=True))
        found |= {
            float(e["global_step"]): float(e[name]) for e in self.evaluations if isinstance(e.get(name), (int, float))
        }
        pairs = sorted((x, found[step]) for step, x in at.items() if step in found)
        return [x for x, _ in pairs], [y for _, y in pairs]


def label_of(name: str) -> str:
    """A run's name without its seed: push-s3, push_seed3 and push3 are one."""
    return _SEED.sub("", name) or name


def read_runs(named: Sequence[tuple[str, RunPaths]], suite: str) -> dict[str, list[Run]]:
    """The runs by label, in the order given.

    Raises:
        RlhpcError: A run has no metrics.
    """
    groups: dict[str, list[Run]] = {}
    for label, paths in named:
        rows = read_metrics(paths.metrics)
        if not rows:
            state = "cannot be read" if paths.metrics.is_file() and paths.metrics.stat().st_size else "has no row yet"
            raise RlhpcError(f"{paths.metrics} {state}; see rlhpc status {paths.root}")
        evaluations = read_results(paths, suite)
        groups.setdefault(label, []).append(Run(paths, rows, evaluations))
    return groups


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Several seeds' curves as one.

    Returns:
        x, mean, lowest, highest, over the range that all seeds have; values between points are interpolated.
    """
    if len(curves) == 1:
        x, y = curves[0]
        return list(x), list(y), [], []
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if end <= start:  # no common range, such as one evaluation each: show how each run ended
        x, y = ([curve[i][-1] for curve in curves] for i in (0, 1))
        return [statistics.fmean(x)], [statistics.fmean(y)], [min(y)], [max(y)]
    grid = np.unique(np.linspace(start, end, min(_GRID, max(len(x) for x, _ in curves))))
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid.tolist(), values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()


def _chart(groups: Mapping[str, list[Run]], title: str, y_label: str, x: tuple[str, str, float], get: Any) -> str:
    """One metric of all groups against one axis; "" if no run has it."""
    against, x_label, scale = x
    lines = []
    for color, (label, runs) in enumerate(groups.items()):
        curves = [curve for run in runs if (curve := get(run, against))[0]]
        if not curves:
            continue
        at, mean, low, high = spread(curves)
        lines.append(
            Line(
                label,
                [value / scale for value in at],
                mean,
                low,
                high,
                color=color,
                band=len(at) > 1,
                markers=len(at) <= 12,
            )
        )
    title += " over wall time" if against == "time/wall_s" else " over experience"
    return line_chart(title, x_label, y_label, lines, key=len(groups) > 1) if lines else ""


def charts(groups: Mapping[str, list[Run]]) -> list[str]:
    """Everything that was logged, each against environment steps (or global steps) and against wall time."""
    runs = [run for group in groups.values() for run in group]
    steps = all(series(run.rows, "rollout/env_steps")[0] for run in runs)
    unit, length = time_unit(max(max(series(run.rows, "time/wall_s")[1], default=0.0) for run in runs))
    axes = [
        ("rollout/env_steps", "environment steps", 1.0) if steps else ("step", "global step", 1.0),
        ("time/wall_s", f"wall time ({unit})", length),
    ]
    found = []
    for name, title, label in dict.fromkeys(one for run in runs for one in kind_of_run(run.paths).compared):
        found += [_chart(groups, title, label, axis, lambda run, x, n=name: run.curve(n, x)) for axis in axes]
    return [chart for chart in found if chart]


def final_table(groups: Mapping[str, list[Run]]) -> str:
    """How the runs of each label ended, over their seeds."""
    body: list[list[Cell]] = []
    for label, runs in groups.items():
        last = [max(run.evaluations, key=lambda result: result["global_step"], default=None) for run in runs]
        results = [result for result in last if result is not None]
        rates = [r for r in results if isinstance(r.get("success_once"), (int, float))]
        body.append(
            [
                label,
                len(runs),
                _over([_end(run, "rollout/env_steps") for run in runs], number),
                _over([_end(run, "time/wall_s") for run in runs], duration),
                _over([_end(run, "train/episode_return") for run in runs], lambda v: f"{v:.1f}"),
                _success(rates),
                _over([r.get("return_mean") for r in results], lambda v: f"{v:.2f}"),
                sum(int(r.get("episodes", 0)) for r in results) or "–",
            ]
        )
    head = [
        "runs",
        "seeds",
        "env steps",
        "wall time",
        "training return",
        "success once",
        "evaluated return",
        "episodes",
    ]
    return f'<div class="scroll">{table(head, body, text_columns={0})}</div>'


def _end(run: Run, name: str) -> float | None:
    values = series(run.rows, name)[1]
    return values[-1] if values else None


def _over(values: Sequence[float | None], show: Any) -> str:
    """Mean, with the lowest and highest if they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = str(show(statistics.fmean(known)))
    low, high = show(min(known)), show(max(known))
    return text if low == high else f"{text} ({low} … {high})"


def _success(results: Sequence[Mapping[str, Any]]) -> str:
    """Share over all seeds' episodes, with Wilson's 95 % interval."""
    episodes = sum(int(result["episodes"]) for result in results)
    if not episodes:
        return "–"
    reached = sum(result["success_once"] * int(result["episodes"]) for result in results)
    low, high = wilson(round(reached), episodes)
    return f"{reached / episodes:.1%} ({low:.1%} … {high:.1%})"


def write_comparison(named: Sequence[tuple[str, RunPaths]], output: Path, suite: str = "default") -> Path:
    """Writes the page.

    Args:
        named: Label and run; runs of one label are seeds of one thing.
        output: The HTML file.
        suite: Evaluation suite that is compared.

    Raises:
        RlhpcError: A run has nothing to show, or the page cannot be written.
    """
    groups = read_runs(named, suite)
    folders: list[list[Cell]] = [[label, str(run.paths.root)] for label, runs in groups.items() for run in runs]
    html = page(
        title="Comparison of " + " · ".join(groups),
        subtitle=f"{len(folders)} runs, evaluation suite {suite}, written {time.strftime('%Y-%m-%d %H:%M')}",
        body=[
            section("How they ended", final_table(groups)),
            *_scores(groups),
            section("Curves", curves_part(groups)),
            section("Runs", f'<div class="scroll">{table(["label", "folder"], folders, text_columns={0, 1})}</div>'),
        ],
    )
    return write_page(html, output)


def _scores(groups: Mapping[str, list[Run]]) -> list[str]:
    """What the seeds say together, by the metrics of evaluations that all runs have; nothing of single runs."""
    runs = [run for group in groups.values() for run in group]
    names = dict.fromkeys(name for run in runs for name, _, _ in kind_of_run(run.paths).compared)
    found = []
    if len(runs) > len(groups):
        for metric in (name for name in names if name.startswith("eval/")):
            scores = {
                label: [score_of(run.rows, run.evaluations, metric) for run in of] for label, of in groups.items()
            }
            if all(score is not None for of in scores.values() for score in of):
                scored = [Scored(label, [s for s in of if s is not None], len(of)) for label, of in scores.items()]
                found.append(section(f"Over seeds: {metric}", scores_part(scored, metric, "maximize")))
    return found


def curves_part(groups: Mapping[str, list[Run]], of: int | None = None) -> str:
    """The charts of some runs, as HTML.

    Args:
        groups: The runs by label.
        of: How many labels there are in all, if these are the best of them.
    """
    drawn = charts(groups)
    if not drawn:
        return missing("No curve that these runs have in common.")
    some = f" The {len(groups)} best of {of} configurations." if of is not None and of > len(groups) else ""
    told = f"<p>Lines are means over seeds, bands and error bars go from the lowest seed to the highest.{some}</p>"
    return told + figures(drawn)
