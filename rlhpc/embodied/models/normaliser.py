"""Running normalisation of observations within a policy, as SB3's VecNormalize and CleanRL's wrappers have it.

The statistics are buffers: they are saved, exported and sent to rollout ranks with the weights, so evaluations, recordings and
exports see observations as training does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: What normalised numbers are clipped to, and what keeps a constant one finite.
_CLIP, _EPS = 10.0, 1e-8


class ObservationNormaliser(nn.Module):
    """(x − mean) / √(var + 1e-8), within ±10. Before the first update x stays as it is.

    Args:
        width: Numbers of an observation.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("var", torch.ones(width, dtype=torch.float64))

    def forward(self, flat: Tensor) -> Tensor:
        """Observations `[B, width]`, normalised."""
        return ((flat - self.mean.float()) * (self.var.float() + _EPS).rsqrt()).clamp(-_CLIP, _CLIP)

    def moments(self, flat: Tensor, mask: Tensor) -> Tensor:
        """Returns sums over each slot, `[n, 1 + 2 · width]`: how many observations count, their offsets from the mean, and the
        squares of these.

        Args:
            flat: `[n, T, width]`.
            mask: Which count, bool `[n, T]`.
        """
        offsets = (flat.double() - self.mean) * mask[..., None]
        return torch.cat([mask.double().sum(1, keepdim=True), offsets.sum(1), (offsets * offsets).sum(1)], 1)

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Takes in observations (Chan et al. 1979).

        Args:
            moments: Of all slots of the run, in their order, so that the result does not depend on their division over ranks.
        """
        count, offset, square = moments.sum(0).split([1, len(self.mean), len(self.mean)])
        if not count.item():
            return
        total = self.count + count
        spread = self.var * self.count + square - offset * offset / total
        self.mean.copy_(self.mean + offset / total)
        self.var.copy_((spread / total).clamp(min=0))
        self.count.copy_(total[0])
