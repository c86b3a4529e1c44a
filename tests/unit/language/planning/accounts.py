"""Configurations and models whose memory is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
MATH = str(ROOT / "configs" / "reasoning" / "math.yaml")
EIGHT = ["cluster.accelerators_per_node=8", "cluster.accelerator_memory=80G"]


# -- keys and values ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
