"""Adapters on a language model: what is sent is the base and the adapters, once each; otherwise nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhpc.config.sections import LoraConfig
from rlhpc.language.planning.model_size import size_of
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.training import lora as merging
from rlhpc.training.lora import attach_lora, full_weights
from tests.extras import need_extra

need_extra("llm")

import transformers

from tests.unit.training.adapters import DTYPES, MODELS, RATES, Adapted


def twice(base: torch.Tensor, delta: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return ((base.float() + delta).to(base.dtype).float() + delta).to(base.dtype)


def on_top_of_the_last(base: torch.Tensor, delta: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    kept["last"] = (kept.get("last", base).float() + delta).to(base.dtype)
    return kept["last"]


def in_place(base: torch.Tensor, delta: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return base.copy_(base.float() + delta)


def not_at_all(base: torch.Tensor, delta: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return base


@RATES
@DTYPES
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("fault", [twice, on_top_of_the_last, in_place, not_at_all])
def test_a_merge_that_is_wrong_is_noticed_at_the_first_update_that_it_spoils(
    fault: Callable[..., torch.Tensor], in_parts: bool, family: str, rate: float, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    adapted, kept = Adapted(family, dtype), dict[str, torch.Tensor]()

    def wrong(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> torch.Tensor:
        delta = (b @ a) * scale
        return fault(base, delta.T if transposed else delta, kept)

    monkeypatch.setattr(merging, "_sum", wrong)
    before = adapted.base.clone()
    for _ in range(3):  # the start and what the fault leaves right by chance
        expected = (before.float() + adapted.delta()).to(dtype)
        try:
            sent = adapted.sent(in_parts)
        except RlhpcError as error:
            assert f"{adapted.name} " in str(error)
            return
        assert torch.equal(sent, expected), "sent, though it is not what was trained"
        adapted.step(rate)
    pytest.fail("nothing was noticed")


SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_num_heads": 2, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "head_dim": 32,
}  # fmt: skip
#: Configurations by name: dense ones, with the head tied to the embeddings and not; mixtures; and recurrent ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Phi3": ("Phi3", {}),
    "GPT2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "GPTNeoX": ("GPTNeoX", {}),
    "Qwen3Moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "head_dim": 32, "mlp_only_layers": [0]}),
    "Qwen2Moe, tied": ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "tie_word_embeddings": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Glm4Moe": ("Glm4Moe", {**EXPERTS, "n_routed_experts": 4, "head_dim": 32, "first_k_dense_replace": 1}),
    "Phimoe": ("Phimoe", {"num_local_experts": 4}),
    "Falcon": ("Falcon", {"num_kv_heads": 1}),
    "DeepseekV4": (
        "DeepseekV4",
        {**EXPERTS, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 16, "head_dim": 32, "q_lora_rank": 32},
    ),
    "FalconH1": ("FalconH1", MAMBA),
    "NemotronH": ("NemotronH", {**MAMBA, "layers_block_type": ["mamba", "attention"]}),
}
TARGETS: list[Any] = [
    "all-linear",
    ["q_proj", "self_attn.v_proj"],
    ["q_proj", "lm_head"],
    r".*\.0\..*(o_proj|dense|c_attn)",
    r".*lm_head|.*wte|.*q_proj",
    ["c_fc", "query_key_value", "gate_up_proj"],
    ["q_proj", "gate_proj", "up_proj", "down_proj"],
]


def built(family: str) -> tuple[Any, dict[str, Any]]:
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval(), config.to_dict()


def attached(model: Any, targets: Any) -> Any:
    """The model with adapters, or why there are none."""
    try:
        return attach_lora(model, LoraConfig(rank=4, alpha=8, target_modules=targets), seed=0)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_with_adapters_merged_compute_what_was_trained(family: str, targets: Any) -> None:
    """Of any adapter that is not refused: a model that loads what is sent says what the adapted one says."""
    model, _ = built(family)
    adapted = attached(model, targets)
    if isinstance(adapted, str):
        assert adapted.startswith(f"actor.lora.target_modules is {targets!r}: ") and "; allowed: " in adapted
        assert targets != "all-linear"
        return
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        other, ids = built(family)[0], torch.arange(3, 19)[None]
        before = other(input_ids=ids).logits
        other.load_state_dict(dict(full_weights(adapted, lambda tensor: tensor)), strict=False)
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(other(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.parametrize("family", ["Llama, tied", "GPT2", "Qwen2Moe, tied"])
@pytest.mark.parametrize("targets", [["lm_head"], ".*lm_head"], ids=str)
def test_an_adapter_on_a_weight_of_two_modules_is_refused(family: str, targets: Any) -> None:
    refused = attached(built(family)[0], targets)
    assert isinstance(refused, str) and "lm_head and " in refused and " have one weight" in refused, refused
    assert "lm_head" not in refused.partition("; allowed: ")[2]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_account_of_memory_knows_which_layers_get_adapters(family: str, targets: Any) -> None:
    model, config = built(family)
    adapted = attached(model, targets)
    if isinstance(adapted, str):
        return
    found = sum(
        4 * (out + given) for out, given in size_of("somebody/model", config=config).adapted_layers(targets).values()
    )
    assert found == sum(tensor.numel() for name, tensor in adapted.named_parameters() if ".lora_" in name)
