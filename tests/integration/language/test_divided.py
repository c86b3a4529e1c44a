"""What an engine's ranks cannot share is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import EXPERTS, save_model, save_tokenizer
from omegaconf import OmegaConf

from rlhpc.config.typed import untouched
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout.preflight import check_model
from rlhpc.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rollout": {"parallel": {"tensor": 3}}}, r"has 4 heads, 2 for keys and values.*allowed: 1, 2, 4$"),
        ({"rollout": {"parallel": {"expert": True, "tensor": 2}}}, "it needs a mixture of experts"),
        ({"rollout": {"parallel": {"tensor": 2}}, "cluster": {"elastic": [{"ranks_per_job": 3}]}},
         r"cluster.elastic\[0\].ranks_per_job is 3, and 2 ranks are an engine"),
        ({"rollout": {"parallel": {"tensor": 2}, "rollout_backend": "hf"}}, "each process 2 accelerators, and the engine hf"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    save_model(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    cfg = OmegaConf.merge(untouched(GrpoConfig), {"rollout": {"rollout_backend": "vllm"}}, settings)
    cfg.actor.model.model_path = str(tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_model(cfg, {"actor": 1, "rollout": 2})


def test_experts_need_an_engine_that_takes_them_one_by_one(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=64, head_dim=32)
    save_tokenizer(tmp_path)
    cfg = untouched(GrpoConfig)
    cfg.actor.model.model_path, cfg.rollout.weight_sync = str(tmp_path), "shards"
    with pytest.raises(ConfigError, match="sends a mixture's experts one by one"):
        check_model(cfg, {"actor": 1, "rollout": 1})
