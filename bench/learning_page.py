"""`results/learning.svg` and `results/learning.md` from the results of `bench.learning`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learning_cases import CASES
from rlhpc.metrics.charts import CHART, Line, arrange_in_rows, line_chart, standalone

COLOURS = {"rlhpc": 0, "single_process": 1}
NAMES = {"rlhpc": "rlhpc", "single_process": "one process"}


def _read_curves(result: dict[str, Any], side: str, measure: str) -> list[list[float | None]]:
    return [run["curves"][measure] for run in result["runs"] if run["side"] == side]


def _list_panels(results: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    return [(learning_result, measure) for learning_result in results for measure in learning_result["compared"]]


def compute_band(name: str, x: Sequence[float], columns: Sequence[Sequence[float]], color: int) -> Line:
    """Returns mean and band from lowest to highest seed; `columns` has the seeds' values at each x."""
    means, minima, maxima = (
        [float(statistic(column)) for column in columns] for statistic in (statistics.mean, min, max)
    )
    return Line(name, x, means, minima, maxima, color=color, band=True)


def draw_panel(result: dict[str, Any], measure: str) -> str:
    """Draws mean and band from lowest to highest seed of both sides."""
    width = result["env_steps"] / result["spans"]
    lines = []
    for side, color in COLOURS.items():
        curves = _read_curves(result, side, measure)
        span_indices = [i for i in range(result["spans"]) if all(curve[i] is not None for curve in curves)]
        columns = [[float(curve[i] or 0.0) for curve in curves] for i in span_indices]
        lines.append(compute_band(NAMES[side], [(i + 1) * width for i in span_indices], columns, color))
    label = {"return": "return of training episodes", "success": "success, once in an episode"}[measure]
    num_seeds = len(_read_curves(result, "rlhpc", measure))
    return line_chart(f"{result['title']}, {num_seeds} seeds", "environment steps", label, lines, CHART)


def draw_page(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws one picture with a panel for each case and measure."""
    charts = [draw_panel(learning_result, measure) for learning_result, measure in _list_panels(results)]
    path.write_text(standalone(arrange_in_rows(charts, CHART, num_columns=3)))


def render_table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page's rows: means over the seeds, and the criterion's outcome."""
    lines = [
        "| task | measure | steps | seeds | whole curve: rlhpc / one process | last quarter: rlhpc / one process "
        "| difference in seed deviations (whole, end) | bands overlap | equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for learning_result, measure in _list_panels(results):
        comparison = learning_result["compared"][measure]
        full_curve, end_part = comparison["whole"], comparison["end"]
        part_texts = [
            f"{curve_part['rlhpc']:.3g} / {curve_part['single_process']:.3g}" for curve_part in (full_curve, end_part)
        ]
        deviations_text = f"{full_curve['in_seed_deviations']:+.1f}, {end_part['in_seed_deviations']:+.1f}"
        equal_text = "yes" if full_curve["equal"] and end_part["equal"] else "**no**"
        num_seeds = len(_read_curves(learning_result, "rlhpc", measure))
        lines.append(
            f"| {learning_result['title']} | {measure} | {learning_result['env_steps']:,} | {num_seeds} | {part_texts[0]} "
            f"| {part_texts[1]} | {deviations_text} | {comparison['bands_overlap']:.0%} | {equal_text} |"
        )
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """Draws all results in `folder`."""
    paths = {name: folder / f"learning_{name}.json" for name in CASES}
    results_by_name = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    draw_page([*results_by_name.values()], folder / "learning.svg")
    notes = "\n".join(
        f"- {case_result['title']} (`{case_result['command']}`): {case_result.get('note', CASES[name].note)}"
        for name, case_result in results_by_name.items()
    )
    path = folder / "learning.md"
    path.write_text(
        "# Learning curves beside single-process loops\n\n"
        "Written by `python -m bench.learning --page` from `learning_<case>.json`; the criterion is in `bench/learning.py`.\n"
        "Lines are means over seeds, bands go from the lowest to the highest.\n\n"
        f"![learning curves](learning.svg)\n\n{render_table([*results_by_name.values()])}\n\n{notes}\n"
    )
    return path
