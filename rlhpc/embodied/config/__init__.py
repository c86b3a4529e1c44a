"""Configuration sections of embodied runs."""

from __future__ import annotations

from typing import TypeGuard

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import mapping
from rlhpc.embodied.config.data import DemoBufferConfig, DemosConfig, ReplayBufferConfig
from rlhpc.embodied.config.envs import (
    ClonedEnvConfig,
    ClonedEnvsConfig,
    DemonstratedWorkflowConfig,
    EmbodiedRunnerConfig,
    EmbodiedWorkflowConfig,
    EnvConfig,
    EnvSideConfig,
    EvalEnvConfig,
    PlayedEnvConfig,
    PlayingRunnerConfig,
    RealTimeConfig,
    RealTimeEvalEnvConfig,
    RolloutConfig,
    RolloutEnvConfig,
    RolloutEnvsConfig,
    TaskConfig,
)
from rlhpc.embodied.config.models import BcModelConfig, EmbodiedActorConfig, ModelConfig, NetworkConfig, SacModelConfig
from rlhpc.embodied.config.run import (
    BcActorConfig,
    BcAlgorithmConfig,
    BcConfig,
    PpoActorConfig,
    PpoAlgorithmConfig,
    PpoConfig,
    PpoRolloutConfig,
    SacActorConfig,
    SacAlgorithmConfig,
    SacConfig,
    SacOptimConfig,
    acts_in_actor,
    minibatch_size,
)

__all__ = [
    "BcActorConfig",
    "BcAlgorithmConfig",
    "BcConfig",
    "BcModelConfig",
    "ClonedEnvConfig",
    "ClonedEnvsConfig",
    "DemoBufferConfig",
    "DemonstratedWorkflowConfig",
    "DemosConfig",
    "EmbodiedActorConfig",
    "EmbodiedConfig",
    "EmbodiedRunnerConfig",
    "EmbodiedWorkflowConfig",
    "EnvConfig",
    "EnvSideConfig",
    "EvalEnvConfig",
    "ModelConfig",
    "NetworkConfig",
    "PlayedEnvConfig",
    "PlayingConfig",
    "PlayingRunnerConfig",
    "PolicyConfig",
    "PpoActorConfig",
    "PpoAlgorithmConfig",
    "PpoConfig",
    "PpoRolloutConfig",
    "RealTimeConfig",
    "RealTimeEvalEnvConfig",
    "ReplayBufferConfig",
    "RolloutConfig",
    "RolloutEnvConfig",
    "RolloutEnvsConfig",
    "SacActorConfig",
    "SacAlgorithmConfig",
    "SacConfig",
    "SacModelConfig",
    "SacOptimConfig",
    "TaskConfig",
    "acts_in_actor",
    "minibatch_size",
    "plays",
]  # fmt: skip

#: Configuration of a run that trains a policy on its own rollouts.
PlayingConfig = PpoConfig | SacConfig
#: Configuration of any run with simulators.
EmbodiedConfig = PpoConfig | SacConfig | BcConfig
#: Network section of any policy.
PolicyConfig = ModelConfig | SacModelConfig


def plays(cfg: RunConfig) -> TypeGuard[EmbodiedConfig]:
    """Returns whether a run uses simulators."""
    return "env" in mapping(cfg)
