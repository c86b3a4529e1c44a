"""DeepSpeed configuration, built from keys that rlhpc sets, defaults of rlhpc, and keys that the user adds."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.config.sections import GradScalerConfig
from rlhpc.config.typed import plain
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import suggest_name
from rlhpc.training.loss_scale import MIN_SCALE

if TYPE_CHECKING:
    from rlhpc.training.backend import ActorSection

KEY = "actor.deepspeed.config"

#: DeepSpeed keys that rlhpc sets, and the rlhpc keys that determine them.
FIXED_KEYS = {
    "train_batch_size": "actor.global_batch_size",
    "train_micro_batch_size_per_gpu": "actor.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "actor.max_tokens_per_micro_batch",
    "managed_gradient_accumulation": "",
    "gradient_allreduce_op": "",
    "gradient_clipping": "actor.optim.clip_grad",
    "optimizer": "actor.optim",
    "scheduler": "algorithm.anneal_lr",
    "fp16": "actor.model.dtype",
    "bf16": "actor.model.dtype",
    "amp": "actor.model.dtype",
    "torch_autocast": "actor.model.dtype",
    "zero_allow_untested_optimizer": "",
    "zero_force_ds_cpu_optimizer": "",
    "checkpoint.load_universal": "",
    "zero_optimization.stage": "actor.deepspeed.zero_stage",
    "zero_optimization.offload_optimizer": "actor.deepspeed.cpu_offload",
    "zero_optimization.offload_param": "actor.deepspeed.cpu_offload",
    "zero_optimization.cpu_offload": "actor.deepspeed.cpu_offload",
    "zero_optimization.elastic_checkpoint": "",
    "zero_optimization.compute_grad_norm": "",
}

#: Default size of DeepSpeed's gradient buffer in elements; it is allocated in full, however small the model.
_BUCKET = 500_000_000

#: Sections that the user may set. DeepSpeed itself would silently ignore a misspelt section.
ALLOWED = (
    "aio", "checkpoint", "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_types",
    "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "gradient_predivide_factor",
    "memory_breakdown", "prescale_gradients", "sparse_gradients", "steps_per_print", "tensorboard", "timers", "wandb",
    "wall_clock_breakdown", "zero_optimization",
)  # fmt: skip


def deepspeed_config(actor: ActorSection, dtype: torch.dtype, num_parameters: int | None = None) -> dict[str, Any]:
    """Returns the configuration for `deepspeed.initialize`. This needs neither DeepSpeed nor the model, so that a run can
    check the configuration before it starts.

    Args:
        actor: Section `actor` of the configuration.
        dtype: Dtype of the computation.
        num_parameters: Number of trainable parameters; it limits the size of the gradient buffer.

    Raises:
        ConfigError: The stage does not exist, or `actor.deepspeed.config` has a key that rlhpc sets or that is unknown.
    """
    stage, clip_grad = actor.deepspeed.zero_stage, actor.optim.clip_grad
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ConfigError(f"actor.deepspeed.zero_stage is {stage!r}; choose from 1, 2, 3")
    user_config: dict[str, Any] = dict(plain(actor.deepspeed.config or {}))
    _check_user_config(user_config)
    is_bfloat16, is_float16 = dtype == torch.bfloat16, dtype == torch.float16
    defaults: dict[str, Any] = {"steps_per_print": 2**31}
    if num_parameters is not None:
        defaults["zero_optimization"] = {"reduce_bucket_size": max(1, min(num_parameters, _BUCKET))}
    if is_bfloat16 or is_float16:
        # Sums over ranks and micro-batches in half precision would lose the contribution of small gradients.
        defaults |= {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    zero_section: dict[str, Any] = {"stage": int(stage)}
    if actor.deepspeed.cpu_offload:
        zero_section["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero_section["offload_param"] = {"device": "cpu"}
    fixed_options = {
        # DeepSpeed only multiplies these; the number of micro-batches in a step is set before each backward pass.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": float(clip_grad) if clip_grad is not None else 0.0,
        "bf16": {"enabled": is_bfloat16},
        "fp16": _loss_scale(actor) if is_float16 else {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section,
    }
    return _merge_configs(_merge_configs(defaults, user_config), fixed_options)


def _loss_scale(actor: ActorSection) -> dict[str, Any]:
    """Returns DeepSpeed's section `fp16` for a dynamic loss scale, which falls at the first overflow, as in torch."""
    options = getattr(actor, "grad_scaler", None) or GradScalerConfig()
    power = math.log2(options.init_scale)
    if not power.is_integer():
        raise ConfigError(
            f"actor.grad_scaler.init_scale is {options.init_scale:g}; DeepSpeed starts from a power of two, such as "
            f"{2.0 ** round(power):g}"
        )
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": int(power),
        "loss_scale_window": options.growth_interval,
        "hysteresis": 1,
        "min_loss_scale": MIN_SCALE,
    }


def _check_user_config(user_config: dict[str, Any]) -> None:
    """Rejects keys that rlhpc sets, and sections that DeepSpeed would ignore."""
    for path, actor_key in FIXED_KEYS.items():
        section, _, key = path.partition(".")
        section_config = user_config.get(section)
        if (section in user_config and not key) or (key and isinstance(section_config, dict) and key in section_config):
            raise ConfigError(
                f"{KEY}.{path} is set by rlhpc itself; " + (f"use {actor_key}" if actor_key else "leave it out")
            )
    for section in user_config:
        if section not in ALLOWED:
            raise ConfigError(
                f"{KEY}.{section}: no such key; {suggest_name(str(section), ALLOWED)}allowed: {', '.join(ALLOWED)}"
            )
    zero = user_config.get("zero_optimization")
    if zero is not None and not isinstance(zero, dict):
        raise ConfigError(f"{KEY}.zero_optimization is {zero!r}; it must be a mapping")


def _merge_configs(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged_config = copy.deepcopy(base)
    for key, value in overrides.items():
        are_mappings = isinstance(value, dict) and isinstance(merged_config.get(key), dict)
        merged_config[key] = _merge_configs(merged_config[key], value) if are_mappings else copy.deepcopy(value)
    return merged_config
