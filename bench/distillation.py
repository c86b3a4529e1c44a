"""On-policy distillation compared with GRPO: a GRPO-trained model teaches the model that GRPO started from.

    python -m bench.distillation --seeds 3

Each seed runs SFT, GRPO from the SFT model (the teacher), and distillation from the SFT model (the student). The number of
steps is fixed in advance, the learning rate ends at 0, and the last checkpoint counts. The accuracy is that of greedy answers
to held-out problems. The compared tokens are trained tokens.

Prints a line for each seed and writes bench/results/distillation.json. Fails if a student is more than three standard errors
below its teacher, or needs more than half of the teacher's tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import spread, write

ROOT = Path(__file__).resolve().parents[1]
SFT, GRPO = "configs/reasoning/demo_sft.yaml", "configs/reasoning/demo.yaml"
#: One answer to each of many prompts: a teacher needs no comparison within a group.
DISTIL = (
    "algorithm.name=distillation", "algorithm.distillation.mode=full", "algorithm.group_size=1", "data.prompts_per_step=256",
    "actor.optim.lr=5e-4", "actor.optim.lr_warmup_steps=10", "actor.optim.lr_scheduler=linear",
)  # fmt: skip


def run_rlhpc(*arguments: str) -> None:
    """Runs one `rlhpc` command; prints its output only if it fails."""
    result = subprocess.run([sys.executable, "-m", "rlhpc.cli", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def train(config: str, folder: Path, name: str, num_steps: int, *overrides: str) -> Path:
    """Trains to a step, and exports its checkpoint."""
    extra_overrides = ("workflow.sft=null", "workflow.sft_overrides=[]", "runner.segments=1") if config == GRPO else ()
    run_rlhpc(
        "train", config, f"runner.run_dir={folder}", f"runner.name={name}", f"runner.max_steps={num_steps}",
        f"runner.save_interval={num_steps}", *extra_overrides, *overrides,
    )  # fmt: skip
    export = folder / f"{name}-export"
    run_rlhpc(
        "convert",
        "--checkpoint",
        str(folder / name / "checkpoints" / f"global_step_{num_steps}"),
        "--output",
        str(export),
    )
    return export


def read_figures(folder: Path, name: str, export: Path) -> dict[str, float]:
    """Returns the result of a run, and its costs."""
    output = folder / f"{name}-eval.json"
    arguments = ["--config", GRPO, "--suite", "held_out", "--output", str(output), f"runner.run_dir={folder}"]
    run_rlhpc("eval", "--model", str(export), *arguments)
    evaluation = json.loads(output.read_text())
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    num_tokens = sum(row["train/tokens"] for row in rows if "train/tokens" in row)
    return {"accuracy": evaluation["accuracy"], "n": evaluation["n"], "tokens": num_tokens, "steps": len(rows)}


def run_seed(seed: int, folder: Path, steps: dict[str, int], overrides: list[str]) -> dict[str, Any]:
    """Runs SFT, its teacher, and its student."""
    seed_overrides = [f"runner.seed={seed}", *overrides]
    row: dict[str, Any] = {"seed": seed}
    start = train(SFT, folder, f"sft-{seed}", steps["sft"], f"runner.seed={seed}")
    row["sft"] = read_figures(folder, f"sft-{seed}", start)
    start_time = time.perf_counter()
    model_override = f"actor.model.model_path={start}"
    teacher = train(GRPO, folder, f"grpo-{seed}", steps["grpo"], model_override, *seed_overrides)
    row["grpo"] = {**read_figures(folder, f"grpo-{seed}", teacher), "seconds": time.perf_counter() - start_time}
    start_time = time.perf_counter()
    student_overrides = (model_override, f"teacher.model.model_path={teacher}", *DISTIL, *seed_overrides)
    student = train(GRPO, folder, f"distil-{seed}", steps["distil"], *student_overrides)
    row["distilled"] = {**read_figures(folder, f"distil-{seed}", student), "seconds": time.perf_counter() - start_time}
    return row


def main() -> int:
    """Runs all seeds; returns 1 if a seed misses a criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=3, default=(180, 480, 100), metavar=("SFT", "GRPO", "DISTILLATION"))
    parser.add_argument("overrides", nargs="*", help="key=value, of GRPO and of the distillation")
    args = parser.parse_args()
    steps = dict(zip(("sft", "grpo", "distil"), args.steps, strict=True))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, args.seeds + 1):
            row = run_seed(seed, Path(folder), steps, args.overrides)
            rows.append(row)
            accuracy_texts = [
                f"{name} {row[name]['accuracy']:.1%} ({row[name]['tokens']:.0f} tokens)" for name in list(row)[1:]
            ]
            print(f"seed {seed}: {', '.join(accuracy_texts)}", flush=True)
    figures = {
        name: {key: spread([row[name][key] for row in rows]) for key in ("accuracy", "tokens")}
        for name in ("sft", "grpo", "distilled")
    }
    command_words = [
        "python -m bench.distillation",
        f"--seeds {args.seeds}",
        "--steps",
        *map(str, args.steps),
        *args.overrides,
    ]
    print(write("distillation", " ".join(command_words), {"figures": figures, "rows": rows}))
    exit_code = 0
    for row in rows:
        grpo, distillation = row["grpo"], row["distilled"]
        error = math.sqrt(2 * grpo["accuracy"] * (1 - grpo["accuracy"]) / grpo["n"])
        if distillation["accuracy"] < grpo["accuracy"] - 3 * error or distillation["tokens"] > grpo["tokens"] / 2:
            print(f"seed {row['seed']} fell short", file=sys.stderr)
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
