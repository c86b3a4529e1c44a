"""Check of the memory model by PyTorch's `FSDPMemTracker`, which tracks all tensors of an FSDP2 step.

The check uses fake tensors and a fake process group. For any model it takes seconds and little memory, and needs no
accelerator. The tracker runs the forward and backward pass of two micro-batches at two depths; the difference per layer is
extrapolated to the depth of the model. Log-probs are left out, because their chunks depend on the batch. The optimizer is left
out, because the tracker counts its state wrongly with fake tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.planning.memory_model import STEP, Training
from rlhpc.language.planning.model_size import config_of, size_of
from rlhpc.runs.memory.account import gib
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

#: Numbers of layers of the measured models.
DEPTHS = (4, 8)


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory that the tracker measured, compared with the memory model.

    Attributes:
        peaks: Peak bytes of a rank, by number of layers.
        accounted: Peak bytes according to the memory model, by number of layers.
        full_model_bytes: Peak bytes of the full model, extrapolated from the two depths.
        full_model_accounted_bytes: Peak bytes of the full model according to the memory model.
        seconds: Duration of the measurement.
    """

    peaks: Mapping[int, float]
    accounted: Mapping[int, float]
    full_model_bytes: float
    full_model_accounted_bytes: float
    seconds: float

    def describe(self) -> str:
        """Formats the result as a line."""
        layers_text = ", ".join(
            f"{layers} layers {gib(peak_nbytes)} (accounted {gib(self.accounted[layers])})"
            for layers, peak_nbytes in self.peaks.items()
        )
        relative_error = self.full_model_accounted_bytes / self.full_model_bytes - 1
        return (
            f"measured with fake tensors, forward and backward pass under FSDP: {layers_text}; the whole model "
            f"{gib(self.full_model_bytes)}, by the account {gib(self.full_model_accounted_bytes)} ({relative_error:+.1%}); "
            f"{self.seconds:.0f} s"
        )


def measure_memory(training: Training, path: str | None, kwargs: Mapping[str, Any]) -> MeasuredMemory:
    """Measures the memory of a training step.

    Args:
        training: Training of the group. For any backend, FSDP over the same number of ranks is measured.
        path, kwargs: Model of the group.

    Raises:
        ConfigError: The installed PyTorch or transformers cannot build or run the model with fake tensors.
        UnknownModelError: The model is unknown.
    """
    start_time = time.monotonic()
    config = dict(config_of(path, kwargs))
    base_training = dataclasses.replace(
        training,
        backend="fsdp",
        sizes=MeshSizes(shard=training.ranks),
        lora=0,
        offload=False,
        reference=False,
        other_models_bytes=0.0,
        uses_logits=False,
        has_head=True,
        separate_embeddings=False,
        accelerated=True,
        eager=0,
    )
    peak_bytes, accounted_by_depth = {}, {}
    for layers in DEPTHS:
        shallow_config = {**config, "num_hidden_layers": layers}
        shallow_config.pop("layer_types", None)
        peak_bytes[layers] = _measure_peak(base_training, shallow_config)
        accounted_by_depth[layers] = accounted_bytes(
            dataclasses.replace(base_training, size=size_of(path, config=shallow_config))
        )
    min_layers, max_layers = DEPTHS
    bytes_per_layer = (peak_bytes[max_layers] - peak_bytes[min_layers]) / (max_layers - min_layers)
    full_model_bytes = peak_bytes[max_layers] + bytes_per_layer * (training.size.layers - max_layers)
    return MeasuredMemory(
        peak_bytes, accounted_by_depth, full_model_bytes, accounted_bytes(base_training), time.monotonic() - start_time
    )


def accounted_bytes(training: Training) -> float:
    """Returns the peak bytes of the measured part of a step according to the memory model."""
    unmeasured_terms = {"optimizer", "context and collectives"}
    return max(
        sum(term.nbytes for term in memory_moment.terms if term.name not in unmeasured_terms)
        for memory_moment in training.moments()
        if memory_moment.name != STEP
    )


def _measure_peak(training: Training, config: Mapping[str, Any]) -> float:
    """Returns the peak bytes of a rank according to the tracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(
        str(config["model_type"]), **{k: v for k, v in config.items() if k != "model_type"}
    )
    with _open_fake_process_group(training.ranks), warnings.catch_warnings(), contextlib.ExitStack() as exit_stack:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (training.ranks,))  # before fake tensors, because it reads values of tensors
        exit_stack.enter_context(FakeTensorMode())
        try:
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, attn_implementation="sdpa")
            model.config.use_cache = False
            if training.checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            trunk: nn.Module = model.base_model
            precision = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if training.mixed_precision else ()))
            layer_list = max((m for m in trunk.children() if isinstance(m, nn.ModuleList)), key=len, default=())
            sharded_modules = [*layer_list, model]
            for module in sharded_modules:
                fully_shard(
                    module,
                    mesh=mesh,
                    mp_policy=precision,
                    reshard_after_forward=training.reshard and module is not model,
                )
            for module in sharded_modules:
                assert isinstance(module, FSDPModule)
                module.set_force_sum_reduction_for_comms(True)
            ids = torch.zeros(1, training.tokens, dtype=torch.long)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((ids,))
            with tracker:
                for _ in range(2):  # gradients of the first micro-batch exist during the second
                    tracker.reset_mod_stats()
                    model(input_ids=ids, logits_to_keep=1).logits.float().mean().backward()
            peak_snapshots = tracker.get_tracker_snapshot("peak")
        except (RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"--measure: models of type {config.get('model_type')} cannot be followed: {first_line(error)}"
            ) from error
    return float(sum(_sum_device_bytes(memory_snapshot) for memory_snapshot in peak_snapshots.values()))


def _sum_device_bytes(memory_snapshot: Mapping[Any, int]) -> int:
    """Returns the total bytes of a device in a tracker's snapshot, or the sum of the categories without a total."""
    return next(
        (
            category_nbytes
            for category, category_nbytes in memory_snapshot.items()
            if str(category).rpartition(".")[2].lower() == "total"
        ),
        sum(memory_snapshot.values()),
    )


@contextlib.contextmanager
def _open_fake_process_group(num_ranks: int) -> Iterator[None]:
    """Creates a fake process group of `num_ranks` ranks within this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("--measure makes a process group of its own, and this process has one")
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
