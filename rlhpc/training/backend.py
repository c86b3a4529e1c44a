"""Interface of training backends, independent of the trained module.

It knows neither tokens nor observations. It builds the module from a task package's `Blueprint`, stores its state in its own
format, and runs the package's functions on it. `OffloadingBackend` moves accelerator memory to the host and back.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from rlhpc.algorithms.nonfinite import skips_step
from rlhpc.config.parallel import MeshSizes, unsupported_backend_sizes
from rlhpc.runtime.devices import empty_cache, host_memory, synchronize, torch_device
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.text import first_line
from rlhpc.runtime.trace_recorder import span
from rlhpc.training.blueprint import Blueprint, Full, Named, transformer_layers
from rlhpc.training.flat_parameters import AdamOptions
from rlhpc.training.loss_scale import LossScaler

if TYPE_CHECKING:
    from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, GradScalerConfig, OptimConfig, ParallelConfig
    from rlhpc.training.mesh import Mesh
    from rlhpc.training.shard_layout import HeldSlice


#: Integer dtype of the same size as a float, by bytes; the float's bits are flipped through it.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Mantissa bit to flip, counted from the highest. In float32 one stale tensor of SmolLM2 changes log-probs 1e4 times as much
#: as rounding does with the second bit, 1e3 times with the first, and 6e3 times with the third.
_BIT = 2
#: Value that a tensor of zeros is filled with.
_FILL = 2.0**-6


class Perturbation:
    """Reversible change of weights: flips one mantissa bit of each element, which is its own inverse and needs no copy.

    Flipping the second mantissa bit changes a number by 12.5 to 25 %, up or down depending on its bits. This is enough to
    reveal one stale tensor, and too little for a deep model to amplify rounding. Zeros would hardly change, so a tensor that
    contains only zeros (a new LoRA adapter's factor B) is filled with a constant, and with zeros again by `undo`.
    """

    def __init__(self) -> None:
        self._zeros: list[bool] = []

    @torch.no_grad()
    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Perturbs the tensors in place.

        Raises:
            ValueError: A tensor's dtype is not floating-point with 16, 32 or 64 bits.
        """
        self._zeros = []
        for tensor in tensors:
            bits = _bits(tensor)
            self._zeros.append(not bits.any())
            if self._zeros[-1]:
                tensor.fill_(_FILL)
            else:
                bits.bitwise_xor_(_mask(tensor.dtype))

    @torch.no_grad()
    def undo(self, tensors: Iterable[torch.Tensor]) -> None:
        """Restores the tensors bit for bit; pass the same tensors in the same order as to `apply`."""
        for tensor, was_zero in zip(tensors, self._zeros, strict=True):
            if was_zero:
                tensor.zero_()
            else:
                _bits(tensor).bitwise_xor_(_mask(tensor.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a floating-point tensor's memory as integers of the same size."""
    if not tensor.is_floating_point() or tensor.element_size() not in _INTEGERS:
        raise ValueError(f"{tensor.dtype} cannot be perturbed: floats of 16, 32 or 64 bits can")
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _mask(dtype: torch.dtype) -> int:
    """Returns the XOR mask of the mantissa bit to flip."""
    mantissa = round(-torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())
    return 1 << (mantissa - _BIT)


__all__ = ["ActorSection", "Blueprint", "Full", "Named", "TrainingBackend", "TrainingRanks", "transformer_layers"]

Batch = TypeVar("Batch")
Outputs = TypeVar("Outputs")
Metrics = dict[str, torch.Tensor]


class ActorSection(Protocol):
    """Keys of section `actor` that a backend uses, in any task type."""

    @property
    def training_backend(self) -> str:
        """Name of the training backend."""

    @property
    def optim(self) -> OptimConfig:
        """Options of the optimizer."""

    @property
    def fsdp(self) -> FsdpConfig:
        """Options of FSDP2."""

    @property
    def deepspeed(self) -> DeepspeedConfig:
        """Options of DeepSpeed."""

    @property
    def parallel(self) -> ParallelConfig:
        """Sizes of the mesh dimensions."""


class TrainingRanks(Protocol):
    """Methods and attributes of the worker that a backend uses."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""

    @property
    def accelerators(self) -> tuple[int, ...]:
        """Indices of the accelerators assigned to this rank."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces a tensor over the ranks, in place, and returns it."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns all ranks' objects, in rank order."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def init_process_group(self) -> Any:
        """Initializes torch's default process group and returns it; None if there is only one rank."""


@former_members(refuses="is_step_skipped")
class TrainingBackend(abc.ABC):
    """One rank's module and optimizer. All ranks call the same methods in the same order.

    Loss functions return the rank's *part* of the global loss: a sum divided by the global count. Gradients are
    therefore summed over ranks and micro-batches, never averaged, and any split yields the gradient of the whole batch.

    The constructor of a subclass builds `self.module` (and its optimizer) and ends with `prepare_reference`. A subclass
    defines `_backward`, `optimizer_step`, `replace_weights`, `save`, `load`, `offload` and `reload`. If the
    weights cannot be read while they are offloaded, `is_offloaded` returns True then, and the subclass reads or writes them
    inside `keep_on_device`.

    Args:
        blueprint: Description of the trained module.
        actor: Section `actor` of the configuration.
        worker: Worker of this rank.

    Attributes:
        module: The trained module.
        device: Device that the module runs on.
        base_lr: `actor.optim.lr`.
        sizes: Sizes of the mesh dimensions (`MeshSizes`).
        mesh: Device mesh; None if the backend has none.
        norms: Gradient norms of the last step, by policy (`Blueprint.policies`).
        scaler: Loss scale of training in float16; None in other dtypes, and if the backend scales losses itself.

    Raises:
        ConfigError: The backend does not support the configured parallelism.
    """

    sizes: MeshSizes
    mesh: Mesh | None = None

    name = ""
    """The backend's name in `actor.training_backend`; checkpoints record it."""

    lockstep = True
    """Whether all ranks must pass the same number of micro-batches to `forward_backward` (padded with empty ones) and call
    `evaluate` at the same time."""

    scales_loss = False
    """Whether the backend trains in float16: it divides gradients by `scaler.scale` before it takes their norm, and passes
    the norm to `_update_scale`."""

    divides = False
    """Whether `actor.parallel` may divide a model over more than the data-parallel dimension."""

    module: nn.Module

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> None:
        self.blueprint, self.actor, self.worker = blueprint, actor, worker
        self.rank, self.ranks = worker.rank, worker.world_size
        self.sizes = MeshSizes.from_config(actor.parallel, self.ranks, f"{blueprint.key}.parallel")
        if not (self.divides or self.sizes.plain):
            raise ConfigError(unsupported_backend_sizes(blueprint.key, self.name or type(self).__name__, self.sizes))
        self.device = torch.device(torch_device(worker.accelerators))
        self.dtype = blueprint.dtype
        self.optim = AdamOptions.from_config(actor.optim)
        self.base_lr = self.optim.lr
        self._reference: nn.Module | None = None
        self.norms: dict[str, float] = {}
        self.scaler: LossScaler | None = None
        if self.dtype == torch.float16:
            self.scaler = self._make_scaler(getattr(actor, "grad_scaler", None))

    def _make_scaler(self, options: GradScalerConfig | None) -> LossScaler | None:
        """Builds the loss scale of training in float16.

        Raises:
            ConfigError: The backend, or the task type, does not train in float16.
        """
        if not self.scales_loss or options is None:
            raise ConfigError(
                f"{self.blueprint.key}.model.dtype=float16 needs a scaled loss, which {self.blueprint.key}.training_backend="
                f"{self.name or type(self).__name__} does not have here: take bfloat16, or training_backend local or fsdp"
            )
        return LossScaler(options, self.device)

    def require_values(self) -> None:
        """Checks that the module has value parameters if the optimizer's options are about them. A subclass calls it after it
        has built the module.

        Raises:
            ConfigError: The module has no value parameters.
        """
        names = (name for name, p in self.module.named_parameters() if p.requires_grad)
        if self.optim.separates_values and not any(map(self.blueprint.is_value, names)):
            key = "value_lr" if self.optim.value_lr is not None else "critic_warmup_steps"
            raise ConfigError(
                f"{self.blueprint.key}.optim.{key}: the model has no value head or critic; leave the key out, or set "
                f"{self.blueprint.key}.model.add_value_head (policies) or value_head (language models)"
            )

    # -- computing ------------------------------------------------------------------------------------------------

    @property
    def forward_module(self) -> nn.Module:
        """Module that forward passes call; a subclass may return a wrapper."""
        return self.module

    @property
    def records_passes(self) -> bool:
        """True if passes are recorded and replayed, so that each size of micro-batches needs a recording."""
        return False

    @property
    def models(self) -> list[nn.Module]:
        """The module and, if it has been built, the reference; settings of forward passes apply to both."""
        return [self.module] if self._reference is None else [self.module, self._reference]

    @property
    def num_trained_parameters(self) -> int:
        """Number of trainable parameters, over all ranks."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def evaluate(self, forward: Callable[[nn.Module, Batch], Outputs], batch: Batch) -> Outputs:
        """Returns `forward(forward_module, batch)`, run in evaluation mode without gradients. `forward` returns tensors, or
        lists, tuples or dicts of tensors.
        """
        self.module.eval()
        with torch.no_grad(), _explain_out_of_memory(self.blueprint.knobs):
            return forward(self.forward_module, batch)

    def evaluate_reference(self, forward: Callable[[nn.Module, Batch], Outputs], batch: Batch) -> Outputs:
        """Returns `forward` of the reference policy, run as in `evaluate`; builds the reference at the first call."""
        if self._reference is None:
            self._reference = self._make_reference()
        with torch.no_grad(), _explain_out_of_memory(self.blueprint.knobs):
            return forward(self._reference, batch)

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Metrics]]
    ) -> list[Metrics]:
        """Discards earlier gradients and accumulates the gradients of the rank's micro-batches. Call it once before each
        optimizer step, because it may already sum gradients over the ranks.

        Args:
            micro_batches: Micro-batches of this rank; `lockstep` says whether all ranks need the same number.
            loss: Function of `(called, micro-batch)` that returns the rank's part of the loss, and metrics.

        Returns:
            The metrics of each micro-batch, detached.
        """
        self._clear()
        self.module.train()
        metrics = []
        with _explain_out_of_memory(self.blueprint.knobs):
            for index, micro_batch in enumerate(micro_batches):
                metrics.append(self._run_pass(loss, micro_batch, is_last=index == len(micro_batches) - 1))
        return metrics

    def _run_pass(
        self, loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Metrics]], micro_batch: Batch, is_last: bool
    ) -> Metrics:
        """Runs one forward and backward pass; returns the metrics, detached."""
        with span("micro-batch", "train", tokens=getattr(micro_batch, "tokens", None)):
            loss_value, metrics = loss(self.forward_module, micro_batch)
            self._backward(loss_value, is_last)
        return {key: metric.detach() for key, metric in metrics.items()}

    @abc.abstractmethod
    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Sums the gradients over the ranks, clips them to `actor.optim.clip_grad`, and updates the weights. No rank updates
        if the norm is not finite (`is_step_skipped`).

        Returns:
            The global gradient norm before clipping, as a tensor: on the host if the step read it, on the device otherwise.
        """

    def is_step_skipped(self, norm: torch.Tensor) -> bool:
        """Returns whether a step was skipped because its gradient norm, which `optimizer_step` returned, is not finite.

        If `Blueprint.reads_norm` is False, a backend may step without reading the norm. In this case this method returns
        False, and the task package reads the norms at the end of its update, before weights are sent.
        """
        return skips_step(norm)

    @property
    def loss_scale(self) -> float | None:
        """Factor of the losses in float16; None in other dtypes."""
        return None if self.scaler is None else self.scaler.scale

    @property
    def overflowed(self) -> bool:
        """True if the last step was skipped because the loss scale was too large; it is smaller now."""
        return self.scaler is not None and self.scaler.overflowed

    def _update_scale(self, norm: torch.Tensor) -> None:
        """Adapts the loss scale to the gradient norm of a step."""
        if self.scaler is not None:
            self.scaler.update(math.isfinite(norm))

    def bad_gradients(self) -> list[str]:
        """Returns the names of the parameters whose gradient, summed over the ranks, was not finite in the step that was
        just skipped. The list is empty if the backend does not record them. All ranks call it.
        """
        return []

    def _clear(self) -> None:  # noqa: B027 (optional)
        """Discards accumulated gradients."""

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Accumulates the gradient of one micro-batch; `is_last` is True for the last micro-batch of a `forward_backward`."""
        self._scaled(loss).backward()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss that a backward pass starts from."""
        return loss if self.scaler is None else self.scaler.scaled(loss)

    def prepare_reference(self) -> None:
        """Builds the reference policy now if the run needs one."""
        if self.blueprint.has_reference and self._reference is None:
            self._reference = self._make_reference()

    @abc.abstractmethod
    def _make_reference(self) -> nn.Module:
        """Builds the reference policy, a frozen model that is ready to be called."""

    # -- weights --------------------------------------------------------------------------------------------------

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the full weight, gathered from the ranks' shards; all ranks call it for the same weights."""
        return tensor

    def named_weights(self, excluded_names: Container[str] = ()) -> Named:
        """Yields all weights in full, as in `Blueprint.named_weights`, except those in `excluded_names`. All ranks
        iterate; each tensor may be dropped before the next is requested.
        """
        with self.keep_on_device():
            yield from self.blueprint.named_weights(self.module, self.full, excluded_names)

    def pieces(self, *, by_rows: bool = False) -> Iterator[tuple[HeldSlice, torch.Tensor]]:
        """Yields the slices of the weights that this rank holds, one at a time, under their names in checkpoints, in the
        compute dtype and with LoRA merged (`shard_layout`). All ranks iterate to the end; a value may be a view of the live
        weights.

        Args:
            by_rows: Reshard matrices that are split by columns to row slices first.

        Raises:
            NotImplementedError: The backend has no mesh and yields only full weights, from `named_weights`.
        """
        raise NotImplementedError(f"{self.name} has its weights in another form than in slices")

    def frozen_names(self) -> frozenset[str]:
        """Returns the names of the weights that never change."""
        return self.blueprint.frozen_names(self.module)

    @abc.abstractmethod
    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's complete state dict and keeps the optimizer state. All ranks pass the same full tensors."""

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Perturbs each trained element during the block, and then restores it bit for bit (`Perturbation`). Copies in
        the optimizer are not changed. All ranks enter and leave the block together."""
        with self.keep_on_device():
            perturbation = Perturbation()
            self._edit_trained(perturbation.apply)
            try:
                yield
            finally:
                self._edit_trained(perturbation.undo)

    def _edit_trained(self, edit: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Applies `edit` in place to this rank's part of the trained weights, always in the same order."""
        edit([parameter.detach() for parameter in self.module.parameters() if parameter.requires_grad])

    def local_tensors(self) -> Named:
        """Yields names and tensors of this rank's weights in their stored dtype; shards if the weights are sharded."""
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Writes model and optimizer durably to `folder`; each rank writes its shards."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Restores a checkpoint from `save`, of any world size. Options such as eps keep their configured
        values.

        Raises:
            CheckpointError: The checkpoint is from a different model or backend, or cannot be read.
        """

    def write_identity(self, folder: Path) -> None:
        """Writes the identity file (backend and model of the checkpoint) and the blueprint's further files, on rank 0."""
        if self.rank == 0:
            identity = {**self._identity(), "about": self.blueprint.recorded_facts(self.module)}
            if self.scaler is not None:
                identity["grad_scaler"] = self.scaler.state()
            identity_json = json.dumps(identity, indent=2, sort_keys=True)
            write_durably(folder / self.blueprint.identity_file, identity_json.encode() + b"\n")
            self.blueprint.write_extra_files(folder, self.module)

    def check_identity(self, folder: Path) -> None:
        """Checks that a checkpoint is from the same backend and model, and restores the loss scale.

        Raises:
            CheckpointError: The checkpoint does not match; the message names the first difference.
        """
        path = Path(folder) / self.blueprint.identity_file
        if self.name == self.blueprint.unmarked and not path.exists():
            return
        try:
            recorded_identity = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a checkpoint of this kind of model ({error})") from error
        for key, expectation in self._identity().items():
            # Older checkpoints omit disabled features, and have some keys only in `about`.
            recorded_fact = recorded_identity.get(
                key, False if expectation is False else _about_value(recorded_identity, key)
            )
            if recorded_fact != expectation:
                raise CheckpointError(
                    f"{folder}: the checkpoint has {key} {recorded_fact!r}, this configuration {expectation!r}"
                )
        if self.scaler is not None:
            self.scaler.restore(recorded_identity.get("grad_scaler"))

    def _identity(self) -> dict[str, Any]:
        return {
            "actor.training_backend": self.name,
            **self.blueprint.identity(),
            "trainable parameters": self.num_trained_parameters,
        }

    # -- offload --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def offload(self) -> None:
        """Moves weights, gradients and optimizer state to the host, so that another role can use the accelerator."""

    @abc.abstractmethod
    def reload(self) -> None:
        """Moves the state back to the accelerator after `offload`."""

    @property
    def is_offloaded(self) -> bool:
        """True if the weights are offloaded and cannot be used before `reload`."""
        return False

    @contextlib.contextmanager
    def keep_on_device(self) -> Iterator[None]:
        """Reloads offloaded weights while the block runs, and offloads them again at its end. This is for
        checkpoints and weights that are requested while the weights are offloaded."""
        was_offloaded = self.is_offloaded
        if was_offloaded:
            self.reload()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()


def _about_value(identity: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key such as `actor.lora.alpha` from the entry `about` of a checkpoint; None if it is missing."""
    _, *path = key.split(".")
    node: Any = identity.get("about") if path else None
    for field in path:
        node = node.get(field) if isinstance(node, dict) else None
    return node


@contextlib.contextmanager
def _explain_out_of_memory(knobs: str) -> Iterator[None]:
    """Raises an error that names the settings to change if an allocation in the block fails.

    Raises:
        ConfigError: Memory was exhausted.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_allocation = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_allocation and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"out of memory in a forward or backward pass: {knobs}, set actor.model.gradient_checkpointing=true, or with "
            "actor.training_backend=fsdp set actor.fsdp.cpu_offload=true, with deepspeed actor.deepspeed.cpu_offload=true "
            f"({first_line(error)})"
        ) from error


_ALIGN = 64


class HostMemory:
    """Page-locked host memory for offloaded tensors. It is kept for reuse, because page-locking takes longer than a copy."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of retained bytes."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def blocks(self, sizes: list[int], device: str) -> list[torch.Tensor]:
        """Returns uint8 tensors of these sizes. The tensors reuse the memory of blocks from earlier calls.

        Args:
            sizes: Bytes of each block.
            device: Type of the device that the blocks are copied from and to.
        """
        padded_sizes = [size + -size % _ALIGN for size in sizes]
        if self.nbytes < sum(padded_sizes):
            self._buffer = None  # free it before the next allocation
            self._buffer = host_memory(sum(padded_sizes), device)
        if self._buffer is None:
            return []
        allocated_blocks = self._buffer[: sum(padded_sizes)].split(padded_sizes)
        return [padded_block[:size] for padded_block, size in zip(allocated_blocks, sizes, strict=True)]


class OffloadedTensors:
    """Tensors whose storages are copied to the host and then freed. The tensors cannot be used until `restore`.

    Args:
        tensors: Tensors of one device. Shared memory is copied once; other tensors that share the memory become unusable.
        scratch: Tensors whose memory is freed without a copy.
        host: Host memory for the contents; by default new memory is allocated.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        scratch: Iterable[torch.Tensor] = (),
        host: HostMemory | None = None,
    ) -> None:
        self._storage_ids: set[int] = set()
        emptied_storages, contents = self._storages(scratch), self._storages(tensors)
        self._device = device = contents[0].device.type if contents else "cpu"
        self._host = HostMemory() if host is None else host
        blocks = self._host.blocks([storage.nbytes() for storage in contents], device)
        synchronize(device)  # another stream may still write into them
        for storage, block in zip(contents, blocks, strict=True):
            block.copy_(_bytes_of(storage), non_blocking=True)
        synchronize(device)
        self._contents = [(storage, storage.nbytes(), block) for storage, block in zip(contents, blocks, strict=True)]
        self._emptied_storages = [(storage, storage.nbytes()) for storage in emptied_storages]
        for storage in (*contents, *emptied_storages):
            storage.resize_(0)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Returns each storage of the tensors once; skips empty storages and storages that cannot be resized."""
        storages = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storage_ids and storage.nbytes() and storage.resizable():
                self._storage_ids.add(storage._cdata)
                storages.append(storage)
        return storages

    @property
    def nbytes(self) -> int:
        """Number of bytes that were freed."""
        return sum(size for _, size, _ in self._contents) + sum(size for _, size in self._emptied_storages)

    def restore(self) -> None:
        """Allocates the memory again and restores the contents; the contents of scratch tensors are undefined."""
        for storage, size in self._emptied_storages:
            storage.resize_(size)
        for storage, size, block in self._contents:
            storage.resize_(size)
            _bytes_of(storage).copy_(block, non_blocking=True)
        synchronize(self._device)  # before other data overwrites the host copy
        self._contents, self._emptied_storages = [], []


class OffloadingBackend(TrainingBackend):
    """Backend that frees its accelerator memory while another role uses the accelerator. A subclass lists its tensors in
    `offloadable_tensors`, and reads or writes them inside `keep_on_device`.
    """

    _offloaded_tensors: OffloadedTensors | None = None
    _host: HostMemory | None = None

    @property
    def is_offloaded(self) -> bool:
        """True if the tensors are offloaded, so that their storages are empty."""
        return self._offloaded_tensors is not None

    def offload(self) -> None:
        """Moves the tensors to the host; does nothing on a CPU or if they are already offloaded."""
        if self.device.type != "cpu" and not self.is_offloaded:
            self.move_to_host()
            empty_cache()

    def move_to_host(self) -> int:
        """Moves this rank's tensors from its device to the host, and returns the number of freed bytes."""
        self._host = self._host or HostMemory()
        contents, scratch = (
            [t for t in tensors if t.device.type == self.device.type] for tensors in self.offloadable_tensors()
        )
        self._offloaded_tensors = OffloadedTensors(contents, scratch, self._host)
        return self._offloaded_tensors.nbytes

    def reload(self) -> None:
        """Moves the tensors back to the accelerator; does nothing if they are not offloaded."""
        if self._offloaded_tensors is not None:
            self._offloaded_tensors.restore()
            self._offloaded_tensors = None
            self.recreate_freed()

    @abc.abstractmethod
    def offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to copy to the host, in any order and on any device, and the tensors to free without a copy."""

    def recreate_freed(self) -> None:
        """Recreates the tensors that were freed without a copy; `reload` calls it at its end."""


def tensors_of(*modules: torch.nn.Module | None) -> Iterator[torch.Tensor]:
    """Yields parameters and buffers of the modules that are not None."""
    for module in modules:
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples, sets, dicts and dataclasses, and their gradients, down to `depth` levels."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return
    if depth > 0:
        for child in value:
            yield from tensors_in(child, depth - 1)
