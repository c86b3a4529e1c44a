"""Dropout in reinforcement learning: an unchanged policy's importance ratio is 1 in the update, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

import transformers
from omegaconf import OmegaConf

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.training.trainer import LanguageBlueprint

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32),  # 0.1 each
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_dropout=0.3),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=31, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=32, dropout=0.3, attention_dropout=0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("lora", [0.0, 0.3], ids=["", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_update_says_what_the_rollout_said(family: str, lora: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    cfg = OmegaConf.structured(GrpoConfig)
    cfg.actor.model.model_path = str(tmp_path)
    cfg.actor.lora.rank, cfg.actor.lora.dropout = (2, lora) if lora else (0, 0.0)
    ids = torch.arange(1, 31)[None]
    for dropout in (False, True):
        model = LanguageBlueprint(cfg, "cpu", dropout=dropout).build()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        with torch.no_grad():
            updated, rolled_out = model.train()(ids).logits, model.eval()(ids).logits
        assert torch.equal(updated, rolled_out) != dropout, "supervised training keeps it"
