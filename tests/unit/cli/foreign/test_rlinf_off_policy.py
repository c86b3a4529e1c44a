"""Import of RLinf's off-policy runs: SAC, CrossQ and offline IQL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rlhpc.embodied.models import build_model
from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import CUBE, MLP, PPO, SAC, flat, imported, merged, put, translation

IQL: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-0", "env": "0-0", "rollout": "0-0"}},
    "runner": {
        "task_type": "offline", "max_steps": 50000, "max_epochs": 80000, "local_update_steps": 500, "val_check_interval": 5000,
        "save_interval": -1, "eval_episodes": 7,
    },
    "algorithm": {
        "loss_type": "offline_iql", "adv_type": None, "gamma": 0.98, "tau": 0.01, "expectile": 0.8, "temperature": 4.0,
        "hidden_dims": [128, 128], "dropout_rate": None,
    },
    "data": {"dataset_type": "d4rl", "task_name": "hopper-medium-v2", "dataset_path": None},
    "env": {"eval": {"env_type": "d4rl", "task_name": "hopper-medium-v2", "total_num_envs": 2, "seed": 1}},
    "actor": {
        "training_backend": "fsdp", "global_batch_size": 64, "micro_batch_size": 64, "seed": 3,
        "model": {"model_type": "mlp_policy"},
        "optim": {"lr": 1e-4, "lr_scheduler": "torch_cosine"}, "critic_optim": {"lr": 2e-4}, "value_optim": {"lr": 2e-4},
    },
}  # fmt: skip


def sac(above: Any) -> dict[str, Any]:
    tree = merged(merged(merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO), SAC), above)
    return flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})


CROSSQ = {"algorithm": {"q_head_type": "crossq"}, "actor": {"model": {"q_head_type": "crossq"}}}


def test_crossq_stays_crossq(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(project, "push.yaml", merged(merged(PPO, SAC), CROSSQ)), capsys)
    assert (cfg.runner.task_type, cfg.algorithm.name, cfg.actor.model.model_type) == ("off_policy", "crossq", "crossq")
    assert "off_policy (CrossQ)" in report
    # The actor is that of SAC; the critics are renormalised from the first batch on (modules/q_head.py, batch_renorm.py).
    assert (cfg.actor.model.activation, cfg.actor.model.ortho_init) == ("tanh", True)
    policy = build_model(cfg.actor.model, spaces.Box(-1, 1, (5,)), spaces.Box(-1, 1, (2,)), seed=0)
    assert [type(layer).__name__ for layer in policy.actor[:4]] == ["Linear", "Tanh", "Linear", "Tanh"]
    critic = policy.critics.train().one
    assert [type(layer).__name__ for layer in critic[:3]] == ["BatchRenorm", "Linear", "ReLU"]
    rows = torch.randn(6, 7)
    corrected = critic[0](rows)
    mean, variance = rows.mean(0), rows.var(0, correction=0)
    torch.testing.assert_close(critic[0].mean, 0.001 * mean)
    torch.testing.assert_close(critic[0].variance, 0.999 + 0.001 * variance)
    ratio = ((variance + 1e-3).sqrt() / math.sqrt(1 + 1e-3)).clamp(1 / 3, 3)
    shift = (mean / math.sqrt(1 + 1e-3)).clamp(-5, 5)
    torch.testing.assert_close(corrected, (rows - mean) / (variance + 1e-3).sqrt() * ratio + shift)


def test_sac_has_rlinfs_networks() -> None:
    ours = translation(sac({})).ours
    expected = {
        "algorithm.name": "sac", "actor.model.model_type": "sac", "actor.model.hidden_sizes": [256, 256, 256],
        "actor.model.activation": "tanh", "actor.model.critic_layer_norm": True, "actor.model.ortho_init": True,
    }  # fmt: skip
    assert {key: ours[key] for key in expected} == expected


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("window", "minimum"), [(50, 4), (3, 10)])
def test_the_buffer_counts_transitions(window: int, minimum: int, stages: int) -> None:
    buffer = {"sample_window_size": window, "min_buffer_size": minimum}
    ours = translation(sac({"algorithm": {"replay_buffer": buffer}, "rollout": {"pipeline_stage_num": stages}})).ours
    trajectory = 64 * 2 // stages
    assert ours["algorithm.replay_buffer.min_buffer_size"] == minimum * trajectory
    assert ours["algorithm.replay_buffer.size"] == max(window, minimum) * trajectory


@pytest.mark.parametrize(
    ("above", "says"),
    [
        ({"actor": {"model": {"model_type": "openpi"}}}, "acts by a flow is missing"),
        (
            {"actor": {"model": {"model_type": "flow_policy", "input_type": "state"}}},
            "acts by a flow is missing",
        ),
        ({"algorithm": {"agg_q": "mean"}}, "algorithm.agg_q is 'mean': .* the smallest value"),
        ({"algorithm": {"actor_agg_q": "q1"}}, "algorithm.actor_agg_q is 'q1': .* the mean"),
        (
            {"algorithm": {"q_head_type": "crossq"}, "actor": {"model": {"q_head_type": "crossq", "num_q_heads": 10}}},
            "num_q_heads is 10: .* CrossQ has two critics",
        ),
        ({"algorithm": {"q_head_type": "later"}}, "algorithm.q_head_type is 'later': rlhpc has no such critics"),
        (
            {"algorithm": {"q_head_type": "crossq"}, "actor": {"model": {"q_head_type": "default"}}},
            "one critic for both",
        ),
        ({"algorithm": {"entropy_tuning": {"initial_alpha": 0.0}}}, "a temperature of 0 is no SAC"),
    ],
)
def test_another_critic_or_actor_is_refused(above: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        translation(sac(above))


def test_rlpd_from_pictures() -> None:
    """Ten critics of which two count, and RLinf's frozen ResNet-10; what is drawn in another way is named."""
    model = {
        "model_type": "cnn_policy", "model_path": "weights", "num_q_heads": 10,
        "encoder_config": {"ckpt_name": "resnet10_pretrained.pt"},
    }  # fmt: skip
    algorithm = {"agg_q": "min", "actor_agg_q": "mean", "critic_subsample_size": 2, "backup_entropy": False}
    for drq in (False, True):
        result = translation(sac({"algorithm": algorithm, "actor": {"model": model, "enable_drq": drq}}))
        expected = {
            "actor.model.model_type": "sac", "actor.model.num_q_heads": 10, "algorithm.critic_subsample_size": 2,
            "algorithm.actor_agg_q": "mean", "algorithm.random_shift": 4 if drq else 0,
            "actor.model.kwargs": {"encoder": "resnet10", "freeze": True, "weights": "weights/resnet10_pretrained.pt"},
        }  # fmt: skip
        assert {key: result.ours[key] for key in expected} == expected
        assert result.omitted["algorithm.critic_subsample_size"][1]


def test_limits_that_differ_are_named() -> None:
    same = translation(sac({"actor": {"critic_optim": {"clip_grad": 0.5}}}))
    other = translation(sac({"actor": {"critic_optim": {"clip_grad": 9.0}}}))
    assert not same.omitted["actor.critic_optim.clip_grad"][1] and other.omitted["actor.critic_optim.clip_grad"][1]


def test_iql_learns_offline_from_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "hopper"
    data.mkdir()
    source = put(tmp_path, "iql.yaml", IQL)
    cfg, _, report = imported(source, capsys, f"algorithm.demo_buffer.load_path={data}")
    assert "keys and values are right" in report
    expected = {
        "name": "iql", "gamma": 0.98, "tau": 0.01, "expectile": 0.8, "inverse_temperature": 4.0, "max_weight": 100.0,
        "offline_steps": 100, "offline_updates": 500,
    }  # fmt: skip
    assert {key: cfg.algorithm[key] for key in expected} == expected
    assert (cfg.runner.max_steps, cfg.runner.val_check_interval, cfg.runner.save_interval) == (100, 10, -1)
    assert (cfg.env.train.env_type, cfg.env.train.env_id, cfg.env.eval.env_id) == (
        "gymnasium",
        "Hopper-v5",
        "Hopper-v5",
    )
    assert (cfg.env.eval.num_episodes, list(cfg.actor.model.hidden_sizes)) == (7, [128, 128])
    assert (cfg.actor.optim.lr, cfg.actor.optim.value_lr, cfg.actor.optim.clip_grad) == (1e-4, 2e-4, None)
    left = report.split("training will differ")[1].split("training is the same")[0]
    assert "actor.optim.lr_scheduler: torch_cosine" in left and "data.task_name: hopper-medium-v2" in left
    assert "actor.value_optim.lr:" not in left


def test_a_data_set_without_an_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="antmaze-large-play-v0"):
        translation(flat(merged(IQL, {"data": {"task_name": "antmaze-large-play-v0"}})))
    with pytest.raises(ConfigError, match="dropout"):
        translation(flat(merged(IQL, {"algorithm": {"dropout_rate": 0.1}})))


def test_what_rlinfs_limit_of_gradients_and_its_temperature_do_otherwise_is_named() -> None:
    optim = {"adam_beta1": 0.5, "adam_beta2": 0.999, "clip_grad": 2.0}
    tuning = {"entropy_tuning": {"alpha_type": "softplus"}}
    result = translation(sac({"actor": {"optim": optim}, "algorithm": tuning}))
    assert result.ours["actor.optim.clip_grad"] == 2.0 and result.omitted["actor.optim.clip_grad"][1]
    assert result.omitted["actor.optim.adam_beta1"][1] and "actor.optim.adam_beta2" not in result.omitted


@pytest.mark.parametrize(("model", "kind", "differs"), [
    ("cnn_policy", "q_head_only", True), ("cnn_policy", "all", False), ("mlp_policy", "q_head_only", False),
])  # fmt: skip
def test_targets_of_encoders_follow_as_in_rlinf_or_are_named(model: str, kind: str, differs: bool) -> None:
    own = {"algorithm": {"target_update_type": kind}, "actor": {"model": {"model_type": model}}}
    assert translation(sac(own)).omitted["algorithm.target_update_type"][1] is differs


def test_slots_that_wait_for_the_next_rollout_are_named() -> None:
    resets = translation(flat(sac({"env": {"train": {"auto_reset": True}}})))
    waits = translation(flat(sac({"env": {"train": {"auto_reset": False}}})))
    assert "env.train.auto_reset" not in resets.omitted and waits.omitted["env.train.auto_reset"][1]


def test_each_key_of_a_reward_model_is_known_or_named() -> None:
    """Without one, RLinf reads none of them, whatever their names are."""
    model = {"model_type": "resnet", "arch": "resnet18", "reward_threshold": 0.5, "of_a_later_version": 1}
    pictures = {"actor": {"model": {"model_type": "cnn_policy"}}}
    reward = {"use_reward_model": True, "reward_threshold": 0.6, "model": model}
    asked = translation(flat(sac(merged(pictures, {"reward": reward})))).omitted
    assert (
        not asked["reward.model.arch"][1] and not asked["reward.reward_threshold"][1]
    )  # RLinf ignores the second, too
    assert asked["reward.model.reward_threshold"][1] and asked["reward.model.of_a_later_version"][1]
    assert "another format" in asked["reward.use_reward_model"][0]  # no path is set
    unread = translation(flat(sac(merged(pictures, {"reward": {**reward, "use_reward_model": False}})))).omitted
    assert {reason for key, reason in unread.items() if key.startswith("reward.model")} == {
        ("RLinf reads it with use_reward_model", False)
    }


def test_a_transport_in_another_precision_is_named() -> None:
    for dtype, differs in ((None, False), ("bf16", True)):
        made = translation(flat(sac({"weight_syncer": {"type": "bucket", "bucket": {"bucket_dtype": dtype}}})))
        assert made.omitted["weight_syncer.bucket.bucket_dtype"][1] is differs


def test_evaluation_episodes_that_rlinf_ends_early_are_named() -> None:
    for steps in (20, 80):
        made = translation(
            flat(sac({"env": {"eval": {"max_steps_per_rollout_epoch": steps, "max_episode_steps": 40}}}))
        )
        named = made.omitted.get("env.eval.max_steps_per_rollout_epoch", ("", False))
        assert ("so early" in named[0]) is (steps < 40)
