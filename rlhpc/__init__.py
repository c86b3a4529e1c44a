"""rlhpc: reinforcement learning on batch-scheduled clusters, with Slurm as the process manager.

Names are loaded when they are first used, so `import rlhpc` costs neither torch nor submitit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.lazy import lazy_names

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
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.runtime.channel import Channel as Channel
    from rlhpc.runtime.cluster import Cluster as Cluster
    from rlhpc.runtime.worker import Worker as Worker
