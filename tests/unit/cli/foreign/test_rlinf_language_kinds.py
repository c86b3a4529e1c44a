"""Kinds of RLinf's runs of language models: their loop, their placement, and supervised runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.foreign import rlinf
from rlhpc.cli.foreign.rlinf_language_kinds import KINDS
from rlhpc.config.schema import Schema
from rlhpc.runs.task_type import find_task_type
from tests.extras import need_extra
from tests.unit.cli.foreign.rlinf_configs import CRITIC, LANGUAGE, _kinds, flat, imported, merged, put, translation
from tests.unit.cli.foreign.test_rlinf_language import changed, translated

_kinds()

#: In RLinf's format, but of our own making.
SFT: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-3"}},
    "runner": {
        "task_type": "sft", "experiment_name": "scans", "max_epochs": -1, "max_steps": 300, "val_check_interval": 50,
        "save_interval": 100,
    },
    "data": {
        "type": "vlm", "dataset_name": "scans", "use_chat_template": True, "train_data_paths": "scans/train.jsonl",
        "val_data_paths": "scans/eval.jsonl", "prompt_key": "question", "answer_key": "finding", "image_keys": ["scan"],
        "max_prompt_length": 512, "lazy_loading": True, "num_workers": 4,
    },
    "actor": {
        "training_backend": "fsdp", "micro_batch_size": 2, "eval_batch_size": 2, "global_batch_size": 16, "seed": 5,
        "model": {"model_type": "qwen3_vl", "precision": "fp32", "model_path": "models/eyes", "is_lora": True, "lora_rank": 8},
        "optim": {
            "lr": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "clip_grad": 1.0, "lr_scheduler": "cosine",
            "total_training_steps": "${runner.max_steps}", "lr_warmup_steps": 20,
        },
        "fsdp_config": {"strategy": "fsdp", "mixed_precision": {"param_dtype": "bf16"}},
    },
}  # fmt: skip


def placed(*changes: Any, **places: Any) -> Any:
    return translated({"cluster": {"component_placement": {"actor,rollout,reward": None, **places}}}, *changes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title({}))
@pytest.mark.parametrize("leaves", [{}, flat(merged(LANGUAGE, CRITIC)), {"agentloop.toolcall_parser": "searchr1"}])
def test_what_is_written_are_keys_of_that_kind(kind: Any, leaves: dict[str, Any]) -> None:
    keys = Schema(find_task_type(kind.task_type).config, kind.task_type).keys
    own_keys = {key for key, _ in kind.rows(leaves)}
    rows = [key for key, _ in rlinf.RUN if key not in own_keys] + [key for key, _ in kind.rows(leaves)]
    written = [key for key in rows if key and key not in keys]
    assert set(written) <= ({"algorithm.gamma"} if kind.task_type == "sft" else set())  # a row that writes nothing


def test_supervised_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "scans.yaml", SFT), capsys)
    assert cfg is not None, report
    assert (cfg.runner.task_type, cfg.runner.max_steps, cfg.runner.val_check_interval) == ("sft", 300, 50)
    train = cfg.data.train
    assert (train.prompt_key, train.response_key, train.images_key) == ("question", "finding", "scan")
    assert (cfg.data.prompts_per_step, cfg.data.holdout.path) == (16, "scans/eval.jsonl")
    assert (cfg.actor.lora.rank, cfg.actor.lora.alpha, cfg.actor.model.dtype) == (8, 8, "bfloat16")
    optim = cfg.actor.optim
    assert (optim.lr_scheduler, optim.lr_warmup_steps, optim.weight_decay, optim.adam_eps) == ("cosine", 20, 0.01, 1e-8)
    assert cfg.cluster.component_placement == {"actor": "0-3"} and cfg.reward.terms[0].name == "exact"


def test_each_supervised_trainer_has_its_own_key_of_held_out_files() -> None:
    """RLinf's Megatron trainer reads `eval_data_paths`, its FSDP trainer `val_data_paths`."""
    leaves = flat(merged(SFT, {"data": {"eval_data_paths": "other.jsonl"}}))
    assert translation(leaves).ours["data.holdout.path"] == "scans/eval.jsonl"
    megatron = translation(leaves | {"actor.training_backend": "megatron"})
    assert megatron.ours["data.holdout.path"] == "other.jsonl"
    del leaves["data.val_data_paths"]
    without = translation(leaves)
    assert not {"data.holdout.path", "data.eval", "reward.terms", "runner.val_check_interval"} & set(without.ours)


def test_what_a_supervised_run_cannot_do_is_named() -> None:
    own_loss = {
        "model": {"format_ce_coef": 2.0, "sample_reweight": {"enabled": True}, "trainable_modules": ["lm_head"]},
    }
    made = translation(flat(merged(SFT, {"data": {"video_nframes": 5, "choice_key": "options"}, "actor": own_loss})))
    names = {"data.video_nframes", "data.choice_key", "data.answer_key", "actor.model.format_ce_coef"}
    assert names | {"actor.model.sample_reweight.enabled", "actor.model.trainable_modules"} <= set(changed(made))


@pytest.mark.parametrize("task", ["sft", "reasoning"])
def test_passes_over_data_on_this_machine_are_counted(task: str, tmp_path: Path) -> None:
    """RLinf leaves out what does not fill a batch: 45 problems are two batches of 16 each."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": str(n)}) + "\n\n" for n in range(45)))
    tree = SFT if task == "sft" else merged(LANGUAGE, {"data": {"rollout_batch_size": 16}})

    def steps(paths: Any, epochs: int, most: int) -> Any:
        change = {"data": {"train_data_paths": paths}, "runner": {"max_epochs": epochs, "max_steps": most}}
        leaves = {key: value for key, value in flat(merged(tree, change)).items() if "${" not in str(value)}
        return translation(leaves)

    assert steps(str(path), 3, -1).ours["runner.max_steps"] == 6
    assert steps([str(path), str(path)], 3, -1).ours["runner.max_steps"] == 15
    assert steps(str(path), 3, 4).ours["runner.max_steps"] == 4
    elsewhere = steps("not/here.jsonl", 3, -1)
    assert elsewhere.ours["runner.max_steps"] == "???" and "runner.max_epochs" in changed(elsewhere)
    assert "runner.max_epochs" not in changed(steps("not/here.jsonl", 3, 100))


def test_parquet_files_are_counted_too(tmp_path: Path) -> None:
    need_extra("llm")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"problem": ["a"] * 300}), tmp_path / "data.parquet")
    data = {
        "data": {"train_data_paths": [str(tmp_path / "data.parquet")]},
        "runner": {"max_steps": -1, "max_epochs": 2},
    }
    assert translated(data).ours["runner.max_steps"] == 4


def test_groups_that_the_run_has_are_placed() -> None:
    apart = placed(rollout="0-7", inference="8-9", actor="10-11", reward="0-7")
    assert apart.ours["cluster.component_placement"] == {"rollout": "0-7", "reference": "8-9", "actor": "10-11"}
    free = placed({"algorithm": {"kl_beta": 0.0}}, rollout="0-7", inference="8-9", actor="10-11")
    assert free.ours["cluster.component_placement"] == {"rollout": "0-7", "actor": "10-11"}
    assert "cluster.component_placement.inference" not in changed(free)
    twice = placed(**{"actor,reward": "0-1", "rollout": "0-1", "actor,rollout": "2-3"})  # the last one is RLinf's
    assert twice.ours["cluster.component_placement"] == {"actor,rollout": "2-3"}
    unknown = placed(**{"actor,rollout": "0-1", "oracle": "2"})
    assert "cluster.component_placement.oracle" in changed(unknown)


def test_actors_that_do_not_divide_the_prompts_are_fewer() -> None:
    """RLinf divides responses over its actors, rlhpc prompts: 128 prompts over 20 pairs of ranks are 16 pairs."""
    made = placed(rollout="0-7", actor="8-47")
    assert made.ours["cluster.component_placement"]["actor"] == "8-39"
    reason, differs = made.omitted["cluster.component_placement.actor"]
    assert "32 of the 40 ranks" in reason and not differs
    assert placed(rollout="0-7", actor="all").ours["cluster.component_placement"]["actor"] == "all"
    places = {"actor,critic,rollout,reward": None, "actor,rollout": "0-5", "critic": "0-5"}
    critic = translated(CRITIC, {"cluster": {"component_placement": places}})
    assert critic.ours["cluster.component_placement"] == {"rollout": "0-5", "actor,critic": "0-3"}
