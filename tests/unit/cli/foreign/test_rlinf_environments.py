"""Import of RLinf's environments, and of the policies that see through their cameras."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_states_that_rlinf_goes_through_in_a_shuffled_order_are() -> None:
    result = translated({}, {**LIBERO, "use_ordered_reset_state_ids": True})
    assert result.ours["env.train.kwargs"]["start_order"] == "shuffled"
    assert "env.train.use_ordered_reset_state_ids" not in result.omitted
    assert (
        "start_order" not in translated({}, {**LIBERO, "use_ordered_reset_state_ids": False}).ours["env.train.kwargs"]
    )


@pytest.mark.parametrize("number", [0, 7])
def test_episodes_start_from_the_state_that_rlinfs_file_names(number: int) -> None:
    result = translated({}, {**LIBERO, "specific_reset_id": number})
    for side in ("train", "eval"):
        assert result.ours[f"env.{side}.kwargs"]["initial_state"] == number
        assert f"env.{side}.specific_reset_id" not in result.omitted
    absent = translated({}, {**LIBERO, "specific_reset_id": None})
    assert "initial_state" not in absent.ours["env.train.kwargs"]
    elsewhere = translated({}, {**CUBE, "specific_reset_id": number})
    assert elsewhere.omitted["env.train.specific_reset_id"] == ("episodes start from all states", True)


def test_metaworld_rewards_success_and_sees_from_rlinfs_camera() -> None:
    env = {**LIBERO, "env_type": "metaworld", "task_suite_name": "metaworld_50", "reward_coef": 2.0}
    result = translated({"actor": {"model": OPENPI}}, env)
    assert result.ours["env.train.kwargs"] == {
        "height": 128, "width": 96, "reward_mode": "sparse", "obs_mode": "rgb", "camera_position": [0.75, 0.075, 0.7],
    }  # fmt: skip
    assert (result.ours["env.train.env_id"], result.ours["env.train.reward_scale"]) == ("metaworld_50", 2.0)
    assert translated({}, env).ours["env.train.kwargs"] == {"height": 128, "width": 96, "reward_mode": "sparse"}
    assert "env.train.task_suite_name" not in result.omitted


def test_an_mlp_sees_the_states_of_libero_alone() -> None:
    env = {"env_type": "libero", "task_suite_name": "libero_spatial", "init_params": {"camera_heights": 128}}
    settling = {"height": 128, "settling_steps": 15, "settling_gripper": "open"}
    assert translated({}, env).ours["env.train.kwargs"] == {"obs_mode": "state", **settling}
    pictures = translated({"actor": {"model": {"model_type": "openpi"}}}, env).ours["env.train.kwargs"]
    assert pictures == settling


def test_the_pretrained_encoder_of_rlinfs_cnn_stays_as_it_is() -> None:
    model = {**MLP, "model_type": "cnn_policy", "model_path": "/w", "encoder_config": {"ckpt_name": "resnet10.pt"}}
    ours = translated({"actor": {"model": model}}).ours
    assert ours["actor.model.model_type"] == "resnet10"
    assert ours["actor.model.kwargs"] == {"weights": "/w/resnet10.pt", "freeze": True}


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
