"""Accuracy of a reward model that distinguishes right and wrong sums, on the tiny model's answers to held-out problems.

    python -m bench.reward_model --seeds 3 --work /tmp/reward_model

The pairs come from eight answers of the SFT model (configs/reasoning/demo_sft.yaml) to each problem, at temperature 1. All
seeds use the same pairs; the seed determines their order and the initial head. The control (`--control`) learns from the same
pairs with a random choice of the preferred answer. Existing files in the folder are reused.

Prints a line for each seed and writes bench/results/reward_model.json. Fails if the mean accuracy is below 80 %, or if the
control differs from 50 % by more than ten points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.machine import write

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "reasoning"
SUITE = 'data.eval=[{name: held_out, source: arithmetic, size: 500, eval_fraction: 0.2, kwargs: {digits: 2, operators: "+"}}]'


def run_rlhpc(work_folder: Path, *arguments: str) -> None:
    """Runs an `rlhpc` command in the folder; raises if it fails."""
    subprocess.run([sys.executable, "-m", "rlhpc.cli", *arguments], cwd=work_folder, check=True)


def make_data(work_folder: Path) -> dict[str, int]:
    """Trains the answering model and writes pairs of its answers; returns the number of pairs in each file."""
    work_folder.mkdir(parents=True, exist_ok=True)
    if not (work_folder / "runs/demo_sft/export/global_step_180/config.json").exists():
        run_rlhpc(work_folder, "train", str(CONFIGS / "demo_sft.yaml"))
        run_rlhpc(work_folder, "convert", "--run", "runs/demo_sft")
    pairs_command = ["pairs", "--run", "runs/demo_sft"]
    for name, more_arguments in {
        "train": [], "held_out": ["--suite", "held_out", SUITE], "by_lot": ["--shuffle"],
    }.items():  # fmt: skip
        if not (work_folder / f"{name}.jsonl").exists():
            run_rlhpc(work_folder, *pairs_command, "--output", f"{name}.jsonl", *more_arguments)
    return {name: len((work_folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "held_out")}


def train(work_folder: Path, name: str, data: str, num_steps: int, seed: int) -> dict[str, Any]:
    """Trains a run; returns its evaluations during training, the complete last one, and accuracy by the error of the rejected
    answer.
    """
    overrides = [
        f"runner.name={name}", f"runner.seed={seed}", f"runner.max_steps={num_steps}", "runner.val_check_interval=100",
        "runner.resume_dir=auto",
        f"data.train.path={data}.jsonl", "data.eval=[{name: held_out, source: jsonl, path: held_out.jsonl}]",
    ]  # fmt: skip
    run_rlhpc(work_folder, "train", str(CONFIGS / "reward_model.yaml"), *overrides)
    run_rlhpc(work_folder, "eval", "--run", f"runs/{name}", "--suite", "held_out")
    run_folder = work_folder / "runs" / name
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    eval_result = json.loads((run_folder / f"eval/global_step_{num_steps}/held_out.json").read_text())
    evaluations = [
        json.loads(line)
        for line in (run_folder / f"eval/global_step_{num_steps}/held_out.rewards.jsonl").read_text().splitlines()
    ]
    hits_by_kind: dict[str, list[bool]] = {}
    for row in evaluations:
        right_response, wrong_response = row["responses"]
        error_kind = "no number of as many digits"
        if len(right_response) == len(wrong_response) and wrong_response.isdigit():
            error_kind = "last digit right" if right_response[-1] == wrong_response[-1] else "last digit wrong"
        hits_by_kind.setdefault(error_kind, []).append(row["rewards"][0] > row["rewards"][1])
    return {
        "name": name, "seed": seed, "steps": num_steps, "seconds": rows[-1]["time/wall_s"],
        **{key: eval_result[key] for key in ("n", "accuracy", "accuracy_ci95", "margin", "calibration_error")},
        "curve": {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row},
        "train_accuracy": statistics.fmean(row["train/accuracy"] for row in rows[-50:]),
        "kinds": {
            error_kind: {"n": len(hits), "accuracy": statistics.fmean(hits)}
            for error_kind, hits in sorted(hits_by_kind.items())
        },
    }  # fmt: skip


def format_run(row: dict[str, Any]) -> str:
    """Formats a run in a line."""
    ci_low, ci_high = row["accuracy_ci95"]
    curve_text = ", ".join(f"{step}: {value:.1%}" for step, value in row["curve"].items() if step % 100 == 0)
    kinds_text = "; ".join(
        f"{error_kind} {kind_result['accuracy']:.1%} of {kind_result['n']}"
        for error_kind, kind_result in row["kinds"].items()
    )
    return (
        f"{row['name']}: {row['accuracy']:.1%} ({ci_low:.1%} to {ci_high:.1%}) of {row['n']} held-out pairs, "
        f"{row['train_accuracy']:.1%} of those of the last 50 steps; margin {row['margin']:.2f}, "
        f"calibration error {row['calibration_error']:.1%}; "
        f"{row['seconds']:.0f} s\n  by step: {curve_text}\n  {kinds_text}"
    )


def main() -> int:
    """Runs all seeds and the control; returns 1 if a figure misses its criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--control", action="store_true", help="also learn from pairs whose chosen one is drawn by lot")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench_reward_model")
    args = parser.parse_args()
    work_folder = args.work.absolute()
    num_pairs = make_data(work_folder)
    print(f"{num_pairs['train']} pairs of training, {num_pairs['held_out']} held out", flush=True)
    rows = []
    for seed in range(1, args.seeds + 1):
        rows.append(train(work_folder, f"rm{seed}", "train", args.steps, seed))
        print(format_run(rows[-1]), flush=True)
    values = [row["accuracy"] for row in rows]
    print(
        f"mean {statistics.fmean(values):.1%}, {min(values):.1%} to {max(values):.1%} over {len(values)} seeds",
        flush=True,
    )
    command = f"python -m bench.reward_model --seeds {args.seeds} --steps {args.steps}"
    figures, fell_short = {"pairs": num_pairs, "rows": rows}, statistics.fmean(values) < 0.8
    if args.control:
        figures["control"] = control = train(work_folder, "by_lot", "by_lot", args.steps, 1)
        print(format_run(control), flush=True)
        command, fell_short = f"{command} --control", fell_short or abs(control["accuracy"] - 0.5) > 0.1
    path = write("reward_model", command, figures)
    print(f"{command} → {path.name}: {json.loads(path.read_text())['machine']}")
    return int(fell_short)


if __name__ == "__main__":
    raise SystemExit(main())
