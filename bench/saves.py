"""Pause of a run for its checkpoints with async checkpointing, compared with a run that waits for the files.

    python -m bench.saves --repeat 2

The run is PPO with a policy and a value network of 128 million parameters, which writes a checkpoint of 1.5 GB after each of
ten steps. Both modes run in turn with the same seed. `still` is the mean pause from the second save on, because the first
save also allocates the memory for copies. Prints a line for each run and writes bench/results/saves.json.
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
STEPS = 10
WORDS = (
    "runner.segments=1", f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.keep_checkpoints=1",
    "runner.logger.logger_backends=[jsonl]", "actor.model.hidden_sizes=[8000, 8000]",
    "actor.model.ortho_init=false", "algorithm.rollout_steps=16",
    "actor.global_batch_size=64", "env.eval.num_episodes=1",
)  # fmt: skip


def measure_run(folder: Path, saves_async: bool, num_epochs: int) -> dict[str, float]:
    """Returns, in seconds, the pause of a run for a save, a step without a save, and the total from its first step on."""
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs" / "quickstart.yaml"), *WORDS,
        f"runner.run_dir={folder}", f"runner.async_save={str(saves_async).lower()}", f"algorithm.update_epochs={num_epochs}",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    root = folder / "quickstart"
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    last_status = json.loads((root / "status.json").read_text())
    checkpoint = root / "checkpoints" / f"global_step_{STEPS}"
    return {
        "still": statistics.fmean(row["time/save_s"] for row in rows[2:]),
        "step": statistics.fmean(row["time/step_s"] for row in rows[1:]),
        "all": float(last_status["elapsed_s"]),
        "gigabytes": sum(path.stat().st_size for path in checkpoint.rglob("*")) / 1e9,
    }


def main() -> None:
    """Measures runs with and without async checkpointing in turn, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="makes steps longer")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on the filesystem to measure")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"beside": [], "waiting": []}
    for _ in range(args.repeat):
        for name, mode_rows in rows.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as temporary_folder:
                mode_rows.append(measure_run(Path(temporary_folder), name == "beside", args.epochs))
            print(name, json.dumps(mode_rows[-1]), flush=True)
    figures = {
        name: {key: spread([row[key] for row in mode_rows]) for key in mode_rows[0]} for name, mode_rows in rows.items()
    }
    ratios = {
        key: figures["beside"][key]["median"] / figures["waiting"][key]["median"] for key in ("still", "step", "all")
    }
    print(", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items()))
    print(
        write(
            "saves",
            f"python -m bench.saves --repeat {args.repeat} --folder {args.folder}",
            {"figures": figures, "ratios": ratios},
        )
    )


if __name__ == "__main__":
    main()
