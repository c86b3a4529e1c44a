"""Values that a configuration reads from the environment (`${oc.env:NAME}`).

The values may be secrets. Written files and messages therefore contain the reference instead of the value. A restarted run
reads the values from its environment again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_MIN_SECRET_LENGTH = 6
"""Minimum length of a secret; shorter values are numbers and words that occur in any text."""
_REFERENCE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,\s*null\s*)?\}")
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

    def resolve_env(*arguments: Any) -> Any:
        global _num_reads
        _num_reads += 1
        text = oc.env(*arguments)
        if arguments and arguments[0] in os.environ and isinstance(text, str):
            _values_read[str(arguments[0])] = text
        return text

    with warnings.catch_warnings():  # later versions of OmegaConf deprecate this name
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("oc.env", resolve_env, replace=True)


def read_values() -> dict[str, str]:
    """Returns the values that configurations of this process have read from the environment, by variable."""
    return dict(_values_read)


def variable_of(reference_text: Any) -> str | None:
    """Returns the name of the variable if a text is nothing but a reference to it, with null as the only possible default."""
    reference_match = _REFERENCE.fullmatch(reference_text) if isinstance(reference_text, str) else None
    return reference_match[1] if reference_match else None


def mask_values(text: str, values_by_variable: Mapping[str, str] | None = None) -> str:
    """Returns a text with `${oc.env:NAME}` in place of values from the environment. Does not replace absolute paths.

    Args:
        text: The text.
        values_by_variable: Values that another process has read, by variable; by default the values that this process
            has read.
    """
    for name, variable_value in sorted(
        (_values_read if values_by_variable is None else values_by_variable).items(),
        key=lambda variable_item: -len(variable_item[1]),
    ):
        if len(variable_value) >= _MIN_SECRET_LENGTH and not PurePath(variable_value).is_absolute():
            text = text.replace(variable_value, f"${{oc.env:{name}}}")
    return text


def to_plain(cfg: Any) -> Any:
    """Returns a configuration as dicts and lists. Resolves all references except those to the environment."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    watch()
    if not isinstance(cfg, (DictConfig, ListConfig)):
        return cfg
    if cfg._is_none():
        return None
    unresolved_config: Any = OmegaConf.to_container(cfg, resolve=False)
    child_keys: Any = list(cfg.keys()) if isinstance(cfg, DictConfig) else range(len(cfg))
    plain_values: dict[Any, Any] = {}
    for key in child_keys:
        if OmegaConf.is_missing(cfg, key):
            plain_values[key] = "???"
            continue
        count_before = _num_reads
        child: Any = cfg[key]
        if OmegaConf.is_interpolation(cfg, key):
            resolved_child: Any = OmegaConf.to_container(child, resolve=True) if OmegaConf.is_config(child) else child
            plain_values[key] = unresolved_config[key] if _num_reads != count_before else resolved_child
        else:
            plain_values[key] = to_plain(child)
    return plain_values if isinstance(cfg, DictConfig) else list(plain_values.values())
