"""FSDP2 backend (`actor.training_backend: fsdp`): parameters, gradients and optimizer state are sharded over a device mesh.

Each transformer layer is gathered for its forward and backward pass and freed afterwards. A language model's embeddings and LM
head are gathered in the same way; the remaining parameters form the root. Tensor parallelism splits layers further within a
model-parallel block (`tensor_parallel`). The optimizer works on the local shards, which are plain tensors.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlhpc.algorithms.nonfinite import bad_tensors
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.trace_recorder import span
from rlhpc.training.backend import (
    Batch,
    Blueprint,
    Named,
    OffloadingBackend,
    Outputs,
    TrainingRanks,
    tensors_in,
    tensors_of,
)
from rlhpc.training.distributed_checkpoint import load_sharded, save_sharded
from rlhpc.training.lora import plain
from rlhpc.training.mesh import Mesh, form_single_rank_group, ranks_per_shard
from rlhpc.training.parameter_names import require_same_shapes
from rlhpc.training.safetensors_reader import Slices
from rlhpc.training.safetensors_writer import find_missing, load_shards
from rlhpc.training.shard_layout import HeldSlice, copy_full, local_part, pieces
from rlhpc.training.tensor_parallel import make_buffers

if TYPE_CHECKING:
    from rlhpc.training.backend import ActorSection

log = logging.getLogger(__name__)

SHARDS, OPTIMIZER = "shards", "optimizer.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Collectives of whole tensors, by their names from torch 2.13 on, or before.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class FsdpBackend(OffloadingBackend):
    """FSDP2 backend. Gradients are summed, not averaged, because each rank's loss is a part of the global loss."""

    name = "fsdp"
    divides = True
    scales_loss = True

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> None:
        super().__init__(blueprint, actor, worker)
        # Losses use the outputs of forward passes and change no tensor in place.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.options = actor.fsdp
        worker.init_process_group()
        form_single_rank_group(self.device.type)
        self.mesh: Mesh = Mesh(self.sizes, self.rank, self.device.type)
        #: Device of a rank's shards between uses.
        self.shard_device = torch.device("cpu") if self.options.cpu_offload else self.device
        is_mixed = self.dtype != torch.float32
        precision = MixedPrecisionPolicy(self.dtype, torch.float32) if is_mixed else MixedPrecisionPolicy()
        self.module = self._build_sharded(blueprint.build, precision, bool(self.options.reshard_after_forward))
        self._num_trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        self._copies = {name: ranks_per_shard(p, self.ranks) for name, p in self._parameters()}
        self._moments = {
            name: {moment: torch.zeros_like(p.to_local()) for moment in _MOMENTS} for name, p in self._parameters()
        }
        #: Number of optimizer steps of each parameter; a parameter without a gradient is not updated.
        self._steps = {name: 0 for name, _ in self._parameters()}
        self._bad_gradients: list[str] = []
        self.require_values()
        self._build_optimizer()
        self.prepare_reference()

    # -- setting up -----------------------------------------------------------------------------------------------

    def _build_sharded(
        self, build: Callable[..., nn.Module], precision: MixedPrecisionPolicy, reshards: bool, *, is_root: bool = False
    ) -> nn.Module:
        """Builds a sharded module. Each rank reads its slices of the weights from the files if possible. Otherwise rank 0
        builds the model and broadcasts it tensor by tensor.

        Args:
            build: `Blueprint.build` or `build_reference`.
            precision: Dtypes of computation and reduction.
            reshards: Free a layer's gathered weights after its forward pass.
            is_root: Also free the gathered weights of the root and the last layer, although a backward pass needs them first.
        """
        blueprint = self.blueprint
        module, slices, buffers = self._build_empty(build)
        source = dict[str, torch.Tensor]()
        if slices is None:
            module = build(empty=self.rank != 0)
            if self.rank == 0:
                source = {name: p.detach() for name, p in module.named_parameters()}
                buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        assert module is not None
        if scalars := [name for name, p in module.named_parameters() if not p.dim()]:
            raise ConfigError(
                f"actor.training_backend=fsdp cuts weights into rows, and {', '.join(scalars)} is a single number; give it a "
                "dimension, or choose local or deepspeed"
            )
        blueprint.divide(module, self.mesh)
        offload = (
            CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.options.cpu_offload else OffloadPolicy()
        )
        if self.mesh.expert_fsdp is not None:
            for submodule in blueprint.expert_modules(module):
                fully_shard(
                    submodule,
                    mesh=self.mesh.expert_fsdp,
                    mp_policy=precision,
                    offload_policy=offload,
                    reshard_after_forward=reshards,
                )
        layers = blueprint.layers(module)
        last_layer, modules_without_cast = blueprint.last_layer(module), blueprint.modules_without_cast(module)
        for submodule in [*layers, module]:
            frees_weights = reshards and (is_root or (submodule is not module and submodule is not last_layer))
            policy = replace(precision, cast_forward_inputs=submodule not in modules_without_cast)
            fully_shard(
                submodule,
                mesh=self.mesh.fsdp,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=frees_weights,
            )
        if slices is not None or self.rank != 0:
            module.to_empty(device=self.shard_device)
        if slices is not None:
            self._fill_from_files(module, slices, buffers)
        else:
            self._distribute(module, source, buffers)
        for fsdp_module in _fsdp_modules(module):
            fsdp_module.set_force_sum_reduction_for_comms(True)
            fsdp_module.set_gradient_divide_factor(1.0)
            _trace_collectives(fsdp_module)
        return module

    def _build_empty(
        self, build: Callable[..., nn.Module]
    ) -> tuple[nn.Module | None, Slices | None, dict[str, torch.Tensor]]:
        """Returns a model on the meta device, a reader of its weights, and the buffers that no file contains; None for model
        and reader if rank 0 must read the weights.
        """
        slices = self.blueprint.slices()
        if not all(self.worker.all_gather_object(slices is not None)) or slices is None:
            return None, None, {}
        module = build(empty=True)
        missing_names = find_missing(module, slices, (name for name, _ in self.blueprint.created_tensors(module)))
        buffers, unknown_names = make_buffers(module)
        if names := [*missing_names, *unknown_names]:
            log.info("rank 0 reads the weights and sends the others theirs: there is no %s in the files", names[0])
            return None, None, {}
        return module, slices, buffers

    def _fill_from_files(self, module: nn.Module, slices: Slices, buffers: Mapping[str, torch.Tensor]) -> None:
        load_shards(
            module, self.mesh, slices, self.blueprint.created_tensors(module), f"{self.blueprint.key}.model.model_path"
        )
        for name, buffer in module.named_buffers():
            self._set_buffer(module, name, buffers.get(name, buffer))

    def _set_buffer(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        module_name, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(module_name), attribute, value.to(self.device))

    @torch.no_grad()
    def _distribute(self, module: nn.Module, source: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        """Fills every rank's shards from rank 0's parameters, and copies rank 0's buffers to all ranks. Buffers such as
        position tables are computed when a model is built, but not on the meta device.
        """
        if self.ranks > 1:
            for name, parameter in module.named_parameters():
                copy_full(parameter, self._broadcast_from_first(source.pop(name, None), parameter))
        for name, buffer in module.named_buffers():
            full_buffer = self._broadcast_from_first(buffers.get(name), buffer) if self.ranks > 1 else buffers[name]
            self._set_buffer(module, name, full_buffer)

    def _broadcast_from_first(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.to(self.device).contiguous()
        dist.broadcast(value, 0)
        return value

    def _make_reference(self) -> nn.Module:
        return self._build_sharded(self.blueprint.build_reference, MixedPrecisionPolicy(), True, is_root=True)

    def _parameters(self) -> Iterator[tuple[str, DTensor]]:
        """Yields the names and tensors of trainable parameters, in the model's order."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                yield name, parameter

    def _build_optimizer(self) -> None:
        """Builds the optimizer over the local shards on their current device. Empty shards of small tensors are omitted."""
        nonempty = {name: p for name, p in self._parameters() if p.to_local().numel()}
        self._local_shards = {name: nn.Parameter(p.to_local().detach()) for name, p in nonempty.items()}
        is_value = self.blueprint.is_value if self.optim.separates_values else lambda name: False
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, shard in self._local_shards.items():
            groups[is_value(name)].append(shard)
        # A rank with no elements at all still needs an optimizer, over a dummy tensor.
        if not self._local_shards:
            groups[0].append(nn.Parameter(torch.zeros(1, device=self.shard_device)))
        self.optimizer = self.optim.torch_optimizer([{"params": parameters} for parameters in groups])
        for name, shard in self._local_shards.items():
            step = torch.full((), float(self._steps[name]), device=shard.device)
            self.optimizer.state[shard] = {"step": step, **self._moments[name]}

    # -- interface of training backends ---------------------------------------------------------------------------

    @property
    def num_trained_parameters(self) -> int:
        """Number of trainable parameters, over all ranks."""
        return self._num_trained

    def evaluate(self, forward: Callable[[nn.Module, Batch], Outputs], batch: Batch) -> Outputs:
        """Returns `forward(forward_module, batch)`, run without gradients (`TrainingBackend.evaluate`)."""
        outputs = super().evaluate(forward, batch)
        self._reshard()  # weights that stay gathered would be stale after the next update
        return outputs

    def _reshard(self) -> None:
        for submodule in _fsdp_modules(self.module):
            submodule.reshard()

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        assert isinstance(self.module, FSDPModule)
        self.module.set_is_last_backward(is_last)
        if self.options.enable_gradient_accumulation:
            self.module.set_requires_gradient_sync(is_last)
        self._scaled(loss).backward()

    def _clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        self._bad_gradients = []

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Clips by the norm over all ranks, updates the weights, and clears gradients (`TrainingBackend.optimizer_step`)."""
        self._reshard()
        if self._warms_critic():
            for name, parameter in self._parameters():
                if not self.blueprint.is_value(name):
                    parameter.grad = None
        updated_names = [name for name, parameter in self._parameters() if parameter.grad is not None]
        for name, parameter in self._parameters():
            if name in self._local_shards:
                gradient = parameter.grad
                assert gradient is None or isinstance(gradient, DTensor)
                self._local_shards[name].grad = None if gradient is None else gradient.to_local()
            parameter.grad = None
        local_parameters = list(self._local_shards.values())
        if self.scaler is not None:
            self.scaler.unscale(p.grad for p in local_parameters if p.grad is not None)
        norm = self.worker.all_reduce(self._squared_norm().to(self.device)).sqrt()
        host_norm = norm.cpu()
        self._update_scale(host_norm)
        if self.is_step_skipped(host_norm):
            self._bad_gradients = bad_tensors(
                (name, p.grad) for name, p in self._local_shards.items() if p.grad is not None
            )
            self.optimizer.zero_grad()
            return host_norm
        if self.optim.clip_grad > 0:
            clip_grads_with_norm_(local_parameters, self.optim.clip_grad, norm.to(self.shard_device))
        for group, group_lr in zip(self.optimizer.param_groups, self.optim.group_lrs(lr), strict=True):
            group["lr"] = group_lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name in updated_names:
            self._steps[name] += 1
        return host_norm

    def _warms_critic(self) -> bool:
        """Returns whether the next step updates the value parameters alone."""
        num_steps = max((steps for name, steps in self._steps.items() if self.blueprint.is_value(name)), default=0)
        return self.optim.separates_values and num_steps < self.optim.critic_warmup_steps

    def _squared_norm(self) -> torch.Tensor:
        """Returns this rank's part of the squared gradient norm. A shard that n ranks hold counts 1/n on each of
        them. torch cannot compute this norm, because the parameters are on meshes of different dimensions.
        """
        squared_norm = torch.zeros((), device=self.shard_device)
        for num_copies in sorted(set(self._copies.values())):
            gradients = [
                p.grad
                for name, p in self._local_shards.items()
                if p.grad is not None and self._copies[name] == num_copies
            ]
            if gradients:
                squared_norm = squared_norm + get_total_norm(gradients).square() / num_copies
        return squared_norm

    def bad_gradients(self) -> list[str]:
        """Returns the names of parameters with non-finite gradients (`TrainingBackend.bad_gradients`)."""
        return sorted(set().union(*self.worker.all_gather_object(self._bad_gradients)))

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a full weight (`TrainingBackend.full`)."""
        if not isinstance(tensor, DTensor):
            return tensor
        # Gather on the accelerator even if the shards are on the host.
        device_tensor: Any = tensor.to(self.device) if tensor.device.type != self.device.type else tensor
        gathered_tensor: torch.Tensor = device_tensor.full_tensor()
        return gathered_tensor

    @torch.no_grad()
    def named_weights(self, excluded_names: Container[str] = ()) -> Named:
        """Yields all weights in full (`TrainingBackend.named_weights`); gathers them in buckets."""
        with self.keep_on_device():
            tensors = self.module.state_dict(keep_vars=True).items()
            requested_tensors = {name: tensor for name, tensor in tensors if plain(name) not in excluded_names}
            gather = BucketGather(requested_tensors, self.full, self.blueprint.gather_dtype)
            yield from self.blueprint.named_weights(self.module, gather, excluded_names)

    @torch.no_grad()
    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's weights (`TrainingBackend.replace_weights`). Each rank stores its shards."""
        with self.keep_on_device():
            self._reshard()
            current_weights = self.module.state_dict(keep_vars=True)
            require_same_shapes({name: tensor.shape for name, tensor in current_weights.items()}, tensors)
            for name, tensor in current_weights.items():
                copy_full(tensor, tensors[name])

    def pieces(self, *, by_rows: bool = False) -> Iterator[tuple[HeldSlice, torch.Tensor]]:
        """Yields this rank's slices of the weights (`TrainingBackend.pieces`)."""
        with self.keep_on_device():
            is_included = self.blueprint.is_exported
            for held_slice, values in pieces(
                self.module, self.mesh, self.full, by_rows=by_rows, is_included=is_included
            ):
                slice_values = values()
                yield held_slice, slice_values.to(self.dtype) if slice_values.is_floating_point() else slice_values

    def _edit_trained(self, edit: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._reshard()
        edit([local_part(parameter) for parameter in self.module.parameters() if parameter.requires_grad])

    def local_tensors(self) -> Named:
        """Yields the names and values of this rank's shards."""
        with self.keep_on_device():
            for name, parameter in self.module.named_parameters():
                yield name, local_part(parameter)

    def _checkpoint_state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a checkpoint, as DTensors that share memory with the live tensors."""
        self._reshard()
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters():
            state[f"model.{name}"] = parameter.detach()
            for moment_name, local_moment in self._moments[name].items():
                # `from_local` would copy a shard on the host to the mesh's device, and loaded values would be lost.
                spec = parameter._spec
                state[f"{moment_name}.{name}"] = DTensor(local_moment, spec, requires_grad=False)
        return state

    def save(self, folder: Path) -> None:
        """Writes each rank's shards as safetensors, in the layout of PyTorch's distributed checkpoints."""
        folder = Path(folder)
        with self.keep_on_device():
            save_sharded(folder / SHARDS, self._checkpoint_state(), self.worker)
        if self.rank == 0:
            max_steps = max(self._steps.values(), default=0)
            state = {"name": self.optim.name, "steps": max_steps, "parameters": self._steps}
            write_durably(folder / OPTIMIZER, json.dumps(state).encode() + b"\n")
            self.write_identity(folder)
        empty_cache()  # an engine may be about to take all free memory
        self.worker.barrier()

    def load(self, folder: Path) -> None:
        """Restores a checkpoint from any number of ranks (`TrainingBackend.load`).

        Raises:
            CheckpointError: The optimizer state cannot be read.
        """
        folder = Path(folder)
        self.check_identity(folder)
        with self.keep_on_device():
            load_sharded(folder / SHARDS, self._checkpoint_state())
        try:
            state = json.loads((folder / OPTIMIZER).read_text())
            # Older checkpoints have one number for all parameters.
            steps = {name: int(state.get("parameters", {}).get(name, state["steps"])) for name in self._steps}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / OPTIMIZER}: cannot be read ({error})") from error
        self._steps = steps
        for name, parameter in self._parameters():
            parameter.grad = None
            if name in self._local_shards:
                self.optimizer.state[self._local_shards[name]]["step"].fill_(self._steps[name])

    def offload(self) -> None:
        """Moves shards and optimizer state to the host, unless `actor.fsdp.cpu_offload` keeps them there."""
        if not self.options.cpu_offload:
            super().offload()

    def move_to_host(self) -> int:
        """Moves this rank's tensors to the host (`OffloadingBackend.move_to_host`); gathered weights are freed."""
        for submodule in (submodule for module in self.models for submodule in _fsdp_modules(module)):
            submodule.reshard()
        return super().move_to_host()

    def offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to copy (`OffloadingBackend.offloadable_tensors`). Gradients are not copied, because they
        exist only between `forward_backward` and `optimizer_step`."""
        return (*map(local_part, tensors_of(self.module, self._reference)), *tensors_in(self._moments)), ()


#: Bytes of a bucket of full weights.
_BUCKET = 64 << 20


class BucketGather:
    """Function that returns full weights, and gathers several at a time: for a weight that has not been gathered, also the
    weights after it, up to a bucket. All ranks request the same weights in the same order.

    Args:
        tensors: Weights by name, in the order in which most of them will be requested.
        gather_full: Gathers a single weight.
        dtype: Dtype to which floating-point weights are converted before they are gathered; None keeps theirs.
        bucket_bytes: Bytes of a bucket of full weights.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        gather_full: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype | None,
        bucket_bytes: int = _BUCKET,
    ) -> None:
        self._tensors = [*{id(tensor): tensor for tensor in tensors.values()}.values()]
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._gather_full, self._dtype, self._bucket_bytes = gather_full, dtype, bucket_bytes
        self._gathered_weights: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the full weight; each weight is kept only until it is requested."""
        if id(tensor) not in self._gathered_weights:
            self._gathered_weights.clear()  # weights that were not requested
            bucket = self._bucket_from(tensor)
            if not bucket:
                return self._gather_full(self._convert(tensor))
            full_tensors = _gather_rows([self._convert(member) for member in bucket])
            self._gathered_weights = {
                id(member): full_weight for member, full_weight in zip(bucket, full_tensors, strict=True)
            }
        return self._gathered_weights.pop(id(tensor))

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.detach().to(self._dtype)

    def _bucket_from(self, first_tensor: torch.Tensor) -> list[DTensor]:
        """Returns a weight and those after it with the same layout and dtype, up to a bucket; empty if the weight is not
        divided by rows alone, or is on the host."""
        layout, bucket, num_bytes = _row_layout(first_tensor), list[DTensor](), 0
        if layout is None or id(first_tensor) not in self._index:
            return []
        for tensor in self._tensors[self._index[id(first_tensor)] :]:
            num_bytes += tensor.numel() * (self._dtype or tensor.dtype).itemsize
            if _row_layout(tensor) != layout or (bucket and num_bytes > self._bucket_bytes):
                break
            assert isinstance(tensor, DTensor)
            bucket.append(tensor)
        return bucket


def _row_layout(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns mesh, mesh dimension and dtype of a tensor on an accelerator's mesh if only its rows are sharded; else None."""
    if not isinstance(tensor, DTensor) or tensor.device.type != tensor.device_mesh.device_type or not tensor.numel():
        return None
    sharded_dims = [(dim, placement) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(sharded_dims) != 1 or type(sharded_dims[0][1]) is not Shard or sharded_dims[0][1].dim != 0:
        return None
    return tensor.device_mesh, sharded_dims[0][0], tensor.dtype


def _gather_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gathers tensors of one `_row_layout` by one collective operation."""
    layout = _row_layout(tensors[0])
    assert layout is not None
    mesh, dim, dtype = layout
    num_ranks, group = mesh.size(dim), mesh.get_group(dim)
    # The first ranks have the same number of rows, as by torch.chunk; the last ones may have fewer.
    row_counts = [-(-tensor.shape[0] // num_ranks) for tensor in tensors]
    sizes = [rows * (tensor.numel() // tensor.shape[0]) for rows, tensor in zip(row_counts, tensors, strict=True)]
    flat_buffer = torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device)
    for part, tensor in zip(flat_buffer.split(sizes), tensors, strict=True):
        assert isinstance(tensor, DTensor)
        local_rows = tensor.to_local().reshape(-1)
        part[: local_rows.numel()] = local_rows
    gathered_rows = flat_buffer.new_empty(num_ranks, len(flat_buffer))
    dist.all_gather_into_tensor(gathered_rows.view(-1), flat_buffer, group=group)
    return [
        part.reshape(num_ranks * rows, *tensor.shape[1:])[: tensor.shape[0]]
        for part, rows, tensor in zip(gathered_rows.split(sizes, 1), row_counts, tensors, strict=True)
    ]


class _TracedCollective:
    """Base of the collectives of a sharded module, which are spans of the trace. Buffers are torch's default ones.

    On a CPU, a span lasts until all ranks have the result. On an accelerator, it is the launch of the collective; the rank's
    profile (`runner.trace.profile`) shows when the collective itself runs.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the buffer of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class _TracedAllGather(_TracedCollective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with span("gather weights", "send", bytes=output_tensor.nbytes):
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _TracedReduceScatter(_TracedCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with span("reduce gradients", "send", bytes=input_tensor.nbytes):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _trace_collectives(module: FSDPModule) -> None:
    """Makes the collectives of a sharded module spans of the trace, if this version of torch has a hook for that."""
    if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
        # Their interface is in a private module of torch, so they do not derive from it.
        all_gather: Any = _TracedAllGather()
        reduce_scatter: Any = _TracedReduceScatter()
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    submodules: Iterator[Any] = module.modules()
    return [submodule for submodule in submodules if isinstance(submodule, FSDPModule)]
