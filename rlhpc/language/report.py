"""What the report of a language model's run shows."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths, model_name
from rlhpc.language.curves import (
    Evaluation,
    by_suite,
    evaluation_curve,
    learning_curves,
    pass_at_k_curve,
    read_evaluations,
    time_curves,
)
from rlhpc.language.episodes_page import write_episodes_page
from rlhpc.language.pass_at_k import level_order
from rlhpc.language.samples_page import write_samples_page
from rlhpc.metrics.charts import number
from rlhpc.metrics.curves import hollow_points
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, card, duration, figures, missing, table
from rlhpc.metrics.phase_times import Rows
from rlhpc.metrics.provenance import (
    evaluations_by_suite,
    judged_results,
    judging_suite,
    largest_pass_at,
    metric_title,
    of_suite,
    with_pass_at,
)
from rlhpc.runs.task_type import Parts
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.text import in_parentheses, interval_text


def parts(
    paths: RunPaths, rows: Rows, *, always: Container[str], trained: tuple[str, str], rate: str, linked: bool
) -> Parts:
    """See `Kind.parts`; with a second page, samples.html, where evaluations have left samples.

    Args:
        paths: The run.
        rows: Its metrics.
        always: Curves that are drawn whether something was logged or not.
        trained: Metric that says how training goes, and its title.
        rate: Metric of the tokens per second.
        linked: The page may refer to other files of the run.
    """
    evaluations = read_evaluations(paths)
    samples = write_samples_page(paths) if linked else None
    episodes = write_episodes_page(paths) if linked else None
    suite = judging_suite(paths, evaluations)
    judging = of_suite(evaluations, suite)
    evaluated = {int(result["global_step"]): f"{result['accuracy']:.1%}" for result in judging}
    return Parts(
        subject=data_name(paths),
        cards=key_figures(rows, judged_results(paths, rows, evaluations, suite, "accuracy"), trained, rate),
        curves=list(learning_curves(rows, always).values()),
        evaluation=evaluation_section(
            paths, rows, evaluations, samples.name if samples else None, episodes.name if episodes else None
        ),
        times=list(time_curves(rows).values())[::-1],
        evaluated=evaluated,
        trained=trained,
    )


def data_name(paths: RunPaths) -> str:
    """Model and data of the run, for its subtitle."""
    try:
        cfg = read_yaml(paths.config.read_bytes())
        train, model = cfg["data"]["train"], str(cfg["actor"]["model"]["model_path"] or "")
        task = (train.get("kwargs") or {}).get("task") or train.get("path") or train["source"]
        return f"{model_name(Path(model))} on {Path(str(task)).name}" if model else str(task)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return ""


def key_figures(rows: Rows, evaluations: Sequence[Evaluation], trained: tuple[str, str], rate: str) -> str:
    """The cards at the top of the page, of the evaluations of one suite."""
    best = max(evaluations, key=lambda result: result["accuracy"], default=None)
    last = evaluations[-1] if evaluations else None

    def of(name: str) -> float | None:
        return next(iter(series(rows, name)[1][-1:]), None)

    def evaluated(title: str, result: Evaluation | None) -> str:
        if result is None:
            return card(title, "–", "not evaluated yet")
        return card(title, f"{result['accuracy']:.1%}", f"accuracy, {result['suite']}, step {result['global_step']}")

    name, label = trained
    value, wall = of(name), of("time/wall_s")
    rates = series(rows, rate)[1]
    return (
        '<div class="cards">'
        + evaluated("Best evaluation", best)
        + evaluated("Last evaluation", last)
        + card(label.capitalize(), "–" if value is None else f"{value:.3f}", "at the last step")
        + card("Training steps", str(rows[-1]["step"]) if rows else "–", "")
        + card("Wall time", "–" if wall is None else duration(wall), "training")
        + card("Tokens / s", number(sum(rates) / len(rates)) if rates else "–", "mean over the run")
        + "</div>"
    )


def evaluation_section(
    paths: RunPaths,
    rows: Rows,
    evaluations: Sequence[Evaluation],
    samples_page: str | None,
    episodes_page: str | None = None,
) -> str:
    """Plot and table of the evaluations, accuracy by level, and the ways to the pages of samples and episodes."""
    html = figures(
        [passed] if (passed := pass_at_k_curve(evaluations)) else [],
        lambda size: evaluation_curve(paths, rows, evaluations, size),
    )
    html += hollow_points(evaluations_by_suite(paths, rows, evaluations, "accuracy"))
    if not evaluations:
        return html or missing(
            "No evaluation yet: <code>rlhpc eval</code> on a checkpoint, or the workflow's eval rule."
        )
    if samples_page:
        html += f'<p><a href="{escape(samples_page)}">What the model wrote, checkpoint beside checkpoint</a></p>'
    if episodes_page:
        html += f'<p><a href="{escape(episodes_page)}">What its episodes left, turn by turn</a></p>'
    html += f'<div class="scroll">{_table(evaluations)}</div>'
    for suite, own in by_suite(evaluations).items():
        if any(result.get("levels") for result in own):
            html += f'<h3>{escape(suite)}: accuracy by level</h3><div class="scroll">{_levels(own)}</div>'
    return html


def _table(evaluations: Sequence[Evaluation]) -> str:
    best = {suite: max(result["accuracy"] for result in own) for suite, own in by_suite(evaluations).items()}
    named = [with_pass_at(result) for result in evaluations]
    passed = largest_pass_at(name for result in named for name in result)
    rows: list[list[Cell]] = []
    for result in named:
        sampled = [_percent(result.get(passed)), _percent(result.get("majority"))] if passed else []
        rows.append(
            [
                str(result["suite"]),
                result["global_step"],
                result["n"],
                _percent(result["accuracy"]) + (" ★" if result["accuracy"] == best[str(result["suite"])] else ""),
                interval_text((result["low"], result["high"]), ".1%") or "–",
                *sampled,
                _digits(result.get("reward_mean"), 3),
                _digits((result.get("response_tokens") or {}).get("mean"), 1),
                _percent(result.get("truncated")),
                str(result.get("backend", "–")),
            ]
        )
    more = [metric_title(passed), "majority"] if passed else []
    head = ["suite", "step", "n", "accuracy", "95 % interval", *more, "reward", "tokens", "cut off", "backend"]
    return table(head, rows, text_columns={0, len(head) - 1})


def _levels(own: Sequence[Evaluation]) -> str:
    """One row per level, one column per checkpoint."""
    levels = sorted({level for result in own for level in result.get("levels") or {}}, key=level_order)
    sizes = own[-1].get("levels") or {}
    body: list[list[Cell]] = []
    for level in levels:
        cells: list[Cell] = []
        for result in own:
            scores = (result.get("levels") or {}).get(level) or {}
            cells.append(
                _percent(scores.get("accuracy")) + in_parentheses(scores.get("accuracy_ci95"), ".1%", to=" … ")
            )
        body.append([level or "–", sizes.get(level, {}).get("n", "–"), *cells])
    return table(["level", "n", *(f"step {result['global_step']}" for result in own)], body, text_columns={0})


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, (int, float)) else "–"


def _digits(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "–"
