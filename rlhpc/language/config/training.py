"""Sections of training groups: actor, critic and their optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import II

from rlhpc.config.constraints import COUNT, FREE, NOT_NEGATIVE, Choices, Registered
from rlhpc.config.sections import (
    DeepspeedConfig,
    FsdpConfig,
    GradScalerConfig,
    LoraConfig,
    ParallelConfig,
    ScheduledOptimConfig,
    ValueOptimConfig,
)
from rlhpc.language.config.models import LanguageModelConfig, PolicyModelConfig

#: Fewest tokens of a shared prefix (`share_prefixes`): with fewer, more calls of attention cost about what they save.
SHORTEST_PREFIX = 32


@dataclass
class LanguageOptimConfig(ScheduledOptimConfig):
    """Settings of the optimizer."""

    name: str = "adamw"
    """`adam` or `adamw`."""
    lr: float = 1.0e-6
    """Learning rate. The default is for all weights of a pretrained model; adapters need ten times as much or more."""
    adam_eps: float = 1.0e-8
    """Added to the denominator, for numerical stability."""
    clip_grad: float | None = 1.0
    """Maximum gradient norm; null turns clipping off."""


@dataclass
class LanguageActorConfig:
    """Settings of the actor group, which trains the model."""

    training_backend: Annotated[str, FREE, Registered("rlhpc.training.registry:BACKENDS")] = "local"
    """Training backend: `local` (all weights on each rank, gradients summed over ranks), `fsdp`, `deepspeed`, or
    `module:Class`."""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model."""
    optim: LanguageOptimConfig = field(default_factory=LanguageOptimConfig)
    """Settings of the optimizer."""
    max_tokens_per_micro_batch: Annotated[int, COUNT, FREE] = 16384
    """Maximum number of tokens, including padding, in one forward and backward pass on a rank."""
    use_remove_padding: Annotated[bool, FREE] = True
    """Sequence packing: a model that supports it (with `sdpa`) reads samples as one row without padding, instead of samples of
    similar length as a padded rectangle."""
    share_prefixes: Annotated[bool, FREE] = True
    """Samples of a prompt compute a common prefix of 32 tokens or more once, such as the prompt or earlier turns of an agent.
    For models that pack samples, without sliding windows, context parallelism, dropout and `compile`; the log says why others
    compute it for each sample."""
    enable_dp_load_balance: Annotated[bool, FREE] = True
    """Load balance: samples are redistributed before each optimizer step, so that all ranks have about equal work."""
    compile: Annotated[str, Choices("off", "blocks"), FREE] = "off"
    """`blocks` compiles each transformer block with torch.compile, which takes a minute or so at the start and saves time and
    memory in each step; for `training_backend` local, fsdp without tensor, context and expert parallelism, and deepspeed below
    stage 3, and for models without experts."""
    kernels: Annotated[str, Choices("torch", "liger"), FREE] = "torch"
    """Kernels of norms, rotary embeddings and MLPs: `torch`, or `liger`, the fused Triton kernels of the package liger-kernel,
    for GPUs."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA adapters."""
    grad_scaler: Annotated[GradScalerConfig, FREE] = field(default_factory=GradScalerConfig)
    """Loss scale with `model.dtype: float16`."""
    fsdp: Annotated[FsdpConfig, FREE] = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    parallel: Annotated[ParallelConfig, FREE] = field(default_factory=ParallelConfig)
    """Division of the model over ranks by `fsdp`."""
    deepspeed: Annotated[DeepspeedConfig, FREE] = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""


@dataclass
class GrpoOptimConfig(LanguageOptimConfig, ValueOptimConfig):
    """Settings of the optimizer."""


@dataclass
class GrpoActorConfig(LanguageActorConfig):
    """Settings of the actor group, which trains the model."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The model."""
    optim: GrpoOptimConfig = field(default_factory=GrpoOptimConfig)
    """Settings of the optimizer."""
    global_batch_size: Annotated[int | None, COUNT] = None
    """Number of responses per optimizer step over all ranks; null is all responses of a step, so that an epoch has one
    optimizer step."""
    offload_in_rollout: Annotated[bool, FREE] = False
    """Colocated placement: offloads the actor to the host while the rollout ranks generate, and their engines while it
    trains."""


@dataclass
class SftOptimConfig(LanguageOptimConfig):
    """Settings of the optimizer."""

    lr: float = 2.0e-5
    """Learning rate. The default is for all weights of a pretrained model; adapters need ten times as much or more."""


@dataclass
class SftActorConfig(LanguageActorConfig):
    """Settings of the actor group, which trains the model."""

    optim: SftOptimConfig = field(default_factory=SftOptimConfig)
    """Settings of the optimizer."""


@dataclass
class DpoOptimConfig(SftOptimConfig):
    """Settings of the optimizer."""

    lr: float = 1.0e-6
    """Learning rate. The default is for all weights of a pretrained model; adapters need ten times as much or more."""


@dataclass
class DpoActorConfig(SftActorConfig):
    """Settings of the actor group, which trains the model and computes the reference's log-probs."""

    optim: DpoOptimConfig = field(default_factory=DpoOptimConfig)
    """Settings of the optimizer."""


@dataclass
class CriticModelConfig(LanguageModelConfig):
    """The value model: a language model with a head that computes one number per token."""

    model_path: str | None = II("actor.model.model_path")
    """A Hugging Face folder or hub name, or a built-in model; by default the actor's. A sequence classifier with one label,
    such as an exported reward model, keeps its head; any other model gets a new head."""


@dataclass
class CriticOptimConfig(LanguageOptimConfig):
    """Settings of the optimizer."""

    lr: float = 1.0e-5
    """Learning rate."""


@dataclass
class CriticConfig(LanguageActorConfig):
    """The critic group, for `algorithm.adv_type: gae`: a value model that is trained together with the actor."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The value model."""
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    """Settings of the optimizer."""
    global_batch_size: Annotated[int | None, COUNT] = II("actor.global_batch_size")
    """Number of responses per optimizer step over all ranks; null is all responses of a step."""
    update_epochs: Annotated[int, COUNT] = II("algorithm.update_epochs")
    """Number of passes over each rollout."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps at the start of the run in which only the critic is trained."""


@dataclass
class RewardOptimConfig(LanguageOptimConfig):
    """Settings of the optimizer."""

    lr: float = 1.0e-4
    """Learning rate."""


@dataclass
class RewardActorConfig(LanguageActorConfig):
    """Settings of the actor group, which trains the model."""

    optim: RewardOptimConfig = field(default_factory=RewardOptimConfig)
    """Settings of the optimizer."""
