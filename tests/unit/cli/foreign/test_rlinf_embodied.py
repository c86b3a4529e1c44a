"""Import of RLinf's embodied configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.cli.foreign.rlinf_configs import (
    CRITIC,
    KINDS,
    LANGUAGE,
    PPO,
    SAC,
    _kinds,
    flat,
    imported,
    merged,
    put,
    translation,
)

_kinds()


def test_a_value_model_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = merged(LANGUAGE, CRITIC)
    del source["cluster"]["component_placement"]["actor,rollout,reward"]
    cfg, _, report = imported(put(tmp_path, "values.yaml", source), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "cluster.component_placement": {"actor,critic,rollout": "0-15"}, "algorithm.adv_type": "gae",
        "algorithm.gae_lambda": 0.9, "algorithm.gamma": 1.0, "algorithm.value_clip": 0.5, "critic.training_backend": "fsdp",
        "critic.optim.lr": 1e-5, "critic.optim.clip_grad": 1.0, "critic.optim.lr_scheduler": "linear",
        "critic.model.dtype": "bfloat16", "critic.model.model_path": "models/one", "critic.warmup_steps": 0,
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert (
        cfg.reward.terms[0].weight == 10.0
    )  # RLinf's answers are worth -5 or 5, which the clip of values is relative to
    assert "there is no critic" not in report


def test_ppo_becomes_a_run_of_ours(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, text, report = imported(put(project, "push.yaml", PPO), capsys, "runner.keep_checkpoints=5")
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    wanted = {
        "runner.task_type": "embodied", "runner.name": "push_a_cube", "runner.seed": 7, "runner.max_steps": 60,
        "runner.keep_checkpoints": 5, "cluster.accelerators_per_node": 2, "algorithm.loss_type": "ppo",
        "algorithm.normalize_advantages": "batch", "algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.3,
        "algorithm.value_coef": 1.0, "algorithm.entropy_coef": 0.01, "algorithm.update_epochs": 8,
        "algorithm.rollout_steps": 40, "algorithm.rollout_parts": 2,
        "env.train.num_envs": 64, "env.train.env_id": "PushCube-v1", "env.train.max_episode_steps": 40,
        "env.eval.num_envs": 16, "env.eval.num_episodes": 32, "env.eval.video_episodes": 4,
        "rollout.pipeline_stage_num": 2, "actor.model.model_type": "mlp", "actor.optim.name": "adamw", "actor.optim.lr": 3e-4,
        "actor.optim.adam_eps": 1e-8, "actor.global_batch_size": 1280,
    }  # fmt: skip
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    assert list(cfg.actor.model.hidden_sizes) == [256, 256, 256]
    assert cfg.env.train.kwargs == {
        "obs_mode": "state", "sim_config": {"control_freq": 20}, "control_mode": "pd_ee_delta_pos"
    }  # fmt: skip
    assert cfg.algorithm.clip_ratio_c is None  # RLinf's embodied losses do not get it
    assert "update_epochs: 8  # algorithm.update_epoch\n" in text
    assert (cfg.algorithm.huber_delta, cfg.actor.optim.value_lr) == (10.0, 1e-3)


def test_rounds_without_auto_reset_become_parts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "algorithm": {"adv_type": "grpo", "loss_type": "actor", "group_size": 8},
        "env": {"train": {"auto_reset": False, "group_size": 8, "use_fixed_reset_state_ids": True}},
    }
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, own)), capsys)
    assert (cfg.env.train.num_envs, cfg.algorithm.rollout_steps, cfg.env.train.group_size) == (64, 40, 8)
    assert cfg.algorithm.rollout_parts == 2
    assert (cfg.algorithm.normalize_advantages, cfg.algorithm.value_coef) == ("none", 0.0)
    assert not cfg.env.train.use_fixed_reset_state_ids  # ours is for the whole run, theirs for a rollout
    own["algorithm"] = {"loss_type": "decoupled_actor_critic", "staleness_threshold": 1}
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, own)), capsys)
    assert (cfg.env.train.num_envs, cfg.algorithm.rollout_steps, cfg.algorithm.rollout_parts) == (128, 20, 1)
    assert "2 rounds of 64 slots became 128 slots" in " ".join(report.split())


@pytest.mark.parametrize(
    ("change", "expected", "differs"),
    [
        ({"env.train.auto_reset": True}, ("token-mean", None), False),
        ({"env.train.auto_reset": False, "env.train.ignore_terminations": True}, ("token-mean", None), False),
        ({"env.train.auto_reset": False}, ("seq-mean-token-mean", None), False),
        ({"env.train.auto_reset": False, "algorithm.filter_rewards": True}, ("seq-mean-token-mean", True), False),
        (
            {"env.train.auto_reset": False, "actor.model.num_action_chunks": 5, "algorithm.reward_type": "chunk_level"},
            ("seq-mean-token-mean", None),
            True,
        ),
        (
            {"env.train.auto_reset": False, "env.train.ignore_terminations": True, "algorithm.filter_rewards": True},
            ("token-mean", None),
            True,
        ),
    ],
)
def test_an_episode_weighs_what_it_weighs_in_rlinfs_loss(change: Any, expected: Any, differs: bool) -> None:
    """RLinf's embodied workers do not pass `loss_agg_func` on; with masks, they divide by the steps of an episode."""
    grpo = {"algorithm.adv_type": "grpo", "algorithm.loss_type": "actor", "algorithm.loss_agg_func": "token-mean"}
    same = {"actor.model.num_action_chunks": 1, "env.train.ignore_terminations": False}
    result = translation({**flat(KINDS["embodied"][0]), **grpo, **same, **change})
    ours = (result.ours["algorithm.loss_agg"], result.ours.get("algorithm.count_filtered_groups"))
    assert ours == expected and result.omitted["algorithm.loss_agg_func"][1] is differs


def test_asynchronous_ppo_sends_weights_after_every_step() -> None:
    interval = {"runner.weight_sync_interval": 3}
    for loss, expected in (("actor_critic", 3), ("decoupled_actor_critic", None)):
        result = translation({**flat(KINDS["embodied"][0]), **interval, "algorithm.loss_type": loss})
        assert result.ours.get("runner.weight_sync_interval") == expected
        assert not result.omitted.get("runner.weight_sync_interval", ("", False))[1]


@pytest.mark.parametrize(("value", "expected"), [(3.0, 3.0), (5, 5.0), (None, None), ("absent", 3.0)])
def test_asynchronous_ppo_clips_twice_around_an_interpolated_policy(value: Any, expected: Any) -> None:
    """RLinf's asynchronous PPO passes `clip_ratio_c` on, which is 3 if the file leaves it out, and recomputes no log-probs."""
    leaves = {**flat(KINDS["embodied"][0]), "rollout.recompute_logprobs": False, "algorithm.clip_ratio_c": value}
    if value == "absent":
        del leaves["algorithm.clip_ratio_c"]
    result = translation({**leaves, "algorithm.loss_type": "decoupled_actor_critic"})
    assert result.ours.get("algorithm.clip_ratio_c") == expected
    assert result.ours["algorithm.proximal_policy"] == "interpolated"
    synchronous = translation({**leaves, "algorithm.loss_type": "actor_critic"})
    assert not {"algorithm.clip_ratio_c", "algorithm.proximal_policy"} & synchronous.ours.keys()
    assert not synchronous.omitted["rollout.recompute_logprobs"][1]


def test_the_mean_of_asynchronous_ppo_is_over_the_tokens_that_the_threshold_keeps() -> None:
    threshold = {"algorithm.loss_type": "decoupled_actor_critic", "algorithm.behave_weight_threshold": 2.0}
    for resets, differs in ((True, True), (False, False)):
        own = {"env.train.auto_reset": resets, "env.train.ignore_terminations": False}
        result = translation({**flat(KINDS["embodied"][0]), **threshold, **own})
        assert result.ours["algorithm.behave_weight_threshold"] == 2.0
        assert ("algorithm.behave_weight_threshold" in result.omitted) is differs


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("batch", None)),
        ({"algorithm.normalize_advantages": False}, ("batch", False)),  # RLinf's workers do not pass it on
        ({"runner.use_training_pipeline": True, "algorithm.normalize_advantages": False}, ("none", None)),
        ({"cluster.component_placement.actor, env, rollout": "0-1"}, ("batch", True)),
        ({"cluster.component_placement.actor, env, rollout": "all"}, ("batch", True)),
        ({"algorithm.adv_type": "grpo", "algorithm.loss_type": "actor"}, ("none", False)),
    ],
)
def test_advantages_are_normalized_where_rlinfs_are(change: Any, expected: Any) -> None:
    one = {"cluster.component_placement.actor, env, rollout": "3-3"}
    result = translation({**flat(KINDS["embodied"][0]), **one, **change})
    found = result.omitted.get("algorithm.normalize_advantages")
    assert (result.ours["algorithm.normalize_advantages"], None if found is None else found[1]) == expected
    leaves = {**flat(KINDS["embodied"][0]), **one, **change}
    del leaves["algorithm.normalize_advantages"]
    if expected == ("batch", True):
        assert "over its own part of a rollout" in translation(leaves).omitted["algorithm.adv_type"][0]


@pytest.mark.parametrize(("estimator", "gamma"), [("gae", 0.8), ("grpo", None), ("raw", 1.0), ("reinpp", 1.0)])
def test_group_estimators_do_not_discount(estimator: str, gamma: float | None) -> None:
    leaves = {**flat(KINDS["embodied"][0]), "algorithm.adv_type": estimator, "algorithm.gamma": 0.8}
    result = translation({**leaves, "algorithm.loss_type": "actor_critic" if estimator == "gae" else "actor"})
    assert result.ours.get("algorithm.gamma") == gamma
    assert result.omitted.get("algorithm.gamma", ("", False))[1] is False


@pytest.mark.parametrize(("acting", "differs"), [("32", False), (32, False), ("bf16", True)])
def test_another_precision_of_acting_is_named(acting: Any, differs: bool) -> None:
    precision = {"rollout.model.precision": acting, "actor.model.precision": "32"}
    result = translation({**flat(KINDS["embodied"][0]), **precision})
    assert result.omitted["rollout.model.precision"][1] is differs


def test_greedy_training_of_action_tokens_is_named() -> None:
    sampling = {"rollout.sampling_params.do_sample": False}
    for model, differs in (("openvla", True), ("openvla_oft", True), ("mlp_policy", False)):
        result = translation({**flat(KINDS["embodied"][0]), **sampling, "actor.model.model_type": model})
        assert result.omitted["rollout.sampling_params.do_sample"][1] is differs
    sampled = {
        **flat(KINDS["embodied"][0]),
        "actor.model.model_type": "openvla",
        "rollout.sampling_params.do_sample": True,
    }
    assert not translation(sampled).omitted.get("rollout.sampling_params.do_sample", ("", False))[1]


def test_sac_counts_updates_by_transitions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, SAC)), capsys)
    assert report.endswith("rlhpc plan also looks at the files that they name\n")
    assert (cfg.runner.task_type, cfg.actor.model.model_type) == ("off_policy", "sac")
    assert (cfg.algorithm.update_to_data, cfg.algorithm.rollout_steps) == (
        0.25,
        2,
    )  # 32 updates for 64 slots of 2 decisions
    assert (cfg.algorithm.auto_entropy_tuning, cfg.algorithm.initial_alpha, cfg.algorithm.random_steps) == (
        False,
        0.02,
        0,
    )
    assert (cfg.actor.optim.value_lr, cfg.algorithm.alpha_lr) == (2e-4, 1e-4)
    # 10 trajectories, each of the 64 slots' 2 decisions in one of the 2 stages
    assert (cfg.algorithm.replay_buffer.min_buffer_size, cfg.algorithm.replay_buffer.size) == (640, 6400)


def test_adapters_are_not_scaled_as_in_rlinf() -> None:
    lora = {"actor.model.is_lora": True, "actor.model.lora_rank": 24}
    for kind, model in (("fsdp", {}), ("embodied", {"actor.model.model_type": "openvla_oft"})):
        ours = translation({**flat(KINDS[kind][0]), **model, **lora}).ours
        assert (ours["actor.lora.rank"], ours["actor.lora.alpha"]) == (24, 24), kind
        assert "actor.lora.rank" not in translation({**flat(KINDS[kind][0]), **model}).ours


def test_adapters_are_rlinfs_or_those_of_a_folder(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        "model_type": "openvla_oft", "model_path": "/models/oft", "num_action_chunks": 8, "use_proprio": True,
        "is_lora": True, "lora_rank": 24,
    }  # fmt: skip
    batches = {"global_batch_size": 256, "micro_batch_size": 64}
    new = merged(PPO, {"actor": {**batches, "model": model}})
    lora = imported(put(project, "new.yaml", new), capsys)[0].actor.lora
    assert (lora.rank, lora.alpha, lora.init, lora.path) == (24, 24, "gaussian", None)
    assert {"lm_head", "proj", "qkv", "down_proj"} <= set(lora.target_modules)  # RLinf's models/__init__.py
    own = merged(new, {"actor": {"model": {"lora_path": "/models/adapters"}}})
    cfg, text, report = imported(put(project, "old.yaml", own), capsys)
    assert (cfg.actor.lora.rank, cfg.actor.lora.path) == (24, "/models/adapters")
    assert "init:" not in text and "target_modules:" not in text  # the folder says them
    assert cfg.actor.model.kwargs.proprio_adapters is True
    assert "lora" not in report.split("training is the same")[0].partition("left out")[2]


@pytest.mark.parametrize("slots", [7, 49, 64, 3_000_000])
def test_sac_makes_as_many_updates_as_rlinf(slots: int) -> None:
    leaves = flat(KINDS["off_policy"][0]) | {"env.train.total_num_envs": slots, "algorithm.update_epoch": 3}
    ours = translation(leaves).ours
    transitions = slots * ours["algorithm.rollout_steps"]
    assert [int(ours["algorithm.update_to_data"] * step * transitions + 1e-6) for step in (1, 10, 100)] == [3, 30, 300]


@pytest.mark.parametrize("version", ["rlinf", "official"])
def test_rlinf_crops_no_picture_of_openvla(version: str) -> None:
    model = {"actor.model.model_type": "openvla_oft", "actor.model.implement_version": version}
    result = translation({**flat(KINDS["embodied"][0]), **model, "actor.model.center_crop": True})
    assert "center_crop" not in result.ours["actor.model.kwargs"]
    assert result.omitted["actor.model.center_crop"][1] is False


PRECISION, MIXED = "actor.model.precision", "actor.fsdp_config.mixed_precision.param_dtype"


@pytest.mark.parametrize(
    ("model", "keys", "dtype", "named"),
    [
        ("openvla", {PRECISION: "bf16", MIXED: "bf16"}, "bfloat16", PRECISION),
        ("openvla", {PRECISION: "fp32", MIXED: "bf16"}, "bfloat16", None),
        ("openvla", {PRECISION: "fp32"}, "float32", None),
        ("mlp_policy", {PRECISION: "32", MIXED: "bf16"}, None, MIXED),
        ("mlp_policy", {PRECISION: "32", MIXED: "32"}, None, None),
        ("openpi", {PRECISION: None}, None, PRECISION),
        ("openpi", {PRECISION: "fp32"}, None, None),
        ("openpi", {PRECISION: "fp32", MIXED: "bf16"}, None, MIXED),
    ],
)
def test_the_precision_of_a_policy_is_that_of_the_computation(
    model: str, keys: dict[str, Any], dtype: str | None, named: str | None
) -> None:
    """RLinf's FSDP computes in `param_dtype`, and keeps weights and Adam's averages in the precision of the model."""
    result = translation({**flat(KINDS["embodied"][0]), "actor.model.model_type": model, **keys})
    assert result.ours.get("actor.model.dtype") == dtype
    assert [key for key in (PRECISION, MIXED) if result.omitted.get(key, ("", False))[1]] == ([named] if named else [])


def test_openvla_oft_becomes_openvla(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        "model_type": "openvla_oft", "model_path": "/models/oft", "num_action_chunks": 8, "use_proprio": True,
        "use_film": True, "unnorm_key": "libero_10_no_noops", "center_crop": True, "attn_implementation": "flash_attention_2",
    }  # fmt: skip
    batches = {"global_batch_size": 256, "micro_batch_size": 64}
    cfg, _, report = imported(put(project, "push.yaml", merged(PPO, {"actor": {**batches, "model": model}})), capsys)
    found = cfg.actor.model
    assert (found.model_type, found.model_path, found.attn_implementation) == ("openvla", "/models/oft", "sdpa")
    assert found.kwargs == {
        "head": "parallel", "proprio": True, "unnorm_key": "libero_10_no_noops",
        "temperature_train": 1.0, "temperature_eval": 0.0, "top_k": -1, "stop_token": False,
    }  # fmt: skip
    assert "rlhpc's openvla has no FiLM" in " ".join(report.split())
