"""Adapters on a language model: what is sent is the base and the adapters, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.config.sections import LoraConfig
from rlhpc.runtime.errors import RlhpcError
from rlhpc.training.lora import ADAPTER, attach_lora, full_weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

LAYER = "model.layers.0.self_attn.q_proj.weight"


def adapted(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.02,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    return attach_lora(model, LoraConfig(rank=4, alpha=8, target_modules=["q_proj"]), seed=0)


def sent(model: Any) -> torch.Tensor:
    return dict(full_weights(model, lambda tensor: tensor))[LAYER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rate", [1e-6, 1e-3])
@pytest.mark.parametrize("how", ["by peft", "by hand"])
def test_adapters_that_were_merged_already_are_not_merged_again(how: str, rate: float, dtype: torch.dtype) -> None:
    """Also after one step at the smallest learning rate, wherever it changes a bit of the base at all."""
    model = adapted(dtype)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    base = layer.base_layer.weight.data
    before = base.clone()
    assert torch.equal(sent(model), before)
    b = layer.lora_B[ADAPTER].weight
    b.data += rate * torch.randn(b.shape).sign()  # a first step of Adam's
    delta = 2.0 * (b.data @ layer.lora_A[ADAPTER].weight.data)
    expected = (before.float() + delta).to(dtype)
    for _ in range(3):
        assert torch.equal(sent(model), expected)
    if how == "by peft":
        model.merge_adapter()
    else:
        base += delta.to(dtype)
    if how == "by hand" and torch.equal(base, before):  # it rounds away, in half precision
        assert dtype == torch.bfloat16 and torch.equal(sent(model), expected)
        return
    with pytest.raises(RlhpcError, match=rf"^{LAYER} has changed, .* merged twice"):
        sent(model)
