"""Sections of language models: their path, precision and training options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import ATTENTION, ENGINE_DTYPES, FREE, NOT_NEGATIVE


@dataclass
class PretrainedConfig:
    """Pretrained language model."""

    model_path: str | None = None
    """A Hugging Face folder or hub name, with its tokenizer."""
    dtype: Annotated[str, ENGINE_DTYPES] = "auto"
    """Precision of weights and computation: float32, bfloat16, float16, or auto: bfloat16 on an accelerator that supports it,
    otherwise float32."""
    attn_implementation: Annotated[str, ATTENTION] = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Allows code from the model's folder to run."""


@dataclass
class FrozenModelConfig(PretrainedConfig):
    """Settings of a language model that is not trained."""

    model_path: str | None = None
    """A Hugging Face folder or hub name, with its tokenizer, or `builtin:tiny`, `builtin:tiny_vl` or `builtin:smollm2`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of `builtin:tiny` and `builtin:tiny_vl`, such as `{hidden: 64}`; other models take none."""


@dataclass
class LanguageModelConfig(FrozenModelConfig):
    """Settings of the language model."""

    dtype: str = "auto"
    """Precision of the computation: float32; bfloat16 or float16 (mixed precision with float32 master weights; float16 with a
    scaled loss, see `grad_scaler`); or auto: bfloat16 on an accelerator that supports it, otherwise float32."""
    attn_implementation: Annotated[str, FREE] = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """Whether to recompute activations in the backward pass, which saves memory."""
    router_aux_loss_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the load balancing loss of a mixture-of-experts model's routers."""
    freeze_vision: bool = False
    """Whether to freeze the vision tower of a vision-language model; its weights are then sent to the engine only once."""


@dataclass
class PolicyModelConfig(LanguageModelConfig):
    """Settings of the language model."""

    value_head: bool = False
    """Whether the model gets a value head, for `algorithm.adv_type: gae` without a group `critic`; policy and value loss then
    train the same layers. Rollout ranks and exports omit the head."""
