"""Adam and AdamW on one flat parameter.

Five kernels a step whatever the number of tensors, and no torch.optim: creating its first optimizer imports torch's
compiler, which takes seconds of every start.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.runtime.errors import ConfigError

NAMES = ("adam", "adamw")


class FlatAdam:
    """Adam (Kingma & Ba 2015) with torch's conventions: eps outside the root, weight decay coupled, or not (AdamW).

    Args:
        parameter, gradient: Flat, of one size; the parameter is updated in place.
        optim: `actor.optim`: name, lr, adam_beta1, adam_beta2, adam_eps, weight_decay.

    Raises:
        ConfigError: Unknown name.
    """

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor, optim: Any) -> None:
        self.name = str(optim.name).lower()
        if self.name not in NAMES:
            raise ConfigError(f"actor.optim.name is {optim.name!r}; choose from {', '.join(NAMES)}")
        self.lr, self.eps = float(optim.lr), float(optim.adam_eps)
        self.beta1, self.beta2 = float(optim.adam_beta1), float(optim.adam_beta2)
        self.weight_decay = float(optim.weight_decay)
        self.parameter, self.gradient = parameter, gradient
        self.steps = 0
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradient."""
        self.steps += 1
        gradient = self.gradient
        if self.weight_decay and self.name == "adamw":
            self.parameter.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient.add(self.parameter, alpha=self.weight_decay)
        self.exp_avg.lerp_(gradient, 1 - self.beta1)
        self.exp_avg_sq.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        first, second = 1 - self.beta1**self.steps, 1 - self.beta2**self.steps
        denominator = self.exp_avg_sq.sqrt().mul_(second**-0.5).add_(self.eps)
        self.parameter.addcdiv_(self.exp_avg, denominator, value=-self.lr / first)

    def to(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Goes on with the same values on another device."""
        self.parameter, self.gradient = parameter, gradient
        self.exp_avg, self.exp_avg_sq = self.exp_avg.to(parameter.device), self.exp_avg_sq.to(parameter.device)
