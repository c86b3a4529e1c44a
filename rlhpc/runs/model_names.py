"""Model names: folders, and Hugging Face hub names in the local cache. Sends no request to the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.runs.preflight import FILES, Need, Resource, path_resource
from rlhpc.runtime.files import expand_home

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig


def is_hub_name(name: str) -> bool:
    """Returns whether a model's name is a hub name rather than the path of a folder."""
    folder = expand_home(name)
    is_path = folder.is_dir() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return not is_path


def cached_config(name: str) -> Path | None:
    """Returns the newest config.json of a hub name in the local cache; None if the model is not in the cache."""
    hf_home = Path(os.environ.get("HF_HOME", expand_home("~/.cache/huggingface")))
    cache = Path(os.environ.get("HF_HUB_CACHE", hf_home / "hub"))
    files = (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
    try:
        return max(files, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a model's folder has tokenizer files."""
    return any(folder.glob("*token*")) or any(folder.glob("vocab.*"))


def model_resource(cfg: RunConfig, path: str | None, maker: str = "") -> Resource:
    """Returns the resource that a check of a model's configuration and tokenizer needs.

    Args:
        cfg: The configuration.
        path: The model's folder or name.
        maker: Run or command that writes the folder before the start; "" if the folder must exist.
    """
    if not path or path.startswith("builtin:"):
        return FILES
    if not is_hub_name(path):
        return path_resource(cfg, path, maker)
    config_path = cached_config(path)
    if config_path is not None and has_tokenizer(config_path.parent):
        return FILES
    return Resource(Need.NETWORK, f"{path} is no folder, and not in the Hugging Face cache")
