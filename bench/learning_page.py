"""`results/learning.png` and `results/learning.md` from the results of `bench.learning`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learning_cases import CASES

COLOURS = {"rlhpc": "#1f77b4", "single_process": "#d95f02"}
NAMES = {"rlhpc": "rlhpc", "single_process": "one process"}


def _curves(result: dict[str, Any], side: str, measure: str) -> list[list[float | None]]:
    return [run["curves"][measure] for run in result["runs"] if run["side"] == side]


def _panels(results: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    return [(result, measure) for result in results for measure in result["compared"]]


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean and band from lowest to highest seed, a panel for each case and measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(results)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (result, measure) in zip(axes.flat, panels, strict=False):
        width = result["env_steps"] / result["spans"]
        for side, colour in COLOURS.items():
            curves = _curves(result, side, measure)
            at = [i for i in range(result["spans"]) if all(curve[i] is not None for curve in curves)]
            x = [(i + 1) * width / 1000 for i in at]
            columns_at = [[curve[i] for curve in curves] for i in at]
            axis.plot(x, [statistics.mean(column) for column in columns_at], color=colour, label=NAMES[side])
            axis.fill_between(
                x, [min(c) for c in columns_at], [max(c) for c in columns_at], color=colour, alpha=0.2, lw=0
            )
        seeds = len(_curves(result, "rlhpc", measure))
        axis.set_title(f"{result['title']}, {seeds} seeds", fontsize=9)
        axis.set_xlabel("thousand environment steps", fontsize=8)
        axis.set_ylabel(
            {"return": "return of training episodes", "success": "success, once in an episode"}[measure], fontsize=8
        )
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(results: Sequence[dict[str, Any]]) -> str:
    """The page's rows: means over the seeds, and what the criterion says."""
    lines = [
        "| task | measure | steps | seeds | whole curve: rlhpc / one process | last quarter: rlhpc / one process "
        "| difference in seed deviations (whole, end) | bands overlap | equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result, measure in _panels(results):
        found = result["compared"][measure]
        whole, end = found["whole"], found["end"]
        both = [f"{part['rlhpc']:.3g} / {part['single_process']:.3g}" for part in (whole, end)]
        apart = f"{whole['in_seed_deviations']:+.1f}, {end['in_seed_deviations']:+.1f}"
        equal = "yes" if whole["equal"] and end["equal"] else "**no**"
        seeds = len(_curves(result, "rlhpc", measure))
        lines.append(
            f"| {result['title']} | {measure} | {result['env_steps']:,} | {seeds} | {both[0]} | {both[1]} | {apart} "
            f"| {found['bands_overlap']:.0%} | {equal} |"
        )
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """Draws all results in `folder`."""
    found = {name: folder / f"learning_{name}.json" for name in CASES}
    results = {name: json.loads(path.read_text()) for name, path in found.items() if path.is_file()}
    draw([*results.values()], folder / "learning.png")
    notes = "\n".join(
        f"- {result['title']} (`{result['command']}`): {result.get('note', CASES[name].note)}"
        for name, result in results.items()
    )
    path = folder / "learning.md"
    path.write_text(
        "# Learning curves beside single-process loops\n\n"
        "Written by `python -m bench.learning --page` from `learning_<case>.json`; the criterion is in `bench/learning.py`.\n"
        "Lines are means over seeds, bands go from the lowest to the highest.\n\n"
        f"![learning curves](learning.png)\n\n{table([*results.values()])}\n\n{notes}\n"
    )
    return path
