"""SAC from images in a plain loop, as DrQ has it (Yarats et al. 2021): the reference of `bench.pixels`.

One encoder is trained by the critics' loss, the actor gets its features detached, and the target critics have an encoder of
their own. The task is `PixelReach`, which both sides learn: a hand and a target in pictures of 16 x 16.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SIZE, STEP, REACH, GAMMA, TAU, RATE, BATCH, SHIFT = 16, 0.15, 0.12, 0.95, 0.02, 1e-3, 64, 2
#: Steps with random actions, after which updates begin.
STARTS = 200


class PixelReach(gym.Env[np.ndarray, np.ndarray]):
    """A hand reaches a target in the plane. The reward is the negative distance, and an episode ends at the target."""

    observation_space: Any = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space: Any = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self._hand, self._target = self.np_random.uniform(0.1, 0.9, (2, 2))
        return self._draw(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves the hand."""
        self._hand = np.clip(self._hand + STEP * np.clip(np.asarray(action, float), -1, 1), 0, 1)
        distance = float(np.linalg.norm(self._hand - self._target))
        has_reached = distance < REACH
        return self._draw(), -distance, has_reached, False, {"success": has_reached}

    def _draw(self) -> np.ndarray:
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        for channel, place in enumerate((self._hand, self._target)):
            row, column = np.minimum((place * (SIZE - 1)).astype(int), SIZE - 2)
            picture[row : row + 2, column : column + 2, channel] = 255
        return picture


gym.register("PixelReach-v0", entry_point="bench.single_process_pixels:PixelReach", max_episode_steps=20)


class Encoder(nn.Module):
    """Two convolutions, a layer, layer norm and tanh."""

    def __init__(self) -> None:
        super().__init__()
        side = (SIZE - 2 - 3) // 2 + 1
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * side * side, 64), nn.ReLU(), nn.LayerNorm(64), nn.Tanh(),
        )  # fmt: skip

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Encodes pictures `[B, 3, H, W]` of bytes."""
        features: torch.Tensor = self.layers(pictures.float() / 255)
        return features


def build_head(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Builds a network of two layers of 64."""
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


class Critics(nn.Module):
    """Two Q-networks with one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.heads = Encoder(), nn.ModuleList(build_head(66, 1) for _ in range(2))

    def forward(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Returns Q-values `[2, B]`."""
        rows = torch.cat((features, actions), 1)
        return torch.stack([head(rows).squeeze(1) for head in self.heads])


def shift(pictures: torch.Tensor) -> torch.Tensor:
    """Shifts each picture by up to `SHIFT` pixels, with the edges continued."""
    padded = F.pad(pictures.float(), (SHIFT,) * 4, mode="replicate").to(torch.uint8)
    offsets = torch.randint(0, 2 * SHIFT + 1, (len(pictures), 2)).tolist()
    return torch.stack(
        [picture[:, y : y + SIZE, x : x + SIZE] for picture, (y, x) in zip(padded, offsets, strict=True)]
    )


class PixelSac:
    """Networks, optimizers and the update."""

    def __init__(self) -> None:
        self.critics, self.targets, self.actor = Critics(), Critics(), build_head(64, 4)
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=RATE)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=RATE)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=RATE)

    def act(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns drawn actions, their log-probabilities, and the actions of evaluation."""
        mean, log_std = self.actor(features).chunk(2, -1)
        log_std = -5 + 3.5 * (torch.tanh(log_std) + 1)
        drawn = mean + log_std.exp() * torch.randn_like(mean)
        logprobs = torch.distributions.Normal(mean, log_std.exp()).log_prob(drawn)
        return drawn.tanh(), (logprobs - torch.log(1 - drawn.tanh() ** 2 + 1e-6)).sum(-1), mean.tanh()

    def update(self, obs: torch.Tensor, next_obs: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor,
               ends: torch.Tensor) -> None:  # fmt: skip
        """Runs one update."""
        obs, next_obs = shift(obs), shift(next_obs)
        with torch.no_grad():
            next_actions, logprobs, _ = self.act(self.critics.encoder(next_obs))
            values = (
                self.targets(self.targets.encoder(next_obs), next_actions).amin(0) - self.log_alpha.exp() * logprobs
            )
            expected_values = rewards + (1 - ends) * GAMMA * values
        q_values = self.critics(self.critics.encoder(obs), actions)
        self._step(self.critic_opt, ((q_values - expected_values) ** 2).mean(1).sum())
        features = self.critics.encoder(obs).detach()
        drawn, logprobs, _ = self.act(features)
        values = self.critics(features, drawn).amin(0)
        self._step(self.actor_opt, (self.log_alpha.exp().detach() * logprobs - values).mean())
        self._step(self.alpha_opt, (-self.log_alpha.exp() * (logprobs.detach() - 2)).mean())
        for parameter, target in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
            target.data.lerp_(parameter.data, TAU)

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def pictures_of(arrays: np.ndarray) -> torch.Tensor:
    """Converts pictures `[B, H, W, 3]` to tensors `[B, 3, H, W]`."""
    return torch.from_numpy(arrays).permute(0, 3, 1, 2)


def train(seed: int, num_steps: int) -> PixelSac:
    """Trains for `num_steps` steps of the environment, with one update for each step after the random ones."""
    torch.manual_seed(seed)
    env, random, learner = gym.make("PixelReach-v0"), np.random.default_rng(seed), PixelSac()
    obs_rows, next_rows = (np.zeros((num_steps, SIZE, SIZE, 3), np.uint8) for _ in range(2))
    action_rows, rewards, ends = (np.zeros((num_steps, *shape), np.float32) for shape in ((2,), (), ()))
    obs, _ = env.reset(seed=seed)
    for step in range(num_steps):
        with torch.no_grad():
            action = (
                random.uniform(-1, 1, 2).astype(np.float32)
                if step < STARTS
                else learner.act(learner.critics.encoder(pictures_of(obs[None])))[0][0].numpy()
            )
        next_obs, reward, has_ended, is_truncated, _ = env.step(action)
        obs_rows[step], next_rows[step], action_rows[step] = obs, next_obs, action
        rewards[step], ends[step] = float(reward), float(has_ended)
        obs = env.reset()[0] if has_ended or is_truncated else next_obs
        if step >= STARTS:
            rows = random.integers(0, step + 1, BATCH)
            arrays = (torch.from_numpy(column[rows]) for column in (action_rows, rewards, ends))
            learner.update(pictures_of(obs_rows[rows]), pictures_of(next_rows[rows]), *arrays)
    return learner


def evaluate(learner: PixelSac, num_episodes: int) -> float:
    """Returns the share of episodes that reach the target, with the actions of evaluation."""
    env, num_successes = gym.make("PixelReach-v0"), 0
    for episode in range(num_episodes):
        obs, is_over = env.reset(seed=10_000 + episode)[0], False
        while not is_over:
            with torch.no_grad():
                action = learner.act(learner.critics.encoder(pictures_of(obs[None])))[2][0].numpy()
            obs, _, has_reached, is_truncated, _ = env.step(action)
            is_over = has_reached or is_truncated
            num_successes += bool(has_reached)
    return num_successes / num_episodes
