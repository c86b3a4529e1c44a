"""Adam and AdamW on one flat parameter.

It takes few kernels per step, whatever the number of tensors, and avoids torch.optim: creating its first optimizer
imports torch's compiler, which costs seconds at every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.config.sections import OptimConfig

NAMES = ("adam", "adamw")
#: Elements that one fused kernel is given at most: well within what a 32-bit index reaches.
_PIECE = 1 << 30


@dataclass(frozen=True)
class AdamOptions:
    """Section `actor.optim`, in the form the optimizers need.

    Attributes:
        name: One of `NAMES`; weight decay is coupled in adam and decoupled in adamw.
        clip_grad: Largest gradient norm; 0 turns clipping off.
    """

    name: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float

    @classmethod
    def of(cls, optim: OptimConfig) -> AdamOptions:
        """Options from the section.

        Raises:
            ConfigError: The optimizer's name is unknown.
        """
        name = optim.name.lower()
        if name not in NAMES:
            raise ConfigError(f"actor.optim.name is {optim.name!r}; choose from {', '.join(NAMES)}")
        return cls(
            name,
            lr=optim.lr,
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
            clip_grad=0.0 if optim.clip_grad is None else optim.clip_grad,
        )

    def torch_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """torch's own optimizer, fused: the other variants make temporary tensors as large as what is trained."""
        kind = torch.optim.AdamW if self.name == "adamw" else torch.optim.Adam
        return kind(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


class FlatAdam:
    """Adam (Kingma & Ba 2015) with torch's conventions: eps outside the root, weight decay coupled or decoupled (AdamW).

    On an accelerator a step is torch's fused kernel, which reads and writes everything once and makes no temporary tensor; on
    the CPU it is five operations, one of which makes a tensor as large as the parameter. They differ by rounding.

    Args:
        parameter, gradient: Flat tensors of the same size; the parameter is updated in place.
        options: The optimizer's options.
    """

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor, options: AdamOptions) -> None:
        self.name, self.lr, self.eps = options.name, options.lr, options.eps
        self.beta1, self.beta2, self.weight_decay = options.beta1, options.beta2, options.weight_decay
        self.parameter, self.gradient = parameter, gradient
        self.steps = 0
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameter from the gradient."""
        self.steps += 1
        if self.fuses:
            self._fused_step()
            return
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

    @property
    def fuses(self) -> bool:
        """Whether a step is one kernel."""
        return self.parameter.device.type != "cpu"

    def _fused_step(self) -> None:
        update = torch._fused_adamw_ if self.name == "adamw" else torch._fused_adam_
        parameters, gradients, first, second = (
            list(one.split(_PIECE)) for one in (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        )
        taken = torch.full((), float(self.steps), device=self.parameter.device)
        update(
            parameters, gradients, first, second, [], [taken] * len(parameters), lr=self.lr, beta1=self.beta1,
            beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
