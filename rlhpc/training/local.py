"""The local backend: replicated weights, gradients in one flat buffer, summed over the ranks in one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlhpc.algorithms.finite import bad_tensors
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.training.adam import FlatAdam

Reduce = Callable[[torch.Tensor], torch.Tensor]


class LocalBackend:
    """Owns module and optimizer.

    Losses are sums over a rank's part divided by the *global* count, so the ranks' gradients add up to the gradient of
    the whole minibatch, whatever the split. The module's trainable parameters and their gradients become views of two
    flat buffers: moving the module afterwards is this class's business.

    Args:
        module: The policy, already on its device.
        optim: `actor.optim`: name, lr, adam_beta1, adam_beta2, adam_eps, weight_decay, clip_grad.
        reduce: Sums a tensor over the group, in place.
        ranks: World size of the group.
        look: Reads each gradient norm before the update also where that waits for the device.
    """

    def __init__(
        self, module: nn.Module, optim: Any, reduce: Reduce = lambda t: t, ranks: int = 1, *, look: bool = False
    ) -> None:
        self.module, self.base_lr, self._reduce, self._ranks = module, float(optim.lr), reduce, ranks
        self._look = look
        self.clip_grad = float(optim.clip_grad) if optim.clip_grad is not None else 0.0
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        if not named:
            raise ConfigError("actor.model has no trainable parameters")
        if len({(p.dtype, p.device) for p in self._parameters}) != 1:
            raise ConfigError("actor.training_backend=local needs all trainable parameters on one device, in one dtype")
        self._sizes = [p.numel() for p in self._parameters]
        self._weights = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._gradients = torch.zeros_like(self._weights)
        self._attach()
        self.optimizer = FlatAdam(self._weights, self._gradients, optim)

    def _attach(self) -> None:
        parts = zip(self._parameters, self._split(self._weights), self._split(self._gradients), strict=True)
        for parameter, weight, gradient in parts:
            parameter.grad = None  # a gradient of the old data would refuse the new
            parameter.data = weight
            parameter.grad = gradient

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(p.shape) for part, p in zip(flat.split(self._sizes), self._parameters, strict=True)]

    @property
    def weights(self) -> torch.Tensor:
        """All trainable parameters, flat; a view."""
        return self._weights

    def zero_grad(self) -> None:
        """Clears the gradients."""
        self._gradients.zero_()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps to come."""
        self.optimizer.lr = lr

    @torch.no_grad()
    def optimizer_step(self) -> torch.Tensor:
        """Sums the gradients over the ranks, clips, updates; nothing is updated where `refuses` says so of the norm.

        Returns:
            The global gradient norm before clipping, a tensor (reading it would wait for the device).
        """
        if self._ranks > 1:
            self._reduce(self._gradients)
        norm = torch.linalg.vector_norm(self._gradients)
        if self.refuses(norm):
            return norm
        if self.clip_grad > 0:
            self._gradients.mul_((self.clip_grad / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()
        return norm

    def refuses(self, norm: torch.Tensor) -> bool:
        """Whether a step with this gradient norm is not taken, as it is not finite. On an accelerator that is only known where
        the backend was told to look: else the caller reads the norms at the end of its update, before any weight leaves."""
        return (self._look or norm.device.type == "cpu") and not math.isfinite(norm)

    def bad_gradients(self) -> list[str]:
        """Parameters whose gradient, summed over the ranks, is not finite."""
        return bad_tensors(zip(self._names, self._split(self._gradients), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, by parameter name."""
        averages = zip(
            self._names, self._split(self.optimizer.exp_avg), self._split(self.optimizer.exp_avg_sq), strict=True
        )
        state = {name: {"exp_avg": first.clone(), "exp_avg_sq": second.clone()} for name, first, second in averages}
        return {"optimizer": self.optimizer.name, "steps": self.optimizer.steps, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Options such as the learning rate stay those of the configuration.

        Raises:
            CheckpointError: The state is of a model with other parameters.
        """
        saved = state["state"]
        shapes = {name: tuple(p.shape) for name, p in zip(self._names, self._parameters, strict=True)}
        if {name: tuple(value["exp_avg"].shape) for name, value in saved.items()} != shapes:
            raise CheckpointError("actor.model: the checkpoint's optimizer belongs to a model with other parameters")
        for kind, flat in (("exp_avg", self.optimizer.exp_avg), ("exp_avg_sq", self.optimizer.exp_avg_sq)):
            flat.copy_(torch.cat([saved[name][kind].reshape(-1) for name in self._names]))
        self.optimizer.steps = int(state["steps"])

    def offload(self) -> None:
        """Moves weights and optimizer state to the host, to give the accelerator to another role."""
        self.reload("cpu")

    @torch.no_grad()
    def reload(self, device: torch.device | str) -> None:
        """Inverse of `offload`."""
        self._weights, self._gradients = self._weights.to(device), self._gradients.to(device)
        self._attach()
        trained = set(map(id, self._parameters))
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if id(tensor) not in trained:
                tensor.data = tensor.data.to(device)
        self.optimizer.to(self._weights, self._gradients)
