"""Environments and policies without computation, or with sleeps, which isolate the overhead of a rollout."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.observations import count_rows
from rlhpc.embodied.models.base import Policy


class RandomPolicy(Policy):
    """Uniformly random actions, which the noise is already: a forward pass costs nothing."""

    def __init__(self, cfg: Any, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._discrete = isinstance(action_space, spaces.Discrete)

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Returns actions `[*shape, 1, dim]`."""
        if self._discrete:
            return torch.randint(int(self.action_space.n), (*shape, 1, 1), generator=generator)
        return torch.rand((*shape, 1, *self.action_space.shape), generator=generator) * 2 - 1

    def predict_action_batch(self, obs: Any, mode: str = "train", noise: Any = None) -> tuple[Any, dict[str, Any]]:
        """Implements `Policy.predict_action_batch`."""
        zeros = torch.zeros(len(noise))
        return noise, {"prev_logprobs": zeros, "prev_values": zeros}

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Any, Any]:
        """Returns no features, and values of 0, `[B]` (`Policy.features`)."""
        return None, torch.zeros(count_rows(obs))


class SleepingPolicy(RandomPolicy):
    """Sleeps `actor.model.kwargs.seconds` for each slot of its batch."""

    def predict_action_batch(self, obs: Any, mode: str = "train", noise: Any = None) -> tuple[Any, dict[str, Any]]:
        """Implements `Policy.predict_action_batch`."""
        time.sleep(count_rows(obs) * float(self._cfg.kwargs["seconds"]))
        return super().predict_action_batch(obs, mode, noise)


class SleepingEnv(VectorEnv):
    """Environment whose step sleeps `env.train.kwargs.seconds` for each slot, with constant observations and rewards."""

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs, self._seconds = num_envs, float(cfg.kwargs["seconds"])
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Implements `VectorEnv.reset`."""
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(self, actions: np.ndarray) -> Step:
        """Implements `VectorEnv.step`."""
        time.sleep(self.num_envs * self._seconds)
        no_ends = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 4), np.float32), np.zeros(self.num_envs, np.float32), no_ends, no_ends, {}
