"""Environment steps per second of Gymnasium simulators in rlhpc, compared with their own vector environments.

    python -m bench.simulators --repeat 3

In rlhpc, env and rollout ranks play a rollout with random actions and send it to the actor, like in `bench.environments`;
the simulators run in one or two processes of their own Python. The references only step on random actions: Gymnasium's
SyncVectorEnv and AsyncVectorEnv (one process per slot) with the same environment and wrappers, and for Atari ale-py's
AtariVectorEnv, which has threads and wrappers in C++.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.interleaved import compare, measure_vector_env

ROOT = Path(__file__).resolve().parents[1]
#: Configuration → decisions of a rollout that is timed.
TASKS = {"fetch_reach": 100, "cheetah_run": 500, "pusht": 200, "pusht_pixels": 40, "minigrid": 200, "breakout": 60}
PYTHON = os.environ.get("RLHPC_SIMULATORS_PYTHON", str(ROOT / ".venv-simulators/bin/python"))
SLOTS = 8


def build_section(task: str) -> dict[str, Any]:
    """Returns `env.train` of a configuration, without keys of the run itself."""
    from rlhpc.config.typed import plain
    from rlhpc.runs.configuration import load_config

    train = plain(load_config(ROOT / f"configs/embodied/{task}.yaml", []))["env"]["train"]
    return {key: train[key] for key in ("env_id", "kwargs", "wrappers", "max_episode_steps")}


def measure_rlhpc(task: str, num_processes: int) -> float:
    """Returns environment steps per second of a run."""
    from bench.environments import time_rollout

    env = {**build_section(task), "simulator_python": PYTHON}
    model = {"model_type": "bench.idle:RandomPolicy"}
    elapsed_s = time_rollout(
        env, model, num_ranks=1, num_slots=SLOTS, num_steps=TASKS[task], num_simulators=num_processes
    )
    return SLOTS * TASKS[task] / elapsed_s


def measure_gymnasium(kind: str, task: str) -> float:
    """Returns environment steps per second of a vector environment, in a process of the simulators' Python."""
    command = [PYTHON, "-m", "bench.simulators", "--theirs", kind, task, json.dumps(build_section(task))]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.PIPE
    )
    return float(result.stdout.splitlines()[-1])


def measure_reference(kind: str, task: str, env: dict[str, Any]) -> float:
    """Returns the rate that `measure_gymnasium` prints."""
    import gymnasium
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    envs: Any
    if kind == "own":
        package, _, env_name = env["env_id"].partition(":")
        importlib.import_module(package)  # registers the games
        envs = gymnasium.make_vec(env_name, SLOTS, "vector_entry_point", reward_clipping=True, repeat_action_probability=0.0,
                                  episodic_life=True, use_fire_reset=True, autoreset_mode=AutoresetMode.SAME_STEP)  # fmt: skip
    else:
        vector = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
        envs = vector([partial(_make_env, env)] * SLOTS, autoreset_mode=AutoresetMode.SAME_STEP)
    return measure_vector_env(envs, SLOTS, TASKS[task])


def _make_env(env: dict[str, Any]) -> Any:
    from gymnasium.wrappers import TimeLimit
    from omegaconf import OmegaConf

    from rlhpc.embodied.config import EnvSideConfig
    from rlhpc.embodied.envs.gymnasium_env import make_single_env

    base_env, limit = make_single_env(OmegaConf.merge(OmegaConf.structured(EnvSideConfig), env))  # type: ignore[arg-type]
    return TimeLimit(base_env, limit) if limit else base_env


def list_contenders() -> dict[str, Any]:
    """Returns the measurements by name; a round runs all in this order."""
    measurements: dict[str, Any] = {}
    for task in TASKS:
        measurements[f"{task}: SyncVectorEnv"] = partial(measure_gymnasium, "sync", task)
        measurements[f"{task}: rlhpc, 1 process"] = partial(measure_rlhpc, task, 1)
        measurements[f"{task}: AsyncVectorEnv"] = partial(measure_gymnasium, "async", task)
        measurements[f"{task}: rlhpc, 2 processes"] = partial(measure_rlhpc, task, 2)
    measurements["breakout: AtariVectorEnv"] = partial(measure_gymnasium, "own", "breakout")
    return measurements


def compute_ratios(median: dict[str, float]) -> dict[str, float]:
    """Returns the ratios of rlhpc's rates to the others."""
    one_process, two_processes = "rlhpc, 1 process", "rlhpc, 2 processes"
    compared_names = [
        (one_process, "SyncVectorEnv"),
        (two_processes, "AsyncVectorEnv"),
        (two_processes, "AtariVectorEnv"),
    ]
    return {
        f"{task}: {own_name} / {peer}": median[f"{task}: {own_name}"] / median[f"{task}: {peer}"]
        for task in TASKS for own_name, peer in compared_names if {f"{task}: {own_name}", f"{task}: {peer}"} <= set(median)
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all contenders, interleaved, and writes `results/simulators.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="measure only what has this in its name; writes no result")
    parser.add_argument("--theirs", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.theirs:
        env_kind, task, env = options.theirs
        print(measure_reference(env_kind, task, json.loads(env)))
        return
    compare("simulators", list_contenders(), compute_ratios, options.repeat, options.only)


if __name__ == "__main__":
    main()
