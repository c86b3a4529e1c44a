"""Reinforcement learning on batch-scheduled clusters, with Slurm as the process manager.

Names are imported on first use, so `import rlhpc` alone imports neither torch nor submitit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.former_names import install
from rlhpc.runtime.imports import lazy_names

install()

__version__ = "0.1.0"

_HOMES = {
    "rlhpc.runtime.errors": [
        "ChannelError",
        "CheckpointError",
        "ConfigError",
        "DeadlineExceeded",
        "PlacementError",
        "RegistryError",
        "RendezvousTimeout",
        "RlhpcError",
        "StaleGeneration",
        "SubmitError",
        "UserError",
        "WorkerFailed",
    ],
    "rlhpc.runtime.cluster": [
        "Cluster",
        "Node",
        "NodeGroup",
    ],
    "rlhpc.runtime.placement": [
        "FlexiblePlacementStrategy",
        "HybridComponentPlacement",
        "ModelParallelComponentPlacement",
        "NodePlacementStrategy",
        "PackedPlacementStrategy",
        "Placement",
    ],
    "rlhpc.runtime.worker": [
        "Worker",
    ],
    "rlhpc.runtime.worker_group": [
        "Handle",
        "WorkerGroup",
    ],
    "rlhpc.runtime.channel": [
        "Channel",
        "QueueEmpty",
        "QueueFull",
    ],
    "rlhpc.runtime.session": [
        "Session",
    ],
    "rlhpc.runs.configuration": [
        "load_config",
    ],
    "rlhpc.runs.handle": [
        "TrainingRun",
        "train",
    ],
    "rlhpc.live.loaded_run": [
        "LoadedRun",
        "load_run",
    ],
    "rlhpc.runs.runner": [
        "Runner",
    ],
    "rlhpc.jobs.waiter": [
        "DriverFailed",
        "DriverRejected",
    ],
    "rlhpc.language.algorithms.base": [
        "LanguageAlgorithm",
    ],
    "rlhpc.language.algorithms.registry": [
        "register_algorithm",
    ],
    "rlhpc.language.scoring.registry": [
        "Column",
        "LogitReader",
        "Scorer",
        "Rater",
        "register_scorer",
    ],
    "rlhpc.language.models.token_batch": [
        "TokenBatch",
    ],
    "rlhpc.language.data.prompts": [
        "Prompt",
    ],
    "rlhpc.language.rewards.base": [
        "Reward",
        "Sample",
    ],
    "rlhpc.language.rewards.registry": [
        "register_reward",
    ],
    "rlhpc.language.envs.base": [
        "Environment",
        "Step",
        "ToolEnvironment",
        "tool",
    ],
    "rlhpc.language.envs.registry": [
        "register_environment",
    ],
    "rlhpc.language.agents.registry": [
        "Agent",
        "ToolAgent",
        "register_agent",
    ],
    "rlhpc.language.runners.grpo": [
        "ReasoningRunner",
    ],
    "rlhpc.language.runners.supervised": [
        "DpoRunner",
        "RewardModelRunner",
        "SftRunner",
    ],
    "rlhpc.embodied.export": [
        "load_exported",
    ],
    "rlhpc.embodied.envs.base": [
        "VectorEnv",
    ],
    "rlhpc.embodied.envs.registry": [
        "register_env",
    ],
    "rlhpc.embodied.envs.sync_vector_env": [
        "SlotStep",
        "SlotwiseVectorEnv",
    ],
    "rlhpc.embodied.models.base": [
        "Policy",
    ],
    "rlhpc.embodied.models.registry": [
        "register_model",
    ],
    "rlhpc.embodied.workers": [
        "EmbodiedActor",
        "EnvWorker",
        "MultiStepRolloutWorker",
    ],
    "rlhpc.embodied.runners": [
        "EmbodiedRunner",
    ],
    "rlhpc.embodied.runners.off_policy_runner": [
        "OffPolicyRunner",
    ],
    "rlhpc.embodied.runners.bc": [
        "BcRunner",
    ],
}
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.runtime.channel import Channel as Channel
    from rlhpc.runtime.cluster import Cluster as Cluster
    from rlhpc.runtime.worker import Worker as Worker
