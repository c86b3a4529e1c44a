"""Generation engines by name."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from rlhpc.language.engines.base import RolloutBackend
from rlhpc.runtime.errors import ConfigError

_BUILT_IN = {"hf": "rlhpc.language.engines.hf:HFRollout", "vllm": "rlhpc.language.engines.vllm:VLLMRollout"}


def find_rollout(name: str) -> Any:
    """The class of `rollout.rollout_backend`.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    path = _BUILT_IN.get(name.lower(), name)
    module, colon, attribute = path.partition(":")
    if not colon:
        near = difflib.get_close_matches(name.lower(), _BUILT_IN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(
            f"rollout.rollout_backend is {name!r}, which is unknown{hint} allowed: {', '.join(_BUILT_IN)}, or module:Class"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"rollout.rollout_backend is {name!r}, which cannot be imported: {error}") from None


def make_rollout(cfg: Any, *, model_path: str, device: Any, seed: int) -> RolloutBackend:
    """Builds the engine of `rollout.rollout_backend`.

    Args:
        cfg: The run's configuration; sections `rollout` and `actor.model` are read.
        model_path: Hugging Face folder or hub name of the weights to start from, with its tokenizer.
        device: Where it computes.
        seed: Of the engine; what a request draws depends on the request's own.

    Raises:
        ConfigError: It cannot be built: an unknown name, a library that is not installed, a model that is not there, or
            memory that does not suffice.
    """
    backend: RolloutBackend = find_rollout(str(cfg.rollout.rollout_backend))(
        cfg, model_path=model_path, device=device, seed=seed
    )
    return backend
