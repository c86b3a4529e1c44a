"""Configurations of models by their hub names, so that a run can be planned where neither the hub nor the files are at hand.

What a folder, or the hub's cache on this machine, says of a model comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
_QWEN2_SMALL = {**_QWEN2, "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}


def _sizes(base: Mapping[str, Any], hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> Any:
    return {
        **base, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, **more,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}
#: By the hub's name in lower case, without what says how a model was tuned.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "qwen/qwen2.5-0.5b": _sizes(_QWEN2_SMALL, 896, 4864, 24, 14, 2),
    "qwen/qwen2.5-1.5b": _sizes(_QWEN2_SMALL, 1536, 8960, 28, 12, 2),
    "qwen/qwen2.5-3b": _sizes(_QWEN2_SMALL, 2048, 11008, 36, 16, 2),
    "qwen/qwen2.5-7b": _sizes(_QWEN2, 3584, 18944, 28, 28, 4),
    "qwen/qwen2.5-14b": _sizes(_QWEN2, 5120, 13824, 48, 40, 8),
    "qwen/qwen2.5-32b": _sizes(_QWEN2, 5120, 27648, 64, 40, 8),
    "qwen/qwen2.5-72b": _sizes(_QWEN2, 8192, 29568, 80, 64, 8),
    "qwen/qwen3-0.6b": _sizes(_QWEN3, 1024, 3072, 28, 16, 8, **_TIED),
    "qwen/qwen3-1.7b": _sizes(_QWEN3, 2048, 6144, 28, 16, 8, **_TIED),
    "qwen/qwen3-4b": _sizes(_QWEN3, 2560, 9728, 36, 32, 8, **_TIED),
    "qwen/qwen3-8b": _sizes(_QWEN3, 4096, 12288, 36, 32, 8),
    "qwen/qwen3-14b": _sizes(_QWEN3, 5120, 17408, 40, 40, 8),
    "qwen/qwen3-32b": _sizes(_QWEN3, 5120, 25600, 64, 64, 8),
    "qwen/qwen3-30b-a3b": _sizes(_QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen/qwen3-235b-a22b": _sizes(_QWEN3_MOE, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    "meta-llama/llama-3.1-8b": _sizes(_LLAMA3, 4096, 14336, 32, 32, 8),
    "meta-llama/llama-3.1-70b": _sizes(_LLAMA3, 8192, 28672, 80, 64, 8),
    "meta-llama/llama-3.3-70b": _sizes(_LLAMA3, 8192, 28672, 80, 64, 8),
    "huggingfacetb/smollm2-135m": _sizes(
        {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, **_TIED}, 576, 1536, 30, 9, 3
    ),
}
#: What says how a model was tuned, and nothing about its sizes.
_TUNED = ("-instruct", "-base", "-chat", "-2507", "-thinking", "-math")


def known(name: str) -> Mapping[str, Any] | None:
    """The configuration of a model of this name on the hub, tuned or not; None if it is not among `KNOWN`."""
    name = name.lower()
    while name not in KNOWN:
        ending = next((part for part in _TUNED if name.endswith(part)), None)
        if ending is None:
            return None
        name = name.removesuffix(ending)
    return KNOWN[name]
