"""rlhpc: reinforcement learning on batch-scheduled clusters, with Slurm as the process manager.

Names are loaded when they are first used, so `import rlhpc` costs neither torch nor submitit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "rlhpc.runtime.errors": [
        "RlhpcError", "UserError", "ConfigError", "PlacementError", "SubmitError", "CheckpointError", "RegistryError",
        "StaleGeneration", "RendezvousTimeout", "DeadlineExceeded", "ChannelError", "WorkerFailed",
    ],
    "rlhpc.runtime.cluster": ["Cluster", "Node", "NodeGroup"],
    "rlhpc.runtime.placement": [
        "Placement", "PackedPlacementStrategy", "FlexiblePlacementStrategy", "NodePlacementStrategy",
        "HybridComponentPlacement", "ModelParallelComponentPlacement",
    ],
    "rlhpc.runtime.worker": ["Worker"],
    "rlhpc.runtime.group": ["WorkerGroup", "Handle"],
    "rlhpc.runtime.channel": ["Channel", "QueueFull", "QueueEmpty"],
    "rlhpc.runtime.session": ["Session"],
    "rlhpc.runs.configuration": ["load_config"],
    "rlhpc.language.algorithm.base": ["LanguageAlgorithm", "Column", "Scorer", "LogitReader"],
    "rlhpc.language.algorithm.registry": ["register_algorithm"],
    "rlhpc.language.scoring.base": ["Rater"],
    "rlhpc.language.scoring.registry": ["register_scorer"],
    "rlhpc.language.tokens.batches": ["TokenBatch"],
    "rlhpc.embodied.export": ["load_exported"],
    "rlhpc.embodied.roles": ["EmbodiedActor", "MultiStepRolloutWorker", "EnvWorker"],
    "rlhpc.embodied.runners": ["EmbodiedRunner"],
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from rlhpc.runtime.channel import Channel as Channel
    from rlhpc.runtime.cluster import Cluster as Cluster
    from rlhpc.runtime.worker import Worker as Worker


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rlhpc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
