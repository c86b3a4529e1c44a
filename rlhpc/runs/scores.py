"""What several seeds say together: the part of a comparison that is about one number a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.metrics.intervals import Row, interval_chart
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, figures, table
from rlhpc.metrics.seeds import Estimate, improvement, interquartile_mean, mean
from rlhpc.metrics.svg import number
from rlhpc.runs.kinds import Kind

#: More configurations than that are not told apart in one drawing.
MOST_DRAWN = 8
_METHOD = (
    "Intervals are 95 % percentile intervals of a bootstrap over seeds, within each configuration; IQM is the mean of "
    "the middle half of the seeds (of fewer than four seeds, all of them), and P(best &gt; this) is the probability "
    "that a run of the best configuration has a better score than one of this (Agarwal et al. 2021). An interval from "
    "a few seeds is a rough one."
)


@dataclass(frozen=True)
class Scored:
    """One configuration with the scores of its seeds.

    Attributes:
        label: What it is called.
        scores: One number for each run that has one.
        planned: How many runs it has, with and without a score.
    """

    label: str
    scores: Sequence[float]
    planned: int


def score_of(rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """A run's number: of its last evaluation, or of its last step; None if it has none."""
    name = metric.removeprefix("eval/")
    if name != metric:
        found = [float(e[name]) for e in evaluations if isinstance(e.get(name), int | float)]
        if found:
            return found[-1]
    values = series(list(map(dict, rows)), metric)[1]
    return values[-1] if values else None


def metric_of(kind: Kind[Any], having: Sequence[Mapping[str, float]]) -> str | None:
    """The first metric by which runs of a kind are compared and that all of them have.

    Args:
        kind: The kind.
        having: For each run, the scores that it has by metric.
    """
    names = list(dict.fromkeys(name for name, _, _ in kind.compared))
    return next((name for name in names if having and all(name in scores for scores in having)), None)


def ranked(found: Sequence[Scored], goal: str) -> list[Scored]:
    """Those with scores, the best interquartile mean first."""
    sign = -1 if goal == "maximize" else 1
    return sorted((one for one in found if one.scores), key=lambda one: sign * interquartile_mean(one.scores).value)


def scores_part(found: Sequence[Scored], metric: str, goal: str) -> str:
    """Table and chart of the scores, as HTML; the best configuration comes first.

    Args:
        found: The configurations, in the order in which their curves are drawn.
        metric: What the scores are.
        goal: `maximize` or `minimize`.
    """
    order = ranked(found, goal)
    if not order:
        return ""
    colors = {one.label: index for index, one in enumerate(found)}  # as in the curves
    best, sign = order[0], 1 if goal == "maximize" else -1
    body: list[list[Cell]] = []
    for one in order:
        ahead = "–"
        if one is not best:
            ahead = _words(improvement([sign * s for s in best.scores], [sign * s for s in one.scores]), percent=True)
        seeds = str(len(one.scores)) if len(one.scores) == one.planned else f"{len(one.scores)} of {one.planned}"
        alone = len(one.scores) == 1
        body.append(
            [one.label, seeds, _words(mean(one.scores), alone), _words(interquartile_mean(one.scores), alone), ahead]
        )
    none = [one.label for one in found if not one.scores]
    left_out = f"<p>Without a score yet: {len(none)} of {len(found)} configurations.</p>" if none else ""
    rows = [
        Row(one.label, *interquartile_mean(one.scores), dots=one.scores, color=colors[one.label])
        for one in order[:MOST_DRAWN]
    ]
    more = f", the best {MOST_DRAWN} of {len(order)}" if len(order) > MOST_DRAWN else ""
    chart = interval_chart(f"IQM over seeds{more}", f"{metric} (dots: single runs)", rows)
    head = ["configuration", "seeds", "mean", "IQM", "P(best > this)"]
    return (
        f'<div class="scroll">{table(head, body, text_columns={0})}</div>{left_out}{figures([chart])}'
        f'<p class="legend">{_METHOD}</p>'
    )


def _words(found: Estimate, alone: bool = False, *, percent: bool = False) -> str:
    show = (lambda v: f"{v:.0%}") if percent else number
    return show(found.value) if alone else f"{show(found.value)} ({show(found.low)} … {show(found.high)})"
