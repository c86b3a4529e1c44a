"""Overlap of generation, scoring, training and weight sync in RL of a language model: a step's time against its phases.

    python -m bench.overlap --repeat 3

`step / sum` is 1 if the phases run one after the other, `step / longest` is 1 if the longest phase hides all others, and
`step / busiest rank` is 1 if one rank is never idle. The actor scores and trains; the rollout rank generates. All modes train
the same model on the same problems, in turn. The figures are medians over the repetitions of means over the steps. The actor
and the rollout rank have one core each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import spread, write

ROOT = Path(__file__).resolve().parents[1]
#: The phases of a step, by the metric that has their seconds.
PHASES = {
    "generate": "time/generate_s", "score": "time/score_s", "train": "time/train_s", "sync": "time/rollout_sync_s",
}  # fmt: skip
SCORED = ["algorithm.recompute_logprobs=true", "algorithm.kl_coef=0.01"]
MODES = {
    "in turns (offload)": [*SCORED, "actor.offload_in_rollout=true"],
    "synchronous": SCORED,
    "one version behind": [*SCORED, "algorithm.max_staleness=1"],
    "two versions behind": [*SCORED, "algorithm.max_staleness=2"],
}
#: Steps before which nothing is counted.
WARM = 5


def measure(folder: Path, mode: str, num_steps: int, repetition: int) -> dict[str, float]:
    """Returns medians over the steps of one run: seconds of the step and of its phases."""
    name = f"{mode.split()[0]}-{repetition}"
    overrides = [
        f"runner.run_dir={folder}", f"runner.name={name}", "runner.segments=1", f"runner.max_steps={num_steps}",
        "runner.save_interval=-1", "actor.model.model_path=builtin:tiny", "workflow.sft=null", "workflow.sft_overrides=[]",
        "rollout.max_new_tokens=24", *MODES[mode],
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "train", "configs/reasoning/demo.yaml", *overrides], cwd=ROOT, text=True,
        capture_output=True,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()][WARM:-2]
    # In async mode steps are as far apart as their ends are; the mean does not care how they are cut.
    seconds = (rows[-1]["time/wall_s"] - rows[0]["time/wall_s"]) / (len(rows) - 1)
    phases = {phase: statistics.mean(row[key] for row in rows[1:]) for phase, key in PHASES.items()}
    return {"step": seconds, **phases}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    rows_by_mode: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(options.repeat):
            for mode in MODES if repetition % 2 else reversed(MODES):
                row = measure(Path(folder), mode, options.steps, repetition)
                phases = [row[phase] for phase in PHASES]
                busiest_s = max(row["generate"], row["score"] + row["train"])
                row |= {
                    "step / sum": row["step"] / sum(phases),
                    "step / longest": row["step"] / max(phases),
                    "step / busiest rank": row["step"] / busiest_s,
                }
                rows_by_mode[mode].append(row)
                print(f"{mode:20} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    figures = {
        mode: {key: spread([row[key] for row in rows]) for key in rows[0]} for mode, rows in rows_by_mode.items()
    }
    print(
        write(
            "overlap", f"python -m bench.overlap --repeat {options.repeat} --steps {options.steps}", {"modes": figures}
        )
    )


if __name__ == "__main__":
    main()
