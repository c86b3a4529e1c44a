"""Action distributions written out: no torch.distributions in the hot path, noise given from outside."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)


class CategoricalHead(nn.Module):
    """Discrete and MultiDiscrete actions: independent categoricals over slices of the logits.

    Actions are `[B, 1, d]` int64, d the number of components.
    """

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes, self.inputs = sizes, sum(sizes)

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise `[*shape, sum(sizes)]`: argmax(logits + noise) is a sample (Gumbel-max)."""
        uniform = torch.rand((*shape, self.inputs), generator=generator).clamp_(min=1e-20)
        return -torch.log((-torch.log(uniform)).clamp_(min=1e-20))

    def act(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions `[B, 1, d]` and their log-probabilities `[B]`; without noise the most likely one."""
        if len(self.sizes) == 1:
            logp = torch.log_softmax(logits, -1)
            index = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
            return index.unsqueeze(1), logp.gather(-1, index).squeeze(-1)
        actions, logprobs, at = [], torch.zeros(logits.shape[0], device=logits.device), 0
        for size in self.sizes:
            part = logits[:, at : at + size]
            index = (part if noise is None else part + noise[:, at : at + size]).argmax(-1, keepdim=True)
            logprobs = logprobs + torch.log_softmax(part, -1).gather(-1, index).squeeze(-1)
            actions.append(index)
            at += size
        return torch.cat(actions, -1).unsqueeze(1), logprobs

    def evaluate(self, logits: Tensor, actions: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities `[B]` and entropy `[B]` of given actions."""
        flat, at = actions.reshape(actions.shape[0], -1), 0
        logprobs: Any = 0.0
        total: Any = 0.0
        for i, size in enumerate(self.sizes):
            logp = torch.log_softmax(logits[:, at : at + size], -1)
            logprobs = logprobs + logp.gather(-1, flat[:, i : i + 1]).squeeze(-1)
            if entropy:
                total = total - (logp.exp() * logp).sum(-1)
            at += size
        return logprobs, total if entropy else None


class GaussianHead(nn.Module):
    """Box actions: a diagonal Gaussian with a state-independent log-std (as CleanRL). Actions are `[B, 1, d]` float32.

    The environment clips them to its bounds; the log-probability is that of the unclipped action.
    """

    def __init__(self, dim: int, log_std_init: float) -> None:
        super().__init__()
        self.inputs = dim
        self.log_std = nn.Parameter(torch.full((dim,), float(log_std_init)))

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal `[*shape, d]`."""
        return torch.randn((*shape, self.inputs), generator=generator)

    def act(self, mean: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions `[B, 1, d]` and their log-probabilities `[B]`; without noise the mean."""
        noise = torch.zeros_like(mean) if noise is None else noise
        actions = mean + self.log_std.exp() * noise
        logprobs = (-0.5 * noise**2 - self.log_std - 0.5 * _LOG_2PI).sum(-1)
        return actions.unsqueeze(1), logprobs

    def evaluate(self, mean: Tensor, actions: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities `[B]` and entropy `[B]` of given actions."""
        noise = (actions.reshape(mean.shape) - mean) * (-self.log_std).exp()
        logprobs = (-0.5 * noise**2 - self.log_std - 0.5 * _LOG_2PI).sum(-1)
        total = (self.log_std + 0.5 + 0.5 * _LOG_2PI).sum().expand(mean.shape[0]) if entropy else None
        return logprobs, total


def make_head(space: Any, log_std_init: float) -> CategoricalHead | GaussianHead:
    """The head for an action space.

    Raises:
        ConfigError: The space is not supported.
    """
    if isinstance(space, spaces.Discrete):
        return CategoricalHead([int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        return CategoricalHead([int(n) for n in space.nvec.reshape(-1)])
    if isinstance(space, spaces.MultiBinary):
        return CategoricalHead([2] * int(torch.tensor(space.shape).prod()))
    if isinstance(space, spaces.Box):
        return GaussianHead(int(torch.tensor(space.shape).prod()), log_std_init)
    raise ConfigError(f"action space {space} is not supported; supported: Discrete, MultiDiscrete, MultiBinary, Box")
