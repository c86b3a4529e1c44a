"""A flow that ends in a chunk which agrees with actions that are decided already, as real-time chunking needs it (Black,
Galliker and Levine 2025, arXiv:2506.07339).

Of H actions that a policy predicts at once, those of the chunk before may overlap the first. On the way of the flow from noise
(t = 1) to actions (t = 0), the velocity is corrected towards them: with x̂ = x − t·v, the actions that it leads to,

    v ← v − min(β, t/(1 − t) · (t² + (1 − t)²)/t²) · (W·(Y − x̂))ᵀ ∂x̂/∂x,

Y being the actions of the chunk before, and W how much each counts. Times here run as in `rlhpc.embodied.models.flow`, so t is
the paper's 1 − τ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Velocity `[B, chunk, dim]` of states `[B, chunk, dim]` at times `[B]`.
Velocity = Callable[[Tensor, Tensor], Tensor]


def overlap_weights(horizon: int, executed: int, delay: int) -> Tensor:
    """How much each action of the chunk before counts, `[horizon]` (equation 5 of the paper).

    Args:
        horizon: H, actions of a chunk.
        executed: s, actions that are played from one chunk to the next: the last s have none in the chunk before.
        delay: d, actions that will have been played before the chunk is there: these count fully, later ones less and less.
    """
    weights = torch.zeros(horizon)
    weights[:delay] = 1.0
    for i in range(delay, horizon - executed):
        part = (horizon - executed - i) / (horizon - executed - delay + 1)
        weights[i] = part * math.expm1(part) / math.expm1(1.0)
    return weights


@dataclass(frozen=True)
class Guide:
    """What a chunk should agree with.

    Attributes:
        wanted: Actions as the flow has them, `[B, ...]` like its states.
        weights: How much each counts, of a form that broadcasts with `wanted`.
        most: β, the largest weight of the correction.
    """

    wanted: Tensor
    weights: Tensor
    most: float

    def __call__(self, velocity: Velocity) -> Velocity:
        """The corrected velocity."""

        def corrected(x: Tensor, t: Tensor) -> Tensor:
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                v = velocity(given, t)
                end = given - t[:, None, None] * v
                error = ((self.wanted - end) * self.weights).detach()
                (pull,) = torch.autograd.grad(end, given, error)
            return v.detach() - self._weight(t)[:, None, None] * pull

        return corrected

    def _weight(self, t: Tensor) -> Tensor:
        return (((1 - t) ** 2 + t**2) / (t * (1 - t))).clamp(max=self.most)  # infinite at t = 1
