"""Preflight of a language run: refused models and data, and digests of the files that a rank reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import pytest
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.run import DpoConfig, GrpoConfig, SftConfig
from rlhpc.language.preflight import (
    check_dpo,
    check_inputs_digest,
    check_model,
    inputs_digest,
    open_demonstrations,
    open_pairs,
    open_prompts,
)
from rlhpc.runtime.errors import ConfigError

Config = TypeVar("Config", GrpoConfig, SftConfig, DpoConfig)
LONG = 30


def config(config_type: type[Config], model: Path, train: dict[str, Any], **sections: Any) -> Config:
    given = {
        "data": {"train": train, "max_prompt_tokens": 12, **sections.pop("data", {})},
        "actor": {"model": {"model_path": str(model)}, "max_tokens_per_micro_batch": 64},
        **sections,
    }
    return typed(config_type, OmegaConf.merge(default_section(config_type), given))


def rows_file(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(first: int, last: int, *, long: int = 0) -> list[dict[str, Any]]:
    """Sums with an answer, a demonstration and a rejected response; the first `long` have long responses."""
    return [
        {
            "prompt": f"{number}+1=", "answer": str(number + 1), "response": str(number + 1) * (LONG if index < long else 1),
            "chosen": str(number + 1) * (LONG if index < long else 1), "rejected": "no",
        }
        for index, number in enumerate(range(first, last))
    ]  # fmt: skip


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
def test_a_model_that_an_engine_s_ranks_cannot_share_is_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    cfg = OmegaConf.merge(default_section(GrpoConfig), {"rollout": {"rollout_backend": "vllm"}}, settings)
    cfg.actor.model.model_path = str(tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_model(cfg, {"actor": 1, "rollout": 2})


def test_experts_need_an_engine_that_takes_them_one_by_one(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_experts=4).save_pretrained(tmp_path)
    cfg = default_section(GrpoConfig)
    cfg.actor.model.model_path, cfg.rollout.weight_sync = str(tmp_path), "shards"
    with pytest.raises(ConfigError, match="sends a mixture's experts one by one"):
        check_model(cfg, {"actor": 1, "rollout": 1})


def test_prompts_that_are_too_long_are_dropped_and_noted(
    causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*sums(1, 6), {"prompt": "1+" * 20, "answer": "20"}]
    cfg = config(GrpoConfig, causal, {"path": rows_file(tmp_path, "rows", rows)}, reward={"terms": [{"name": "exact"}]})
    tokenizer, encoder, prompts = open_prompts(cfg, check_answers=True)
    assert len(prompts) == 5 and prompts.dropped == 1
    token_ids, _ = encoder.encode(prompts[0])
    assert tokenizer.decode(token_ids).replace(" ", "").endswith("1+1=")
    check_model(cfg, {"actor": 1, "rollout": 1})
    assert "data.train: 1 of 6 problems are dropped" in capsys.readouterr().err
    cfg.data.overlong_prompts = "error"
    with pytest.raises(ConfigError, match=r"rows.jsonl"):
        open_prompts(cfg)


def test_demonstrations_and_held_out_demonstrations_are_checked(
    causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdout = {"path": rows_file(tmp_path, "held_out", sums(6, 9, long=1))}
    train = {"path": rows_file(tmp_path, "train", sums(1, 6, long=2))}
    cfg = config(
        SftConfig, causal, train, data={"holdout": holdout}, runner={"val_check_interval": 1},
        actor={"model": {"model_path": str(causal)}, "max_tokens_per_micro_batch": 20},
    )  # fmt: skip
    tokenizer = check_model(cfg, {"actor": 1})
    notes = capsys.readouterr().err
    assert "data.train: 2 of 5 problems are dropped" in notes and "held-out rows: 1 of 3 problems" in notes
    _, held_out = open_demonstrations(cfg, cfg.data, tokenizer, is_holdout=True)
    assert [held_out[index].answer for index in range(len(held_out))] == ["8", "9"]


def test_pairs_and_held_out_pairs_are_checked(causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = {"path": rows_file(tmp_path, "train", sums(1, 6, long=2))}
    holdout = {"path": rows_file(tmp_path, "held_out", sums(6, 9))}
    cfg = config(
        DpoConfig, causal, train, data={"holdout": holdout}, runner={"val_check_interval": 1},
        actor={"model": {"model_path": str(causal)}, "max_tokens_per_micro_batch": 40},
    )  # fmt: skip
    tokenizer = check_dpo(cfg)
    assert capsys.readouterr().err.count("pairs are dropped") == 1
    _, pairs, num_dropped = open_pairs(cfg, tokenizer)
    assert (len(pairs), num_dropped) == (3, 2)
    _, pairs, num_dropped = open_pairs(cfg, tokenizer, is_holdout=True)
    assert [pairs[index].responses[0] for index in range(len(pairs))] == ["7", "8", "9"] and not num_dropped
    cfg.data.overlong_prompts = "error"
    with pytest.raises(ConfigError, match=r"train.jsonl"):
        check_dpo(cfg)


def test_a_rank_with_other_files_than_the_driver_is_refused(causal: Path, tmp_path: Path) -> None:
    path = rows_file(tmp_path, "rows", sums(1, 6))
    cfg = config(GrpoConfig, causal, {"path": path})
    tokenizer, _, prompts = open_prompts(cfg)
    digest = inputs_digest(cfg, tokenizer, prompts)
    assert check_inputs_digest(cfg, tokenizer, prompts, "", "node1") == digest
    copy, other = (Path(shutil.copytree(causal, tmp_path / name)) for name in ("copy", "other"))
    cfg.actor.model.model_path = str(copy)
    assert check_inputs_digest(cfg, tokenizer, prompts, digest, "node1") == digest, "a copy under another path"
    model_config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**model_config, "rms_norm_eps": 0.5}))
    cfg.actor.model.model_path = str(other)
    with pytest.raises(ConfigError, match=r"on node2, the model in .*other .* are others than those"):
        check_inputs_digest(cfg, tokenizer, prompts, digest, "node2")
    cfg.actor.model.model_path = str(causal)
    cfg.data.train.path = rows_file(tmp_path, "other_rows", sums(2, 7))
    with pytest.raises(ConfigError, match=r"the problems of data.train"):
        check_inputs_digest(cfg, tokenizer, open_prompts(cfg)[2], digest, "node2")
