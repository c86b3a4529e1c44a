"""Registry of training backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.training.backend import ActorSection, Blueprint, TrainingBackend, TrainingRanks

#: Registry of classes `(blueprint, actor, worker) -> TrainingBackend`.
BACKENDS: Registry[Any] = Registry(
    "training backend", "actor.training_backend", "rlhpc.training_backends",
    {
        "local": "rlhpc.training.data_parallel:ReplicatedBackend",
        "fsdp": "rlhpc.training.fsdp:FsdpBackend",
        "deepspeed": "rlhpc.training.deepspeed:DeepSpeedBackend",
    },
)  # fmt: skip


def make_backend(blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> TrainingBackend:
    """Builds the backend that `actor.training_backend` names. All ranks of the worker's group call it.

    The name is `local`, `fsdp`, `deepspeed`, or `module:Class` of a `TrainingBackend`.

    Args:
        blueprint: Description of the trained module.
        actor: Section `actor` of the configuration.
        worker: The worker of this rank.

    Raises:
        ConfigError: The backend does not exist, or its package is not installed.
    """
    backend: TrainingBackend = BACKENDS.find(actor.training_backend)(blueprint, actor, worker)
    return backend
