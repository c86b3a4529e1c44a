"""Agent demonstration: a tiny transformer learns to search from scratch, by SFT on demonstrations, then GRPO.

    python -m bench.demo_agent --seeds 3

The evaluation uses questions that neither SFT nor GRPO trains on. Half of the demonstrations answer without a search, so GRPO
must discover that the tool pays. Two controls have the same start and number of steps: GRPO with rewards shuffled within each
group, and GRPO with searches that find nothing.

Prints a line for each seed and writes bench/results/demo_agent.json and a drawing of the training curves. Fails if the agent
is less than 20 points above SFT or less than 15 points above the best accuracy without the tool, or if shuffled rewards gain
more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.learning_page import compute_band
from bench.machine import RESULTS, write
from rlhpc.metrics.charts import line_chart, standalone

ROOT = Path(__file__).resolve().parents[1]
SFT, GRPO = "configs/agents/search_sft.yaml", "configs/agents/search.yaml"
#: Beside GRPO as it is.
CONTROLS = {
    "shuffled": ("algorithm.name=bench.shuffled:ShuffledRewards",),
    "no_tool": ("agent.kwargs.closed=true",),
}
#: What the drawing calls them.
NAMES = {"grpo": "GRPO", "shuffled": "shuffled rewards", "no_tool": "no tool"}


def run_rlhpc(*arguments: str) -> None:
    """Runs one `rlhpc` command; prints its output only if it fails."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    result = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", *arguments], cwd=ROOT, capture_output=True, text=True, env=env
    )
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def export_last(run_folder: Path) -> Path:
    """Returns the last checkpoint of a run, exported as a model."""
    last_checkpoint = max(
        (run_folder / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2])
    )
    run_rlhpc("convert", "--checkpoint", str(last_checkpoint))
    return run_folder / "export" / last_checkpoint.name


def measure_accuracy(model: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Returns the accuracy of a model on the held-out questions."""
    output = model.parents[1] / "eval" / f"{name}.json"
    run_rlhpc(
        "eval", "--model", str(model), "--config", GRPO, "--suite", "held_out", "--output", str(output), *arguments
    )
    eval_result: dict[str, Any] = json.loads(output.read_text())
    return {"accuracy": eval_result["accuracy"], "ci95": eval_result["accuracy_ci95"], "n": eval_result["n"]}


def read_curve(run_folder: Path) -> list[float]:
    """Returns the share of questions that were answered in training, by step."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [round(row["train/reward"], 4) for row in map(json.loads, lines) if "train/reward" in row]


def run_seed(seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs SFT, GRPO and its controls at one seed."""
    start_time, folder = time.perf_counter(), [f"runner.run_dir={runs}", f"runner.seed={seed}"]
    sft_name = f"demo-agent-{seed}-sft"
    run_rlhpc("train", SFT, *folder, f"runner.name={sft_name}")
    model = export_last(runs / sft_name)
    row: dict[str, Any] = {"seed": seed, "sft": measure_accuracy(model, "held_out", *folder), "curves": {}}
    for run_kind, overrides_of_kind in {"grpo": (), **CONTROLS}.items():
        name, run_overrides = (
            f"demo-agent-{seed}-{run_kind}",
            [*folder, f"actor.model.model_path={model}", *overrides_of_kind, *overrides],
        )
        run_rlhpc("train", GRPO, *run_overrides, f"runner.name={name}")
        row[run_kind] = measure_accuracy(export_last(runs / name), "held_out", *run_overrides)
        row["curves"][run_kind] = read_curve(runs / name)
    return {**row, "seconds": time.perf_counter() - start_time}


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws training curves: the mean of every five steps and over the seeds, and a band from the
    lowest seed to the highest.
    """
    lines = []
    for color, (run_kind, name) in enumerate(NAMES.items()):
        curves = [list(map(statistics.mean, batch_values(row["curves"][run_kind], 5))) for row in rows]
        columns = list(zip(*curves, strict=False))
        x = [5.0 * (i + 1) for i in range(len(columns))]
        lines.append(compute_band(name, x, columns, color))
    chart = line_chart(f"Answered in training, {len(rows)} seeds", "GRPO step", "share of questions", lines)
    path.write_text(standalone(chart))


def batch_values(values: list[float], size: int) -> list[list[float]]:
    """Batches neighbouring values; the last batch may be smaller."""
    return [values[start_index : start_index + size] for start_index in range(0, len(values), size)]


def find_missed_criteria(row: dict[str, Any]) -> str:
    """Returns the criteria that a seed missed; "" if it met all of them."""
    grpo, sft = row["grpo"]["accuracy"], row["sft"]["accuracy"]
    if grpo < sft + 0.2:
        return "less than 20 points above SFT"
    if grpo < row["no_tool"]["accuracy"] + 0.15:
        return "less than 15 points above what can be had without the tool"
    if row["shuffled"]["accuracy"] > sft + 0.05:
        return "shuffled rewards brought more than 5 points"
    return ""


def main() -> int:
    """Runs all seeds; returns 1 if a seed misses a criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("overrides", nargs="*", help="key=value, of GRPO")
    args = parser.parse_args()
    rows = []
    for seed in range(1, args.seeds + 1):
        row = run_seed(seed, args.runs.absolute(), args.overrides)
        rows.append(row)
        accuracy_text = ", ".join(
            f"{run_kind} {row[run_kind]['accuracy']:.1%}" for run_kind in ("sft", "grpo", *CONTROLS)
        )
        print(
            f"seed {seed}: {accuracy_text} of {row['sft']['n']} held-out questions; {row['seconds']:.0f} s", flush=True
        )
    draw_curves(rows, RESULTS / "demo_agent.svg")
    write("demo_agent", f"python -m bench.demo_agent --seeds {args.seeds}", {"rows": rows})
    shortfalls = {row["seed"]: shortfall for row in rows if (shortfall := find_missed_criteria(row))}
    for seed, shortfall in shortfalls.items():
        print(f"seed {seed}: {shortfall}", file=sys.stderr)
    return int(bool(shortfalls))


if __name__ == "__main__":
    raise SystemExit(main())
