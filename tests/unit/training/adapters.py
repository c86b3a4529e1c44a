"""A small model with adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhpc.config.sections import LoraConfig
from rlhpc.training.lora import ADAPTER, attach_lora, full_weights
from rlhpc.training.shard_layout import pieces
from tests.extras import need_extra

need_extra("llm")

import transformers

#: Families: by name, their configuration, what gets adapters, and where that is. GPT-2 stores its weights transposed.
MODELS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "dense": (
        lambda: transformers.LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1,
        ), "q_proj", "model.layers.0.self_attn.q_proj",
    ),
    "transposed": (
        lambda: transformers.GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=2, n_positions=32),
        "c_attn", "transformer.h.0.attn.c_attn",
    ),
    "experts": (
        lambda: transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
            vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_experts=4,
            num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        ), "q_proj", "model.layers.0.self_attn.q_proj",
    ),
}  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
RATES = pytest.mark.parametrize("rate", [1e-6, 1e-3])


class Adapted:
    """A model with adapters on one of its layers."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config, target, layer = MODELS[family]
        model = transformers.AutoModelForCausalLM.from_config(config()).to(dtype)
        self.name = f"{layer}.weight"
        self.model: Any = attach_lora(model, LoraConfig(rank=4, alpha=8, target_modules=[target]), seed=0)
        self.layer = self.model.get_submodule(f"base_model.model.{layer}")
        self.base = self.layer.base_layer.weight.data

    def step(self, rate: float) -> None:
        """As Adam makes them: each element moves by so much."""
        for factor in (self.layer.lora_B[ADAPTER].weight, self.layer.lora_A[ADAPTER].weight):
            factor.data += rate * torch.randn(factor.shape).sign()

    def delta(self) -> torch.Tensor:
        product = 2.0 * (self.layer.lora_B[ADAPTER].weight.data @ self.layer.lora_A[ADAPTER].weight.data)
        return product.T if self.layer.fan_in_fan_out else product

    def sent(self, in_parts: bool = False) -> torch.Tensor:
        if in_parts:  # as to engines that take what each rank holds
            held = pieces(self.model, None, lambda tensor: tensor)
            return next(values for held_slice, values in held if held_slice.name == self.name)()
        return dict(full_weights(self.model, lambda tensor: tensor))[self.name]
