"""What a checkpoint's files say of the run that wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import plain, select
from rlhpc.runtime.files import read_file, read_json, read_yaml


def differing(cfg: RunConfig, saved: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Keys whose values differ between a checkpoint and a configuration, in words.

    Args:
        cfg: The configuration.
        saved: Dotted key → value in the checkpoint; a key that is missing or None is not compared.
        keys: The keys to compare.
    """
    found = []
    for key in keys:
        there, here = saved.get(key), plain(select(cfg, key), resolve=False)
        if there is not None and str(there).lower() != str(here).lower():
            found.append(f"{key} is {there!r} there and {here!r} here")
    return found


def saved_values(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Values from a JSON or YAML file of a checkpoint, by dotted key; empty if it cannot be read.

    Args:
        path: The file.
        keys: The keys to read; by default those at the top level.
    """
    try:
        content = (read_json if path.suffix == ".json" else read_yaml)(read_file(path))
        found: Any = OmegaConf.to_container(OmegaConf.create(content)) if keys else content
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: OmegaConf.select(OmegaConf.create(found), key) for key in keys} if keys else found
