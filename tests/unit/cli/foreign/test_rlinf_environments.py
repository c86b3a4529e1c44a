"""Import of RLinf's environments, and of the policies that see through their cameras."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import CUBE, MLP, PPO, flat, merged, translation
from tests.unit.cli.foreign.test_rlinf_demonstrations import OPENPI

LIBERO = {
    "env_type": "libero", "task_suite_name": "libero_goal", "init_params": {"camera_heights": 128, "camera_widths": 96},
    "reward_coef": 5.0, "use_rel_reward": True, "max_episode_steps": 60, "max_steps_per_rollout_epoch": 60,
}  # fmt: skip
GROUPS = {"algorithm": {"adv_type": "grpo", "loss_type": "actor", "group_size": 8}}


def translated(above: Any, env: Any = LIBERO) -> Any:
    tree = merged({"env": {"train": merged(CUBE, env), "eval": merged(CUBE, env)}, "actor": {"model": MLP}}, PPO)
    leaves = flat({key: value for key, value in merged(tree, above).items() if key not in ("defaults", "hydra")})
    return translation({key: value for key, value in leaves.items() if not key.endswith("init_params.id")})


def test_libero_has_the_cameras_that_the_policy_takes() -> None:
    ours = translated({"actor": {"model": OPENPI}}).ours
    rest = {"settling_steps": 15, "settling_gripper": "open"}
    assert ours["env.train.kwargs"] == {"height": 128, "width": 96, **rest}
    closed = translated({"env": {"train": {"reset_gripper_open": False}}}).ours["env.train.kwargs"]
    assert closed["settling_gripper"] == "still"
    assert (ours["env.train.env_id"], ours["env.train.reward_scale"]) == ("libero_goal", 5.0)
    one = {"model_type": "openvla_oft", "num_images_in_input": 1, "openpi": None}
    assert translated({"actor": {"model": one}}).ours["env.train.kwargs"]["cameras"] == ["agentview"]
    tasks = translated({"env": {"train": {"task_id_filter": [0, 3]}}}).ours["env.train.kwargs"]["task_ids"]
    assert tasks == [0, 3]


def test_slots_that_rlinf_compares_share_their_resets() -> None:
    result = translated(merged(GROUPS, {"env": {"train": {"group_size": 1}}}))
    assert result.ours["env.train.group_size"] == 8
    assert result.omitted["env.train.group_size"] == (
        "RLinf compares 8 slots, of which 1 share a reset; in rlhpc all slots of a group share it", True
    )  # fmt: skip
    same = translated(merged(GROUPS, {"env": {"train": {"group_size": 8}}}))
    assert same.ours["env.train.group_size"] == 8 and "env.train.group_size" not in same.omitted


def test_the_reason_for_a_simulator_that_is_missing_names_it() -> None:
    result = translated({}, {**LIBERO, "env_type": "habitat"})
    assert (
        result.ours["env.train.env_type"] == "habitat"
        and "no simulator habitat" in result.omitted["env.train.env_type"][0]
    )
    assert result.missing_feature["env.train.env_type"] == "^name habitat$"
    robot = translated({}, {**LIBERO, "env_type": "realworld"})
    assert "docs/how-to/real-robot.md" in robot.omitted["env.train.env_type"][0]


def test_pi0_is_lerobots_and_says_what_is_different() -> None:
    result = translated({"actor": {"model": {**OPENPI, "num_steps": 5}}})
    expected = {
        "actor.model.model_type": "lerobot", "actor.training_backend": "local",
        "actor.model.kwargs": {
            "num_steps": 5, "noise_steps": "one", "value_input": "action_expert", "value_hidden": [512, 256, 128],
            "detach_value_input": False, "delta_actions": [0, 1, 2, 3, 4, 5], "train_expert_only": False,
            "action_horizon": 50, "prompt_tokens": 48,
        },
    }  # fmt: skip
    assert {key: result.ours[key] for key in expected} == expected and "actor.model.dtype" not in result.ours
    assert result.omitted["actor.model.model_path"][1] and "actor.model.openpi.noise_method" not in result.omitted
    assert "actor.model.model_type" not in result.omitted


@pytest.mark.parametrize(
    ("openpi", "kwargs"),
    [
        ({"detach_critic_input": True}, {"value_input": "action_expert", "detach_value_input": True}),
        (
            {"value_after_vlm": True, "config_name": "pi05_libero"},
            {"value_input": "mean_token", "value_hidden": [1024, 512, 256]},
        ),
        (
            {"value_after_vlm": True, "value_vlm_mode": "first_token"},
            {"value_input": "first_token", "value_hidden": [512, 256, 128]},
        ),
    ],
)
def test_the_critic_of_pi0_reads_what_rlinfs_does(openpi: Any, kwargs: Any) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": openpi})}})
    assert kwargs.items() <= result.ours["actor.model.kwargs"].items()
    assert not any(result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] for key in openpi)


def test_a_last_token_that_is_padding_is_a_difference() -> None:
    last = {"value_after_vlm": True, "value_vlm_mode": "last_token"}
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": last})}})
    assert result.omitted["actor.model.openpi.value_vlm_mode"][1]


def test_actions_of_openpi_are_relative_to_the_state_where_its_configuration_says() -> None:
    def components(name: str) -> Any:
        model = merged(OPENPI, {"openpi": {"config_name": name}})
        return translated({"actor": {"model": model}}).ours["actor.model.kwargs"].get("delta_actions")

    assert components("pi0_libero") == [0, 1, 2, 3, 4, 5] and components("pi05_libero") is None
    assert components("pi0_aloha_robotwin") == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    for name, flips in (("pi05_aloha_robotwin", True), ("pi0_aloha_robotwin", None)):
        result = translated({"actor": {"model": merged(OPENPI, {"openpi": {"config_name": name}})}})
        assert result.ours["actor.model.kwargs"].get("adapt_to_pi") is flips
        assert not result.omitted.get("actor.model.openpi.config_name", ("", False))[1]


@pytest.mark.parametrize(
    ("openpi", "expected"),
    [
        ({"config_name": "pi0_metaworld"}, (5, None, 48, False)),
        ({"config_name": "pi05_libero", "train_expert_only": True}, (10, False, 200, True)),
        ({"config_name": "pi05_behavior"}, (32, True, 200, False)),
        ({"config_name": "pi05_maniskill", "action_horizon": 8, "discrete_state_input": True}, (8, True, 200, False)),
        ({"config_name": "pi0_robocasa365_pretrain_human300", "max_token_len": 64}, (50, None, 64, False)),
    ],
)
def test_networks_and_prompts_are_those_of_openpis_configuration(openpi: Any, expected: Any) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": openpi})}})
    kwargs = result.ours["actor.model.kwargs"]
    names = ("action_horizon", "discrete_state_input", "prompt_tokens", "train_expert_only")
    assert tuple(kwargs.get(name) for name in names) == expected
    assert not any(result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] for key in openpi)


def test_an_unknown_configuration_of_openpi_is_a_difference() -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": {"config_name": "pi07_kitchen"}})}})
    assert result.omitted["actor.model.openpi.config_name"][1]


@pytest.mark.parametrize(
    ("name", "openpi_data", "expected"),
    [
        ("pi05_isaaclab_stack_cube", {}, {"sign_actions": [6]}),
        ("pi0_behavior", {}, {"max_cameras": 2, "state_components": [[i] for i in range(32)]}),
        ("pi0_robocasa_human", {"state_space": "16d"}, {"state_components": [[i] for i in (*range(11, 25), 7, 8)]}),
        ("pi0_robocasa_human", {}, {}),
        ("pi05_libero", {}, {}),
    ],
)
def test_openpis_transforms_of_states_and_actions_are_kept(name: str, openpi_data: Any, expected: Any) -> None:
    model = merged({**OPENPI, "action_dim": 7, "openpi_data": openpi_data}, {"openpi": {"config_name": name}})
    kwargs = translated({"actor": {"model": model}}, {"env_type": "isaaclab", "init_params": {"id": "x"}}).ours[
        "env.train.kwargs"
    ]
    found = {key: kwargs[key] for key in ("sign_actions", "max_cameras", "state_components") if key in kwargs}
    assert found == expected


def test_a_learned_noise_of_pi0_keeps_its_log_probability_and_entropy() -> None:
    noisy = {"noise_method": "flow_noise", "joint_logprob": True, "action_env_dim": 7}
    tree = {
        "actor": {"model": merged(OPENPI, {"openpi": noisy, "num_action_chunks": 5})},
        "algorithm": {"entropy_bonus": 0.35, "logprob_type": "chunk_level"},
    }
    ours = translated(tree).ours
    kwargs = {"noise_method": "flow_noise", "noise_steps": "all", "step_logprobs": "mean"}
    assert kwargs.items() <= ours["actor.model.kwargs"].items()
    # RLinf averages over 5 actions of 7 components.
    assert ours["algorithm.entropy_coef"] == pytest.approx(0.01)


def test_simulators_of_rlinf_run_by_its_own_classes() -> None:
    env = {
        "env_type": "robotwin", "task_config": {"task_name": "lift_pot"}, "reward_coef": 5.0, "use_rel_reward": True,
        "use_custom_reward": True, "seed": 3,
    }  # fmt: skip
    policy = {**OPENPI, "action_dim": 14, "openpi": {"num_images_in_input": 2, "noise_method": "flow_sde"}}
    result = translated({"actor": {"model": policy}}, env)
    assert (result.ours["env.train.env_type"], result.ours["env.train.env_id"]) == ("rlinf", "robotwin")
    kwargs = result.ours["env.train.kwargs"]
    assert kwargs["section"]["task_config"] == {"task_name": "lift_pot"} and kwargs["section"]["reward_coef"] == 5.0
    assert "seed" not in kwargs["section"] and result.ours["env.train.use_rel_reward"] is True
    assert (kwargs["action_dim"], kwargs["model_type"]) == (14, "openpi")
    assert kwargs["observations"] == ["states", "main_images", "wrist_images", "task_descriptions"]
    assert "env.train.reward_scale" not in result.ours, "it is in RLinf's section"
    assert not [key for key, (_, changes) in result.omitted.items() if key.startswith("env.train") and changes]
    numbers = translated({"actor": {"model": {**MLP, "action_dim": 4}}}, env)
    assert numbers.ours["env.train.kwargs"]["observations"] == ["states"]


@pytest.mark.parametrize(
    ("change", "env_type"),
    [
        ({"init_params": {"id": "PickCube-v1"}, "reward_mode": "raw"}, "maniskill"),
        ({"init_params": {"id": "PutOnPlateInScene25Main-v3"}, "reward_mode": "raw"}, "rlinf"),
        ({"init_params": {"id": "PickCube-v1"}, "reward_mode": "raw", "use_full_state": True}, "rlinf"),
        ({"init_params": {"id": "PickCube-v1"}, "reward_mode": "default"}, "rlinf"),
    ],
)
def test_maniskills_own_tasks_are_simulated_here(change: Any, env_type: str) -> None:
    env = merged(CUBE, change)
    tree = merged({"env": {"train": env, "eval": env}, "actor": {"model": {**MLP, "action_dim": 8}}}, PPO)
    leaves = flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})
    assert translation(leaves).ours["env.train.env_type"] == env_type


@pytest.mark.parametrize(
    ("option", "steps"),
    [({"joint_logprob": True}, "all"), ({"joint_logprob": False}, "one"), ({"ignore_last": True}, "one")],
)
def test_the_noise_of_pi0_enters_the_steps_that_rlinf_draws(option: dict[str, bool], steps: str) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": option})}})
    assert result.ours["actor.model.kwargs"]["noise_steps"] == steps
    (key,) = option
    assert result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] == (key == "ignore_last")


def test_states_that_rlinf_goes_through_in_a_shuffled_order_are() -> None:
    result = translated({}, {**LIBERO, "use_ordered_reset_state_ids": True})
    assert result.ours["env.train.kwargs"]["start_order"] == "shuffled"
    assert "env.train.use_ordered_reset_state_ids" not in result.omitted
    assert (
        "start_order" not in translated({}, {**LIBERO, "use_ordered_reset_state_ids": False}).ours["env.train.kwargs"]
    )


def test_metaworld_rewards_success_and_sees_from_rlinfs_camera() -> None:
    env = {**LIBERO, "env_type": "metaworld", "task_suite_name": "metaworld_50", "reward_coef": 2.0}
    result = translated({"actor": {"model": OPENPI}}, env)
    assert result.ours["env.train.kwargs"] == {
        "height": 128, "width": 96, "reward_mode": "sparse", "obs_mode": "rgb", "camera_position": [0.75, 0.075, 0.7],
    }  # fmt: skip
    assert (result.ours["env.train.env_id"], result.ours["env.train.reward_scale"]) == ("metaworld_50", 2.0)
    assert translated({}, env).ours["env.train.kwargs"] == {"height": 128, "width": 96, "reward_mode": "sparse"}
    assert "env.train.task_suite_name" not in result.omitted


def test_the_pretrained_encoder_of_rlinfs_cnn_stays_as_it_is() -> None:
    model = {**MLP, "model_type": "cnn_policy", "model_path": "/w", "encoder_config": {"ckpt_name": "resnet10.pt"}}
    ours = translated({"actor": {"model": model}}).ours
    assert ours["actor.model.model_type"] == "resnet10"
    assert ours["actor.model.kwargs"] == {"weights": "/w/resnet10.pt", "freeze": True}


@pytest.mark.parametrize("method", ["flow_cps", "reinflow"])
def test_another_noise_of_a_flow_policy_is_refused(method: str) -> None:
    model = merged(OPENPI, {"openpi": {"noise_method": method}})
    with pytest.raises(ConfigError, match=f"noise_method is '{method}'"):
        translated({"actor": {"model": model}})


@pytest.mark.parametrize(
    ("model", "strategy", "backend"),
    [("mlp_policy", "no_shard", "local"), ("mlp_policy", "full_shard", "fsdp"), ("openvla", "no_shard", "fsdp")],
)
def test_pretrained_policies_are_sharded(model: str, strategy: str, backend: str) -> None:
    fsdp = {"sharding_strategy": strategy, "reshard_after_forward": False, "cpu_offload": True}
    actor = {"model": {"model_type": model, "precision": "bf16"}, "fsdp_config": fsdp}
    ours = translated({"actor": actor}).ours
    assert ours["actor.training_backend"] == backend
    assert (ours.get("actor.fsdp.cpu_offload"), ours.get("actor.fsdp.reshard_after_forward")) == (
        (True, False) if backend == "fsdp" else (None, None)
    )
    if model == "openvla":
        assert ours["actor.model.dtype"] == "bfloat16"


def test_colocated_groups_that_take_turns_are_offloaded() -> None:
    ours = translated({"rollout": {"enable_offload": True}}).ours
    assert ours["actor.enable_offload"] and ours["rollout.enable_offload"]
    asynchronous = {"algorithm": {"loss_type": "decoupled_actor_critic", "staleness_threshold": 1}}
    assert "actor.enable_offload" not in translated(asynchronous).ours
    apart = {"cluster": {"component_placement": {"actor, env, rollout": None, "actor": "0-0", "env,rollout": "1-1"}}}
    tree = merged(merged({"env": {"train": CUBE, "eval": CUBE}, "actor": {"model": MLP}}, PPO), apart)
    del tree["cluster"]["component_placement"]["actor, env, rollout"]
    leaves = flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})
    assert "actor.enable_offload" not in translation(leaves).ours


def test_the_queue_of_rollouts_without_a_limit_is_rlinfs_default() -> None:
    for size, differs in ((0, False), (2, True)):
        assert translated({"rollout": {"rollout_queue_size": size}}).omitted["rollout.rollout_queue_size"][1] is differs


def test_imitation_by_pi0_has_no_value_head_and_no_noise() -> None:
    result = translated({"actor": {"model": OPENPI}, "algorithm": {"loss_type": "embodied_dagger"}})
    assert "noise_steps" not in result.ours["actor.model.kwargs"]
    assert "actor.model.model_type" not in result.omitted
    assert not result.omitted["actor.model.openpi.noise_method"][1]
