"""The choice of a language model's training backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lm import TrainingBackend

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

_BACKENDS = {
    "local": "rlhpc.training.lm_local:LocalLMBackend",
    "fsdp": "rlhpc.training.fsdp:FsdpBackend",
    "deepspeed": "rlhpc.training.zero:DeepSpeedBackend",
}


def make_backend(cfg: Any, worker: Worker) -> TrainingBackend:
    """Builds what `actor.training_backend` names: `local`, `fsdp`, `deepspeed`, or `module:Class`, called with
    `(cfg, worker)`. All ranks of the worker's group call it.

    Raises:
        ConfigError: There is no such backend, or its package is not installed.
    """
    name = str(cfg.actor.training_backend)
    target = _BACKENDS.get(name.lower(), name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ConfigError(
            f"actor.training_backend is {name!r}; choose from {', '.join(_BACKENDS)}, or give module:Class"
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"actor.training_backend={name}: {error}") from error
    backend: TrainingBackend = factory(cfg, worker)
    return backend
