"""Interface of training backends, independent of the trained module.

A backend knows neither tokens nor observations. It gets a `Blueprint` of the module from a task package, keeps weights,
gradients and optimizer in its own way, and runs the task package's functions on the module. `OffloadingBackend` offloads
accelerator memory to the host and back, with every view of it intact.
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

from rlhpc.config.parallel import MeshSizes, undivided
from rlhpc.runtime.devices import empty_cache, host_memory, synchronize, torch_device
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.text import first_line
from rlhpc.training.blueprint import Blueprint, Full, Named, transformer_layers
from rlhpc.training.flat_parameters import AdamOptions

if TYPE_CHECKING:
    from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, OptimConfig, ParallelConfig
    from rlhpc.training.mesh import Mesh
    from rlhpc.training.shard_layout import Region


#: The integers of a float's size: their bits are flipped.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The mantissa bit that is flipped, from the highest. In float32 one stale tensor of SmolLM2 moves log-probs 1e4 times as far
#: as rounding does with the second, 1e3 times with the first, and 6e3 times with the third.
_BIT = 2
#: The value that every element of a tensor of zeros gets.
_FILL = 2.0**-6


class Perturbation:
    """Flip of one mantissa bit of each number: an operation that is its own inverse and needs no memory.

    The second bit of the mantissa moves a number by 12.5 to 25 %, in a direction that depends on its bits. This is enough to
    reveal one stale tensor, and too little for a deep model to amplify rounding. Zeros would hardly move: a tensor that
    contains only zeros (a new LoRA adapter's second factor) is filled with a constant, and later with zeros.
    """

    def __init__(self) -> None:
        self._zeros: list[bool] = []

    @torch.no_grad()
    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Changes the tensors in place.

        Raises:
            ValueError: A tensor has another dtype than floating-point numbers of 16, 32 or 64 bits.
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
        """Restores the same tensors, in the same order, to the last bit."""
        for tensor, was_zero in zip(tensors, self._zeros, strict=True):
            if was_zero:
                tensor.zero_()
            else:
                _bits(tensor).bitwise_xor_(_mask(tensor.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as integers."""
    if not tensor.is_floating_point() or tensor.element_size() not in _INTEGERS:
        raise ValueError(f"{tensor.dtype} cannot be perturbed: floats of 16, 32 or 64 bits can")
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _mask(dtype: torch.dtype) -> int:
    """Returns the bit that is flipped."""
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
        """Name of the backend."""

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
    """Interface of the worker that a backend uses."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""

    @property
    def accelerators(self) -> tuple[int, ...]:
        """Accelerators granted to this rank."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces a tensor over the ranks, in place."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns all ranks' objects, in rank order."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def init_process_group(self) -> Any:
        """Forms torch's default process group; None if there is only one rank."""


class TrainingBackend(abc.ABC):
    """One rank's module and optimizer. All ranks call the same methods in the same order.

    Loss functions return the rank's *part* of the global loss: a sum divided by the global count. Gradients are
    therefore summed over ranks and micro-batches, never averaged, and any split yields the gradient of the whole batch.

    A subclass builds `self.module` (and its optimizer) in its constructor, which ends with `prepare_reference`, and
    defines `_backward`, `optimizer_step`, `replace_weights`, `save`, `load`, `offload` and `reload`. If its weights
    cannot be read where `offload` leaves them, it reports this in `away`, and reads or writes them inside `awake`.

    Args:
        blueprint: Description of the trained module.
        actor: Section `actor` of the configuration.
        worker: The worker of this rank.

    Attributes:
        module: The module that was built.
        device: The device it computes on.
        base_lr: `actor.optim.lr`.
        sizes: Sizes of the mesh: the ranks of a block, and the samples of a block (`MeshSizes.data_of`).
        mesh: The mesh itself, if there is one.
        norms: Gradient norms of the last step, by policy (`Blueprint.policies`).
    """

    sizes: MeshSizes
    mesh: Mesh | None = None

    name = ""
    """The backend's name in `actor.training_backend`; checkpoints record it."""

    lockstep = True
    """Whether all ranks must pass `forward_backward` the same number of micro-batches (padded with empty ones), and
    evaluate at the same time."""

    divides = False
    """Whether `actor.parallel` may divide a model over more than the data-parallel dimension."""

    module: nn.Module

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> None:
        self.blueprint, self.actor, self.worker = blueprint, actor, worker
        self.rank, self.ranks = worker.rank, worker.world_size
        self.sizes = MeshSizes.of(actor.parallel, self.ranks, f"{blueprint.key}.parallel")
        if not (self.divides or self.sizes.plain):
            raise ConfigError(undivided(blueprint.key, self.name or type(self).__name__, self.sizes))
        self.device = torch.device(torch_device(worker.accelerators))
        self.dtype = blueprint.dtype
        self.optim = AdamOptions.of(actor.optim)
        self.base_lr = self.optim.lr
        self._reference: nn.Module | None = None
        self.norms: dict[str, float] = {}

    # -- computing ------------------------------------------------------------------------------------------------

    @property
    def called(self) -> nn.Module:
        """Module to call with a batch; a subclass may return a wrapper."""
        return self.module

    @property
    def models(self) -> list[nn.Module]:
        """The module and, if it exists, the reference: settings of forward passes apply to both."""
        return [self.module] if self._reference is None else [self.module, self._reference]

    @property
    def parameters_trained(self) -> int:
        """Number of trainable parameters, over all ranks."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def evaluate(self, forward: Callable[[nn.Module, Batch], Outputs], batch: Batch) -> Outputs:
        """Runs `forward(called, batch)` without gradients, in evaluation mode. It returns tensors, or lists, tuples or
        dicts of them.
        """
        self.module.eval()
        with torch.no_grad(), _explain_out_of_memory(self.blueprint.knobs):
            return forward(self.called, batch)

    def evaluate_reference(self, forward: Callable[[nn.Module, Batch], Outputs], batch: Batch) -> Outputs:
        """Runs `forward` as `evaluate` does, with the weights from before training."""
        if self._reference is None:
            self._reference = self._make_reference()
        with torch.no_grad(), _explain_out_of_memory(self.blueprint.knobs):
            return forward(self._reference, batch)

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Metrics]]
    ) -> list[Metrics]:
        """Accumulates the gradients of the rank's micro-batches, replacing earlier ones. Call it once before each step,
        because it may already sum over the ranks.

        Args:
            micro_batches: See `lockstep`.
            loss: `(called, micro-batch)` → the rank's part of the loss, and metrics.

        Returns:
            The metrics of each micro-batch, detached.
        """
        self._clear()
        self.module.train()
        metrics = []
        with _explain_out_of_memory(self.blueprint.knobs):
            for index, batch in enumerate(micro_batches):
                loss_value, batch_metrics = loss(self.called, batch)
                self._backward(loss_value, last=index == len(micro_batches) - 1)
                metrics.append({key: metric.detach() for key, metric in batch_metrics.items()})
        return metrics

    @abc.abstractmethod
    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Sums the gradients over the ranks, clips them to `actor.optim.clip_grad`, and updates. If their norm is one
        that `refuses`, no rank is updated.

        Returns:
            The global norm before clipping, as a tensor: reading it may wait for the device.
        """

    def refuses(self, norm: torch.Tensor) -> bool:
        """Returns whether a step with this gradient norm was not taken because the norm is not finite. A backend that reads
        norms late, because the blueprint does not require it to `look`, does not know. The task package then reads them at
        the end of its update, before any weight leaves the rank.
        """
        return not math.isfinite(norm)

    def bad_gradients(self) -> list[str]:
        """Returns the parameters whose gradient, summed over the ranks, was not finite in the step just refused; all ranks
        call it. Empty if the backend does not record them.
        """
        return []

    def _clear(self) -> None:  # noqa: B027 (optional)
        """Discards gradients that no step has used."""

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulates the gradient of one micro-batch; `last` marks the last one of a `forward_backward`."""
        loss.backward()

    def prepare_reference(self) -> None:
        """Builds the reference now if the run will need it."""
        if self.blueprint.has_reference and self._reference is None:
            self._reference = self._make_reference()

    @abc.abstractmethod
    def _make_reference(self) -> nn.Module:
        """Builds the frozen second model, ready to be called."""

    # -- weights --------------------------------------------------------------------------------------------------

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a full weight of which this rank may hold only a shard; all ranks call it for the same weights."""
        return tensor

    def named_weights(self, without: Container[str] = ()) -> Named:
        """Yields all weights in full, as in `Blueprint.named_weights`, except those in `without`. All ranks iterate; each
        tensor may be dropped before the next is requested.
        """
        with self.awake():
            yield from self.blueprint.named_weights(self.module, self.full, without)

    def pieces(self, *, rows: bool = False) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yields the boxes of the weights that this rank has, one at a time, as checkpoints name them and in the dtype of the
        computation, LoRA merged (`shard_layout`). All ranks iterate to the end; a value may be a view of the live weights.

        Args:
            rows: Matrices cut by columns are exchanged for rows first.

        Raises:
            NotImplementedError: The backend has no mesh; its weights come in full, from `named_weights`.
        """
        raise NotImplementedError(f"{self.name} has its weights in another form than in boxes")

    def frozen_names(self) -> frozenset[str]:
        """Returns the names of the weights that never change."""
        return self.blueprint.frozen_names(self.module)

    @abc.abstractmethod
    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's whole state; the optimizer stays as it is. All ranks pass the same tensors, in full."""

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Changes each trained number while the block runs, and then restores it to the last bit (`Perturbation`). The
        optimizer's own copies stay as they are. All ranks enter and leave it together."""
        with self.awake():
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
        """Yields this rank's part of the weights, in whatever dtype: its shards if they are sharded."""
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Writes model and optimizer durably below `folder`; each rank writes its part."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, at this or another world size; options such as eps stay those of the configuration.

        Raises:
            CheckpointError: The checkpoint is from another model or backend, or cannot be read.
        """

    def write_identity(self, folder: Path) -> None:
        """Records the backend and model of the checkpoint, and writes the files that accompany its weights, on rank 0."""
        if self.rank == 0:
            identity = {**self._identity(), "about": self.blueprint.about(self.module)}
            identity_json = json.dumps(identity, indent=2, sort_keys=True)
            write_durably(folder / self.blueprint.identity_file, identity_json.encode() + b"\n")
            self.blueprint.write_beside(folder, self.module)

    def check_identity(self, folder: Path) -> None:
        """Rejects a checkpoint from another backend or model.

        Raises:
            CheckpointError: The checkpoint does not match; the message names what differs.
        """
        path = Path(folder) / self.blueprint.identity_file
        if self.name == self.blueprint.unmarked and not path.exists():
            return
        try:
            recorded = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a checkpoint of this kind of model ({error})") from error
        for key, expected in self._identity().items():
            # Older checkpoints omit disabled features, and have some keys only in `about`.
            recorded_value = recorded.get(key, False if expected is False else _about_value(recorded, key))
            if recorded_value != expected:
                raise CheckpointError(
                    f"{folder}: the checkpoint has {key} {recorded_value!r}, this configuration {expected!r}"
                )

    def _identity(self) -> dict[str, Any]:
        return {
            "actor.training_backend": self.name,
            **self.blueprint.identity(),
            "trainable parameters": self.parameters_trained,
        }

    # -- offload --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def offload(self) -> None:
        """Moves everything to the host, so that another role can have the accelerator."""

    @abc.abstractmethod
    def reload(self) -> None:
        """Moves back what `offload` moved away."""

    @property
    def away(self) -> bool:
        """True if the weights cannot be used before a `reload`."""
        return False

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Undoes `offload` while the block runs, and offloads again at its end. Checkpoints and weights may be
        requested while another role is about to take the accelerator."""
        was_away = self.away
        if was_away:
            self.reload()
        try:
            yield
        finally:
            if was_away:
                self.offload()


def _about_value(identity: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key such as `actor.lora.alpha` that a checkpoint has in `about`; None without one."""
    _, *path = key.split(".")
    node: Any = identity.get("about") if path else None
    for field in path:
        node = node.get(field) if isinstance(node, dict) else None
    return node


@contextlib.contextmanager
def _explain_out_of_memory(knobs: str) -> Iterator[None]:
    """Turns a failed allocation into a message that names the settings to change.

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
    """Host memory for offloaded tensors, kept between uses: locking pages costs more than copying into them."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of retained bytes."""
        return 0 if self._flat is None else self._flat.nbytes

    def blocks(self, sizes: list[int], device: str) -> list[torch.Tensor]:
        """Returns memory of these sizes in bytes, uint8, in place of the blocks that were returned before.

        Args:
            sizes: Bytes of each block.
            device: Kind of the device that will copy.
        """
        padded_sizes = [size + -size % _ALIGN for size in sizes]
        if self.nbytes < sum(padded_sizes):
            self._flat = None  # free it before the next allocation
            self._flat = host_memory(sum(padded_sizes), device)
        if self._flat is None:
            return []
        allocated = self._flat[: sum(padded_sizes)].split(padded_sizes)
        return [padded[:size] for padded, size in zip(allocated, sizes, strict=True)]


class OffloadedTensors:
    """Contents of some tensors' storages on the host. The tensors cannot be used until `restore`.

    Args:
        tensors: Tensors of one device; memory that they share is stored once. Other tensors that share the same memory are
            emptied with it.
        scratch: More tensors to empty, whose contents need not be kept.
        host: Memory for the contents; a new one by default.
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
        self._emptied = [(storage, storage.nbytes()) for storage in emptied_storages]
        for storage in (*contents, *emptied_storages):
            storage.resize_(0)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Returns the tensors' storages, each once."""
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
        return sum(size for _, size, _ in self._contents) + sum(size for _, size in self._emptied)

    def restore(self) -> None:
        """Allocates the memory again and restores the contents; those of scratch tensors are undefined."""
        for storage, size in self._emptied:
            storage.resize_(size)
        for storage, size, block in self._contents:
            storage.resize_(size)
            _bytes_of(storage).copy_(block, non_blocking=True)
        synchronize(self._device)  # before other data overwrites the host copy
        self._contents, self._emptied = [], []


class OffloadingBackend(TrainingBackend):
    """Backend that empties its memory while another role has the accelerator. A subclass lists its tensors
    (`offloadable_tensors`), and reads or writes them inside `awake`.
    """

    _parked: OffloadedTensors | None = None
    _host: HostMemory | None = None

    @property
    def away(self) -> bool:
        """True while the tensors are views of empty memory."""
        return self._parked is not None

    def offload(self) -> None:
        """Moves everything to the host."""
        if self.device.type != "cpu" and not self.away:
            self.park()
            empty_cache()

    def park(self) -> int:
        """Empties the tensors of this rank on its device; returns the number of bytes freed."""
        self._host = self._host or HostMemory()
        contents, scratch = (
            [t for t in tensors if t.device.type == self.device.type] for tensors in self.offloadable_tensors()
        )
        self._parked = OffloadedTensors(contents, scratch, self._host)
        return self._parked.nbytes

    def reload(self) -> None:
        """Moves back what `offload` moved away."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            self.returned()

    @abc.abstractmethod
    def offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to keep, in any order, on any device, and those that are unused or can be recreated."""

    def returned(self) -> None:
        """Recreates the tensors that were not kept."""


def tensors_of(*modules: torch.nn.Module | None) -> Iterator[torch.Tensor]:
    """Yields parameters and buffers of the modules that are not None."""
    for module in modules:
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Yields tensors, and their gradients, in nested lists, tuples, sets, dicts and dataclasses."""
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
