"""Tiny models of 29 families, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16}  # fmt: skip
_ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
_LATENT = {**_ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
           "v_head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
_SPARSE = {**_LATENT, "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "linear_conv_kernel_dim": 4}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64,
          "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_expand": 2}  # fmt: skip
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
#: Sizes that differ from `SMALL`, by model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "exaone4": _WINDOW,
    "falcon_h1": _MAMBA,
    "gemma3_text": _WINDOW,
    "gemma4_text": {
        **_WINDOW,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _SPARSE,
    "gpt_oss": {**_EXPERTS, **_WINDOW},
    "granitemoehybrid": {
        **_EXPERTS,
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 16,
    },
    "hunyuan_v1_moe": {**_EXPERTS, "moe_topk": 2},
    "lfm2": _CONV,
    "lfm2_moe": {**_EXPERTS, **_CONV, "num_dense_layers": 1},
    "minimax": {**_EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
    "minimax_m2": {**_EXPERTS, "rotary_dim": 8},
    "ministral3": {"sliding_window": None},
    "nemotron_h": {**_MAMBA, "hybrid_override_pattern": "M*M*", "layers_block_type": ["mamba", "attention"] * 2},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_DELTA},
    "seed_oss": {},
    "smollm3": {},
}
#: Families without torch's attention function.
EAGER = frozenset({"gpt_oss", "deepseek_v4"})


def save_family(folder: Path, family: str) -> Path:
    """Writes a tiny model of a family to a new folder."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**{**SMALL, **FAMILIES[family]})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
