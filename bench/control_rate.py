"""Control rate of a robot while the policy that acts on it is trained: an asynchronous off-policy run, as in HIL-SERL.

    python -m bench.control_rate --hz 10 --steps 12

A simulated robot is moved by a policy at `--hz` commands a second, while the actor trains on the transitions of the step
before (`algorithm.max_staleness: 1`) with `--updates` updates per transition. A script leads now and then. The control period
is the time between two commands of an episode. The result is the share of periods within 10 % of their nominal length, over
all steps in which updates were running, including the periods between two steps of the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import write
from bench.robot import run_rlhpc

REQUIRED = 0.95
EXPERT = "bench.control_rate:zero_actions"


def zero_actions(obs: Any) -> Any:
    """Returns actions of 0, `[N, 1]`."""
    return obs[:, :1] * 0


def train(root: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Trains, and returns the rows of metrics."""
    script = {"expert": EXPERT, "apart": 0.0, "patience": 1, "hold": 10, "max_hold": 20, "chance": 0.02}
    robot = {"hz": options.hz, "simulates": "Pendulum-v1", "moves_hz": 50.0, "stale_s": 1.0, "resume": "auto"}
    overrides = {
        "runner.name": "control_rate",
        "runner.run_dir": root,
        "runner.max_steps": options.steps,
        "runner.save_interval": options.steps,
        "runner.logger.logger_backends": ["jsonl"],
        "algorithm.max_staleness": 1,
        "algorithm.rollout_steps": options.rollout_steps,
        "algorithm.update_to_data": options.updates,
        "algorithm.replay_buffer.min_buffer_size": options.rollout_steps,
        "actor.global_batch_size": 128,
        "actor.model.hidden_sizes": [128, 128],
        "env.train.env_type": "robot",
        "env.train.env_id": "rlhpc.embodied.robots.simulated_robot:SimulatedRobot",
        "env.train.max_episode_steps": 200,
        "env.train.kwargs": robot,
        "env.train.num_envs": 1,
        "env.train.intervene": {"source": "scripted", "kwargs": script},
        "env.eval.env_type": "gymnasium",
        "env.eval.env_id": "Pendulum-v1",
        "env.eval.kwargs": {},
    }
    override_arguments = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    run_rlhpc("train", "configs/embodied/pendulum_sac.yaml", *override_arguments)
    lines = (root / "control_rate" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summarize_rows(rows: list[dict[str, float]], num_rollout_steps: int) -> dict[str, float]:
    """Returns the share of periods within 10 % and the share of time with updates, over the steps with updates."""
    busy_rows = [row for row in rows if row.get("train/updates", 0) > 0][1:]
    if not busy_rows:
        raise SystemExit("no step had updates: take more --steps")
    num_missed = sum(row["env/robot_missed"] for row in busy_rows)
    periods = num_rollout_steps * len(busy_rows) - sum(row["rollout/episodes"] for row in busy_rows)
    return {
        "steps": len(busy_rows),
        "periods": periods,
        "missed": num_missed,
        "share": 1.0 - num_missed / periods,
        "period_p95_ms": max(row["env/robot_period_ms_p95"] for row in busy_rows),
        "period_max_ms": max(row["env/robot_period_ms_max"] for row in busy_rows),
        "latency_p95_ms": max(row["env/robot_latency_ms_p95"] for row in busy_rows),
        "updating_share": sum(row["time/train_s"] for row in busy_rows) / sum(row["time/step_s"] for row in busy_rows),
        "intervention_rate": sum(row["rollout/intervention_rate"] for row in busy_rows) / len(busy_rows),
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=10, help="steps of the run")
    parser.add_argument("--rollout-steps", type=int, default=50, help="commands in a step")
    parser.add_argument("--updates", type=float, default=2.0, help="updates per transition")
    parser.add_argument("--write", action="store_true", help="write the result to bench/results/control_rate.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = summarize_rows(train(Path(folder), options), options.rollout_steps)
    print(json.dumps(result, indent=1))
    if options.write:
        content = {**result, "hz": options.hz, "updates_per_transition": options.updates}
        write("control_rate", f"python -m bench.control_rate {' '.join(sys.argv[1:])}".strip(), content)
    return 0 if result["share"] >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
