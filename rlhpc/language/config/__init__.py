"""Configuration sections of language models' runs.

Names are loaded when they are first used.
"""

from __future__ import annotations

from rlhpc.runtime.imports import lazy_names

_HOMES = {
    "rlhpc.language.config.agents": [
        "AgentConfig",
        "ServiceConfig",
        "ToolServerConfig",
        "TrainedAgentConfig",
    ],
    "rlhpc.language.config.algorithms": [
        "DistillationConfig",
        "DpoAlgorithmConfig",
        "GrpoAlgorithmConfig",
        "LanguageAlgorithmConfig",
        "RewardAlgorithmConfig",
    ],
    "rlhpc.language.config.data": [
        "DataConfig",
        "DataSourceConfig",
        "DpoDataConfig",
        "EvalDataConfig",
        "HoldoutConfig",
        "Named",
        "PairSourceConfig",
        "PreferenceDataConfig",
        "PreferenceSourceConfig",
        "PreferenceSuiteConfig",
        "SftDataConfig",
        "SourceConfig",
        "suite_named",
    ],
    "rlhpc.language.config.engines": [
        "EngineConfig",
        "EngineParallelConfig",
        "GenerationConfig",
        "GrpoRolloutConfig",
        "ServingConfig",
    ],
    "rlhpc.language.config.models": [
        "FrozenModelConfig",
        "LanguageModelConfig",
        "PolicyModelConfig",
        "PretrainedConfig",
    ],
    "rlhpc.language.config.rewards": [
        "RewardConfig",
        "RewardTermConfig",
    ],
    "rlhpc.language.config.run": [
        "DpoConfig",
        "GrpoConfig",
        "GrpoRunnerConfig",
        "LanguageConfig",
        "LanguageWorkflowConfig",
        "RewardRunConfig",
        "RewardRunnerConfig",
        "SftConfig",
        "SftRunnerConfig",
        "TrainedLanguageConfig",
        "answering_config",
        "answers",
        "minibatch_size",
        "responses_per_step",
    ],
    "rlhpc.language.config.scoring": [
        "GrpoRewardConfig",
        "JudgeConfig",
        "ProcessTermConfig",
        "ReferenceConfig",
        "RewardModelConfig",
        "ScoringConfig",
        "ScoringGroupConfig",
        "TeacherConfig",
    ],
    "rlhpc.language.config.training": [
        "CriticConfig",
        "CriticModelConfig",
        "CriticOptimConfig",
        "DpoActorConfig",
        "DpoOptimConfig",
        "GrpoActorConfig",
        "LanguageActorConfig",
        "LanguageOptimConfig",
        "RewardActorConfig",
        "RewardOptimConfig",
        "SftActorConfig",
        "SftOptimConfig",
    ],
}
__all__ = sorted(name for home_names in _HOMES.values() for name in home_names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
