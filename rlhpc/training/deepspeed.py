"""DeepSpeed backend (`actor.training_backend: deepspeed`): ZeRO 1, 2 and 3, in the processes and process group of rlhpc."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlhpc.checkpoint.async_writer import write_file
from rlhpc.checkpoint.state import stream_state
from rlhpc.runtime.devices import move_module
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import fsync_folder, write_durably
from rlhpc.runtime.plugins import require_package
from rlhpc.training.backend import (
    Batch,
    Blueprint,
    Metrics,
    Named,
    OffloadingBackend,
    TrainingRanks,
    tensors_in,
    tensors_of,
)
from rlhpc.training.deepspeed_checkpoint import convert_to_universal, files_of, require_harmless
from rlhpc.training.deepspeed_config import KEY, deepspeed_config
from rlhpc.training.loss_scale import MIN_SCALE
from rlhpc.training.mesh import form_single_rank_group
from rlhpc.training.parameter_names import require_same_shapes

if TYPE_CHECKING:
    from rlhpc.config.sections import GradScalerConfig
    from rlhpc.training.backend import ActorSection


@torch.no_grad()
def build_partitioned(
    build: Callable[..., nn.Module], deepspeed: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Builds a ZeRO-3 module. Rank 0 reads the weights, then each parameter is broadcast and partitioned. All ranks call
    it.

    Args:
        build: Builds the model on the host or, with `empty=True`, on the meta device.
        deepspeed: The initialized package.
        config: DeepSpeed's configuration.
        dtype: Dtype of the parameters.
        device: Device of this rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = build(empty=rank != 0)
    convert = _converter(deepspeed, config)
    owners_by_id: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            owners_by_id.setdefault(id(parameter), []).append((owner, name))
    for parameter in list(module.parameters()):
        if parameter.is_meta:
            parameter_owners = owners_by_id[id(parameter)]
            parameter = nn.Parameter(
                torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=parameter.requires_grad
            )
            for owner, name in parameter_owners:
                setattr(owner, name, parameter)
        else:
            parameter.data = parameter.data.to(dtype)
        convert([parameter])
    for name, buffer in list(module.named_buffers()):
        full_buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        if ranks > 1:
            full_buffer = full_buffer.contiguous()
            dist.broadcast(full_buffer, 0)
        owner_name, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner_name), attribute, full_buffer)
    return module


def _converter(deepspeed: Any, config: dict[str, Any]) -> Callable[[list[nn.Parameter]], None]:
    """Returns the function that converts parameters to ZeRO-3 in place. DeepSpeed has this function only as a method of a
    converted parameter.
    """
    sample = nn.Linear(1, 1, bias=False)
    deepspeed.zero.Init(module=sample, config_dict_or_path=config)
    zero_parameter: Any = sample.weight
    convert: Callable[[list[nn.Parameter]], None] = zero_parameter.convert_to_zero_parameters
    return convert


#: Folder and tag of DeepSpeed's files in a checkpoint's folder, and the file with their layout.
FOLDER, TAG, LAYOUT = "deepspeed", "state", "deepspeed.json"


def _pickle_stage_by_value() -> None:
    """Makes pickle store the ZeRO stage as its class and number. Early versions of Python 3.11 pickle an enum member as a
    call to `getattr`, which a restricted unpickler cannot allow.
    """

    def reduce_stage(stage: Any, protocol: int) -> tuple[Any, tuple[int]]:
        return type(stage), (int(stage.value),)

    importlib.import_module("deepspeed.runtime.zero.config").ZeroStageEnum.__reduce_ex__ = reduce_stage


class DeepSpeedBackend(OffloadingBackend):
    """ZeRO backend: shards optimizer state (stage 1), gradients (2) and parameters (3) over the ranks.

    DeepSpeed averages gradients over ranks; rlhpc sums them, so each loss is multiplied by the number of ranks. With
    bfloat16 or float16, the module's weights are in this dtype and the optimizer keeps float32 copies. In float16, DeepSpeed's
    own loss scaler scales the loss.
    """

    name = "deepspeed"
    scales_loss = True

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> None:
        super().__init__(blueprint, actor, worker)
        self.config = deepspeed_config(actor, self.dtype)
        self.stage = int(self.config["zero_optimization"]["stage"])
        self.deepspeed = self._import_deepspeed()
        self.module = self._build_module(blueprint.build)
        trained_parameters = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._shapes = {name: _shape(p) for name, p in trained_parameters}
        self.config = deepspeed_config(actor, self.dtype, self.num_trained_parameters)
        self.require_values()
        self.engine = self._initialize(self.module, self.config, self._build_optimizer(trained_parameters))
        self._has_gradients = self._overflowed = False
        self.prepare_reference()

    # -- setting up -----------------------------------------------------------------------------------------------

    def _make_scaler(self, options: GradScalerConfig | None) -> None:
        """Checks that the loss scale has options; DeepSpeed's engine has its own scaler."""
        super()._make_scaler(options)

    def _import_deepspeed(self) -> Any:
        """Imports DeepSpeed, initializes it on the worker group's process group, and returns the package."""
        is_on_gpu = self.device.type != "cpu"
        if not is_on_gpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        # A rank sees only its own accelerator, as device 0.
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.ranks), LOCAL_RANK="0")
        deepspeed = require_package("deepspeed", "actor.training_backend=deepspeed needs DeepSpeed", "deepspeed")
        device_name = deepspeed.get_accelerator().device_name()
        if device_name != self.device.type:
            raise ConfigError(
                f"actor.training_backend=deepspeed: DeepSpeed would compute on {device_name!r} (DS_ACCELERATOR is "
                f"{os.environ.get('DS_ACCELERATOR', 'not set')!r}), and this rank computes on {self.device.type!r}: unset "
                "DS_ACCELERATOR where it is set, or take training_backend fsdp"
            )
        if self.dtype == torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"{self.blueprint.key}.model.dtype=float16: DeepSpeed does not train in float16 on this {device_name}; take "
                "bfloat16, or training_backend fsdp or local"
            )
        if not is_on_gpu:
            # DeepSpeed would compile this extension at its first use, for minutes, on every node.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.worker.init_process_group()
        form_single_rank_group(self.device.type)
        # DeepSpeed calls some collectives by their deprecated names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        with _quiet():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            _pickle_stage_by_value()
        return deepspeed

    def _build_module(self, build: Callable[..., nn.Module]) -> nn.Module:
        """Builds the module in the compute dtype on the device. With stage 3, the module is partitioned over the ranks."""
        if self.stage == 3:
            with _quiet():
                return build_partitioned(build, self.deepspeed, self.config, self.dtype, self.device)
        module = build()
        for parameter in module.parameters():  # buffers, such as position frequencies, keep their precision
            parameter.data = parameter.data.to(self.dtype)
        return move_module(module, self.device)

    def _build_optimizer(self, trained_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Builds the optimizer that DeepSpeed wraps: one parameter group or, with a separate learning rate of the value
        parameters, two. Value parameters form the last group.

        Raises:
            ConfigError: A critic warm-up is configured; DeepSpeed updates all parameters in each step.
        """
        if self.optim.critic_warmup_steps:
            raise ConfigError(
                f"{self.blueprint.key}.optim.critic_warmup_steps: DeepSpeed updates all parameters in each step; choose "
                "training_backend local or fsdp, or set it to 0"
            )
        if not self.optim.separates_values:
            return self.optim.torch_optimizer([p for _, p in trained_parameters])
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in trained_parameters:
            groups[self.blueprint.is_value(name)].append(parameter)
        return self.optim.torch_optimizer([{"params": parameters} for parameters in groups])

    def _initialize(self, module: nn.Module, config: dict[str, Any], optimizer: Any) -> Any:
        try:
            with _quiet():
                return self.deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
        except (ValueError, AssertionError) as error:  # pydantic's ValidationError is a ValueError
            if not self.actor.deepspeed.config:
                raise
            raise ConfigError(f"DeepSpeed refuses {KEY}: {error}") from error

    def _make_reference(self) -> nn.Module:
        reference = self._build_module(self.blueprint.build_reference)
        if self.stage < 3:
            return reference
        zero = {key: option for key, option in self.config["zero_optimization"].items() if key != "offload_optimizer"}
        precision = {key: self.config[key] for key in ("bf16", "fp16")}
        config = {"train_micro_batch_size_per_gpu": 1, **precision, "zero_optimization": zero}
        engine: nn.Module = self._initialize(reference, config, None)
        return engine

    # -- training -------------------------------------------------------------------------------------------------

    @property
    def forward_module(self) -> nn.Module:
        """The DeepSpeed engine; forward passes that precede a backward pass must call it."""
        engine: nn.Module = self.engine
        return engine

    @property
    def num_trained_parameters(self) -> int:
        """Number of trainable parameters, over all ranks."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Metrics]]
    ) -> list[Metrics]:
        """Accumulates gradients (`TrainingBackend.forward_backward`). DeepSpeed cannot discard them without a step.

        Raises:
            RuntimeError: A second call came before `optimizer_step`.
        """
        if self._has_gradients:
            raise RuntimeError("forward_backward was called twice before optimizer_step")
        self._has_gradients = True
        return super().forward_backward(micro_batches, loss)

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Updates the weights (`TrainingBackend.optimizer_step`). If the norm is not finite, DeepSpeed skips the step on all
        ranks and reports infinity as the norm.
        """
        for group, group_lr in zip(self.engine.optimizer.param_groups, self.optim.group_lrs(lr), strict=False):
            group["lr"] = group_lr
        scale = self.loss_scale
        if scale is not None:
            # At its smallest scale, DeepSpeed's scaler would end the run by an exception.
            self.engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.engine.step()
        self._has_gradients = False
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), device="cpu")
        self._overflowed = scale is not None and scale > MIN_SCALE and self.is_step_skipped(norm)
        return norm

    @property
    def loss_scale(self) -> float | None:
        """Factor of the losses by DeepSpeed's scaler (`TrainingBackend.loss_scale`)."""
        return float(self.engine.optimizer.loss_scaler.cur_scale) if self.dtype == torch.float16 else None

    @property
    def overflowed(self) -> bool:
        """True if the loss scale was too large for the last step (`TrainingBackend.overflowed`)."""
        return self._overflowed

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a full weight (`TrainingBackend.full`)."""
        if not hasattr(tensor, "ds_id"):
            return tensor
        with self.deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    @torch.no_grad()
    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's weights (`TrainingBackend.replace_weights`) and the optimizer's float32 copies of them."""
        current_weights = self.module.state_dict(keep_vars=True)
        require_same_shapes({name: _shape(tensor) for name, tensor in current_weights.items()}, tensors)
        with self.keep_on_device():
            for name, tensor in current_weights.items():
                replacement = tensors[name].to(self.device)
                if hasattr(tensor, "ds_id"):
                    with self.deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                        tensor.copy_(replacement)
                else:
                    tensor.copy_(replacement)
                if tensor.requires_grad:
                    self._set_master(tensor, replacement.float())

    def _set_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Sets the optimizer's float32 copy of a parameter; all ranks call it."""
        if not hasattr(parameter, "ds_tensor"):
            self.deepspeed.utils.safe_set_full_fp32_param(parameter, value)
            return
        # DeepSpeed's setter of a full parameter ignores that the last rank's partition is padded.
        partition_size = parameter.ds_tensor.numel()
        flat_value = value.new_zeros(partition_size * self.ranks)
        flat_value[: value.numel()] = value.reshape(-1)
        self.deepspeed.utils.safe_set_local_fp32_param(
            parameter, flat_value[partition_size * self.rank : partition_size * (self.rank + 1)]
        )

    def _edit_trained(self, edit: Callable[[Iterable[torch.Tensor]], None]) -> None:
        trained_parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

        def iter_full_parameters() -> Iterator[torch.Tensor]:
            for parameter in trained_parameters:
                if not hasattr(parameter, "ds_id"):
                    yield parameter.detach()
                    continue
                # All ranks change the full parameter, and each rank keeps its partition.
                with self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    yield parameter.detach()

        edit(iter_full_parameters())

    def local_tensors(self) -> Named:
        """Yields names and tensors of this rank's weights. With stage 3, the tensors are flat partitions without padding."""
        with self.keep_on_device():
            parameter: Any  # DeepSpeed adds attributes
            for name, parameter in self.module.named_parameters():
                if not hasattr(parameter, "ds_tensor"):
                    yield name, parameter.detach()
                    continue
                partition = parameter.ds_tensor
                remaining = parameter.ds_numel - partition.numel() * parameter.ds_zero_partition_rank
                yield name, partition.narrow(0, 0, min(max(remaining, 0), partition.numel()))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes a checkpoint in DeepSpeed's format to `deepspeed/`, without frozen weights. Each rank writes its shards."""
        folder = Path(folder)
        target = folder / FOLDER
        if "checkpoint" not in self.config:  # a writer from the user's configuration stays
            self.engine.checkpoint_engine.save = _write_state
        with self.keep_on_device(), _quiet():
            self.engine.save_checkpoint(str(target), tag=TAG, exclude_frozen_parameters=self._has_frozen)
        if self.rank == 0:
            layout = {**self._layout(), "parameters": self._shapes}
            write_durably(folder / LAYOUT, json.dumps(layout, indent=1).encode() + b"\n")
            fsync_folder(target / TAG)
            fsync_folder(target)
            self.write_identity(folder)
        self.worker.barrier()

    @property
    def _has_frozen(self) -> bool:
        """True if some weights are frozen; they are restored from the model's files, not from checkpoints."""
        return not all(parameter.requires_grad for parameter in self.module.parameters())

    def _layout(self) -> dict[str, Any]:
        """Returns the settings that must be the same for DeepSpeed to load its files without conversion."""
        return {
            "world_size": self.ranks,
            "zero_stage": self.stage,
            "dtype": str(self.dtype).removeprefix("torch."),
            "cpu_offload": self.actor.deepspeed.cpu_offload,
            # Stage 3 keeps its optimizer in sub-groups: `zero_optimization.sub_group_size` says how large they are.
            "sub_groups": [len(group) for group in self.engine.optimizer.fp16_groups] if self.stage == 3 else [],
        }

    def load(self, folder: Path) -> None:
        """Restores a checkpoint (`TrainingBackend.load`). If its layout differs, for example in the world size, the
        checkpoint is converted to DeepSpeed's universal format, in a temporary folder next to it.

        Raises:
            CheckpointError: The checkpoint cannot be read, or is of another model or ZeRO stage.
        """
        folder = Path(folder)
        self.check_identity(folder)
        try:
            recorded_layout = json.loads((folder / LAYOUT).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / LAYOUT}: cannot be read ({error})") from error
        if recorded_layout["parameters"] != self._shapes:
            raise CheckpointError(f"{folder} holds other parameters than actor.model.model_path and actor.lora")
        if (recorded_layout["zero_stage"] == 3) != (self.stage == 3):
            raise CheckpointError(
                f"{folder} was saved with actor.deepspeed.zero_stage={recorded_layout['zero_stage']}, which DeepSpeed "
                f"cannot read with stage {self.stage}; resume with that stage, or start from an export of it"
            )
        with self.keep_on_device():
            layout = self._layout()
            # Settings that an older checkpoint lacks did not exist when it was written.
            if {key: recorded_layout.get(key, setting) for key, setting in layout.items()} == layout:
                require_harmless(files_of(folder / FOLDER / TAG, self.rank))
                self._read_checkpoint(folder / FOLDER, is_universal=False)
            else:
                with convert_to_universal(
                    folder / FOLDER / TAG, neighbour=folder, worker=self.worker
                ) as universal_folder:
                    self._read_checkpoint(universal_folder, is_universal=True)
            self._impose_options()

    def _read_checkpoint(self, source: Path, *, is_universal: bool) -> None:
        # The engine reads this from its configuration, but the format is known only now.
        self.engine._config.load_universal_checkpoint = is_universal
        try:
            with _quiet():
                loaded_path, _ = self.engine.load_checkpoint(
                    str(source), tag=TAG, load_module_strict=not self._has_frozen
                )
        finally:
            self.engine._config.load_universal_checkpoint = False
        if loaded_path is None:
            raise CheckpointError(f"{source}: DeepSpeed finds no checkpoint there")

    def _impose_options(self) -> None:
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group.update(self.optim.torch_options())
        optimizer.clip_grad = self.optim.clip_grad
        for state in optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):  # the parts from the universal format would share one counter
                state["step"] = state["step"].clone()

    # -- offload --------------------------------------------------------------------------------------------------

    def move_to_host(self) -> int:
        """Moves this rank's tensors to the host (`OffloadingBackend.move_to_host`); gathered weights are freed."""
        if self.stage == 3:
            self.engine.empty_partition_cache()
        return super().move_to_host()

    def offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to copy and the tensors to free (`OffloadingBackend.offloadable_tensors`)."""
        buckets = getattr(self.engine.optimizer, "ipg_buckets", {}).values()
        return self._iter_tensors(), tensors_in([getattr(bucket, "buffer", None) for bucket in buckets])

    def _iter_tensors(self) -> Iterator[torch.Tensor]:
        """Yields all tensors of model, optimizer and reference, in any order."""
        for tensor in tensors_of(self.module, self._reference):
            yield from tensors_in([tensor, getattr(tensor, "ds_tensor", None)])
        optimizer = self.engine.optimizer
        yield from tensors_in(vars(optimizer))
        yield from tensors_in([optimizer.optimizer.param_groups, list(optimizer.optimizer.state.values())])


def _shape(parameter: torch.Tensor) -> list[int]:
    """Returns the full shape of a parameter, even if it is partitioned."""
    return list(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _write_state(state_dict: Any, path: str) -> None:
    """Writes a state dict to a file; replaces the writer of DeepSpeed's checkpoint engine."""
    write_file(Path(path), state_dict, stream_state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses DeepSpeed's output about memory and progress; errors are raised as exceptions."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
