"""Benefit of training during a rollout (pipeline), and of a policy that serves env ranks in the order of their requests.

    python -m bench.pipeline --repeat 3

Environments and updates sleep. Training: a rollout takes a second, divided into parts, and an epoch of training takes half a
second, a second or two seconds. The ratio is the time of a sequential step over that of a step with
`runner.use_training_pipeline`. The lower bound is that of a line of two machines without other cost.

Speed: each decision of an env rank takes 4 ms, but a random quarter of the decisions takes 24 ms. The ratio is the time of a
rollout with one decision for all ranks at once over that of a rollout with `runner.enable_decoupled_mode`. The lower bound
is the work of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.idle import SleepingEnv
from bench.machine import spread, write
from rlhpc.embodied.envs.base import Step
from rlhpc.embodied.models.mlp import MLPPolicy

ROOT = Path(__file__).resolve().parents[1]
SLOTS, DECISIONS, ROLLOUT_S = 4, 48, 1.0
PARTS, EPOCHS_S = (2, 4, 8), (0.5, 1.0, 2.0)
RANKS, SHORT_S, LONG_S, OFTEN = (2, 4, 8), 0.004, 0.024, 4
#: Steps of a run, and those of them that are not counted.
STEPS, WARM = 7, 2


class SleepingMLP(MLPPolicy):
    """Policy whose training sleeps for each transition."""

    def default_forward(self, inputs: dict[str, Any], *args: Any, **outputs: Any) -> dict[str, torch.Tensor]:
        """Implements `Policy.default_forward`."""
        if torch.is_grad_enabled():
            time.sleep(float(os.environ["RLHPC_BENCH_SECONDS"]) * len(inputs["actions"]))
        return super().default_forward(inputs, *args, **outputs)


class UnevenEnv(SleepingEnv):
    """Environment whose step sleeps `SHORT_S`, or `LONG_S` at random times that each rank draws."""

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        self._drawn = np.random.default_rng([seed, slot_offset])

    def step(self, actions: np.ndarray) -> Step:
        """Implements `VectorEnv.step`."""
        self._seconds = (LONG_S if self._drawn.integers(OFTEN) == 0 else SHORT_S) / self.num_envs
        return super().step(actions)


def run_steps(folder: Path, seconds: float, *overrides: str) -> list[dict[str, float]]:
    """Runs a training in which each transition takes `seconds`, and returns the metrics of its steps."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RLHPC_BENCH_SECONDS": str(seconds)}
    run_overrides = (
        f"runner.run_dir={folder}", "runner.name=run", f"runner.max_steps={STEPS}", "runner.save_interval=-1",
        f"algorithm.rollout_steps={DECISIONS}", "algorithm.update_epochs=1", "algorithm.normalize_advantages=none",
        "env.train.env_id=sleep", "actor.model.model_type=bench.pipeline:SleepingMLP", "actor.model.hidden_sizes=[8]",
        *overrides,
    )  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs" / "quickstart.yaml"), *run_overrides], text=True,
        cwd=ROOT, capture_output=True, env=os.environ | environment,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][WARM:]


def median_of(step_rows: Sequence[dict[str, float]], name: str) -> float:
    """Returns the median of a metric over the steps."""
    return statistics.median(row[name] for row in step_rows)


def time_training_step(folder: Path, num_parts: int, epoch_s: float, uses_pipeline: bool) -> float:
    """Returns the median seconds of a training step."""
    transitions = SLOTS * DECISIONS
    step_rows = run_steps(
        folder, epoch_s / transitions, "env.train.env_type=bench.idle:SleepingEnv", f"env.train.num_envs={SLOTS}",
        f"env.train.kwargs={{seconds: {ROLLOUT_S / transitions}}}", f"algorithm.rollout_parts={num_parts}",
        f"runner.use_training_pipeline={uses_pipeline}",
        f"actor.global_batch_size={transitions // max(PARTS)}",
    )  # fmt: skip
    return median_of(step_rows, "time/step_s")


def compute_lower_bound_s(num_parts: int, epoch_s: float) -> float:
    """Returns the seconds of a step if switching between groups costs nothing."""
    play_s, learn = ROLLOUT_S / num_parts, epoch_s / num_parts
    return play_s + (num_parts - 1) * max(play_s, learn) + learn


def time_rollout(folder: Path, num_ranks: int, is_decoupled: bool) -> tuple[float, float]:
    """Returns the seconds of a rollout, and of its slowest env rank's own work."""
    step_rows = run_steps(
        folder, 0.0, "env.train.env_type=bench.pipeline:UnevenEnv", f"env.train.num_envs={num_ranks}",
        "env.train.kwargs={seconds: 0}", f"actor.global_batch_size={DECISIONS * num_ranks}",
        f"cluster.component_placement={{actor: '0', rollout: '0', env: '0:0-{num_ranks - 1}'}}",
        f"runner.enable_decoupled_mode={is_decoupled}",
    )  # fmt: skip
    return median_of(step_rows, "time/rollout_s"), median_of(step_rows, "time/simulate_s")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/pipeline.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    figures: dict[str, list[float]] = {}

    def note(name: str, figure: float) -> None:
        figures.setdefault(name, []).append(figure)
        print(f"{name:75} {figure:6.3f}", flush=True)

    with tempfile.TemporaryDirectory() as work_dir:
        for turn in range(args.repeat):
            for epoch_s in EPOCHS_S:
                for num_parts in PARTS:
                    folder = Path(work_dir) / f"train-{turn}-{epoch_s}-{num_parts}"
                    sequential_s, streamed_s = (
                        time_training_step(folder / str(is_streamed), num_parts, epoch_s, is_streamed)
                        for is_streamed in (False, True)
                    )
                    case_text = f"training, an epoch of {epoch_s:g} s, {num_parts} parts"
                    note(f"{case_text}: one after the other / meanwhile", sequential_s / streamed_s)
                    note(f"{case_text}: meanwhile / least", streamed_s / compute_lower_bound_s(num_parts, epoch_s))
            for ranks in RANKS:
                folder = Path(work_dir) / f"play-{turn}-{ranks}"
                (lockstep_s, _), (independent_s, slowest_own_s) = (
                    time_rollout(folder / str(is_streamed), ranks, is_streamed) for is_streamed in (False, True)
                )
                note(f"speed, {ranks} env ranks: together / as they ask", lockstep_s / independent_s)
                note(f"speed, {ranks} env ranks: as they ask / least", independent_s / slowest_own_s)
    content = {name: spread(values) for name, values in figures.items()}
    print(write("pipeline", f"python -m bench.pipeline --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
