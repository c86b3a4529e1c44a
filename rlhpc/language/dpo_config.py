"""The configuration of a DPO run. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.language.config import LanguageAlgorithmConfig, SftActorConfig, SftConfig, SftDataConfig, SftOptimConfig
from rlhpc.language.reward_config import PairSourceConfig


@dataclass
class DpoDataConfig(SftDataConfig):
    """Pairs of training and of the held-out loss, and problems of evaluation."""

    train: PairSourceConfig = field(default_factory=PairSourceConfig)  # type: ignore[assignment]
    """Pairs of training."""
    prompts_per_step: int = 32
    """Pairs of a step."""


@dataclass
class DpoAlgorithmConfig(LanguageAlgorithmConfig):
    """The loss."""

    loss_type: str = "sigmoid"
    """Loss: sigmoid (DPO: −log σ of the difference of rewards), or ipo (its square distance from 1 / (2 β))."""
    beta: float = 0.1
    """β: how strongly the policy is held to the reference. The reward of a completion is β · (log π − log π_ref)."""
    label_smoothing: float = 0.0
    """Probability that a pair is the wrong way round (conservative DPO)."""


@dataclass
class DpoOptimConfig(SftOptimConfig):
    """The optimizer."""

    lr: float = 1.0e-6
    """Learning rate. The default is for all weights of a pretrained model; adapters take ten times as much or more."""


@dataclass
class DpoActorConfig(SftActorConfig):
    """The actor group: training, and the reference."""

    optim: DpoOptimConfig = field(default_factory=DpoOptimConfig)
    """The optimizer."""


@dataclass
class DpoConfig(SftConfig):
    """A language model on preferences, held to the weights from before training (DPO)."""

    algorithm: DpoAlgorithmConfig = field(default_factory=DpoAlgorithmConfig)
    data: DpoDataConfig = field(default_factory=DpoDataConfig)
    actor: DpoActorConfig = field(default_factory=DpoActorConfig)
