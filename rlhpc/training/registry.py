"""The choice of a training backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rlhpc.runtime.errors import ConfigError
from rlhpc.training.contract import Blueprint, Ranks, TrainingBackend

if TYPE_CHECKING:
    from rlhpc.training.contract import ActorSection

_BACKENDS = {
    "local": "rlhpc.training.replicated:ReplicatedBackend",
    "fsdp": "rlhpc.training.fsdp:FsdpBackend",
    "deepspeed": "rlhpc.training.zero:DeepSpeedBackend",
}


def make_backend(blueprint: Blueprint, actor: ActorSection, worker: Ranks) -> TrainingBackend:
    """Builds what `actor.training_backend` names: `local`, `fsdp`, `deepspeed`, or `module:Class`, a `TrainingBackend`. All
    ranks of the worker's group call it.

    Args:
        blueprint: What is trained.
        actor: Section `actor` of the configuration.
        worker: The rank.

    Raises:
        ConfigError: There is no such backend, or its package is not installed.
    """
    name = str(actor.training_backend)
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
    backend: TrainingBackend = factory(blueprint, actor, worker)
    return backend
