"""The local backend: replicated weights, gradients in one flat buffer, summed over the ranks in one all-reduce."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlhpc.runtime.errors import ConfigError

Reduce = Callable[[torch.Tensor], torch.Tensor]
_OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class LocalBackend:
    """Owns module and optimizer.

    Losses are sums over a rank's part divided by the *global* count, so the ranks' gradients add up to the gradient of
    the whole minibatch, whatever the split.

    Args:
        module: The policy, already on its device.
        optim: `actor.optim`: name, lr, adam_beta1, adam_beta2, adam_eps, weight_decay, clip_grad.
        reduce: Sums a tensor over the group, in place.
        ranks: World size of the group.
    """

    def __init__(self, module: nn.Module, optim: Any, reduce: Reduce = lambda t: t, ranks: int = 1) -> None:
        self.module, self.base_lr, self._reduce, self._ranks = module, float(optim.lr), reduce, ranks
        self.clip_grad = float(optim.clip_grad) if optim.clip_grad is not None else 0.0
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("actor.model has no trainable parameters")
        if len({(p.dtype, p.device) for p in self._parameters}) != 1:
            raise ConfigError("actor.training_backend=local needs all trainable parameters on one device, in one dtype")
        self.optimizer = make_optimizer(self._parameters, optim)
        first = self._parameters[0]
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device)
        self._views = [
            part.view_as(p)
            for part, p in zip(self._flat.split([p.numel() for p in self._parameters]), self._parameters, strict=True)
        ]
        self._attach()

    def _attach(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def zero_grad(self) -> None:
        """Clears the gradients; they stay views of the flat buffer."""
        self._flat.zero_()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps to come."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def optimizer_step(self) -> torch.Tensor:
        """Sums the gradients over the ranks, clips, updates.

        Returns:
            The global gradient norm before clipping, a tensor (reading it would wait for the device).
        """
        if self._ranks > 1:
            self._reduce(self._flat)
        norm = torch.linalg.vector_norm(self._flat)
        if self.clip_grad > 0:
            self._flat.mul_((self.clip_grad / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, by parameter name."""
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return {"parameters": names, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ConfigError: The state is of a model with other parameters.
        """
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if list(state["parameters"]) != names:
            raise ConfigError("actor.model: the checkpoint's optimizer belongs to a model with other parameters")
        kept = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(self.optimizer.param_groups, kept, strict=True):
            group.update({k: v for k, v in values.items() if k != "lr"})  # the configuration of this start counts
        self._attach()

    def offload(self) -> None:
        """Moves weights and optimizer state to the host, to give the accelerator to another role."""
        self._move(torch.device("cpu"))

    def reload(self, device: torch.device | str) -> None:
        """Inverse of `offload`."""
        self._move(torch.device(device))

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = tensor.data.to(device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    state[key] = value.to(device)
        self._flat = self._flat.to(device)
        sizes = [p.numel() for p in self._parameters]
        parts = zip(self._flat.split(sizes), self._parameters, strict=True)
        self._views = [part.view_as(p) for part, p in parts]
        self._attach()


def make_optimizer(parameters: list[nn.Parameter], optim: Any) -> torch.optim.Optimizer:
    """The optimizer that `actor.optim` describes, fused where torch has it.

    Raises:
        ConfigError: Unknown name.
    """
    name = str(optim.name).lower()
    if name not in _OPTIMIZERS:
        raise ConfigError(f"actor.optim.name is {optim.name!r}; choose from {', '.join(_OPTIMIZERS)}")
    kind = _OPTIMIZERS[name]
    extra: dict[str, Any] = {"fused": True} if "fused" in inspect.signature(kind).parameters else {}
    optimizer: torch.optim.Optimizer = kind(
        parameters,
        lr=float(optim.lr),
        betas=(float(optim.adam_beta1), float(optim.adam_beta2)),
        eps=float(optim.adam_eps),
        weight_decay=float(optim.weight_decay),
        **extra,
    )
    return optimizer
    return optimizer
