"""CrossQ in one process, the way SB3-Contrib's does it, with critics of 256 units, in the loop of `single_process_sac`.

Within the first 100 000 updates, batch renormalisation equals batch normalisation; this program makes fewer updates.

    python -m bench.single_process_crossq --env Pendulum-v1 --seed 1 --steps 6000
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench.single_process_sac import main


def build_network(input_size: int, output_size: int) -> nn.Sequential:
    """Builds a perceptron with normalisation before each layer."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in ((input_size, 256), (256, 256)):
        layers += [nn.BatchNorm1d(num_inputs, eps=1e-3, momentum=0.01), nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.BatchNorm1d(256, eps=1e-3, momentum=0.01), nn.Linear(256, output_size)).eval()


class CrossQActor(nn.Module):
    """Actor with a tanh-squashed Gaussian."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        super().__init__()
        self.body = build_network(obs_size, 2 * int(np.prod(space.shape)))
        self.scale, self.bias = (
            torch.as_tensor((space.high - space.low) / 2),
            torch.as_tensor((space.high + space.low) / 2),
        )

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns actions and their log-probabilities `[B]`."""
        mean, log_std = self.body(obs).chunk(2, -1)
        distribution = torch.distributions.Normal(mean, (-5 + 0.5 * 7 * (torch.tanh(log_std) + 1)).exp())
        pre_tanh = distribution.rsample()
        tanh_actions = torch.tanh(pre_tanh)
        logprob = distribution.log_prob(pre_tanh) - torch.log(self.scale * (1 - tanh_actions.pow(2)) + 1e-6)
        return tanh_actions * self.scale + self.bias, logprob.sum(1)


class CrossQLearner:
    """Networks, optimizers and the update."""

    def __init__(self, obs_size: int, space: gym.spaces.Box) -> None:
        dim = int(np.prod(space.shape))
        self.actor = CrossQActor(obs_size, space)
        self.critics = nn.ModuleList(build_network(obs_size + dim, 1) for _ in range(2))
        self.q_opt = torch.optim.Adam(self.critics.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha, self.alpha_opt, self.target = 1.0, torch.optim.Adam([self.log_alpha], lr=1e-3), -float(dim)

    def update(self, step: int, data: list[torch.Tensor]) -> None:
        """Runs one update."""
        obs, next_obs, actions, rewards, dones = data
        with torch.no_grad():
            next_actions, logprob = self.actor.act(next_obs)
        joined_batch = torch.cat([torch.cat([obs, actions], 1), torch.cat([next_obs, next_actions], 1)])
        self.critics.train()
        values = [critic(joined_batch).flatten().chunk(2) for critic in self.critics]
        self.critics.eval()
        next_values = torch.min(*(q_values[1] for q_values in values)).detach() - self.alpha * logprob
        targets = rewards.flatten() + (1 - dones.flatten()) * 0.99 * next_values
        loss = torch.stack([F.mse_loss(q_values[0], targets) for q_values in values]).sum()
        self.q_opt.zero_grad()
        loss.backward()
        self.q_opt.step()
        if step % 3:
            return
        self.actor.train()
        new_actions, logprob = self.actor.act(obs)
        self.actor.eval()
        critic_inputs = torch.cat([obs, new_actions], 1)
        q_values = torch.min(*(critic(critic_inputs).flatten() for critic in self.critics))
        actor_loss = (self.alpha * logprob - q_values).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        alpha_loss = -(self.log_alpha * (logprob.detach() + self.target)).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()
        self.alpha = self.log_alpha.exp().item()


if __name__ == "__main__":
    main(CrossQLearner, __doc__)
