"""Cart-poles with numbers that are not finite, and with pictures; named in configurations, importable by the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.envs.tensor_tasks import CartPole


class Spoiled(CartPole):
    """A slot whose cart is far to the right gets no number as its reward, and one far to the left shows none."""

    def reset(self, mask: Tensor, seeds: Tensor) -> Tensor:
        return self._shown(super().reset(mask, seeds))

    def step(self, actions: Tensor) -> Any:
        _, rewards, *rest = super().step(actions)
        return self._shown(self.state), torch.where(self.state[:, 0] > 0.13, torch.nan, rewards), *rest

    def _shown(self, state: Tensor) -> Tensor:
        return torch.where(state[:, :1] < -0.13, torch.inf, state)


class Pictures(CartPole):
    """Shows the state and a picture, in memory that it uses again at every step."""

    observation_space = spaces.Dict(
        {"rgb": spaces.Box(0, 255, (36, 36, 3), np.uint8), "state": CartPole.observation_space}
    )

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(num_envs, device)
        self._rgb = torch.zeros(num_envs, 36, 36, 3, dtype=torch.uint8, device=device)

    def reset(self, mask: Tensor, seeds: Tensor) -> Any:
        return self._both(super().reset(mask, seeds))

    def step(self, actions: Tensor) -> Any:
        _, *rest = super().step(actions)
        return self._both(self.state), *rest

    def _both(self, state: Tensor) -> Any:
        self._rgb.copy_((state[:, :3, None, None].transpose(1, 3) * 40 + 128).byte())
        return {"rgb": self._rgb, "state": state}
