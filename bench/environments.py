"""Environment steps per second of a run compared with Gymnasium's vector environments, and the benefit of pipelining.

    python -m bench.environments --repeat 5

Rates: real env and rollout ranks play a rollout with random actions and send it to the actor; the time includes the driver's
calls. Gymnasium's vector environments only step on random actions. SyncVectorEnv is compared with one env rank with the same
number of slots. AsyncVectorEnv, which has one process per slot, is compared with as many env ranks and, with more slots than
cores, with ranks that share the slots. ManiSkill runs its CPU environments in its own wrapper.

Pipelining: environments and a policy sleep a given time for each decision of all slots; a stage sleeps its share of this time.
`speed-up / ideal` is the time of the sequential rollout over that of the pipelined rollout, divided by (e + p) / max(e, p).

Tensors: environment steps per second of rollouts of an MLP policy on many cart-poles, received by the actor: Gymnasium's,
which one env rank steps one by one; environments of tensors on an env rank; and the same in the actor's process.

Quickstart: environment steps per second of the quickstart, including training, with one and with two env ranks.
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
from functools import partial
from pathlib import Path
from typing import Any

from bench.interleaved import ROLLOUTS, compare, measure_vector_env

ROOT = Path(__file__).resolve().parents[1]
#: Task → its sections `env.train`, and decisions of a rollout that is timed.
TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "CartPole-v1": ({"env_type": "gymnasium", "env_id": "CartPole-v1"}, 1000),
    "HalfCheetah-v5": ({"env_type": "gymnasium", "env_id": "HalfCheetah-v5"}, 500),
    "PushCube-v1": ({"env_type": "maniskill", "env_id": "PushCube-v1", "kwargs": {"obs_mode": "state"}}, 100),
}
SLOTS = 8
#: Seconds that a decision of all slots takes the environments and the policy.
PAIRS = ((0.010, 0.010), (0.010, 0.005), (0.005, 0.010))
PIPELINED_STEPS = 100
#: Slots and decisions of the rollouts on many cart-poles, and their sections `env.train`.
TENSOR_SLOTS, TENSOR_STEPS = 1024, 16
MANY = {
    "gymnasium": {"env_type": "gymnasium", "env_id": "CartPole-v1"},
    "tensors": {"env_type": "tensors", "env_id": "cartpole"},
}


# -- rlhpc ------------------------------------------------------------------------------------------------------------


def time_rollout(
    env: dict[str, Any],
    model: dict[str, Any],
    *,
    num_ranks: int,
    num_slots: int,
    num_steps: int,
    num_stages: int = 1,
    num_simulators: int = 0,
    in_actor: bool = False,
) -> float:
    """Returns the seconds of a rollout of `num_steps` decisions in `num_slots` slots, as between two updates of a run. With
    `in_actor`, the actor simulates and acts itself.
    """
    from rlhpc import Cluster, HybridComponentPlacement
    from rlhpc.config.typed import typed
    from rlhpc.embodied.config import PpoConfig
    from rlhpc.embodied.rollout.slot_map import PlayedRollout, Source
    from rlhpc.embodied.rollout.work_sharing import FullRollout
    from rlhpc.embodied.runners.rollout_runner import TensorRunner, ppo_runner
    from rlhpc.embodied.task_types import PPO
    from rlhpc.runs.configuration import load_config
    from rlhpc.runtime.plugins import load_attribute

    ranks_text = f"'0:0-{num_ranks - 1}'"
    with tempfile.TemporaryDirectory() as folder:
        cfg = typed(PpoConfig, load_config(ROOT / "configs" / "base" / "ppo.yaml", [
            f"runner.run_dir={folder}", "runner.name=bench", f"algorithm.rollout_steps={num_steps}",
            f"env.train.num_envs={num_slots}",
            f"rollout.pipeline_stage_num={num_stages}", f"actor.global_batch_size={num_slots * num_steps}",
            f"cluster.component_placement={{actor: 0{'' if in_actor else f', rollout: 0, env: {ranks_text}'}}}",
            f"env.train.simulators={num_simulators}",
            *(f"env.train.{name}={json.dumps(value)}" for name, value in env.items()),
            *(f"actor.model.{name}={json.dumps(value)}" for name, value in model.items()),
        ]))  # fmt: skip
        cluster = Cluster(cfg.cluster)
        placement = HybridComponentPlacement(cfg, cluster)
        classes: dict[str, Any] = {
            role: load_attribute(name, role) for role, name in PPO.groups.worker_classes_of(cfg).items()
        }
        groups = {
            role: cls.create_group(cfg).launch(
                cluster, placement_strategy=placement.get_strategy(role), name=role, wait=False
            )
            for role, cls in classes.items()
        }
        try:
            runner = ppo_runner(cfg, **groups)
            runner.build()
            durations = []
            for step in range(ROLLOUTS + 1):
                start_time, full_rollout = time.perf_counter(), FullRollout(step, step, 0, num_steps)
                if isinstance(runner, TensorRunner):
                    handles = [runner.actor.play(step)]
                else:
                    source = Source(runner.slots, (PlayedRollout(full_rollout, runner.slots),))
                    handles = [
                        runner.rollout.generate(full_rollout),
                        runner.env.interact(full_rollout),
                        runner.actor.receive(step, source),
                    ]
                for handle in handles:
                    handle.wait()
                durations.append(time.perf_counter() - start_time)
            return min(durations[1:])
        finally:
            for group in groups.values():
                group.shutdown()


def measure_rlhpc(task: str, num_ranks: int, num_slots: int) -> float:
    """Returns rlhpc's environment steps per second."""
    env, steps = TASKS[task]
    model = {"model_type": "bench.idle:RandomPolicy"}
    return num_slots * steps / time_rollout(env, model, num_ranks=num_ranks, num_slots=num_slots, num_steps=steps)


def measure_many(kind: str, in_actor: bool) -> float:
    """Returns environment steps per second of an MLP policy on `TENSOR_SLOTS` cart-poles."""
    options = {"model": {"model_type": "mlp"}, "ranks": 1, "slots": TENSOR_SLOTS, "steps": TENSOR_STEPS}
    return TENSOR_SLOTS * TENSOR_STEPS / time_rollout(MANY[kind], in_actor=in_actor, **options)  # type: ignore[arg-type]


def time_pipelined_rollout(environment_s: float, policy_s: float, num_stages: int) -> float:
    """Returns the seconds of a rollout with the given number of pipeline stages."""
    env = {"env_type": "bench.idle:SleepingEnv", "env_id": "sleep", "kwargs": {"seconds": environment_s / SLOTS}}
    model = {"model_type": "bench.idle:SleepingPolicy", "kwargs": {"seconds": policy_s / SLOTS}}
    return time_rollout(env, model, num_ranks=1, num_slots=SLOTS, num_steps=PIPELINED_STEPS, num_stages=num_stages)


# -- gymnasium --------------------------------------------------------------------------------------------------------


def make_env(task: str) -> Any:
    """Builds one environment through `gymnasium.make`."""
    import gymnasium

    env, _ = TASKS[task]
    if env["env_type"] != "maniskill":
        return gymnasium.make(task)
    import mani_skill.envs  # noqa: F401 (registers the tasks)
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    base_env = gymnasium.make(task, num_envs=1, render_backend="none", sim_backend="physx_cpu", **env["kwargs"])
    return CPUGymWrapper(base_env, ignore_terminations=False)


def measure_gymnasium_here(kind: str, task: str, num_slots: int) -> float:
    """Returns environment steps per second of SyncVectorEnv or AsyncVectorEnv on random actions."""
    import gymnasium

    vector = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}[kind]
    envs = vector([lambda: make_env(task)] * num_slots, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    return measure_vector_env(envs, num_slots, TASKS[task][1])


def measure_gymnasium(kind: str, task: str, num_slots: int) -> float:
    """Returns the same rate from a separate process, without the threads of a driver."""
    result = subprocess.run(
        [sys.executable, "-m", "bench.environments", "--gymnasium", kind, task, str(num_slots)], cwd=ROOT, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return float(result.stdout.splitlines()[-1])


# -- quickstart -------------------------------------------------------------------------------------------------------


def measure_quickstart(num_ranks: int) -> float:
    """Returns environment steps per second over 120 training steps of the quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "rlhpc.cli", "train", "configs/quickstart.yaml", f"runner.run_dir={folder}",
             "runner.segments=1", "runner.save_interval=-1", "runner.max_steps=120", "runner.logger.logger_backends=[jsonl]",
             f"cluster.component_placement={{actor: 0, rollout: 0, env: '0:0-{num_ranks - 1}'}}"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        lines = (Path(folder) / "quickstart" / "metrics.jsonl").read_text().splitlines()
    early_row, last_row = json.loads(lines[19]), json.loads(lines[-1])
    return (last_row["rollout/env_steps"] - early_row["rollout/env_steps"]) / (
        last_row["time/wall_s"] - early_row["time/wall_s"]
    )


# -- all --------------------------------------------------------------------------------------------------------------


#: Environments of the rollouts on many cart-poles, and whether the actor simulates and acts.
MANY_KINDS = (("gymnasium", False), ("tensors", False), ("tensors", True))


def format_many_name(kind: str, in_actor: bool) -> str:
    """Returns the name of a measurement of `measure_many`."""
    return f"{TENSOR_SLOTS} cart-poles: {kind}, {'in the actor' if in_actor else 'on an env rank'}"


def list_contenders() -> dict[str, Callable[[], float]]:
    """Returns the measurements by name; a round runs all in this order."""
    measurements: dict[str, Callable[[], float]] = {}
    for task in TASKS:
        measurements[f"{task}: gymnasium sync, {SLOTS} slots"] = partial(measure_gymnasium, "sync", task, SLOTS)
        measurements[f"{task}: rlhpc, 1 rank, {SLOTS} slots"] = partial(measure_rlhpc, task, 1, SLOTS)
        measurements[f"{task}: gymnasium async, 2 slots"] = partial(measure_gymnasium, "async", task, 2)
        measurements[f"{task}: rlhpc, 2 ranks, 2 slots"] = partial(measure_rlhpc, task, 2, 2)
        measurements[f"{task}: gymnasium async, {SLOTS} slots"] = partial(measure_gymnasium, "async", task, SLOTS)
        measurements[f"{task}: rlhpc, 2 ranks, {SLOTS} slots"] = partial(measure_rlhpc, task, 2, SLOTS)
    for env_s, policy_s in PAIRS:
        for stages in (1, 2):
            measurements[f"rollout s: e {env_s} s, p {policy_s} s, {stages} stages"] = partial(
                time_pipelined_rollout, env_s, policy_s, stages
            )
    for kind, in_actor in MANY_KINDS:
        measurements[format_many_name(kind, in_actor)] = partial(measure_many, kind, in_actor)
    for ranks in (1, 2):
        measurements[f"quickstart: {ranks} env ranks"] = partial(measure_quickstart, ranks)
    return measurements


def compute_ratios(median: dict[str, float]) -> dict[str, float]:
    """Returns the ratios for which goals are defined."""
    figures = {}
    for task in TASKS:
        compared_names = (
            (f"rlhpc, 1 rank, {SLOTS} slots", f"gymnasium sync, {SLOTS} slots"),
            ("rlhpc, 2 ranks, 2 slots", "gymnasium async, 2 slots"),
            (f"rlhpc, 2 ranks, {SLOTS} slots", f"gymnasium async, {SLOTS} slots"),
            (f"rlhpc, 2 ranks, {SLOTS} slots", f"rlhpc, 1 rank, {SLOTS} slots"),
        )
        for rlhpc_name, reference in compared_names:
            if f"{task}: {rlhpc_name}" in median and f"{task}: {reference}" in median:
                figures[f"{task}: {rlhpc_name} / {reference}"] = (
                    median[f"{task}: {rlhpc_name}"] / median[f"{task}: {reference}"]
                )
    for env_s, policy_s in PAIRS:
        one_stage_s, two_stages_s = (
            median.get(f"rollout s: e {env_s} s, p {policy_s} s, {stages} stages") for stages in (1, 2)
        )
        if one_stage_s and two_stages_s:
            figures[f"e {env_s} s, p {policy_s} s: speed-up / ideal"] = (
                one_stage_s / two_stages_s / ((env_s + policy_s) / max(env_s, policy_s))
            )
            figures[f"e {env_s} s, p {policy_s} s: longer of the two / pipelined"] = (
                PIPELINED_STEPS * max(env_s, policy_s) / two_stages_s
            )
    slots_one_by_one, *of_tensors = [format_many_name(*kind) for kind in MANY_KINDS]
    for name in of_tensors:
        if {slots_one_by_one, name} <= median.keys():
            figures[f"{name} / {slots_one_by_one}"] = median[name] / median[slots_one_by_one]
    if "quickstart: 2 env ranks" in median:
        figures["quickstart: 2 env ranks / 1"] = median["quickstart: 2 env ranks"] / median["quickstart: 1 env ranks"]
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all contenders, interleaved, and writes `results/environments.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only what has this in its name; writes no result")
    parser.add_argument("--gymnasium", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.gymnasium:
        env_kind, task, slots = options.gymnasium
        print(measure_gymnasium_here(env_kind, task, int(slots)))
        return
    compare("environments", list_contenders(), compute_ratios, options.repeat, options.only)


if __name__ == "__main__":
    main()
