"""Dynamic loss scale of training in float16 (Micikevicius et al. 2018), by the rule of `torch.amp.GradScaler`.

The smallest float16 number is 6e-8, so small gradients would be 0. A backward pass therefore starts from the loss times a
scale, and gradients are divided by it before they are clipped. A step whose gradient overflows is skipped, and the scale is
halved; after many steps without an overflow, it is doubled.

`torch.amp.GradScaler` detects overflows of one rank's gradients alone. Backends of rlhpc skip a step by the gradient norm over
all ranks, which is not finite if any rank's gradient is not, so all ranks have the same scale without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from rlhpc.config.sections import GradScalerConfig

#: Factors by which the scale grows and falls.
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
#: Smallest scale. A gradient that overflows with it does so by itself.
MIN_SCALE = 1.0


class LossScaler:
    """Scale of the loss on one rank.

    Args:
        options: Initial scale and growth interval.
        device: Device of the losses.

    Attributes:
        overflowed: Whether the last step was skipped because of the scale, which is now smaller.
    """

    def __init__(self, options: GradScalerConfig, device: torch.device) -> None:
        # A tensor that never moves, because recorded passes (`captured_passes`) read it at each replay.
        self._scale = torch.tensor(float(options.init_scale), device=device)
        self._value = float(options.init_scale)
        self._growth_interval = options.growth_interval
        self._num_finite = 0
        self.overflowed = False

    @property
    def scale(self) -> float:
        """Factor of the next losses."""
        return self._value

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss times the scale."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divides gradients by the scale, in place."""
        for gradient in gradients:
            gradient.mul_(1.0 / self._value)

    def update(self, is_finite: bool) -> None:
        """Adapts the scale after a step.

        Args:
            is_finite: Whether the gradient norm over all ranks was finite, so that the step was taken.
        """
        self.overflowed = not is_finite and self._value > MIN_SCALE
        if not is_finite:
            self._num_finite = 0
            self._set(max(self._value * BACKOFF_FACTOR, MIN_SCALE))
            return
        self._num_finite += 1
        if self._num_finite >= self._growth_interval:
            self._num_finite = 0
            grown_scale = self._value * GROWTH_FACTOR
            if grown_scale <= torch.finfo(torch.float32).max:
                self._set(grown_scale)

    def _set(self, scale: float) -> None:
        self._value = scale
        self._scale.fill_(scale)

    def state(self) -> dict[str, Any]:
        """Returns the state of a checkpoint, as JSON values."""
        return {"scale": self._value, "growth_tracker": self._num_finite}

    def restore(self, state: Any) -> None:
        """Restores the state of a checkpoint; a checkpoint of another dtype has none, and the scale starts anew.

        Raises:
            CheckpointError: The state is damaged.
        """
        if state is None:
            return
        try:
            scale, num_finite = float(state["scale"]), int(state["growth_tracker"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the loss scale of the checkpoint cannot be read ({error})") from error
        if not (math.isfinite(scale) and scale > 0 and num_finite >= 0):
            raise CheckpointError(f"the loss scale of the checkpoint is {scale} after {num_finite} steps")
        self._num_finite = num_finite
        self._set(scale)
