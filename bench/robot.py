"""PPO on PushCube-v1 from scratch, and from a policy cloned from a few demonstrations, at the same number of env steps.

    python -m bench.robot --seeds 3

The clone sees `--demonstrations` episodes of the scripted expert, and its critic learns their returns; PPO then has the same
settings and seeds with and without it. Success (once in an episode) is measured by `rlhpc eval` over 100 episodes.
Demonstrations are not counted as env steps of PPO.
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

from bench.machine import write

ROOT = Path(__file__).resolve().parents[1]
BC, PPO = "configs/embodied/push_cube_bc.yaml", "configs/embodied/push_cube_ppo.yaml"


def run_rlhpc(*arguments: str) -> None:
    """Runs one `rlhpc` command; prints its output only if it fails."""
    result = subprocess.run([sys.executable, "-m", "rlhpc.cli", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")


def measure_success(run_folder: Path) -> float:
    """Returns the share of 100 episodes of the newest checkpoint that succeeded."""
    output = run_folder / "result.json"
    run_rlhpc("eval", "--run", str(run_folder), "--output", str(output))
    return float(json.loads(output.read_text())["success_once"])


def train(folder: Path, config: str, name: str, *arguments: str) -> Path:
    run_rlhpc(
        "train",
        config,
        f"runner.run_dir={folder}",
        f"runner.name={name}",
        "runner.logger.logger_backends=[jsonl]",
        *arguments,
    )
    return folder / name


def read_curve(run_folder: Path) -> list[tuple[int, float]]:
    """Returns (env steps, success rate of training episodes)."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [(int(row["rollout/env_steps"]), row["train/success_once"]) for row in rows if "train/success_once" in row]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="training steps of PPO, of 800 env steps each")
    parser.add_argument("--demonstrations", type=int, default=10)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work_dir:
        folder = Path(work_dir)
        demos = folder / "demos.h5"
        run_rlhpc(
            "record", "--expert", "rlhpc.embodied.envs.experts:push_cube", "--config", BC, "--episodes",
            str(options.demonstrations), "--only-success", "--output", str(demos),
        )  # fmt: skip
        for seed in range(1, options.seeds + 1):
            shared_overrides = (f"runner.seed={seed}", f"runner.max_steps={options.steps}", "runner.save_interval=-1")
            clone = train(
                folder, BC, f"clone-{seed}", f"runner.seed={seed}", f"demos.path={demos}", "runner.max_steps=60",
                "actor.model.log_std_init=-0.5", "workflow.demos_expert=null", "algorithm.bc_value_coef=0.5",
                "algorithm.gamma=0.8",
            )  # fmt: skip
            scratch = train(folder, PPO, f"scratch-{seed}", *shared_overrides)
            cloned_run = train(folder, PPO, f"cloned-{seed}", *shared_overrides, f"runner.init_from={clone}")
            row = {
                "seed": seed, "clone": measure_success(clone), "PPO from scratch": measure_success(scratch),
                "PPO from the clone": measure_success(cloned_run),
                "curves": {"from scratch": read_curve(scratch), "from the clone": read_curve(cloned_run)},
            }  # fmt: skip
            rows.append(row)
            print({name: value for name, value in row.items() if name != "curves"}, flush=True)
    medians = {
        name: statistics.median(row[name] for row in rows)
        for name in ("clone", "PPO from scratch", "PPO from the clone")
    }
    command_words = f"--seeds {options.seeds} --steps {options.steps} --demonstrations {options.demonstrations}"
    print(medians)
    print(
        write(
            "robot",
            f"python -m bench.robot {command_words}",
            {"env_steps": 800 * options.steps, "medians": medians, "rows": rows},
        )
    )


if __name__ == "__main__":
    main()
