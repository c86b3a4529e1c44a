"""`actor.training_backend: fsdp`: parameters, gradients and optimizer spread over the ranks by PyTorch's FSDP2.

Each transformer layer is gathered for its own forward and backward pass and freed after it; embeddings and head form the
root. The optimizer works on the local shards, which are plain tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlhpc.runtime.durable import write_durably
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.training.dcp import load_sharded, save_sharded
from rlhpc.training.lm import TokenBatch, TokenScores
from rlhpc.training.lm_base import LanguageModelBackend

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

SHARDS, OPTIMIZER = "shards", "optimizer.json"
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpBackend(LanguageModelBackend):
    """FSDP averages gradients by default; here it sums them, as the losses are parts of a global one."""

    name = "fsdp"

    def __init__(self, cfg: Any, worker: Worker) -> None:
        super().__init__(cfg, worker)
        self.options = cfg.actor.fsdp
        self.mesh = self._mesh()
        #: Where a rank's shards lie between uses.
        self.home = torch.device("cpu") if self.options.cpu_offload else self.device
        mixed = self.dtype != torch.float32
        precision = MixedPrecisionPolicy(self.dtype, torch.float32) if mixed else MixedPrecisionPolicy()
        self.module = self._sharded(self.load_module, precision, bool(self.options.reshard_after_forward))
        self._trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        self._moments = {
            name: {kind: torch.zeros_like(p.to_local()) for kind in _MOMENTS} for name, p in self._parameters()
        }
        self._steps = 0
        self._bind()
        self.prepare_reference()

    # -- setting up -----------------------------------------------------------------------------------------------

    def _mesh(self) -> DeviceMesh:
        self.worker.init_process_group()
        if not dist.is_initialized():  # a single rank has no group, and FSDP wants one all the same
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backends = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (self.ranks,))

    def _sharded(
        self, build: Callable[..., nn.Module], precision: MixedPrecisionPolicy, reshard: bool, *, root: bool = False
    ) -> nn.Module:
        """Rank 0 reads the weights; the others make an empty model and get their parts, tensor by tensor.

        Args:
            build: `load_module` or `load_reference`.
            precision: Dtypes of computation and reduction.
            reshard: Frees a layer's gathered weights after its forward pass.
            root: Frees those of embeddings and head, too; a backward pass would want them at once.
        """
        module = build(empty=self.rank != 0)
        source = {name: p.detach() for name, p in module.named_parameters()} if self.rank == 0 else {}
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()} if self.rank == 0 else {}
        kinds = set(getattr(module, "_no_split_modules", None) or ())
        layers = [layer for layer in module.modules() if type(layer).__name__ in kinds]
        offload = (
            CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.options.cpu_offload else OffloadPolicy()
        )
        for part in [*layers, module]:
            frees = reshard and (part is not module or root)
            fully_shard(part, mesh=self.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=frees)
        if self.rank != 0:
            module.to_empty(device=self.home)
        self._distribute(module, source, buffers)
        for wrapped in _parts(module):
            wrapped.set_force_sum_reduction_for_comms(True)
            wrapped.set_gradient_divide_factor(1.0)
        return module

    @torch.no_grad()
    def _distribute(self, module: nn.Module, source: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        """Gives every rank its rows of rank 0's parameters, and all of its buffers (a position table is computed when a
        model is built, and an empty model's is not)."""
        if self.ranks > 1:
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, DTensor)
                whole = self._from_first(source.pop(name, None), parameter)
                rows = whole.chunk(self.ranks)
                if self.rank < len(rows):
                    parameter.to_local().copy_(rows[self.rank])
        for name, buffer in module.named_buffers():
            value = self._from_first(buffers.get(name), buffer) if self.ranks > 1 else buffers[name]
            holder, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(holder), attribute, value.to(self.device))

    def _from_first(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.to(self.device).contiguous()
        dist.broadcast(value, 0)
        return value

    def _make_reference(self) -> nn.Module:
        return self._sharded(self.load_reference, MixedPrecisionPolicy(), True, root=True)

    def _parameters(self) -> Iterator[tuple[str, DTensor]]:
        """Trainable parameters, in the order of the model."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                yield name, parameter

    def _bind(self) -> None:
        """Builds the optimizer over the local shards where they lie now. A rank may hold no row of a small tensor."""
        optim = self.cfg.actor.optim
        if str(optim.name).lower() not in _OPTIMIZERS:
            raise ConfigError(f"actor.optim.name is {optim.name!r}; choose from {', '.join(_OPTIMIZERS)}")
        held = {name: p for name, p in self._parameters() if p.to_local().numel()}
        self._local = {name: nn.Parameter(p.to_local().detach()) for name, p in held.items()}
        # A rank without a single row still steps: over a tensor of its own.
        parameters = list(self._local.values()) or [nn.Parameter(torch.zeros(1, device=self.home))]
        self.optimizer = _OPTIMIZERS[str(optim.name).lower()](
            parameters,
            lr=float(optim.lr),
            betas=(float(optim.adam_beta1), float(optim.adam_beta2)),
            eps=float(optim.adam_eps),
            weight_decay=float(optim.weight_decay),
            fused=True,
        )
        for name, local in self._local.items():
            step = torch.full((), float(self._steps), device=local.device)
            self.optimizer.state[local] = {"step": step, **self._moments[name]}

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def parameters_trained(self) -> int:
        """Trainable parameters, over all ranks."""
        return self._trained

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        """Scores without gradients, in evaluation mode."""
        scores = super().forward(batch, temperature=temperature, entropy=entropy)
        self._reshard()  # what stays gathered would be stale after the next update
        return scores

    def _reshard(self) -> None:
        for part in _parts(self.module):
            part.reshard()

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        assert isinstance(self.module, FSDPModule)
        self.module.set_is_last_backward(last)
        loss.backward()

    def optimizer_step(self, lr: float) -> float:
        """Clips by the norm over all ranks, updates, clears; the norm before clipping. One that is not finite updates
        nothing."""
        self._reshard()
        for name, parameter in self._parameters():
            if name in self._local:
                gradient = parameter.grad
                assert gradient is None or isinstance(gradient, DTensor)
                self._local[name].grad = None if gradient is None else gradient.to_local()
            parameter.grad = None
        locals_ = list(self._local.values())
        gradients = [p.grad for p in locals_ if p.grad is not None]
        norm = get_total_norm(gradients) if gradients else torch.zeros((), device=self.home)
        norm = self.worker.all_reduce(norm.to(self.device).square()).sqrt()
        if not math.isfinite(found := float(norm)):
            self.optimizer.zero_grad()
            return found
        if self.clip_grad > 0:
            clip_grads_with_norm_(locals_, self.clip_grad, norm.to(self.home))
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        return found

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # Gathering is the accelerator's work also where the shards lie on the host.
        moved: Any = tensor.to(self.device) if tensor.device.type != self.device.type else tensor
        whole: torch.Tensor = moved.full_tensor()
        return whole

    def _state(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds, as sharded tensors that share the memory of the live ones."""
        self._reshard()
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters():
            state[f"model.{name}"] = parameter.detach()
            for kind, local in self._moments[name].items():
                # `from_local` would copy a shard on the host to the mesh's device: what is loaded into it is then lost.
                spec = parameter._spec
                state[f"{kind}.{name}"] = DTensor(local, spec, requires_grad=False)
        return state

    def save(self, folder: Path) -> None:
        """Each rank writes its shards as safetensors, in the layout of PyTorch's distributed checkpoints."""
        folder = Path(folder)
        save_sharded(folder / SHARDS, self._state(), self.worker)
        if self.rank == 0:
            state = {"name": str(self.cfg.actor.optim.name).lower(), "steps": self._steps}
            write_durably(folder / OPTIMIZER, json.dumps(state).encode() + b"\n")
            self.write_identity(folder)
        self._empty_cache()  # an engine may be about to take all that is free
        self.worker.barrier()

    def load(self, folder: Path) -> None:
        """Restores weights and optimizer, on any world size; options such as eps stay those of the configuration.

        Raises:
            CheckpointError: The checkpoint is of another model or backend, or cannot be read.
        """
        folder = Path(folder)
        self.check_identity(folder)
        load_sharded(folder / SHARDS, self._state())
        try:
            self._steps = int(json.loads((folder / OPTIMIZER).read_text())["steps"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / OPTIMIZER}: cannot be read ({error})") from error
        for name, parameter in self._parameters():
            parameter.grad = None
            if name in self._local:
                self.optimizer.state[self._local[name]]["step"].fill_(self._steps)

    def offload(self) -> None:
        """Moves shards and optimizer to the host; with `actor.fsdp.cpu_offload` they are there."""
        self._move(torch.device("cpu"))
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Inverse of `offload`."""
        self._move(self.home)

    def _move(self, device: torch.device) -> None:
        if self.home.type == "cpu":
            return
        for module in (self.module, self._reference):
            if module is not None:
                module.to(device)
        self._moments = {
            name: {kind: moment.to(device) for kind, moment in moments.items()}
            for name, moments in self._moments.items()
        }
        self._bind()


def _parts(module: nn.Module) -> list[FSDPModule]:
    parts: Iterator[Any] = module.modules()
    return [part for part in parts if isinstance(part, FSDPModule)]
