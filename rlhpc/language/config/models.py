"""Sections of the configuration about a language model: which one, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import ATTENTION, DTYPES, FREE, NOT_NEGATIVE


@dataclass
class PretrainedConfig:
    """Pretrained language model."""

    model_path: str | None = None
    """A Hugging Face folder or hub name, with its tokenizer."""
    dtype: Annotated[str, DTYPES] = "auto"
    """Precision of weights and computation: float32, bfloat16, or auto: bfloat16 on an accelerator that computes in it, else
    float32."""
    attn_implementation: Annotated[str, ATTENTION] = "sdpa"
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
    attn_implementation: Annotated[str, FREE] = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """Recomputes activations in the backward pass, which saves memory."""
    router_aux_loss_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the loss that has the routers of a mixture of experts choose all of them about equally often."""
    freeze_vision: bool = False
    """Leaves the part of a vision-language model that looks at pictures as it is; its weights are sent to the engine once."""


@dataclass
class PolicyModelConfig(LanguageModelConfig):
    """The language model."""

    value_head: bool = False
    """A head for values on the model's own layers, for `algorithm.adv_type: gae` without a group `critic`: both losses train
    these layers. Rollout ranks and exports do without it."""
