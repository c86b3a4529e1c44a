"""TD3 in one process, the way CleanRL's td3_continuous_action.py does it, in the loop of `single_process_sac`.

python -m bench.single_process_td3 --env Pendulum-v1 --seed 1 --steps 6000
"""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench.single_process_sac import Critic, main


class Td3Actor(nn.Module):
    """Deterministic actor that explores by Gaussian noise."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        super().__init__()
        self.one, self.two, self.out = (
            nn.Linear(obs_size, 256),
            nn.Linear(256, 256),
            nn.Linear(256, int(np.prod(space.shape))),
        )
        self.low, self.high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        self.scale, self.bias = (self.high - self.low) / 2, (self.high + self.low) / 2

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Returns the action without noise."""
        features = F.relu(self.two(F.relu(self.one(obs))))
        return torch.tanh(self.out(features)) * self.scale + self.bias

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the action with noise of standard deviation 0.1."""
        action = self(obs)
        return (action + torch.randn_like(action) * self.scale * 0.1).clamp(self.low, self.high), None


class Td3Learner:
    """Networks, optimizers and the update."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        dim = int(np.prod(space.shape))
        self.actor, self.q1, self.q2 = Td3Actor(obs_size, space), Critic(obs_size, dim), Critic(obs_size, dim)
        self.target_actor, self.t1, self.t2 = copy.deepcopy(self.actor), copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        self.q_opt = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=3e-4)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-4)

    def update(self, step: int, data: list[torch.Tensor]) -> None:
        """Runs one update."""
        obs, next_obs, actions, rewards, dones = data
        with torch.no_grad():
            noise = (torch.randn_like(actions) * 0.2).clamp(-0.5, 0.5) * self.actor.scale
            next_actions = (self.target_actor(next_obs) + noise).clamp(self.actor.low, self.actor.high)
            next_values = torch.min(self.t1(next_obs, next_actions), self.t2(next_obs, next_actions))
            targets = rewards + (1 - dones) * 0.99 * next_values
        loss = F.mse_loss(self.q1(obs, actions), targets) + F.mse_loss(self.q2(obs, actions), targets)
        self.q_opt.zero_grad()
        loss.backward()
        self.q_opt.step()
        if step % 2:
            return
        actor_loss = -self.q1(obs, self.actor(obs)).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        for network, target in ((self.actor, self.target_actor), (self.q1, self.t1), (self.q2, self.t2)):
            for p, t in zip(network.parameters(), target.parameters(), strict=True):
                t.data.copy_(0.005 * p.data + 0.995 * t.data)


if __name__ == "__main__":
    main(Td3Learner, __doc__)
