"""Python values as configuration values: what YAML can hold, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlhpc.runtime import environment_values
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.shown import cut, shown


def plain_value(value: Any, key: str) -> Any:
    """Returns a value as mappings, lists, texts, numbers, booleans and None.

    Paths become texts, tuples lists, and numbers of NumPy or PyTorch those of Python. An OmegaConf node keeps what it takes
    from the environment as it is written.

    Args:
        value: Of a configuration key, or a mapping of sections.
        key: The key, for messages.

    Raises:
        ConfigError: A value is none of these; names its key.
    """
    value = environment_values.to_plain(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of NumPy or PyTorch
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, (str, int))]:
            raise ConfigError(f"{key}: {shown(wrong[0])} is not a key; keys are texts")
        return {name: plain_value(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(
        f"{cut(key)} is of type {type(value).__name__}; a configuration has texts, numbers, booleans, lists and mappings"
    )
