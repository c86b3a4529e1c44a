"""Cost of the weight verification in a run of GRPO on a pretrained model of 135 million parameters.

    python -m bench.proof --steps 11

The benchmark runs the repository's configuration with each engine and compares the run's timers `time/proof_s` and
`time/cpu_s`. Versions 0, 1 and 10 are probed.

Prints a line for each engine and writes bench/results/proof.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import goal, spread, write

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "hf": ("rollout.rollout_backend=hf",),
    "vllm": ("rollout.rollout_backend=vllm", "rollout.max_model_len=128"),
}


def measure_run(folder: Path, overrides: tuple[str, ...], num_steps: int) -> dict[str, Any]:
    """Returns the processor seconds of a run's steps, and the share of the verification."""
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs" / "reasoning" / "smollm2.yaml"), *overrides,
        f"runner.run_dir={folder}", f"runner.max_steps={num_steps}", "runner.save_interval=-1",
        "runner.logger.logger_backends=[jsonl]",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "smollm2" / "metrics.jsonl").read_text().splitlines()]
    proof_times, cpu_times = [row["time/proof_s"] for row in rows], [row["time/cpu_s"] for row in rows]
    return {
        "a step (CPU s)": spread(cpu_times),
        "of that, proof (CPU s)": spread(proof_times),
        "share of the whole run": sum(proof_times) / sum(cpu_times),
        "share of a step, most": max(proof_s / step_s for proof_s, step_s in zip(proof_times, cpu_times, strict=True)),
        "share of a step, median": statistics.median(
            proof_s / step_s for proof_s, step_s in zip(proof_times, cpu_times, strict=True)
        ),
    }


def main() -> None:
    """Measures the cost of verification for each engine, and writes `results/proof.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=11)
    args = parser.parse_args()
    figures, goals = {}, []
    for name, engine_overrides in ENGINES.items():
        with tempfile.TemporaryDirectory() as temporary_folder:
            figures[name] = measure_run(Path(temporary_folder), engine_overrides, args.steps)
        proof_fraction = figures[name]["share of the whole run"]
        goals.append(
            goal(f"{name}: proof takes at most a hundredth of the processor's time", proof_fraction, at_most=0.01)
        )
        print(name, json.dumps(figures[name]), flush=True)
    print(write("proof", f"python -m bench.proof --steps {args.steps}", {"figures": figures, "goals": goals}))


if __name__ == "__main__":
    main()
