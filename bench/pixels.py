"""SAC from images, compared with a plain loop with the same hyperparameters: success after equal numbers of steps.

    python -m bench.pixels --seeds 3

Both learn `PixelReach` (`bench.single_process_pixels`): networks of the same sizes, one update for each step of the task
after 200 random ones. Success is the share of 100 episodes that reach the target within 20 steps, without exploration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from bench.machine import goal, write
from bench.robot import ROOT, measure_success, run_rlhpc
from bench.single_process_pixels import BATCH, GAMMA, RATE, SHIFT, STARTS, TAU, evaluate, train

EPISODES = 100


def measure_rlhpc(folder: Path, seed: int, num_steps: int) -> float:
    """Returns the success of a run of rlhpc."""
    config = {
        "defaults": [str(ROOT / "configs/base/sac.yaml")],
        "runner": {
            "name": f"pixels{seed}", "run_dir": str(folder), "seed": seed, "max_steps": num_steps // 10,
            "save_interval": num_steps // 10, "logger": {"logger_backends": ["jsonl"]},
        },
        "algorithm": {
            "gamma": GAMMA, "tau": TAU, "rollout_steps": 10, "random_steps": STARTS, "random_shift": SHIFT,
            "replay_buffer": {"size": num_steps, "min_buffer_size": STARTS},
        },
        "env": {
            "train": {"env_id": "bench.single_process_pixels:PixelReach-v0", "num_envs": 1},
            "eval": {"num_envs": 10, "num_episodes": EPISODES},
        },
        "actor": {
            "global_batch_size": BATCH,
            "model": {"model_type": "sac", "hidden_sizes": [64, 64]},
            "optim": {"lr": RATE, "value_lr": RATE},
        },
    }  # fmt: skip
    file = folder / "pixels.yaml"
    file.write_text(yaml.safe_dump(config))
    run_rlhpc("train", str(file))
    return measure_success(folder / f"pixels{seed}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all seeds, and writes `results/pixels.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    successes: dict[str, list[float]] = {"rlhpc": [], "single process": []}
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            successes["rlhpc"].append(measure_rlhpc(Path(folder), seed, options.steps))
        successes["single process"].append(evaluate(train(seed, options.steps), EPISODES))
        print(json.dumps(successes), flush=True)
    means = {side: round(statistics.mean(values), 3) for side, values in successes.items()}
    difference = round(abs(means["rlhpc"] - means["single process"]), 3)
    content = {
        "steps": options.steps, "success": successes, "mean": means,
        "goals": [goal("means differ by at most 0.1", difference, at_most=0.1)],
    }  # fmt: skip
    print(write("pixels", f"python -m bench.pixels --seeds {options.seeds} --steps {options.steps}", content))


if __name__ == "__main__":
    main()
