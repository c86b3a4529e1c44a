"""Batch renormalisation (Ioffe 2017), as CrossQ uses it (Bhatt et al. 2024), over the batches of all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.embodied.models.mlp import ACTIVATIONS
from rlhpc.training.flat_parameters import Reduce

#: As CrossQ's authors have them: fraction of the running statistics that a batch replaces, what is added to variances, batches
#: that are normalised by their own statistics alone, bounds of the correction.
MOMENTUM, EPS, WARM_UP, R_MAX, D_MAX = 0.01, 1e-3, 100_000, 3.0, 5.0


class _Sum(torch.autograd.Function):
    """The sum over the ranks, which each rank's loss depends on."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return reduce(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.reduce(gradient.clone()), None


class BatchRenorm(nn.Module):
    """Normalises rows `[B, width]`: while training by the batch's mean and variance, which after `WARM_UP` batches are
    corrected towards the running ones; otherwise by these.

    Attributes:
        reduce: Sums a tensor over the ranks, in place; None where there is one.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.reduce: Reduce | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Normalised rows."""
        if not self.training:
            return (rows - self.mean) * (self.variance + EPS).rsqrt() * self.weight + self.bias
        mean, variance = self._statistics(rows)
        normal = (rows - mean) * (variance + EPS).rsqrt()
        if self.batches >= WARM_UP:
            normal = self._corrected(normal, mean.detach(), variance.detach())
        with torch.no_grad():
            self.mean.lerp_(mean, MOMENTUM)
            self.variance.lerp_(variance, MOMENTUM)
            self.batches += 1
        return normal * self.weight + self.bias

    def _corrected(self, normal: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Rows normalised by a batch's statistics, towards what the running ones would have made of them."""
        running = (self.variance + EPS).sqrt()
        stretch = ((variance + EPS).sqrt() / running).clamp(1 / R_MAX, R_MAX)
        return normal * stretch + ((mean - self.mean) / running).clamp(-D_MAX, D_MAX)

    def _statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over the rows of all ranks."""
        if self.reduce is None:
            variance, mean = torch.var_mean(rows, 0, correction=0)
            return mean, variance
        counted = torch.cat((rows.sum(0), rows.new_full((1,), rows.shape[0])))
        total: Tensor = _Sum.apply(counted, self.reduce)
        mean = total[:-1] / total[-1]
        squares: Tensor = _Sum.apply((rows - mean).square().sum(0), self.reduce)
        return mean, squares / total[-1].detach()


def renormed(sizes: list[int], outputs: int, activation: str) -> nn.Sequential:
    """A perceptron that normalises what each of its layers is given."""
    layers: list[nn.Module] = []
    for inputs, hidden in itertools.pairwise(sizes):
        layers += [BatchRenorm(inputs), nn.Linear(inputs, hidden), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, BatchRenorm(sizes[-1]), nn.Linear(sizes[-1], outputs))


class NormedTwinCritic(nn.Module):
    """Two Q-networks that normalise.

    Args:
        inputs: Width of observation and action.
        hidden: Widths of the hidden layers.
        activation: Its name.
    """

    def __init__(self, inputs: int, hidden: list[int], activation: str) -> None:
        super().__init__()
        self.one, self.two = renormed([inputs, *hidden], 1, activation), renormed([inputs, *hidden], 1, activation)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values `[2, B]` of flat observations `[B, D]` and actions `[B, d]`."""
        rows = torch.cat((obs, actions), -1)
        return torch.stack((self.one(rows).squeeze(-1), self.two(rows).squeeze(-1)))
