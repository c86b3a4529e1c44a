"""`actor.training_backend: local`: replicated weights, gradients in one flat float32 buffer, one all-reduce a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.checkpoint.state import load_state, load_tensors, save_state, save_tensors
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.adam import FlatAdam
from rlhpc.training.lm_base import LanguageModelBackend

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"


class LocalLMBackend(LanguageModelBackend):
    """Every rank holds all weights. Mixed precision computes with a bfloat16 copy of the float32 weights, and adds each
    micro-batch's gradient to the float32 buffer as soon as it is known."""

    name = "local"

    def __init__(self, cfg: Any, worker: Worker) -> None:
        super().__init__(cfg, worker)
        module = self.load_module().to(self.device)
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._sizes = [p.numel() for p in self._parameters]
        self._shapes = [p.shape for p in self._parameters]
        self._weights = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._gradients = torch.zeros_like(self._weights)
        self._compute = self._weights if self.dtype == torch.float32 else self._weights.to(self.dtype)
        self._attach()
        if self._compute is not self._weights:
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._adder(index))
        self.optimizer = FlatAdam(self._weights, self._gradients, cfg.actor.optim)
        self.prepare_reference()

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self._sizes), self._shapes, strict=True)]

    def _attach(self) -> None:
        """Makes parameters and gradients views of the flat buffers."""
        self._grad_views = self._split(self._gradients)
        parts = zip(self._parameters, self._split(self._compute), self._grad_views, strict=True)
        for parameter, weight, gradient in parts:
            parameter.grad = None  # a gradient of the old data would refuse the new
            parameter.data = weight
            if self._compute is self._weights:
                parameter.grad = gradient

    def _adder(self, index: int) -> Any:
        def add(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            self._grad_views[index].add_(parameter.grad)
            parameter.grad = None

        return add

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def _make_reference(self) -> nn.Module:
        reference: nn.Module = self.load_reference().to(self.device)
        return reference

    @torch.no_grad()
    def optimizer_step(self, lr: float) -> float:
        """Sums the gradients over the ranks, clips, updates, clears; the global norm before clipping. One that is not finite
        updates nothing."""
        if self.ranks > 1:
            self.worker.all_reduce(self._gradients)
        norm = torch.linalg.vector_norm(self._gradients)
        if not math.isfinite(found := float(norm)):
            self._gradients.zero_()
            return found
        if self.clip_grad > 0:
            self._gradients.mul_((self.clip_grad / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.lr = lr
        self.optimizer.step()
        if self._compute is not self._weights:
            self._compute.copy_(self._weights)
        self._gradients.zero_()
        return found

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in float32, and the optimizer's averages."""
        yield from zip(self._names, self._split(self._weights), strict=True)
        yield from (("optimizer.exp_avg", self.optimizer.exp_avg), ("optimizer.exp_avg_sq", self.optimizer.exp_avg_sq))

    def save(self, folder: Path) -> None:
        """Rank 0 writes the trained weights, in float32, and the optimizer."""
        folder = Path(folder)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(folder / MODEL, dict(zip(self._names, self._split(self._weights), strict=True)))
            optimizer = self.optimizer
            state = {"name": optimizer.name, "steps": optimizer.steps}
            save_state(folder / OPTIMIZER, {**state, "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq})
            self.write_identity(folder)
        self.worker.barrier()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restores weights and optimizer; options such as eps stay those of the configuration.

        Raises:
            CheckpointError: The checkpoint is of another model or backend.
        """
        folder = Path(folder)
        self.check_identity(folder)
        tensors = load_tensors(folder / MODEL)
        shapes = dict(zip(self._names, self._shapes, strict=True))
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise CheckpointError(f"{folder / MODEL} holds other parameters than actor.model.model_path and actor.lora")
        for name, view in zip(self._names, self._split(self._weights), strict=True):
            view.copy_(tensors[name])
        if self._compute is not self._weights:
            self._compute.copy_(self._weights)
        state = load_state(folder / OPTIMIZER)
        self.optimizer.exp_avg.copy_(state["exp_avg"])
        self.optimizer.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.optimizer.steps = int(state["steps"])
        self._gradients.zero_()

    def offload(self) -> None:
        """Moves everything to the host."""
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Inverse of `offload`."""
        self._move(self.device)

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        if self._weights.device.type == device.type:
            return
        mixed = self._compute is not self._weights
        self._weights, self._gradients = self._weights.to(device), self._gradients.to(device)
        self._compute = self._compute.to(device) if mixed else self._weights
        self._attach()
        trained = set(map(id, self._parameters))
        modules = [self.module] if self._reference is None else [self.module, self._reference]
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) not in trained:
                    tensor.data = tensor.data.to(device)
        self.optimizer.to(self._weights, self._gradients)
