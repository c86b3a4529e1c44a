"""Runs that stay on the card: simulator, policy and update in the actor's process, with environments of tensors and with MJX.

Cart-poles by PPO, pendulums by SAC, and MJX's half-cheetahs by PPO, whose simulation is measured alone, too.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from typing import Any

from bench.gpu.part import ROOT, Report, timed

REPEAT = 3


def build_overrides(report: Report, env_id: str, num_slots: int, num_steps: int) -> list[str]:
    """Returns the overrides of a run in `num_slots` slots with rollouts of `num_steps` decisions."""
    return [
        f"env.train.env_id={env_id}", f"env.train.num_envs={num_slots}", f"algorithm.rollout_steps={num_steps}",
        f"actor.capture_graphs={'false' if report.small else 'true'}", f"cluster.accelerators_per_node={min(report.cards, 1)}",
    ]  # fmt: skip


def run_steps(cfg: Any, task_type: Any) -> tuple[list[float], list[float]]:
    """Returns the seconds of the rollouts and of the updates of some steps of a run, without the first two."""
    from rlhpc import Cluster, HybridComponentPlacement, Session
    from rlhpc.embodied.rollout.slot_map import SlotMap
    from rlhpc.runtime.plugins import load_attribute

    ((role, path),) = task_type.groups.worker_classes_of(cfg).items()
    cls: Any = load_attribute(path, role)
    cluster = Cluster(cfg.cluster)
    group = cls.create_group(cfg).launch(
        cluster, placement_strategy=HybridComponentPlacement(cfg, cluster).get_strategy(role), name=role
    )
    try:
        group.build(
            SlotMap.from_config(cfg, num_env_ranks=1, num_rollout_ranks=1, num_actor_ranks=1, actor_name=group.name)
        ).wait()
        rollouts, updates = list[float](), list[float]()
        for step in range(1, REPEAT + 3):
            for durations, call in ((rollouts, group.play), (updates, group.update)):
                start_time = time.perf_counter()
                call(step).wait()
                durations.append(time.perf_counter() - start_time)
        return rollouts[2:], updates[2:]
    finally:
        group.shutdown()
        if session := Session.running():
            session.stop()


def measure_run(report: Report, name: str, config: str, overrides: list[str], count: int) -> None:
    """Reports the rates of a run's rollouts and steps.

    Args:
        report: The report.
        name: Name of the figures.
        config: Configuration below `configs/embodied`.
        overrides: Overrides of the configuration.
        count: Environment steps of a rollout.
    """
    from rlhpc.embodied.task_types import PPO, SAC
    from rlhpc.runs.configuration import load_config

    with report.piece(name), tempfile.TemporaryDirectory() as folder:
        cfg = load_config(ROOT / "configs/embodied" / f"{config}.yaml", [*overrides, f"runner.run_dir={folder}"])
        rollouts, updates = run_steps(cfg, SAC if cfg.runner.task_type == "off_policy" else PPO)
        report.figure(f"{name}, rollouts", [count / seconds for seconds in rollouts], "env steps/s")
        report.figure(f"{name}, updates of a rollout", [1000 * seconds for seconds in updates], "ms")
        totals = [first + second for first, second in zip(rollouts, updates, strict=True)]
        report.figure(f"{name}, trained", [count / seconds for seconds in totals], "env steps/s")


def missing_packages() -> list[str]:
    """Returns the packages that MJX needs and this Python lacks."""
    names = {"jax": "jax[cuda13]", "mujoco.mjx": "mujoco-mjx"}
    return [package for name, package in names.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def mjx_alone(num_slots: int, num_steps: int, device: str) -> list[float]:
    """Returns MJX's env steps per second on random actions, without a policy."""
    import torch

    from rlhpc.embodied.envs.mjx_tasks import MjxHalfCheetah

    env = MjxHalfCheetah(num_slots, torch.device(device))
    actions = [torch.rand(num_slots, *env.action_space.shape, device=device) * 2 - 1 for _ in range(num_steps)]

    def run() -> None:
        for action in actions:
            obs = env.step(action)[0]
        obs.sum().item()  # JAX's work is not among what torch waits for

    run()
    return [num_slots * num_steps / timed(run) for _ in range(REPEAT)]


def measure(report: Report) -> None:
    """Measures the runs one after the other."""
    num_slots, num_steps = (32, 8) if report.small else (8192, 32)
    overrides = [
        *build_overrides(report, "cartpole", num_slots, num_steps),
        f"actor.global_batch_size={num_slots * num_steps // 4}",
    ]
    measure_run(report, f"{num_slots} cart-poles, PPO", "cartpole_tensors", overrides, num_slots * num_steps)
    updates = 8 if report.small else 64  # for each rollout
    overrides = [
        *build_overrides(report, "pendulum", num_slots, 4), f"algorithm.update_to_data={updates / (4 * num_slots)}",
        "algorithm.replay_buffer={size: 1_000_000, min_buffer_size: 1}",
        *(["algorithm.replay_buffer.size=1000", "actor.model.hidden_sizes=[32,32]"] if report.small else []),
    ]  # fmt: skip
    measure_run(
        report,
        f"{num_slots} pendulums, SAC, {updates} updates a rollout",
        "pendulum_sac_tensors",
        overrides,
        num_slots * 4,
    )
    if missing_names := missing_packages():
        report.skip("MJX", f"this Python lacks {', '.join(missing_names)}: pip install {' '.join(missing_names)}")
        return
    num_slots, num_steps = (8, 4) if report.small else (4096, 32)
    with report.piece("MJX alone"):
        rates = mjx_alone(num_slots, num_steps, report.device)
        report.figure(f"MJX alone, {num_slots} half-cheetahs", rates, "env steps/s")
    overrides = [
        *build_overrides(report, "mjx_half_cheetah", num_slots, num_steps),
        f"actor.global_batch_size={num_slots * num_steps // 4}",
    ]
    measure_run(report, f"MJX, {num_slots} half-cheetahs, PPO", "cartpole_tensors", overrides, num_slots * num_steps)
