"""Families in which samples of one row would see each other: nobody who computes with a model packs one of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, NemotronConfig

from rlhpc import Worker
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.packing import packs
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.training.trainer import ScalarTrainer, TokenTrainer
from rlhpc.runtime.errors import ConfigError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "shared_expert_intermediate_size": 16}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "linear_conv_kernel_dim": 4}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64,
         "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_expand": 2}  # fmt: skip
SPARSE = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "index_topk": 8,
    "index_head_dim": 8, "index_n_heads": 2,
}  # fmt: skip
#: What mixes samples: a recurrent state (GDN, convolution, Mamba), sinks, lightning attention, a compressor, an indexer.
LEAKING: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention", "mamba", "attention"],
                         "shared_intermediate_size": 16},
    "nemotron_h": {**MAMBA, "hybrid_override_pattern": "M*M*", "layers_block_type": ["mamba", "attention"] * 2},
    "falcon_h1": MAMBA,
    "gpt_oss": EXPERTS,
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
    "deepseek_v4": SPARSE,
    "glm_moe_dsa": SPARSE,
    "deepseek_v32": SPARSE,
}  # fmt: skip
#: Families that have no attention of torch's own; the user says so.
EAGER = {"gpt_oss", "deepseek_v4"}
#: Families that transformers makes no models of one number of: no critic can be loaded.
NO_CRITIC = {*LEAKING} - {"qwen3_next", "qwen3_5_text", "gpt_oss", "minimax"}
LENGTHS = (12, 9, 3)


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(params=[*LEAKING, "nemotron"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a family; the last one packs by its declarations and is found out by a pass over a few tokens."""
    name, target = request.param, tmp_path_factory.mktemp("family") / request.param
    if name == "nemotron":
        return saved(NemotronConfig(**SMALL), target)
    return saved(CONFIG_MAPPING[name](**{**SMALL, **LEAKING[name]}), target)


def config_of(folder: Path) -> Any:
    cfg = default_section(GrpoConfig)
    for key, value in {"model_path": str(folder), "dtype": "float32"}.items():
        OmegaConf.update(cfg.actor.model, key, value)
    if folder.name in EAGER:
        cfg.actor.model.attn_implementation = "eager"
    return cfg


def batch_of() -> TokenBatch:
    torch.manual_seed(5)
    masks = [torch.arange(n) >= n // 3 for n in LENGTHS]
    return TokenBatch.from_sequences([torch.randint(3, 64, (n,)) for n in LENGTHS], masks)


def test_trainer_and_reference_read_rectangles(folder: Path) -> None:
    trainer = TokenTrainer(config_of(folder), Worker(), has_reference=True)
    assert not trainer.packed and [packs(model) for model in trainer.backend.models] == [False, False]
    batch = batch_of()
    trained, reference = trainer.forward(batch).logprobs, trainer.reference(batch).logprobs
    torch.testing.assert_close(trained[batch.mask], reference[batch.mask], rtol=1e-5, atol=1e-5)


def test_reference_groups_and_teachers_read_rectangles(folder: Path) -> None:
    cfg = config_of(folder)
    group = SimpleNamespace(model_section="reference", model=cfg.actor.model)
    scorer = LogProbs(cfg, torch.device("cpu"), group)  # type: ignore[arg-type]
    assert not scorer.packed and not packs(scorer.model)


def test_critics_read_rectangles(folder: Path) -> None:
    if folder.name in NO_CRITIC:
        with pytest.raises(ConfigError, match="cannot be loaded"):
            ScalarTrainer(config_of(folder).actor, Worker(), seed=0, key="critic", per_input=True)
        return
    critic = ScalarTrainer(config_of(folder).actor, Worker(), seed=0, key="critic", per_input=True)
    assert not critic.packed and not packs(critic.backend.module)
