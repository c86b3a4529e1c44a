"""Time and environment steps to a mean return of 475 on CartPole-v1: rlhpc compared with single-process PPO.

Same hyperparameters, interleaved seeds, one thread a process. "Reached" means that the last 100 training episodes have a
mean return of 475; the run stops there. `loop_s` counts from the first environment step, `total_s` from the command to its end
(both import torch).

    python -m bench.cartpole --seeds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import spread, write

HERE = Path(__file__).resolve().parent
TARGET = 475.0
TRANSITIONS = 8 * 32  # a rollout of the quickstart configuration
MAX_ENV_STEPS = 480 * TRANSITIONS


def run_rlhpc(seed: int) -> dict[str, Any]:
    """Runs the quickstart configuration once, until the target."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rlhpc.cli", "train", str(HERE.parent / "configs" / "quickstart.yaml"),
            f"runner.run_dir={folder}", "runner.segments=1", "runner.save_interval=-1", f"runner.seed={seed}",
            f"runner.max_steps={MAX_ENV_STEPS // TRANSITIONS}", f"runner.stop_return={TARGET}",
            "runner.logger.logger_backends=[jsonl]",
        ]  # fmt: skip
        start_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        total_s = time.perf_counter() - start_s
        rows = [json.loads(line) for line in (Path(folder) / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    last_row = rows[-1]
    is_reached = last_row.get("train/episode_return", 0.0) >= TARGET
    return {"seed": seed, "reached": is_reached, "env_steps": last_row["rollout/env_steps"], "loop_s": last_row["time/wall_s"],
            "total_s": total_s, "env_steps_per_s": last_row["rollout/env_steps"] / last_row["time/wall_s"]}  # fmt: skip


def run_single_process(seed: int, *options: str) -> dict[str, Any]:
    """Runs `single_process_ppo.py` once, until the target."""
    command = [sys.executable, str(HERE / "single_process_ppo.py"), "--seed", str(seed), "--stop", "--target", str(TARGET),
               "--max-env-steps", str(MAX_ENV_STEPS), *options]  # fmt: skip
    start_s = time.perf_counter()
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    total_s = time.perf_counter() - start_s
    row = json.loads(result.stdout)
    return {"seed": seed, "reached": row["env_steps"] is not None, "env_steps": row["total_env_steps"],
            "loop_s": row["total_seconds"], "total_s": total_s, "env_steps_per_s": row["env_steps_per_s"]}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all contenders, interleaved, and writes `results/cartpole.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    contenders: dict[str, Callable[[int], dict[str, Any]]] = {
        "rlhpc": run_rlhpc,
        "single_process": run_single_process,
        # what rlhpc always does, and CleanRL's does not: an episode cut by the time limit is worth its final value
        "single_process_bootstrapped": lambda seed: run_single_process(seed, "--bootstrap-truncations"),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for seed in range(1, args.seeds + 1):
        for name, run_contender in contenders.items():
            runs[name].append(run_contender(seed))
            print(name, json.dumps(runs[name][-1]), flush=True)
    summary = {
        name: {key: spread([row[key] for row in rows]) for key in ("env_steps", "loop_s", "total_s", "env_steps_per_s")}
        | {"reached": sum(row["reached"] for row in rows)}
        for name, rows in runs.items()
    }
    ratio = {
        other_name: {
            key: summary["rlhpc"][key]["median"] / summary[other_name][key]["median"]
            for key in ("env_steps", "loop_s", "total_s", "env_steps_per_s")
        }
        for other_name in list(contenders)[1:]
    }
    path = write("cartpole", f"python -m bench.cartpole --seeds {args.seeds}", {
        "target": TARGET, "summary": summary, "rlhpc_over": ratio, "runs": runs,
    })  # fmt: skip
    print(json.dumps({"summary": summary, "ratio": ratio}, indent=2))
    print(path)


if __name__ == "__main__":
    main()
