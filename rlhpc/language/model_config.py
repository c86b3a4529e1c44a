"""Sections of the configuration about a language model: which one, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, LoraConfig, OptimConfig, ParallelConfig


@dataclass
class PretrainedConfig:
    """A language model that is there."""

    model_path: str | None = None
    """A Hugging Face folder or hub name, with its tokenizer."""
    dtype: str = "auto"
    """Precision of weights and computation: float32, bfloat16, or auto: bfloat16 on an accelerator that computes in it, else
    float32."""
    attn_implementation: str = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Runs code that comes with the model."""


@dataclass
class FrozenModelConfig(PretrainedConfig):
    """A language model that is not trained."""

    model_path: str | None = None
    """A Hugging Face folder or hub name, with its tokenizer, or `builtin:tiny`, `builtin:tiny_vl` or `builtin:smollm2`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of `builtin:tiny` and `builtin:tiny_vl`, such as `{hidden: 64}`; other models take none."""


@dataclass
class LanguageModelConfig(FrozenModelConfig):
    """The language model."""

    dtype: str = "auto"
    """Precision of the computation: float32, bfloat16 (mixed precision: fp32 master weights), or auto: bfloat16 on an
    accelerator that computes in it, else float32."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass, which saves memory."""
    router_aux_loss_coef: float = 0.0
    """Weight of the loss that has the routers of a mixture of experts choose all of them about equally often."""
    freeze_vision: bool = False
    """Leaves the part of a vision-language model that looks at pictures as it is; its weights are sent to the engine once."""


@dataclass
class ServingConfig:
    """How an engine holds a language model."""

    max_batch_size: int | None = None
    """Sequences that a rank makes at a time; null takes vLLM's own number for an accelerator, and 64 otherwise."""
    max_model_len: int | None = None
    """Longest prompt and response together; null takes the model's context."""
    dtype: str = "auto"
    """Precision of the engine's weights: float32, bfloat16, float16, or auto: the model's `dtype`, as it is on the engine's
    device."""
    gpu_memory_utilization: float = 0.6
    """Fraction of the accelerator's memory that vLLM takes."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's constructor."""


@dataclass
class GenerationConfig(ServingConfig):
    """What a language model writes with."""

    rollout_backend: str = "hf"
    """Generation engine of language models: `hf`, `vllm`, or `module:Class`."""
    max_new_tokens: int = 256
    """Most tokens of a response."""


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
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    lr_scheduler: str = "constant"
    """Course of the learning rate after the warm-up, until the end of the run: constant, linear (to 0) or cosine (to
    0)."""


@dataclass
class LanguageActorConfig:
    """The actor group: training."""

    training_backend: str = "local"
    """`local` (all weights on each rank, gradients summed over the ranks), `fsdp`, `deepspeed`, or `module:Class`."""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model."""
    optim: LanguageOptimConfig = field(default_factory=LanguageOptimConfig)
    """The optimizer."""
    max_tokens_per_micro_batch: int = 16384
    """Most tokens, padding included, in one forward and backward pass on a rank."""
    use_remove_padding: bool = True
    """Whether a model that can (with `sdpa`) reads samples as one row without padding, rather than those of similar length as
    a rectangle."""
    enable_dp_load_balance: bool = True
    """Whether samples change ranks before each optimizer step, so that all ranks have about equally much to compute."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """What `fsdp` divides over which ranks."""
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""
