"""Trainer of language models: value heads that are saved, exported and refused, and dropout in reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

import transformers

from rlhpc import Worker
from rlhpc.config.sections import LoraConfig
from rlhpc.language.config.models import LanguageModelConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import last_values
from rlhpc.language.training.trainer import LanguageBlueprint, ScalarTrainer
from rlhpc.runtime.errors import CheckpointError
from tests.unit.language.models.scalar_models import SAMPLES, batch_of


def section_of(path: Path, rank: int = 0) -> Any:
    section = LanguageActorConfig(model=LanguageModelConfig(model_path=str(path)), lora=LoraConfig(rank=rank))
    return OmegaConf.structured(section)


@pytest.mark.parametrize("rank", [0, 2])
def test_it_is_trained_saved_and_exported_like_other_models(causal: Path, tmp_path: Path, rank: int) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    section = section_of(causal, rank)
    section.model.gradient_checkpointing = True
    section.optim.lr = 0.01
    trainer, batch = ScalarTrainer(section, Worker(), seed=1), batch_of(SAMPLES)

    def loss(values: torch.Tensor, given: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = (values - 5).square().sum()
        return value, {"loss": value}

    losses = []
    for _ in range(3):
        one, nothing = trainer.forward_backward([batch, batch.empty_sample()], loss)
        assert trainer.optimizer_step(0.01) > 0 and nothing["loss"] == 0
        losses.append(one["loss"].item())
    assert losses[0] > losses[1] > losses[2]
    values = trainer.forward(batch)
    trainer.save(tmp_path / "checkpoint")
    other = ScalarTrainer(section, Worker(), seed=2)
    other.load(tmp_path / "checkpoint")
    assert torch.equal(other.forward(batch), values)
    trainer.export(tmp_path / "whole")
    ids, mask = batch.padded(batch.ids, 0), batch.attended()
    with torch.no_grad():
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
        torch.testing.assert_close(theirs(ids, attention_mask=mask).logits[:, 0], last_values(values, batch))
        if rank:
            trainer.export(tmp_path / "adapter", adapter_only=True)
            base = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1, pad_token_id=0)
            adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
            torch.testing.assert_close(adapted(ids, attention_mask=mask).logits[:, 0], last_values(values, batch))


def test_another_kind_of_checkpoint_is_refused(causal: Path, tmp_path: Path) -> None:
    trainer = ScalarTrainer(section_of(causal), Worker(), seed=1)
    trainer.save(tmp_path)
    path = tmp_path / "backend.json"
    record = json.loads(path.read_text())
    assert record["head"] == "score"
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "head"}))
    with pytest.raises(CheckpointError, match="head None, this configuration 'score'"):
        trainer.load(tmp_path)


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
        model = LanguageBlueprint(cfg, "cpu", has_dropout=dropout).build()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        with torch.no_grad():
            updated, rolled_out = model.train()(ids).logits, model.eval()(ids).logits
        assert torch.equal(updated, rolled_out) != dropout, "supervised training keeps it"
