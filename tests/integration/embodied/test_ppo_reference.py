"""A run of PPO, over processes, makes the updates of the loop that `bench` keeps in one process and one file.

The loop gets what is chance from the run: initial weights, noise of the actions, order of the transitions. All else it does
itself: it steps the simulators, values what follows, and computes advantages, losses and Adam's steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from bench import single_process_ppo as reference
from rlhpc.cli import main
from rlhpc.embodied.data.batches import permutation
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.models import build_model, policy_section
from rlhpc.embodied.models.base import noise_of_slots
from rlhpc.runs.configuration import load_config

SLOTS, ROLLOUT, STEPS, SEED = 4, 60, 5, 3
HIDDEN = 32


def overrides(folder: Path) -> list[str]:
    return [
        f"runner.run_dir={folder}", "runner.name=ppo", f"runner.seed={SEED}", f"runner.max_steps={STEPS}",
        "runner.save_interval=1", "runner.keep_checkpoints=10", "runner.logger.logger_backends=[jsonl]",
        f"env.train.num_envs={SLOTS}", "env.train.env_id=Pendulum-v1", "env.train.simulators=0",
        f"algorithm.rollout_steps={ROLLOUT}", "algorithm.update_epochs=3", "algorithm.entropy_coef=0.01",
        "actor.global_batch_size=60", f"actor.model.hidden_sizes=[{HIDDEN},{HIDDEN}]", "actor.model.log_std_init=-0.3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, list[dict[str, torch.Tensor]]]:
    """The configuration, and the policy's weights after each step."""
    words = overrides(tmp_path_factory.mktemp("ppo"))
    assert main(["train", "configs/base/ppo.yaml", *words]) == 0
    cfg = load_config("configs/base/ppo.yaml", words)
    folder = Path(cfg.runner.run_dir) / "ppo" / "checkpoints"
    return cfg, [load_file(next((folder / f"global_step_{n}").rglob("model.safetensors"))) for n in range(1, STEPS + 1)]


def test_every_update_is_the_single_process_loops(run, monkeypatch):
    cfg, weights = run
    envs = make_env(cfg.env.train, SLOTS, seed=SEED)
    assert isinstance(envs.action_space, spaces.Box)
    policy = build_model(policy_section(cfg.actor), envs.observation_space, envs.action_space, seed=SEED)
    args = argparse.Namespace(
        hidden=f"{HIDDEN},{HIDDEN}", actor_gain=1.0, critic_gain=1.0, log_std=0.0, gamma=0.99, gae_lambda=0.95, epochs=3,
        minibatch=60, clip=0.2, value_clip=0.2, entropy=0.01, value_coef=0.5, target_kl=None,
    )  # fmt: skip
    agent = reference.Agent(SimpleNamespace(observation=3, space=envs.action_space), args)
    take(agent, policy.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    obs, cut = torch.as_tensor(envs.reset()[0]), 0
    for step, expected in enumerate(weights, start=1):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - (step - 1) / STEPS)
        noises = [noise_of_slots(policy.sample_noise, (SEED, step, t), range(SLOTS)) for t in range(ROLLOUT)]
        columns: list[list[torch.Tensor]] = []
        for noise in noises:
            with torch.no_grad():
                action = agent.actor(obs) + agent.log_std.exp() * noise
                _, logprob, _, value = agent.act(obs, action)
            low, high = envs.action_space.low, envs.action_space.high
            following, reward, terminated, truncated, infos = envs.step(action.numpy().clip(low, high))
            reward = torch.as_tensor(reward, dtype=torch.float32).clone()
            if truncated.any():
                cut += int(truncated.sum())
                with torch.no_grad():
                    last = agent.critic(torch.as_tensor(infos["final_obs"])).squeeze(-1)
                reward += args.gamma * last * torch.as_tensor(truncated)
            columns.append([obs, action, logprob, value, reward, torch.as_tensor(terminated | truncated).float()])
            obs = torch.as_tensor(following).clone()
        seen, actions, logprobs, values, rewards, ended = (torch.stack(column) for column in zip(*columns, strict=True))
        with torch.no_grad():
            advantages = reference.compute_advantages(args, rewards, values, ended, agent.critic(obs).squeeze(-1))
        orders = iter([permutation(SLOTS * ROLLOUT, SEED, step, epoch) for epoch in range(args.epochs)])
        with monkeypatch.context() as patched:
            patched.setattr(reference.torch, "randperm", lambda count, orders=orders: next(orders))
            flat = [
                column.transpose(0, 1).flatten(0, 1)
                for column in (seen, actions, logprobs, advantages, advantages + values, values)
            ]
            reference.run_update(args, agent, optimizer, flat)
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        policy.load_state_dict(expected)
        for mine, theirs in pairs(agent, policy.state_dict()):
            torch.testing.assert_close(mine, theirs.reshape(mine.shape), rtol=1e-3, atol=2e-5)
        assert max(float((expected[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3
    assert cut == SLOTS, "an episode of each slot was cut on the way"


def pairs(agent: reference.Agent, state: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of the two that are the same."""
    found = [(agent.log_std, state["head.log_std"])]
    for network in ("actor", "critic"):
        theirs = [tensor for name, tensor in state.items() if name.startswith(f"{network}.")]
        found += zip(getattr(agent, network).parameters(), theirs, strict=True)
    return found


@torch.no_grad()
def take(agent: reference.Agent, state: dict[str, torch.Tensor]) -> None:
    for mine, theirs in pairs(agent, state):
        mine.copy_(theirs.reshape(mine.shape))
