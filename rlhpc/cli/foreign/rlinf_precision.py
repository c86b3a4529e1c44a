"""Precisions of RLinf's trainers: that of the computation, and that of weights and optimizer state."""

from __future__ import annotations

from rlhpc.cli.foreign.rules import ForeignConfig, Rule
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import short_repr

#: RLinf's names of precisions (config.py, torch_dtype_from_precision) → those of rlhpc.
_DTYPES = {
    "32": "float32", "fp32": "float32", "32-true": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16",
    "16": "float16", "fp16": "float16", "16-mixed": "float16",
}  # fmt: skip


def dtype_name(config: ForeignConfig, key: str, default: str) -> str:
    """Returns the name of the precision that a key has, or of RLinf's default.

    Raises:
        ConfigError: RLinf has no such precision.
    """
    name = str(config(key, default)).lower()
    if name not in _DTYPES:
        raise ConfigError(f"{key} is {short_repr(name)}; RLinf has the precisions {', '.join(_DTYPES)}")
    return _DTYPES[name]


def computation_dtype_key(config: ForeignConfig, group: str) -> str:
    """Returns the key of the precision in which RLinf's trainer of a group computes: that of FSDP or of autocast goes before
    the model's.
    """
    section = f"{group}.fsdp_config"
    if config.leaves.get(f"{group}.training_backend") != "megatron":
        if config(f"{section}.amp_autocast.enabled", False):
            return f"{section}.amp_autocast.precision"
        if config(f"{section}.mixed_precision.param_dtype") is not None:
            return f"{section}.mixed_precision.param_dtype"
    return f"{group}.model.precision"


def computation_dtype(group: str, default: str) -> Rule:
    """Returns the rule for the precision of a trainer's computation. Weights and optimizer state are float32 in rlhpc; those
    of RLinf's FSDP trainer have the precision of the model (hybrid_engines/fsdp/fsdp_model_manager.py).
    """
    precision = f"{group}.model.precision"

    def rule(config: ForeignConfig) -> str:
        weights = dtype_name(config, precision, default)
        if config.leaves.get(f"{group}.training_backend") != "megatron" and weights != "float32":
            config.omit(f"{precision} {group}.optim.lr", _ROUNDED_WEIGHTS)
        return dtype_name(config, computation_dtype_key(config, group), default)

    return rule


_ROUNDED_WEIGHTS = "RLinf's FSDP trainer keeps weights and Adam's averages in it; in rlhpc they are float32"
