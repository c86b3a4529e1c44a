"""Corrections compared at several bounds of staleness: GRPO on sums of one digit, from the same SFT model.

    python -m bench.staleness --seeds 3

Each cell has runs of `configs/algorithms/grpo.yaml` with one `algorithm.max_staleness` and one list of corrections, one for
each seed. A run's figures are the mean reward of its last ten steps, and means over all steps of the staleness, the gap
between trainer and engine, and the effective sample size and rejected share of the correction.

Prints a line for each run, writes bench/results/staleness.json, and says for each bound which correction differs from none: in
each seed on the same side, and with ranges over the seeds that do not overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import spread, write

ROOT = Path(__file__).resolve().parents[1]
START, GRPO = "configs/algorithms/sums_sft.yaml", "configs/algorithms/grpo.yaml"
#: Lists of corrections by name.
CORRECTIONS = {
    "none": "[]",
    "token_tis": "[{name: token_tis}]",
    "sequence_mis": "[{name: sequence_mis}]",
    "icepop": "[{name: icepop}]",
    "geometric": "[{name: token_tis}, {name: geometric, kwargs: {low: 0.9, high: 1.1}}]",
    "k3": "[{name: k3, kwargs: {threshold: 0.05}}]",
    "binary_tv": "[{name: binary_tv}]",
}
#: Metrics of which a run's mean is reported.
METRICS = (
    "rollout/staleness",
    "train/mismatch_kl",
    "train/correction_ess",
    "train/correction_dropped",
)


def run_rlhpc(*arguments: str) -> None:
    """Runs one `rlhpc` command; prints its output only if it fails."""
    result = subprocess.run([sys.executable, "-m", "rlhpc.cli", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def train_start(folder: Path) -> Path:
    """Trains the model from which all runs start; returns its folder."""
    run_rlhpc("train", START, f"runner.run_dir={folder}")
    run_rlhpc("convert", "--run", str(folder / "sums_sft"))
    return folder / "sums_sft" / "export" / "global_step_40"


def run_cell(folder: Path, start: Path, staleness: int, correction: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Runs GRPO once; returns its figures."""
    name, began_s = f"{correction}-{staleness}-{seed}", time.perf_counter()
    run_rlhpc(
        "train", GRPO, f"runner.run_dir={folder}", f"runner.name={name}", f"runner.seed={seed}",
        f"runner.max_steps={num_steps}", "runner.save_interval=-1", f"actor.model.model_path={start}",
        "algorithm.recompute_logprobs=true", f"algorithm.max_staleness={staleness}",
        f"algorithm.corrections={CORRECTIONS[correction]}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    means = {
        metric: statistics.fmean(values)
        for metric in METRICS
        if (values := [row[metric] for row in rows if metric in row])
    }
    duration_s = time.perf_counter() - began_s
    return {
        "staleness": staleness,
        "correction": correction,
        "seed": seed,
        "reward": statistics.fmean(rewards[-10:]),
        **means,
        "seconds": duration_s,
    }


def compare_rewards(uncorrected_rewards: list[float], corrected_rewards: list[float]) -> str:
    """Returns whether rewards of the same seeds differ: `better`, `worse`, or `not told apart`."""
    differences = [value - base for base, value in zip(uncorrected_rewards, corrected_rewards, strict=True)]
    if min(corrected_rewards) > max(uncorrected_rewards) and min(differences) > 0:
        return "better"
    return "worse" if max(corrected_rewards) < min(uncorrected_rewards) and max(differences) < 0 else "not told apart"


def main() -> None:
    """Runs all cells, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    args = parser.parse_args()
    corrections = list(dict.fromkeys(["none", *args.corrections]))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        start = train_start(Path(folder))
        for staleness in args.staleness:
            # With no staleness, the engine hf and the trainer differ by rounding: there is nothing to correct.
            for correction in corrections if staleness else ["none"]:
                for seed in range(1, args.seeds + 1):
                    row = run_cell(Path(folder), start, staleness, correction, seed, args.steps)
                    rows.append(row)
                    print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                                    for key, value in row.items()), flush=True)  # fmt: skip
    figures: dict[str, Any] = {}
    for staleness in args.staleness:
        rewards = {
            correction: [
                row["reward"] for row in rows if (row["staleness"], row["correction"]) == (staleness, correction)
            ]
            for correction in (corrections if staleness else ["none"])
        }
        figures[str(staleness)] = {name: spread(values) for name, values in rewards.items()}
        for name in list(rewards)[1:]:
            print(f"max_staleness {staleness}: {name} is {compare_rewards(rewards['none'], rewards[name])}")
    arguments = (
        f"--seeds {args.seeds} --steps {args.steps} --staleness {' '.join(map(str, args.staleness))} "
        f"--corrections {' '.join(corrections)}"
    )
    print(write("staleness", f"python -m bench.staleness {arguments}", {"figures": figures, "rows": rows}))


if __name__ == "__main__":
    main()
