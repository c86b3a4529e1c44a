"""ManiSkill simulation rates: alone, in rlhpc's environment, in a plain PPO loop, and in a run of rlhpc.

All contenders simulate PickCube-v1 from states on the same device, with the same number of slots. Both trainings have the
networks, the rollouts of 50 steps and the 8 epochs of 32 minibatches of ManiSkill's own ppo.py. The plain loop is a
reimplementation of that file. On a CPU, ManiSkill itself simulates one slot, so the figures are not comparable there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.gpu.part import ROOT, Report, timed
from bench.single_process_ppo import Agent, compute_advantages, run_update

TASK = "PickCube-v1"
ROLLOUT = 50
KWARGS: dict[str, Any] = {"control_mode": "pd_joint_delta_pos", "reward_mode": "normalized_dense", "obs_mode": "state"}


def maniskill(device: str, num_slots: int) -> Any:
    """Makes ManiSkill's own environments, in its wrapper that resets ended ones."""
    from rlhpc.embodied.envs.maniskill import load_maniskill

    load_maniskill()
    import gymnasium
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    backend = "physx_cpu" if device == "cpu" else f"physx_{device}"
    base_env = gymnasium.make(TASK, num_envs=num_slots, sim_backend=backend, render_backend="none", **KWARGS)
    return ManiSkillVectorEnv(base_env, num_slots, ignore_terminations=True, record_metrics=False)


def measure_alone(env: Any, num_slots: int, num_steps: int) -> float:
    """Returns env steps per second on random actions."""
    shape = (num_slots, *env.single_action_space.shape)
    env.reset(seed=0)
    actions = [torch.rand(shape, device=env.unwrapped.device) * 2 - 1 for _ in range(num_steps)]
    env.step(actions[0])
    return num_slots * num_steps / timed(lambda: [env.step(action) for action in actions])


def measure_rlhpc(num_slots: int, num_steps: int) -> float:
    """Returns env steps per second of rlhpc's environment, as an env rank uses it."""
    import numpy as np

    from rlhpc.embodied.config import EnvSideConfig
    from rlhpc.embodied.envs import make_env

    section = EnvSideConfig(
        env_type="maniskill", env_id=TASK, simulators=0, ignore_terminations=True, kwargs=dict(KWARGS)
    )
    env = make_env(section, num_slots, seed=0)
    env.reset()
    shape = (num_slots, *(env.action_space.shape or ()))
    actions = [np.random.default_rng(i).uniform(-1, 1, shape).astype(np.float32) for i in range(num_steps)]
    env.step(actions[0])
    rate = num_slots * num_steps / timed(lambda: [env.step(action) for action in actions])
    env.close()
    return rate


class SimulationSizes:
    """Sizes that `Agent` reads from environments."""

    def __init__(self, env: Any) -> None:
        self.space, self.observation = env.single_action_space, env.single_observation_space.shape[-1]


def measure_plain_ppo(env: Any, num_slots: int, num_updates: int, num_parts: int) -> float:
    """Returns env steps per second of a loop that trains, without its first update; all data stay on the device."""
    device, batch = env.unwrapped.device, num_slots * ROLLOUT
    args = argparse.Namespace(
        hidden="256,256,256", critic_gain=1.41421, actor_gain=0.01414, log_std=-0.5, gamma=0.8, gae_lambda=0.9, epochs=8,
        minibatch=batch // num_parts, target_kl=0.1, clip=0.2, value_clip=None, entropy=0.0, value_coef=0.5,
    )  # fmt: skip
    sizes: Any = SimulationSizes(env)
    agent = Agent(sizes, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    obs = env.reset(seed=0)[0]

    def one() -> None:
        nonlocal obs
        columns: list[list[torch.Tensor]] = [[] for _ in range(6)]
        for _ in range(ROLLOUT):
            with torch.no_grad():
                action, logprob, _, value = agent.act(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action.clamp(-1, 1))
            row = (obs, action, logprob, value, reward, (terminated | truncated).float())
            for column, element in zip(columns, row, strict=True):
                column.append(element)
            obs = next_obs
        obs_batch, a, logprob_batch, v, r, dones = (torch.stack(column) for column in columns)
        with torch.no_grad():
            advantages = compute_advantages(args, r, v, dones, agent.critic(obs).squeeze(-1))
        rollout_columns = (obs_batch, a, logprob_batch, advantages, advantages + v, v)
        run_update(args, agent, optimizer, [x.reshape(batch, *x.shape[2:]) for x in rollout_columns])

    one()
    return batch * num_updates / sum(timed(one) for _ in range(num_updates))


def run(report: Report, num_slots: int, num_steps: int, num_parts: int) -> tuple[float, float]:
    """Returns env steps per second of a run and of its rollouts alone, without the run's first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rlhpc.cli", "train", "configs/embodied/pick_cube_ppo.yaml", f"runner.run_dir={folder}",
            "runner.segments=1", f"runner.max_steps={num_steps}", "runner.save_interval=-1", "runner.val_check_interval=-1",
            "runner.logger.logger_backends=[jsonl]", f"env.train.num_envs={num_slots}",
            f"actor.global_batch_size={num_slots * ROLLOUT // num_parts}",
            f"cluster.accelerators_per_node={min(report.cards, 1)}",
        ]  # fmt: skip
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            print(" ".join(command), result.stdout[-2000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
            raise RuntimeError(f"rlhpc train ended with {result.returncode}")
        rows = [
            json.loads(line) for line in (Path(folder) / "pick_cube_ppo" / "metrics.jsonl").read_text().splitlines()
        ][1:]
    num_env_steps = num_slots * ROLLOUT * len(rows)
    return num_env_steps / sum(row["time/step_s"] for row in rows), num_env_steps / sum(
        row["time/rollout_s"] for row in rows
    )


def measure(report: Report) -> None:
    """Measures each contender in turn; the runs come last, because their ranks need the complete card."""
    slots, steps, updates, num_minibatches = (8, 20, 1, 2) if report.small else (1024, 200, 4, 32)
    peer_slots = 1 if report.small else slots
    with report.piece("ManiSkill alone"):
        env = maniskill(report.device, peer_slots)
        report.figure(f"ManiSkill alone, {peer_slots} slots", measure_alone(env, peer_slots, steps), "env steps/s")
        report.figure(
            f"a plain loop of PPO, {peer_slots} slots",
            measure_plain_ppo(env, peer_slots, updates, num_minibatches),
            "env steps/s",
        )
        env.close()
    with report.piece("rlhpc's environment"):
        report.figure(f"rlhpc's environment, {slots} slots", measure_rlhpc(slots, steps), "env steps/s")
    with report.piece("a run"):
        total_rate, rollout_rate = run(report, slots, updates + 1, num_minibatches)
        report.figure(f"rlhpc's run of PPO, {slots} slots", total_rate, "env steps/s")
        report.figure(f"rlhpc's run of PPO, {slots} slots, rollouts alone", rollout_rate, "env steps/s")
