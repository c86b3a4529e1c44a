"""Import of RLinf's configurations of language models."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.unit.cli.foreign.rlinf_configs import LANGUAGE, _kinds, imported, put

_kinds()


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "sums.yaml", LANGUAGE), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "runner.task_type": "reasoning", "runner.name": "sums", "runner.max_steps": 100, "cluster.accelerators_per_node": 8,
        "cluster.component_placement": {"actor,rollout": "0-15"}, "algorithm.clip_ratio_low": 0.2,
        "algorithm.clip_ratio_high": 0.28, "algorithm.kl_coef": 0.001, "algorithm.kl_type": "k3",
        "actor.global_batch_size": 256, "actor.max_tokens_per_micro_batch": 4096, "rollout.max_new_tokens": 1024,
        "rollout.top_k": -1, "rollout.temperature": 0.9, "rollout.rollout_backend": "vllm", "actor.training_backend": "fsdp",
        "actor.model.model_path": "models/one", "actor.model.dtype": "bfloat16", "actor.optim.lr_scheduler": "cosine",
        "actor.optim.lr_warmup_steps": 5, "data.train.path": "a.jsonl", "data.train.source": "jsonl",
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert (cfg.data["eval"][0].source, cfg.data["eval"][0].prompt_key) == ("parquet", "problem")
    said = " ".join(report.split())
    assert "rlhpc has no sglang: vllm and hf; vllm is written rollout.rollout_backend: sglang" in said
    assert "rlhpc has no megatron" in said and "actor.megatron.distributed_backend: nccl" in said
    assert "an engine runs on one accelerator rollout.tensor_parallel_size: 2" in said
