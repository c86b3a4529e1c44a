"""Whether a checkpoint is one that this configuration can go on from: asked before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhpc.runtime.errors import CheckpointError

_SHAPES = ("model_type", "hidden_sizes", "num_action_chunks", "value_per_action", "critic_layer_norm", "add_value_head")
_ENVIRONMENT = ("env.train.env_type", "env.train.env_id")
#: Of a Hugging Face config: what its weights' shapes follow from.
_SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_resume(cfg: Any, checkpoint: Path) -> None:
    """Refuses a checkpoint of another kind of run, another environment or another model.

    Raises:
        CheckpointError: Names the keys, what the checkpoint has and what the configuration has.
    """
    # A checkpoint without them is refused, or taken, by the ranks that read it.
    saved, model, backend = (_read(checkpoint / name) for name in ("config.yaml", "model.json", "backend.json"))
    differ = _different(cfg, saved, ("runner.task_type",))
    if not differ and backend:
        differ = _different(cfg, backend, ("actor.training_backend", "actor.lora.rank"), flat=True)
        differ += _sizes(cfg, checkpoint)
    elif not differ:
        differ = _different(cfg, saved, _ENVIRONMENT)
        mine = {f"actor.model.{name}": model["model"][name] for name in _SHAPES if name in model.get("model", {})}
        differ += _different(cfg, mine, tuple(mine), flat=True)
    if differ:
        start = "" if backend else " To start a new run from its weights: runner.init_from=… and another runner.name."
        raise CheckpointError(
            f"runner.resume_dir: {checkpoint} is not of this run: {'; '.join(differ)}. Go on with the checkpoint's "
            f"configuration, or start fresh with another runner.name.{start}"
        )


def _different(cfg: Any, saved: Any, keys: tuple[str, ...], *, flat: bool = False) -> list[str]:
    found = []
    for key in keys:
        there = saved.get(key) if flat else OmegaConf.select(OmegaConf.create(saved), key)
        here = OmegaConf.select(cfg, key)
        here = OmegaConf.to_container(here) if OmegaConf.is_config(here) else here
        if there is not None and str(there).lower() != str(here).lower():
            found.append(f"{key} is {there!r} there and {here!r} here")
    return found


def _sizes(cfg: Any, checkpoint: Path) -> list[str]:
    """Sizes of the language model, where both configs are at hand."""
    there, here = (
        _read(checkpoint / "model" / "config.json"),
        _read(Path(str(cfg.actor.model.model_path)) / "config.json"),
    )
    differ = [f"{key} {there[key]} there and {here[key]} here" for key in _SIZES if key in there and key in here
              and there[key] != here[key]]  # fmt: skip
    return [f"actor.model.model_path names another model ({', '.join(differ)})"] if differ else []


def _read(path: Path) -> dict[str, Any]:
    """A JSON or YAML file; empty where there is none."""
    try:
        text = path.read_text()
        found: Any = json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
