"""Advantage conditioning compared with behaviour cloning, on the same demonstrations and episodes of a cloned policy.

    python -m bench.conditioning --seeds 3

The task is PushCube-v1. A clone of `--demonstrations` episodes of the scripted expert plays `--episodes` episodes with its
learned noise, and a critic learns the returns of all these episodes. Then three policies are cloned with the same number of
updates: from all episodes, from the successful episodes only, and from all episodes with an indicator of improvement at each
step as input. `rlhpc eval` measures success (once in an episode) over 100 episodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import write
from bench.robot import BC, measure_success, run_rlhpc, train

CRITIC = ("algorithm.bc_value_coef=0.5", "algorithm.gamma=0.8")


def measure(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one seed."""
    demos, own_demos = folder / "demos.h5", folder / "own.h5"
    overrides = (
        f"runner.seed={seed}", f"runner.max_steps={options.steps}", "runner.save_interval=-1", "workflow.demos_expert=null",
        "actor.model.log_std_init=-0.5",
    )  # fmt: skip
    run_rlhpc("record", "--expert", "rlhpc.embodied.envs.experts:push_cube", "--config", BC, "--episodes",
          str(options.demonstrations), "--only-success", "--output", str(demos), f"runner.seed={seed}")  # fmt: skip
    first_run = train(folder, BC, "first", f"demos.path={demos}", *overrides)
    run_rlhpc(
        "record", "--run", str(first_run), "--episodes", str(options.episodes), "--sample", "--output", str(own_demos)
    )
    demos_override = f"demos.path=[{demos},{own_demos}]"
    bc_run = train(folder, BC, "alike", demos_override, *overrides, *CRITIC)
    successes_only = train(folder, BC, "good", demos_override, "demos.only_success=true", *overrides, *CRITIC)
    conditioned_run = train(
        folder, BC, "told", demos_override, *overrides, "algorithm.gamma=0.8", f"algorithm.value_model={bc_run}",
        "actor.model.model_type=conditioned", "actor.model.kwargs.of=mlp",
        f"algorithm.improved_fraction={options.improved}", f"algorithm.advantage_steps={options.advantage_steps}",
    )  # fmt: skip
    attempts = json.loads(own_demos.with_suffix(".json").read_text())["episodes"]
    return {
        "seed": seed, "clone of the demonstrations": measure_success(first_run),
        "its own episodes that succeeded": sum(bool(attempt.get("success")) for attempt in attempts) / len(attempts),
        "all alike": measure_success(bc_run), "successes only": measure_success(successes_only),
        "conditioned": measure_success(conditioned_run),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all seeds, and writes `results/conditioning.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demonstrations", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=200, help="of the clone's own")
    parser.add_argument("--steps", type=int, default=40, help="training steps, of five passes each")
    parser.add_argument("--improved", type=float, default=0.3)
    parser.add_argument("--advantage-steps", type=int, default=10)
    options = parser.parse_args(argv)
    rows = []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), seed, options))
            print(rows[-1], flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "seed"}
    command = f"python -m bench.conditioning --seeds {options.seeds}"
    print(write("conditioning", command, {"rows": rows, "medians": medians}))


if __name__ == "__main__":
    main()
