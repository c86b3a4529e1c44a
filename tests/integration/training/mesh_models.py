"""Tiny models of the families that are divided, with random weights, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Everything divides by four but for what is to be uneven, and the heads of keys and values of those that have fewer.
BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
_GROUPED = {**BASE, "num_key_value_heads": 2}
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}


def configs() -> dict[str, Any]:
    import transformers as package

    return {
        "llama": package.LlamaConfig(**BASE),
        "llama_tied": package.LlamaConfig(**{**BASE, "tie_word_embeddings": True}),
        "qwen2": package.Qwen2Config(**_GROUPED),
        "qwen3": package.Qwen3Config(**BASE, head_dim=8),
        "qwen3_tied": package.Qwen3Config(**{**BASE, "tie_word_embeddings": True}, head_dim=8),
        "qwen3_moe": package.Qwen3MoeConfig(**BASE, **_MOE, head_dim=8, num_experts=8),  # type: ignore[call-arg]
        "mixtral": package.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
        "deepseek_v3": package.DeepseekV3Config(
            **BASE, **_MOE, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
            kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        ),
        "odd_experts": package.MixtralConfig(**BASE, num_local_experts=3, num_experts_per_tok=2),
        "odd_heads": package.LlamaConfig(**{**BASE, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
        "odd_words": package.LlamaConfig(**{**BASE, "vocab_size": 63}),
        "gpt2": package.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    }  # fmt: skip


def save_models(root: Path, *names: str) -> None:
    """Writes those that are not there; each in several files."""
    from transformers import AutoModelForCausalLM

    for name, config in configs().items():
        if (names and name not in names) or (root / name).exists():
            continue
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for key, tensor in model.state_dict().items():
                    if tensor.dim() == 1:
                        tensor.normal_(1.0 if "norm" in key else 0.0, 0.1)
                    else:
                        tensor.normal_(0, 0.15)
            model.save_pretrained(root / name, max_shard_size="40KB")
