"""IQL in one process, the way CORL's iql.py does it: first from a file, then in the loop of `single_process_sac`.

CORL's implementation adds new transitions to the buffer of the dataset. Here, as in rlhpc, half of each batch always comes
from the dataset.

    python -m bench.offline_data pendulum.h5
    python -m bench.single_process_iql --env Pendulum-v1 --data pendulum.h5 --seed 1 --steps 3000
"""

from __future__ import annotations

import argparse
import copy

import gymnasium as gym
import h5py
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench.single_process_sac import Critic, main


def build_network(input_size: int, output_size: int) -> nn.Sequential:
    """Builds a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(input_size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, output_size)
    )  # fmt: skip


class IqlActor(nn.Module):
    """Gaussian actor with a standard deviation independent of the observation, in units of half the action range."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        super().__init__()
        dim = int(np.prod(space.shape))
        self.mean, self.log_std = build_network(obs_size, dim), nn.Parameter(torch.zeros(dim))
        self.scale, self.bias = (
            torch.as_tensor((space.high - space.low) / 2),
            torch.as_tensor((space.high + space.low) / 2),
        )

    def normal(self, obs: torch.Tensor) -> torch.distributions.Normal:
        """Returns the distribution, between -1 and 1."""
        return torch.distributions.Normal(torch.tanh(self.mean(obs)), self.log_std.clamp(-20, 2).exp())

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns a sample, clipped to the bounds."""
        return self.normal(obs).sample().clamp(-1, 1) * self.scale + self.bias, None


class IqlLearner:
    """Networks, optimizers and the update."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        dim = int(np.prod(space.shape))
        self.actor, self.value = IqlActor(obs_size, space), build_network(obs_size, 1)
        self.q1, self.q2 = Critic(obs_size, dim), Critic(obs_size, dim)
        self.t1, self.t2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        self.q_opt = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=3e-4)
        self.v_opt = torch.optim.Adam(self.value.parameters(), lr=3e-4)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-4)

    def before(self, args: argparse.Namespace) -> None:
        """Reads the data and trains offline on it."""
        self.expectile, self.temperature = args.expectile, args.inverse_temperature
        with h5py.File(args.data) as file:
            episodes = [file[name] for name in sorted(file, key=lambda name: int(name[5:]))]
            transitions = [
                [group["obs"][:-1], group["obs"][1:], group["actions"][()], group["rewards"][()][:, None],
                 group["terminated"][()][:, None]] for group in episodes
            ]  # fmt: skip
        self.data = [
            torch.as_tensor(np.concatenate(column), dtype=torch.float32) for column in zip(*transitions, strict=True)
        ]
        for _ in range(args.offline_steps * args.offline_updates):
            self.learn(self.draw_batch(256))

    def draw_batch(self, count: int) -> list[torch.Tensor]:
        """Draws random transitions from the dataset."""
        rows = np.random.randint(0, len(self.data[0]), count)
        return [column[rows] for column in self.data]

    def update(self, step: int, data: list[torch.Tensor]) -> None:
        """Runs one update on a batch that is half offline data."""
        del step
        self.learn(
            [
                torch.cat([offline_column, online_column[:128]])
                for offline_column, online_column in zip(self.draw_batch(128), data, strict=True)
            ]
        )

    def learn(self, data: list[torch.Tensor]) -> None:
        """Trains value network, critics, target networks and policy."""
        obs, next_obs, actions, rewards, dones = data
        with torch.no_grad():
            next_values = self.value(next_obs)
            targets = torch.min(self.t1(obs, actions), self.t2(obs, actions))
        advantages = targets - self.value(obs)
        value_loss = (torch.abs(self.expectile - (advantages < 0).float()) * advantages**2).mean()
        self.v_opt.zero_grad()
        value_loss.backward()
        self.v_opt.step()
        target = rewards + (1 - dones) * 0.99 * next_values
        loss = F.mse_loss(self.q1(obs, actions), target) + F.mse_loss(self.q2(obs, actions), target)
        self.q_opt.zero_grad()
        loss.backward()
        self.q_opt.step()
        for q, t in ((self.q1, self.t1), (self.q2, self.t2)):
            for p, average in zip(q.parameters(), t.parameters(), strict=True):
                average.data.copy_(0.005 * p.data + 0.995 * average.data)
        weights = torch.exp(self.temperature * advantages.detach()).clamp(max=100.0).flatten()
        unit_actions = (actions - self.actor.bias) / self.actor.scale
        actor_loss = -(weights * self.actor.normal(obs).log_prob(unit_actions).sum(1)).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()


if __name__ == "__main__":
    main(
        IqlLearner, __doc__, data="", expectile=0.7, inverse_temperature=3.0, offline_steps=5, offline_updates=1000
    )  # fmt: skip
