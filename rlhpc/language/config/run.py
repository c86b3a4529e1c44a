"""Configurations of language runs. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeGuard

from omegaconf import DictConfig, OmegaConf

from rlhpc.config.constraints import FREE, INTERVAL
from rlhpc.config.sections import RunConfig, RunnerConfig, WorkflowConfig
from rlhpc.config.typed import default_section, mapping, plain, typed
from rlhpc.language.config.agents import AgentConfig, TrainedAgentConfig
from rlhpc.language.config.algorithms import (
    DpoAlgorithmConfig,
    GrpoAlgorithmConfig,
    LanguageAlgorithmConfig,
    RewardAlgorithmConfig,
)
from rlhpc.language.config.data import DataConfig, DpoDataConfig, PreferenceDataConfig, SftDataConfig
from rlhpc.language.config.engines import EngineConfig, GrpoRolloutConfig
from rlhpc.language.config.rewards import RewardConfig
from rlhpc.language.config.scoring import (
    GrpoRewardConfig,
    JudgeConfig,
    ReferenceConfig,
    ScoringGroupConfig,
    TeacherConfig,
)
from rlhpc.language.config.training import (
    CriticConfig,
    DpoActorConfig,
    GrpoActorConfig,
    LanguageActorConfig,
    RewardActorConfig,
    SftActorConfig,
)
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class GrpoRunnerConfig(RunnerConfig):
    """Settings of the training loop: duration, checkpoints and evaluation."""

    val_check_interval: Annotated[int, INTERVAL, FREE] = -1
    """Number of steps between evaluations during training, in which the rollout ranks answer the suites of
    `workflow.eval_suites`; -1 for none (the workflow evaluates checkpoints in any case)."""
    deterministic: Annotated[bool, FREE] = False
    """Whether the trainer and the engine `hf` compute the same log-probs, bit for bit, and the run ends if they do not. Both
    compute by slower functions, on CPUs with one thread per rank. With `actor.parallel.tensor`, `context` or `expert` the
    difference has a bound instead."""


@dataclass
class LanguageWorkflowConfig(WorkflowConfig):
    """Actions of the Snakemake rules on a run."""

    sft: str | None = None
    """Configuration of an SFT run that precedes this run, relative to this file. This run's `actor.model.model_path` then
    names the folder to which the workflow exports the SFT run's chosen step, `export/chosen` in the SFT run's folder."""
    sft_overrides: list[str] = field(default_factory=list)
    """Changes to the configuration of that SFT run, as `key=value`."""
    eval_start: bool = False
    """Whether to evaluate the model before training, as step 0."""


@dataclass
class TrainedLanguageConfig(RunConfig):
    """Sections of every run that trains a language model."""

    algorithm: LanguageAlgorithmConfig = field(default_factory=LanguageAlgorithmConfig)
    actor: LanguageActorConfig = field(default_factory=LanguageActorConfig)
    workflow: LanguageWorkflowConfig = field(default_factory=LanguageWorkflowConfig)


@dataclass
class LanguageConfig(TrainedLanguageConfig):
    """Configuration of a run whose model generates responses, in evaluation or also in training."""

    rollout: EngineConfig = field(default_factory=EngineConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


def answers(cfg: RunConfig) -> TypeGuard[LanguageConfig]:
    """Returns whether a run's model generates responses: its configuration has the sections `rollout` and `reward`."""
    return {"rollout", "reward"} <= set(mapping(cfg))


@dataclass
class GrpoConfig(LanguageConfig):
    """Configuration of RL of a language model on verifiable tasks."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: GrpoRunnerConfig = field(default_factory=GrpoRunnerConfig)
    algorithm: GrpoAlgorithmConfig = field(default_factory=GrpoAlgorithmConfig)
    rollout: GrpoRolloutConfig = field(default_factory=GrpoRolloutConfig)
    actor: GrpoActorConfig = field(default_factory=GrpoActorConfig)
    reward: GrpoRewardConfig = field(default_factory=GrpoRewardConfig)
    agent: TrainedAgentConfig = field(default_factory=TrainedAgentConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: Annotated[ReferenceConfig, FREE] = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    groups: list[ScoringGroupConfig] = field(default_factory=list)
    """Further groups that score the model's responses; `cluster.component_placement` places them."""


def responses_per_step(cfg: GrpoConfig) -> int:
    """Returns the number of responses of a step."""
    return cfg.data.prompts_per_step * cfg.algorithm.group_size


def minibatch_size(cfg: GrpoConfig, section: GrpoActorConfig | CriticConfig) -> int:
    """Returns the number of responses per optimizer step of actor or critic: `global_batch_size`, or all of a step."""
    return section.global_batch_size or responses_per_step(cfg)


@dataclass
class SftRunnerConfig(RunnerConfig):
    """Settings of the training loop: duration, checkpoints and evaluation."""

    val_check_interval: Annotated[int, INTERVAL, FREE] = -1
    """Number of steps between two evaluations, of which the last step also has one; -1 for none. An evaluation computes the
    held-out loss (`eval/loss`) and, if `cluster.component_placement` has a group `rollout`, its engines answer the suites of
    `workflow.eval_suites`. Checkpoints are evaluated on suites in any case (by the workflow, or `rlhpc eval`)."""


@dataclass
class SftConfig(LanguageConfig):
    """Configuration of supervised fine-tuning of a language model on demonstrations."""

    runner: SftRunnerConfig = field(default_factory=SftRunnerConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: SftActorConfig = field(default_factory=SftActorConfig)


@dataclass
class RewardRunnerConfig(RunnerConfig):
    """Settings of the training loop: duration, checkpoints and evaluation."""

    val_check_interval: Annotated[int, INTERVAL, FREE] = -1
    """Number of steps between evaluations during training, in which the actor's ranks score the suites of
    `workflow.eval_suites`; -1 for none (the workflow evaluates checkpoints in any case)."""


@dataclass
class RewardRunConfig(TrainedLanguageConfig):
    """Configuration of training a reward model: a language model with a head that computes one number per response."""

    runner: RewardRunnerConfig = field(default_factory=RewardRunnerConfig)
    algorithm: RewardAlgorithmConfig = field(default_factory=RewardAlgorithmConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    actor: RewardActorConfig = field(default_factory=RewardActorConfig)


@dataclass
class DpoConfig(SftConfig):
    """Configuration of DPO: training of a language model on preferences, with its initial weights as the reference."""

    algorithm: DpoAlgorithmConfig = field(default_factory=DpoAlgorithmConfig)
    data: DpoDataConfig = field(default_factory=DpoDataConfig)
    actor: DpoActorConfig = field(default_factory=DpoActorConfig)


#: Sections that determine generation and weight sync.
_SECTIONS = ("cluster", "runner", "workflow", "actor", "rollout", "agent", "data", "reward")


def answering_config(cfg: SftConfig) -> GrpoConfig:
    """Returns a GRPO configuration with the sections of a supervised run, for the run's engines.

    Keys that the supervised run lacks have their defaults.
    """
    defaults = default_section(GrpoConfig)
    section_contents = {name: section for name, section in plain(cfg).items() if name in _SECTIONS}
    return typed(GrpoConfig, OmegaConf.merge(defaults, _select_known_keys(section_contents, defaults)))


def _select_known_keys(section_content: dict[str, Any], schema: DictConfig) -> dict[str, Any]:
    """Returns the keys of `section_content` that exist in a schema, section by section; a free mapping accepts all keys."""
    known_content: dict[str, Any] = {}
    for name, key_value in section_content.items():
        if name not in schema:
            continue
        section = schema._get_node(name)
        is_section = isinstance(key_value, dict) and OmegaConf.get_type(section) is not dict
        known_content[name] = (
            _select_known_keys(key_value, section) if is_section and isinstance(section, DictConfig) else key_value
        )
    return known_content
