"""Training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import II

from rlhpc.config.constraints import COUNT, FREE, NOT_NEGATIVE, Choices, Registered
from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, LoraConfig, OptimConfig, ParallelConfig
from rlhpc.language.config.models import LanguageModelConfig, PolicyModelConfig


@dataclass
class LanguageOptimConfig(OptimConfig):
    """The optimizer."""

    name: str = "adamw"
    """`adam` or `adamw`."""
    lr: float = 1.0e-6
    """Learning rate. The default is for all weights of a pretrained model; adapters take ten times as much or more."""
    adam_eps: float = 1.0e-8
    """Added to the denominator, for numerical stability."""
    clip_grad: float | None = 1.0
    """Largest gradient norm; null does not clip."""
    lr_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps over which the learning rate rises from 0."""
    lr_scheduler: Annotated[str, Choices("constant", "linear", "cosine")] = "constant"
    """Course of the learning rate after the warm-up, until the end of the run: constant, linear (to 0) or cosine (to
    0)."""


@dataclass
class LanguageActorConfig:
    """The actor group: training."""

    training_backend: Annotated[str, FREE, Registered("rlhpc.training.registry:BACKENDS")] = "local"
    """`local` (all weights on each rank, gradients summed over the ranks), `fsdp`, `deepspeed`, or `module:Class`."""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model."""
    optim: LanguageOptimConfig = field(default_factory=LanguageOptimConfig)
    """The optimizer."""
    max_tokens_per_micro_batch: Annotated[int, COUNT, FREE] = 16384
    """Maximum number of tokens, padding included, in one forward and backward pass on a rank."""
    use_remove_padding: Annotated[bool, FREE] = True
    """Sequence packing: a model that supports it (with `sdpa`) reads samples as one row without padding, rather than those of
    similar length as a rectangle."""
    enable_dp_load_balance: Annotated[bool, FREE] = True
    """Load balance: samples change ranks before each optimizer step, so that all ranks have about equal work."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
    fsdp: Annotated[FsdpConfig, FREE] = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    parallel: Annotated[ParallelConfig, FREE] = field(default_factory=ParallelConfig)
    """Division of the model over ranks by `fsdp`."""
    deepspeed: Annotated[DeepspeedConfig, FREE] = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""


@dataclass
class GrpoActorConfig(LanguageActorConfig):
    """The actor group: training."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The model."""
    global_batch_size: Annotated[int | None, COUNT] = None
    """Responses of one optimizer step, over all ranks; null takes all responses of a step, for one optimizer step an epoch."""
    offload_in_rollout: Annotated[bool, FREE] = False
    """Collocated: moves the actor to the host while the rollout ranks generate, and these away while it trains."""


@dataclass
class SftOptimConfig(LanguageOptimConfig):
    """The optimizer."""

    lr: float = 2.0e-5
    """Learning rate. The default is for all weights of a pretrained model; adapters take ten times as much or more."""


@dataclass
class SftActorConfig(LanguageActorConfig):
    """The actor group: training."""

    optim: SftOptimConfig = field(default_factory=SftOptimConfig)
    """The optimizer."""


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
class CriticModelConfig(LanguageModelConfig):
    """The value model: a language model's layers, with a head of one number for each token."""

    model_path: str | None = II("actor.model.model_path")
    """A Hugging Face folder or hub name, or a built-in model; by default that of the actor. A sequence classifier of one
    label, such as an exported reward model, brings its head along; of any other model the head is new."""


@dataclass
class CriticOptimConfig(LanguageOptimConfig):
    """The optimizer."""

    lr: float = 1.0e-5
    """Learning rate."""


@dataclass
class CriticConfig(LanguageActorConfig):
    """The critic group, for `algorithm.adv_type: gae`: the values of tokens, trained beside the actor."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The value model."""
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    """The optimizer."""
    global_batch_size: Annotated[int | None, COUNT] = II("actor.global_batch_size")
    """Responses of one optimizer step, over all ranks; null takes all responses of a step."""
    update_epochs: Annotated[int, COUNT] = II("algorithm.update_epochs")
    """Passes over each rollout."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps at the start of the run in which the critic alone is trained."""


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
