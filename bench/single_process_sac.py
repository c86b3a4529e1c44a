"""SAC in one process and one file, the way CleanRL's sac_continuous_action.py does it.

This is the reference of `bench.sac` and `bench.learning`; `single_process_td3`, `_crossq` and `_iql` use the same loop.

The implementation uses one Gymnasium environment, two separate critic modules, torch.distributions, torch.optim.Adam, and a
replay buffer of NumPy arrays; it updates the actor twice every second step. Prints one JSON line: the returns of the training
episodes by environment step.

    python bench/single_process_sac.py --env InvertedPendulum-v5 --seed 1 --steps 6000
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Critic(nn.Module):
    """Critic network Q(s, a)."""

    def __init__(self, obs_size: int, action_size: int) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(obs_size + action_size, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.one(torch.cat([obs, action], 1)))
        return self.out(F.relu(self.two(features)))


class SacActor(nn.Module):
    """Actor with a tanh-squashed Gaussian."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        super().__init__()
        dim = int(np.prod(space.shape))
        self.one, self.two = nn.Linear(obs_size, 256), nn.Linear(256, 256)
        self.mean, self.log_std = nn.Linear(256, dim), nn.Linear(256, dim)
        self.scale = torch.tensor((space.high - space.low) / 2, dtype=torch.float32)
        self.bias = torch.tensor((space.high + space.low) / 2, dtype=torch.float32)

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns actions and their log-probabilities `[B, 1]`."""
        features = F.relu(self.two(F.relu(self.one(obs))))
        mean, log_std = self.mean(features), torch.tanh(self.log_std(features))
        distribution = torch.distributions.Normal(mean, (-5 + 0.5 * 7 * (log_std + 1)).exp())
        pre_tanh = distribution.rsample()
        tanh_actions = torch.tanh(pre_tanh)
        logprob = distribution.log_prob(pre_tanh) - torch.log(self.scale * (1 - tanh_actions.pow(2)) + 1e-6)
        return tanh_actions * self.scale + self.bias, logprob.sum(1, keepdim=True)


class Buffer:
    """Transitions as NumPy arrays."""

    def __init__(self, size: int, obs_size: int, action_size: int) -> None:
        self.size, self.at, self.full = size, 0, False
        self.obs, self.next_obs = np.zeros((size, obs_size), np.float32), np.zeros((size, obs_size), np.float32)
        self.actions = np.zeros((size, action_size), np.float32)
        self.rewards, self.ends = np.zeros((size, 1), np.float32), np.zeros((size, 1), np.float32)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: float, is_terminal: bool) -> None:
        """Adds one transition."""
        index = self.at
        self.obs[index], self.next_obs[index], self.actions[index], self.rewards[index], self.ends[index] = (
            obs, next_obs, action, reward, is_terminal,
        )  # fmt: skip
        self.at = (index + 1) % self.size
        self.full |= self.at == 0

    def sample(self, count: int) -> list[torch.Tensor]:
        """Samples a batch: obs, next_obs, actions, rewards, ends."""
        rows = np.random.randint(0, self.size if self.full else self.at, count)
        return [torch.as_tensor(x[rows]) for x in (self.obs, self.next_obs, self.actions, self.rewards, self.ends)]


class SacLearner:
    """Networks, optimizers and the update."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        dim = int(np.prod(space.shape))
        self.actor = SacActor(obs_size, space)
        self.q1, self.q2, self.t1, self.t2 = (Critic(obs_size, dim) for _ in range(4))
        self.t1.load_state_dict(self.q1.state_dict())
        self.t2.load_state_dict(self.q2.state_dict())
        self.q_opt = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=1e-3)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha, self.alpha_opt, self.target = 1.0, torch.optim.Adam([self.log_alpha], lr=1e-3), -float(dim)

    def update(self, step: int, data: list[torch.Tensor]) -> None:
        """Runs one update."""
        obs, next_obs, actions, rewards, dones = data
        with torch.no_grad():
            next_actions, logprob = self.actor.act(next_obs)
            min_q = torch.min(self.t1(next_obs, next_actions), self.t2(next_obs, next_actions)) - self.alpha * logprob
            targets = rewards.flatten() + (1 - dones.flatten()) * 0.99 * min_q.view(-1)
        loss = F.mse_loss(self.q1(obs, actions).view(-1), targets) + F.mse_loss(self.q2(obs, actions).view(-1), targets)
        self.q_opt.zero_grad()
        loss.backward()
        self.q_opt.step()
        if step % 2 == 0:
            for _ in range(2):
                new_actions, logprob = self.actor.act(obs)
                min_q = torch.min(self.q1(obs, new_actions), self.q2(obs, new_actions))
                actor_loss = (self.alpha * logprob - min_q).mean()
                self.actor_opt.zero_grad()
                actor_loss.backward()
                self.actor_opt.step()
                with torch.no_grad():
                    _, logprob = self.actor.act(obs)
                alpha_loss = (-self.log_alpha.exp() * (logprob + self.target)).mean()
                self.alpha_opt.zero_grad()
                alpha_loss.backward()
                self.alpha_opt.step()
                self.alpha = self.log_alpha.exp().item()
        for q, target in ((self.q1, self.t1), (self.q2, self.t2)):
            for p, t in zip(q.parameters(), target.parameters(), strict=True):
                t.data.copy_(0.005 * p.data + 0.995 * t.data)


def train(args: argparse.Namespace, kind: type[Any] = SacLearner) -> dict[str, Any]:
    """Trains a learner of class `kind` for `steps` environment steps."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    torch.set_num_threads(1)
    env = gym.make(args.env, **json.loads(args.env_kwargs))
    env.action_space.seed(args.seed)
    observation_space, space = env.observation_space, env.action_space
    assert isinstance(observation_space, gym.spaces.Box)
    assert isinstance(space, gym.spaces.Box)
    learner = kind(int(np.prod(observation_space.shape)), space)
    buffer = Buffer(args.buffer, int(np.prod(observation_space.shape)), int(np.prod(space.shape)))
    returns: list[tuple[int, float]] = []
    obs, total = env.reset(seed=args.seed)[0], 0.0
    start_s = time.perf_counter()
    if hasattr(learner, "before"):
        learner.before(args)
    num_random_steps = args.starts if args.random is None else args.random
    for step in range(args.steps):
        if step < num_random_steps:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = learner.actor.act(torch.as_tensor(obs, dtype=torch.float32)[None])[0][0].numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        buffer.add(obs, next_obs, action, float(reward), terminated)
        obs, total = next_obs, total + float(reward)
        if terminated or truncated:
            returns.append((step + 1, total))
            obs, total = env.reset()[0], 0.0
        if step > args.starts:
            learner.update(step, buffer.sample(256))
    return {"seed": args.seed, "returns": returns, "loop_s": time.perf_counter() - start_s}


def main(kind: type[Any] = SacLearner, description: str | None = __doc__, **more: Any) -> None:
    """Trains with the command line's arguments. Keyword arguments add the learner's options with defaults (`before`)."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--env", default="InvertedPendulum-v5")
    parser.add_argument("--env-kwargs", default="{}")
    for name, default in (("seed", 1), ("steps", 6000), ("starts", 1000), ("buffer", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--random", type=int, help="steps at the start with random actions; default: --starts")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    print(json.dumps(train(parser.parse_args(), kind)))


if __name__ == "__main__":
    main()
