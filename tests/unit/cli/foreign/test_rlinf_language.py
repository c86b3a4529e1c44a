"""Import of RLinf's configurations of language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc import cli
from rlhpc.cli.foreign import translate
from rlhpc.cli.foreign.hydra import compose
from rlhpc.cli.foreign.rules import Translation
from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import (
    CRITIC,
    FSDP,
    LANGUAGE,
    _kinds,
    flat,
    imported,
    merged,
    put,
    translation,
)

_kinds()

APART = {"cluster": {"component_placement": {"actor,rollout,reward": None, "rollout": "0-7", "actor": "8-15"}}}


def translated(*changes: Any) -> Translation:
    tree: Any = LANGUAGE
    for change in changes:
        tree = merged(tree, change)
    leaves = flat(tree)
    return translation({key: value for key, value in leaves.items() if not key.startswith("cluster.c") or value})


def changed(made: Translation) -> dict[str, str]:
    """The reasons of keys without which training differs."""
    return {key: reason for key, (reason, differs) in made.omitted.items() if differs}


@pytest.mark.parametrize(
    ("layout", "normalizes", "minibatches", "differs"),
    [(APART, True, 4, True), (APART, True, 1, False), (APART, False, 4, False), ({}, True, 4, False)],
)
def test_where_training_overlaps_with_rollouts_rlinf_normalizes_each_minibatch(
    layout: Any, normalizes: bool, minibatches: int, differs: bool
) -> None:
    own = {"adv_type": "grpo", "normalize_advantages": normalizes, "n_minibatches": minibatches}
    result = translated(layout, {"algorithm": own})
    assert result.ours["algorithm.normalize_advantages"] == ("batch" if normalizes else "none")
    assert ("algorithm.normalize_advantages" in changed(result)) is differs


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "sums.yaml", LANGUAGE), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "runner.task_type": "reasoning", "runner.name": "sums", "runner.max_steps": 100, "cluster.accelerators_per_node": 8,
        "cluster.component_placement": {"actor,rollout": "0-15"}, "algorithm.clip_ratio_low": 0.2,
        "algorithm.clip_ratio_high": 0.28, "algorithm.kl_coef": 0.001, "algorithm.kl_type": "k3",
        "actor.global_batch_size": 256, "actor.max_tokens_per_micro_batch": 4096, "rollout.max_new_tokens": 1024,
        "rollout.top_k": -1, "rollout.temperature": 0.9, "rollout.rollout_backend": "vllm", "actor.training_backend": "fsdp",
        "actor.model.model_path": "models/one", "actor.model.dtype": "float16", "actor.optim.lr_scheduler": "cosine",
        "data.train.path": "a.jsonl", "data.train.source": "jsonl", "rollout.parallel.tensor": 2, "actor.parallel.tensor": 2,
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert (cfg.data["eval"][0].source, cfg.data["eval"][0].prompt_key) == ("parquet", "problem")
    said = " ".join(report.split())
    assert "rlhpc has no sglang: vllm and hf; vllm is written rollout.rollout_backend: sglang" in said
    assert "rlhpc has no megatron" in said and "actor.megatron.distributed_backend: nccl" in said


def test_a_warm_up_counts_steps_of_the_run_not_of_the_optimizer() -> None:
    """RLinf's schedules count optimizer steps, of which a step of the run has one for each minibatch."""

    def steps(*changes: Any) -> Any:
        return translated({"algorithm": {"n_minibatches": 4}}, *changes).ours["actor.optim.lr_warmup_steps"]

    assert steps() == 2  # 5 optimizer steps
    share = {"lr_warmup_fraction": 0.3, "lr_decay_iters": 40}
    assert steps({"actor": {"lr_sched": share}}) == 3  # 12 optimizer steps
    assert steps({"actor": {"lr_sched": {**share, "lr_decay_iters": 10, "lr_warmup_fraction": 0.01}}}) == 0
    assert steps(FSDP, {"actor": {"optim": {"lr_warmup_steps": 8}}}) == 2
    ratio = {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1, "total_training_steps": 200}
    assert steps(FSDP, {"actor": {"optim": ratio}}) == 5


def test_the_length_of_a_schedule_is_counted_in_steps_of_the_run() -> None:
    decay = {"actor": {"lr_sched": {"lr_decay_style": "cosine", "min_lr": 1e-7, "lr_decay_iters": 30}}}
    assert translated(decay).ours["actor.optim.lr_decay_steps"] == 8  # four minibatches a step
    assert translated(decay, {"algorithm": {"n_minibatches": 1}}).ours["actor.optim.lr_decay_steps"] == 30
    assert "actor.lr_sched.lr_decay_iters" not in set(changed(translated(decay)))
    constant = merged(decay, {"actor": {"lr_sched": {"lr_decay_style": "constant"}}})
    assert not {"actor.lr_sched.min_lr", "actor.lr_sched.lr_decay_iters"} & set(changed(translated(constant)))
    assert "actor.optim.lr_decay_steps" not in translated(constant).ours


def test_a_schedule_ends_at_rlinfs_learning_rate() -> None:
    def end(*changes: Any) -> Any:
        return translated(*changes).ours.get("actor.optim.min_lr")

    decay = {"lr_decay_style": "cosine", "min_lr": 1e-7}
    assert end({"actor": {"lr_sched": decay, "optim": {"min_lr": 1e-6}}}) == 1e-7
    assert end({"actor": {"lr_sched": {**decay, "lr_decay_style": "constant"}}}) is None
    for optim, expected in (
        ({"lr_scheduler": "cosine", "min_lr": 2e-5}, 4e-6),  # RLinf divides by torch's default of 1e-3
        ({"lr_scheduler": "cosine", "min_lr": 2e-5, "min_lr_rate": 0.5}, 1e-4),
        ({"lr_scheduler": "torch_cosine", "min_lr": 2e-5}, 2e-5),
        ({"lr_scheduler": "constant", "min_lr": 2e-5}, None),
    ):
        assert end(FSDP, {"actor": {"optim": {"lr": 2e-4, **optim}}}) == (expected and pytest.approx(expected))


def test_the_limit_of_importance_ratios_is_that_of_megatrons_trainer() -> None:
    limit, key = {"algorithm": {"early_stop_imp_ratio": 5.0}}, "algorithm.early_stop_imp_ratio"
    result = translated(limit)
    assert result.ours[key] == 5.0 and key in changed(result)
    fsdp = translated(limit, FSDP)
    assert key not in fsdp.ours and key not in changed(fsdp)
    for none in (None, 1e10):
        result = translated({"algorithm": {"early_stop_imp_ratio": none}})
        assert key not in result.ours and key not in changed(result)


@pytest.mark.parametrize("value", ["abc", [], 0, -1.5, {"a": 1}, True])
def test_a_value_of_a_wrong_type_is_one_message(value: Any) -> None:
    leaves = flat(merged(LANGUAGE, CRITIC))
    for key in leaves:
        try:
            translation({**leaves, key: value})
        except ConfigError as error:
            assert key in str(error) or "runner.task_type" in str(error), (key, value)


def test_ill_typed_numbers_end_the_command_with_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value, require_package in (("kl_beta", "abc", "a number"), ("n_minibatches", 0, "at least 1")):
        file = put(tmp_path, "wrong.yaml", merged(LANGUAGE, {"algorithm": {name: value}}))
        assert cli.main(["config", "import", str(file)]) == 2
        errors = capsys.readouterr().err
        assert f"algorithm.{name} is" in errors and require_package in errors and "fault of rlhpc" not in errors


def test_a_reference_of_a_key_that_training_does_not_read_changes_nothing(tmp_path: Path) -> None:
    section = {"actor": {"megatron": {"ckpt_format": "${nothing}"}}}
    file = put(tmp_path, "reference.yaml", merged(LANGUAGE, section))
    reason, changes_training = translate(compose(file), str(file)).omitted["actor.megatron.ckpt_format"]
    assert "cannot be followed" in reason and not changes_training
    file = put(tmp_path, "reference.yaml", merged(LANGUAGE, {"algorithm": {"new": "${nothing}"}}))
    with pytest.raises(ConfigError, match=r"algorithm\.new is '\$\{nothing\}', which has no value"):
        translate(compose(file), str(file))


@pytest.mark.parametrize(
    ("changes", "aggregation", "differs"),
    [
        ({"training_batch_size_per_gpu": 1}, "seq-mean-token-mean", False),
        ({"training_batch_size_per_gpu": 4}, "token-mean", True),
        ({"training_batch_size_per_gpu": 4, "use_valid_token_scale": True}, "token-mean", False),
        ({"training_batch_size_per_gpu": 4, "loss_agg_func": "seq-mean-token-mean"}, "seq-mean-token-mean", False),
        ({"training_batch_size_per_gpu": 1, "loss_agg_func": "seq-mean-token-sum"}, "seq-mean-token-sum", False),
    ],
)
def test_losses_are_averaged_as_rlinf_computes_them(changes: dict[str, Any], aggregation: str, differs: bool) -> None:
    """RLinf averages each micro-batch by itself, so `token-mean` is another average with each size of micro-batches."""
    static = {"runner": {"enable_dynamic_batch_size": False}}
    made = translated(static, {"algorithm": {"loss_agg_func": "token-mean", "use_valid_token_scale": False, **changes}})
    assert made.ours["algorithm.loss_agg"] == aggregation
    assert ("algorithm.loss_agg_func" in changed(made)) is differs
    dynamic = translated({"runner": {"enable_dynamic_batch_size": True}}, {"algorithm": changes})
    assert dynamic.ours["algorithm.loss_agg"] == changes.get("loss_agg_func", "token-mean")


def test_the_valid_token_scale_is_another_one_where_actor_and_rollout_are_apart_or_with_fsdp() -> None:
    scale = {
        "algorithm": {"use_valid_token_scale": True, "loss_agg_func": "token-mean", "training_batch_size_per_gpu": 1}
    }
    static = {"runner": {"enable_dynamic_batch_size": False}}
    optim = {"actor": {"optim": {"clip_grad": 0.8, "adam_eps": 1e-5}, "model": {"tensor_model_parallel_size": 2}}}
    apart = translated(static, scale, APART, optim)
    assert apart.ours["algorithm.loss_agg"] == "seq-mean-token-sum-norm"
    # RLinf's gradient is four times as large, because eight ranks are four replicas.
    found = [apart.ours[f"actor.optim.{key}"] for key in ("clip_grad", "adam_eps")]
    assert found == pytest.approx([0.2, 2.5e-6])
    assert "algorithm.use_valid_token_scale" not in changed(apart)
    everywhere = {"cluster": {"component_placement": {"actor,rollout,reward": None, "rollout": "0-7", "actor": "all"}}}
    assert "algorithm.use_valid_token_scale" in changed(translated(static, scale, everywhere))
    assert translated(static, scale, FSDP).ours["algorithm.loss_agg"] == "seq-mean-token-mean"
    same = {"cluster": {"component_placement": {"actor,rollout,reward": None, "rollout": "all", "actor,reward": "all"}}}
    assert translated(static, scale, same).ours["algorithm.loss_agg"] == "token-mean"


def test_minibatches_in_order_differ_only_where_there_are_several() -> None:
    order = {"shuffle_rollout": False}
    assert "algorithm.shuffle_rollout" in changed(translated({"algorithm": {**order, "n_minibatches": 2}}))
    assert "algorithm.shuffle_rollout" not in changed(translated({"algorithm": {**order, "n_minibatches": 1}}))


def test_discounts_and_lambda_are_a_critics() -> None:
    """Without a critic RLinf's estimators do not discount, and its gae gives each token the reward."""
    made = translated({"algorithm": {"adv_type": "reinpp", "gamma": 0.9}})
    assert (made.ours["algorithm.adv_type"], made.ours["algorithm.gamma"]) == ("reinforce++", 1.0)
    assert translated({"algorithm": {"adv_type": "gae", "gamma": 0.9}}).ours["algorithm.adv_type"] == "raw"
    critic = translated(CRITIC, {"algorithm": {"gamma": 0.9}}).ours
    assert (critic["algorithm.adv_type"], critic["algorithm.gamma"], critic["algorithm.gae_lambda"]) == (
        "gae",
        0.9,
        0.9,
    )
    assert critic["critic.optim.lr_scheduler"] == "linear" and critic["algorithm.value_clip"] == 0.5


def test_another_estimator_is_never_taken_silently() -> None:
    episodes = {"algorithm": {"adv_type": "grpo_dynamic", "advantage_mode": "trajectory"}}
    scales = {"algorithm": {"loss_scales": ["group_level", "agent_level", "turn_level"]}}
    made = translated(episodes, scales)
    assert (made.ours["algorithm.adv_type"], made.ours["algorithm.loss_agg"]) == ("grpo", "seq-mean-token-mean")
    assert not {"algorithm.adv_type", "algorithm.loss_scales", "algorithm.loss_agg_func"} & set(changed(made))
    turns = translated(episodes, {"algorithm": {"advantage_mode": "turn"}})
    assert (turns.ours["algorithm.adv_type"], turns.ours["algorithm.credit"]) == ("grpo", "all_turns")
    assert "algorithm.advantage_mode" not in turns.omitted and "algorithm.credit" not in translated().ours
    assert translated({"algorithm": {"adv_type": "unheard_of"}}).ours["algorithm.adv_type"] == "unheard_of"


def test_an_entropy_that_is_not_computed_is_no_bonus() -> None:
    bonus = {"algorithm": {"entropy_bonus": 0.01, "calculate_entropy": False}}
    assert translated(bonus).ours["algorithm.entropy_coef"] == 0.0
    assert translated(bonus, {"algorithm": {"calculate_entropy": True}}).ours["algorithm.entropy_coef"] == 0.01


def test_the_precision_is_that_of_the_computation() -> None:
    mixed = {"actor": {"model": {"precision": "fp32"}, "fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}}
    assert translated(FSDP, mixed).ours["actor.model.dtype"] == "bfloat16"
    assert translated(mixed).ours["actor.model.dtype"] == "float32"  # Megatron does not read FSDP's keys
    scaler = {"actor": {"fsdp_config": {"grad_scaler": {"enabled": True, "init_scale": 1024, "growth_interval": 3}}}}
    ours = {"actor.grad_scaler.init_scale": 1024, "actor.grad_scaler.growth_interval": 3}
    half = {"actor": {"fsdp_config": {"amp_autocast": {"enabled": True, "precision": "fp16"}}}}
    result = translated(FSDP, mixed, half, scaler)
    assert result.ours["actor.model.dtype"] == "float16"
    assert {key: result.ours[key] for key in ours} == ours
    assert not any(key.startswith("actor.fsdp_config") for key in changed(result))
    assert not ours.keys() & translated(FSDP, mixed, scaler).ours.keys()  # bfloat16 needs no scaled loss
    whole = translated(FSDP, {"actor": {"fsdp_config": {"sharding_strategy": "no_shard"}}})
    assert whole.ours["actor.training_backend"] == "local"


def test_weights_in_less_than_float32_are_named() -> None:
    """RLinf's FSDP trainer keeps weights in the precision of the model, Megatron in float32."""
    low = {"actor": {"model": {"precision": "bf16"}}}
    assert "actor.model.precision" in changed(translated(FSDP, low))
    assert "actor.model.precision" not in changed(translated(low))
    assert "actor.model.precision" not in changed(translated(FSDP, {"actor": {"model": {"precision": "fp32"}}}))


@pytest.mark.parametrize(
    ("change", "key"),
    [({"actor": {"optim": {"weight_decay": 0.05}}}, "actor.optim.weight_decay"), ({}, "actor.optim.lr")],
)
def test_megatron_decays_neither_biases_nor_norms(change: dict[str, Any], key: str) -> None:
    assert "Megatron decays neither" in translated(change).omitted[key][0] and key in changed(translated(change))
    without = translated({"actor": {"optim": {"weight_decay": 0}}})
    assert not any(
        "Megatron decays" in reason
        for reason, _ in [*translated(FSDP, change).omitted.values(), *without.omitted.values()]
    )


def test_sizes_that_rlinfs_trainer_does_not_read_or_that_pictures_forbid_are_not_written() -> None:
    sizes = {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 8}
    mesh = {"actor": {"model": sizes}}
    keys = {f"actor.parallel.{name}": size for name, size in (("tensor", 4), ("context", 2), ("expert", 8))}
    written = translated(mesh).ours
    assert {key: written.get(key) for key in keys} == keys
    for change in (FSDP, {"data": {"type": "vlm", "image_keys": "scan", "use_chat_template": True}}):
        made = translated(mesh, change)
        assert not set(keys) & set(made.ours) and not {f"actor.model.{size}" for size in sizes} & set(changed(made))
    assert made.ours["data.train.images_key"] == "scan"


def test_an_engine_of_one_rank_holds_all_experts() -> None:
    experts = {"rollout": {"sglang": {"enable_ep_moe": True}, "tensor_parallel_size": 1}}
    assert "rollout.parallel.expert" not in translated(experts).ours
    assert translated(experts, {"rollout": {"tensor_parallel_size": 2}}).ours["rollout.parallel.expert"] is True


def test_a_placement_that_fits_nothing_is_told_and_the_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = {"cluster": {"component_placement": {"actor,rollout,reward": {"node_group": "a100", "placement": "0-7"}}}}
    cfg, text, report = imported(put(tmp_path, "sums.yaml", merged(LANGUAGE, nodes)), capsys)
    assert cfg is None and "node_group: a100" in text
    assert (
        report.splitlines()[-1].startswith("rlhpc plan does not accept it yet: ") and "no node group 'a100'" in report
    )


@pytest.mark.parametrize("key", ["actor.model.precision", "rollout.model.precision"])
def test_a_precision_that_rlinf_does_not_have_is_refused(key: str) -> None:
    group = key.partition(".")[0]
    with pytest.raises(ConfigError, match=rf"{key} is 'fp8'; RLinf has the precisions 32, fp32"):
        translated({group: {"model": {"precision": "fp8"}}})


def test_a_language_model_learns_by_one_loss() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss_type is 'actor_critic': RLinf's actors of language models"):
        translated({"algorithm": {"loss_type": "actor_critic"}})


@pytest.mark.parametrize(("iters", "begins_at_0"), [(0, False), (8, True)])
def test_the_first_update_of_megatrons_warm_up_is_named(iters: int, begins_at_0: bool) -> None:
    made = translated({"actor": {"lr_sched": {"lr_warmup_iters": iters}}})
    named = made.omitted.get("actor.lr_sched.lr_warmup_iters", ("", False))
    assert ("begins at 0" in named[0]) is begins_at_0
