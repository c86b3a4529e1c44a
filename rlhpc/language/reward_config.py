"""The configuration of a reward model's run. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhpc.config.sections import RunnerConfig
from rlhpc.language.config import LanguageAlgorithmConfig, SourceConfig, TrainedLanguageConfig
from rlhpc.language.model_config import LanguageActorConfig, LanguageOptimConfig


@dataclass
class PairSourceConfig(SourceConfig):
    """Pairs of responses to a prompt, one of which is preferred."""

    chosen_key: str = "chosen"
    """Column of the preferred response of a pair (a text, or chat messages that end with it)."""
    rejected_key: str = "rejected"
    """Column of the other one."""


@dataclass
class PreferenceSourceConfig(PairSourceConfig):
    """Pairs of responses to a prompt, one of which is preferred; or responses with a label each."""

    margin_key: str | None = None
    """Column of the margin by which the preferred one should be ahead; null where there is none."""
    response_key: str = "response"
    """Column of the response that has a label."""
    label_key: str = "label"
    """Column of its label, a number (`algorithm.loss_type: regression`)."""


@dataclass
class PreferenceSuiteConfig(PreferenceSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""


@dataclass
class PreferenceDataConfig:
    """What reward models are trained and evaluated on."""

    train: PreferenceSourceConfig = field(default_factory=PreferenceSourceConfig)
    """Pairs, or responses with labels, of training."""
    eval: list[PreferenceSuiteConfig] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: int = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: str = "drop"
    """What happens to longer ones, and to rows that do not fit into `actor.max_tokens_per_micro_batch`: `drop`, or `error`,
    which names file and line."""
    prompts_per_step: int = 32
    """Pairs, or responses with labels, of a step."""


@dataclass
class RewardAlgorithmConfig(LanguageAlgorithmConfig):
    """The loss."""

    loss_type: str = "bradley_terry"
    """Loss: bradley_terry (of pairs), regression (of labels), a registered name, or `module:function`."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loss: `bradley_terry`: {centering: 0.01}, the weight of (r_chosen + r_rejected)²."""


@dataclass
class RewardRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between evaluations during training, by the actor's ranks, of the suites that `workflow.eval_suites` names; -1
    for none (the workflow evaluates checkpoints anyway)."""


@dataclass
class RewardOptimConfig(LanguageOptimConfig):
    """The optimizer."""

    lr: float = 1.0e-4
    """Learning rate."""


@dataclass
class RewardActorConfig(LanguageActorConfig):
    """The actor group: training."""

    optim: RewardOptimConfig = field(default_factory=RewardOptimConfig)
    """The optimizer."""


@dataclass
class RewardRunConfig(TrainedLanguageConfig):
    """A reward model: a language model's trunk with a head that gives one number to a response."""

    runner: RewardRunnerConfig = field(default_factory=RewardRunnerConfig)
    algorithm: RewardAlgorithmConfig = field(default_factory=RewardAlgorithmConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    actor: RewardActorConfig = field(default_factory=RewardActorConfig)
