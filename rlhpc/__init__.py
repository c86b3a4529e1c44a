"""rlhpc: reinforcement learning on batch-scheduled clusters, with Slurm as the process manager.

Names are loaded when they are first used, so `import rlhpc` costs neither torch nor submitit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

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
    "rlhpc.runtime.worker_group": ["WorkerGroup", "Handle"],
    "rlhpc.runtime.channel": ["Channel", "QueueFull", "QueueEmpty"],
    "rlhpc.runtime.session": ["Session"],
    "rlhpc.runs.configuration": ["load_config"],
    "rlhpc.runs.handle": ["train", "TrainingRun"],
    "rlhpc.runs.runner": ["Runner"],
    "rlhpc.jobs.waiter": ["DriverFailed", "DriverRejected"],
    "rlhpc.language.algorithm.base": ["LanguageAlgorithm", "Column", "Scorer", "LogitReader"],
    "rlhpc.language.algorithm.registry": ["register_algorithm"],
    "rlhpc.language.scoring.base": ["Rater"],
    "rlhpc.language.scoring.registry": ["register_scorer"],
    "rlhpc.language.tokens.batches": ["TokenBatch"],
    "rlhpc.language.data.prompts": ["Prompt"],
    "rlhpc.language.rewards.base": ["Reward", "Sample"],
    "rlhpc.language.rewards.registry": ["register_reward"],
    "rlhpc.language.environments.base": ["Environment", "Step", "ToolEnvironment", "tool"],
    "rlhpc.language.environments.registry": ["register_environment"],
    "rlhpc.language.agents.registry": ["Agent", "ToolAgent", "register_agent"],
    "rlhpc.language.runners.grpo": ["ReasoningRunner"],
    "rlhpc.language.runners.sft": ["SftRunner"],
    "rlhpc.language.runners.dpo": ["DpoRunner"],
    "rlhpc.language.runners.reward_model": ["RewardModelRunner"],
    "rlhpc.embodied.export": ["load_exported"],
    "rlhpc.embodied.envs.base": ["VectorEnv"],
    "rlhpc.embodied.envs.registry": ["register_env"],
    "rlhpc.embodied.envs.sync_vector_env": ["SlotStep", "SlotwiseVectorEnv"],
    "rlhpc.embodied.models.base": ["Policy"],
    "rlhpc.embodied.models.registry": ["register_model"],
    "rlhpc.embodied.workers": ["EmbodiedActor", "MultiStepRolloutWorker", "EnvWorker"],
    "rlhpc.embodied.runners": ["EmbodiedRunner"],
    "rlhpc.embodied.runners.rollout_runner": ["OffPolicyRunner"],
    "rlhpc.embodied.runners.bc": ["BcRunner"],
}  # fmt: skip
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.runtime.channel import Channel as Channel
    from rlhpc.runtime.cluster import Cluster as Cluster
    from rlhpc.runtime.worker import Worker as Worker
