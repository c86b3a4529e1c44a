"""Values that a configuration reads from the environment (`${oc.env:NAME}`).

The values may be secrets. Written files and messages therefore contain the reference instead of the value. A restarted run
reads the values from its environment again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_MIN_SECRET_LENGTH = 6
"""Minimum length of a secret; shorter values are numbers and words that occur in any text."""
_values_read: dict[str, str] = {}
_num_reads, _is_watching = 0, False


def watch() -> None:
    """Starts recording the values that configurations read from the environment. May be called repeatedly."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def env(*arguments: Any) -> Any:
        global _num_reads
        _num_reads += 1
        resolved = oc.env(*arguments)
        if arguments and arguments[0] in os.environ and isinstance(resolved, str):
            _values_read[str(arguments[0])] = resolved
        return resolved

    with warnings.catch_warnings():  # later versions of OmegaConf deprecate this name
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def values_read() -> dict[str, str]:
    """Returns the values that configurations of this process have read from the environment, by variable."""
    return dict(_values_read)


def masked(text: str, values: Mapping[str, str] | None = None) -> str:
    """Returns a text with `${oc.env:NAME}` in place of values from the environment. Does not replace absolute paths.

    Args:
        text: The text.
        values: Values that another process has read, by variable; by default the values that this process has read.
    """
    for name, value in sorted((_values_read if values is None else values).items(), key=lambda item: -len(item[1])):
        if len(value) >= _MIN_SECRET_LENGTH and not PurePath(value).is_absolute():
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def to_plain(cfg: Any) -> Any:
    """Returns a configuration as dicts and lists. Resolves all references except those to the environment."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    watch()
    if not isinstance(cfg, (DictConfig, ListConfig)):
        return cfg
    if cfg._is_none():
        return None
    unresolved: Any = OmegaConf.to_container(cfg, resolve=False)
    keys: Any = list(cfg.keys()) if isinstance(cfg, DictConfig) else range(len(cfg))
    plain_values: dict[Any, Any] = {}
    for key in keys:
        if OmegaConf.is_missing(cfg, key):
            plain_values[key] = "???"
            continue
        count_before = _num_reads
        child: Any = cfg[key]
        if OmegaConf.is_interpolation(cfg, key):
            resolved: Any = OmegaConf.to_container(child, resolve=True) if OmegaConf.is_config(child) else child
            plain_values[key] = unresolved[key] if _num_reads != count_before else resolved
        else:
            plain_values[key] = to_plain(child)
    return plain_values if isinstance(cfg, DictConfig) else list(plain_values.values())
