"""Translation tables of RLinf's environments and rollouts, which all runs with environments share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhpc.cli.foreign.rlinf_unsupported_embodied import GROUP_ESTIMATORS
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows, Rule, is_null

#: The control mode of RLinf's ManiSkill robots, by `policy_setup`.
_CONTROL_MODES = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
}

#: RLinf's simulators that rlhpc runs by RLinf's own classes (env_type rlinf).
_RLINF_CLASSES = (
    "behavior", "calvin", "embodichain", "frankasim", "genesis", "isaaclab", "opensora_wm", "polaris", "robocasa",
    "robocasa365", "robotwin", "roboverse", "wan_wm",
)  # fmt: skip
#: Beginnings of the names of ManiSkill tasks that RLinf registers (envs/maniskill/tasks), or a package that it imports.
_RLINF_TASKS = (
    "PutOnPlateInScene25", "PandaPutOnPlateInScene25", "PutCarrotOnPlateInScene-v2", "PickCube3View", "GSEnv-",
)  # fmt: skip
#: Keys of a section that rlhpc's own section has, or that have no effect here.
_OWN_SECTION_KEYS = (
    "env_type", "total_num_envs", "rollout_epoch", "max_episode_steps", "seed", "group_size", "auto_reset",
    "ignore_terminations", "use_fixed_reset_state_ids", "use_rel_reward", "enable_offload", "is_eval",
)  # fmt: skip
_OWN_SECTIONS = ("video_cfg.", "data_collection.")

#: Cameras of LIBERO, in the order in which RLinf's policies take them.
_LIBERO_CAMERAS = ("agentview", "robot0_eye_in_hand")


def is_embodied(leaves: Mapping[str, Any]) -> bool:
    """Returns whether a configuration trains a policy on its own rollouts in environments."""
    return leaves.get("runner.task_type") == "embodied"


def is_grpo(config: ForeignConfig) -> bool:
    """Returns whether the estimator needs no critic."""
    return config.leaves.get("algorithm.adv_type") in GROUP_ESTIMATORS


def model_type_of(leaves: Mapping[str, Any]) -> str:
    """Returns `actor.model.model_type` of an RLinf configuration; `mlp_policy` if it is null or missing."""
    value = leaves.get("actor.model.model_type")
    return "mlp_policy" if is_null(value) else str(value)


def is_registered(registry: str, name: str) -> bool:
    """Returns whether a name is in a registry, given as `module:NAME`."""
    from rlhpc.runtime.plugins import import_attribute

    return name in import_attribute(registry, "actor.model.model_type").choices()


def is_mlp(config: ForeignConfig) -> bool:
    """Returns whether the policy is RLinf's MLP."""
    return model_type_of(config.leaves) == "mlp_policy"


def uses_rlinf_class(leaves: Mapping[str, Any]) -> bool:
    """Returns whether the environment is a class of RLinf's: a simulator that rlhpc has no adapter of, a ManiSkill task that
    RLinf registers, or RLinf's own rewards or observations of a ManiSkill task.
    """
    if (name := str(leaves.get("env.train.env_type"))) != "maniskill":
        return name in _RLINF_CLASSES
    is_on_policy = str(leaves.get("algorithm.adv_type")) != "embodied_sac"
    has_own_form = leaves.get("env.train.use_full_state") is True or leaves.get("env.train.reward_mode") not in (
        None, "raw", "only_success",
    )  # fmt: skip
    is_registered_here = str(leaves.get("env.train.init_params.id")).startswith(_RLINF_TASKS)
    return is_on_policy and (is_registered_here or has_own_form)


# -- environments and rollouts ------------------------------------------------------------------------------------------


def decisions(config: ForeignConfig) -> int:
    """Returns the number of decisions (action chunks) per slot in one rollout epoch of RLinf."""
    chunk = max(1, config.integer("actor.model.num_action_chunks", 1))
    max_steps = config.integer("env.train.max_steps_per_rollout_epoch") or config.integer(
        "env.train.max_episode_steps", 1
    )
    return max(1, max_steps // chunk)


def rollout_epochs(config: ForeignConfig) -> int:
    """Returns the number of RLinf's rollout epochs in a step."""
    return max(1, config.integer("env.train.rollout_epoch") or config.integer("algorithm.rollout_epoch", 1))


def has_rollout_parts(config: ForeignConfig) -> bool:
    """Returns whether RLinf's rollout epochs become `algorithm.rollout_parts`."""
    return config.flag("env.train.auto_reset") or config("algorithm.loss_type") in ("actor", "actor_critic")


def _num_env_slots(config: ForeignConfig) -> int:
    """Returns the number of env slots.

    Without rollout parts, a slot plays one episode per rollout, and each further rollout epoch of RLinf adds slots.
    """
    slots, rounds = config.integer("env.train.total_num_envs", 8), 1
    if not has_rollout_parts(config) and (rounds := rollout_epochs(config)) > 1:
        config.omit(
            "env.train.rollout_epoch",
            f"a slot plays one episode a step here: {rounds} rounds of {slots} slots became {rounds * slots} slots; if that "
            "is too many, lower env.train.num_envs and actor.global_batch_size by the same factor",
        )
    return slots * rounds


def _rollout_steps(config: ForeignConfig) -> int:
    return decisions(config) * (rollout_epochs(config) if has_rollout_parts(config) else 1)


def _env_id(side: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        if uses_rlinf_class(config.leaves):
            return config(f"env.{side}.env_type", UNSET)
        for key in ("init_params.id", "task_suite_name", "task_config.task_name", "task_name", "init_params.task_name"):
            if (value := config(f"env.{side}.{key}")) is not None:
                return str(value)
        return str(config("env.train.env_type")) if side == "train" else UNSET

    return rule


def _env_type(config: ForeignConfig) -> Any:
    value = str(config("env.train.env_type"))
    if uses_rlinf_class(config.leaves):
        return "rlinf"
    if value == "realworld":
        config.omit(
            "env.train.env_type", "a robot is driven by a class of yours (env_type robot: docs/how-to/real-robot.md)"
        )
    elif not is_registered("rlhpc.embodied.envs.registry:ENVS", value):
        reason = f"rlhpc has no simulator {value}: register yours (docs/how-to/add-environment.md)"
        config.omit("env.train.env_type", reason, missing_feature=rf"^name {re.escape(value)}$")
    return value


def _env_arguments(side: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        env_key = f"env.{side}"
        if uses_rlinf_class(config.leaves):
            return _rlinf_arguments(config, env_key)
        if (env_type := config.leaves.get("env.train.env_type")) == "libero":
            return _libero_arguments(config, env_key)
        if env_type == "metaworld":
            return _metaworld_arguments(config, env_key)
        if env_type != "maniskill":
            return UNSET
        kwargs: dict[str, Any] = {}
        for name, value in config.section(f"{env_key}.init_params").items():
            argument, _, nested_name = name.partition(".")
            if argument in _OMITTED_ARGUMENTS:
                config.read_keys.discard(f"{env_key}.init_params.{name}")
            elif nested_name and value is not None:
                kwargs.setdefault(argument, {})[nested_name] = value
            elif value not in (None, "None"):
                kwargs[argument] = value
        if (setup := config("actor.model.policy_setup")) in _CONTROL_MODES and "control_mode" not in kwargs:
            kwargs["control_mode"] = _CONTROL_MODES[setup]
        if "segmentation" in (modes := str(kwargs.get("obs_mode", "state")).split("+")):
            kwargs["obs_mode"] = "+".join(mode for mode in modes if mode != "segmentation")
            reason = "rlhpc's ManiSkill gives rgb, depth and state"
            config.omit(f"{env_key}.init_params.obs_mode", reason, missing_feature="segmentation")
        if (mode := config(f"{env_key}.reward_mode")) == "only_success":
            kwargs["reward_mode"] = "sparse"
        elif mode not in (None, "raw"):
            config.omit(f"{env_key}.reward_mode", _SHAPED_REWARD)
        return kwargs or UNSET

    return rule


def _rlinf_arguments(config: ForeignConfig, env_key: str) -> Any:
    """Returns the options of `rlinf`: RLinf's section, and the policy settings that its `prepare_actions` reads."""
    section: dict[str, Any] = {}
    names = [key.removeprefix(f"{env_key}.") for key in config.leaves if key.startswith(f"{env_key}.")]
    for name in names:
        if name in _OWN_SECTION_KEYS or name.startswith(_OWN_SECTIONS):
            continue
        *parents, leaf = name.split(".")
        target = section
        for parent in parents:
            target = target.setdefault(parent, {})
        config(f"{env_key}.{name}")
        target[leaf] = config.leaves[f"{env_key}.{name}"]
    if not section:
        return UNSET
    dim = config("actor.model.action_dim") or config("actor.model.openpi.action_env_dim")
    if dim is None:
        config.omit(
            "actor.model.model_type", "RLinf's file does not say how many components an action has: kwargs.action_dim"
        )
        return UNSET
    options: dict[str, Any] = {"action_dim": int(dim), "model_type": model_type_of(config.leaves)}
    if (setup := config("actor.model.policy_setup")) is not None:
        options["policy_setup"] = setup
    options |= {"observations": _rlinf_observations(config), **_openpi_conversions(config)}
    return {**options, "section": section}


def _rlinf_observations(config: ForeignConfig) -> list[str]:
    """Returns the entries of RLinf's observations that the policy gets."""
    name = model_type_of(config.leaves)
    if name == "mlp_policy":
        return ["states"]
    count = next((config(key) for key in _IMAGE_COUNTS if config.leaves.get(key) is not None), 1)
    if name == "cnn_policy":
        count = 3 if config.integer("actor.model.image_num", 1) > 1 else 1
        return ["states", "main_images", *(["extra_view_images"] if count > 1 else [])]
    images = ["main_images", "wrist_images", "extra_view_images"][: max(1, int(count))]
    return ["states", *images, "task_descriptions"]


#: Components of RoboCasa's states (envs/robocasa/utils.py), by the name of their choice; 25d are all.
_ROBOCASA_STATES = {"25d": [], "16d": [[component] for component in (*range(11, 25), 7, 8)]}
#: Components of BEHAVIOR's states that π0.5 takes: base, trunk, arms, and the widths of the grippers, which have two fingers
#: (models/embodiment/openpi/policies/behavior_policy.py).
_BEHAVIOR_STATES = [
    *([component] for component in (*range(253, 256), *range(236, 240), *range(158, 165), *range(197, 204))),
    [193, 194], [232, 233],
]  # fmt: skip


def _openpi_conversions(config: ForeignConfig) -> dict[str, Any]:
    """Returns the options for openpi's transforms of the observations and actions of a simulator of RLinf's."""
    if model_type_of(config.leaves) != "openpi":
        return {}
    name = str(config("actor.model.openpi.config_name", "pi0_libero"))
    if name == "pi05_isaaclab_stack_cube":
        return {"sign_actions": [6]}
    if name == "pi05_behavior":
        return {"state_components": _BEHAVIOR_STATES}
    if name == "pi0_behavior":  # which masks the second wrist camera
        return {"state_components": [[component] for component in range(32)], "max_cameras": 2}
    if not name.startswith(("pi0_robocasa", "pi05_robocasa")):
        return {}
    key = "actor.model.openpi_data.state_space"
    choice = config(key, "25d")
    if not isinstance(choice, str) or choice not in _ROBOCASA_STATES:
        config.omit(key, "name the components of the states: env.train.kwargs.state_components")
        return {}
    return {"state_components": components} if (components := _ROBOCASA_STATES[choice]) else {}


def _picture_size(config: ForeignConfig, env_key: str) -> dict[str, Any]:
    sizes = {name: config(f"{env_key}.init_params.camera_{name}s") for name in ("height", "width")}
    return {name: size for name, size in sizes.items() if size is not None}


def _metaworld_arguments(config: ForeignConfig, env_key: str) -> dict[str, Any]:
    """Returns the arguments of MetaWorld; RLinf rewards success alone, and moves the camera (envs/metaworld)."""
    kwargs = {**_picture_size(config, env_key), "reward_mode": "sparse"}
    return kwargs if is_mlp(config) else {**kwargs, "obs_mode": "rgb", "camera_position": [0.75, 0.075, 0.7]}


def _libero_arguments(config: ForeignConfig, env_key: str) -> Any:
    kwargs = _picture_size(config, env_key)
    if is_mlp(config):
        kwargs["obs_mode"] = "state"
    images = next((config(key) for key in _IMAGE_COUNTS if config.leaves.get(key) is not None), None)
    if images == 1:
        kwargs["cameras"] = [_LIBERO_CAMERAS[0]]
    if (task_ids := config(f"{env_key}.task_id_filter")) is not None:
        kwargs["task_ids"] = task_ids
    if config(f"{env_key}.specific_reset_id") is not None:
        kwargs["initial_state"] = config.integer(f"{env_key}.specific_reset_id")
    # RLinf's environment idles for 15 steps after a reset (envs/libero/libero_env.py).
    gripper = "open" if config.flag(f"{env_key}.reset_gripper_open", True) else "still"
    kwargs |= {"settling_steps": 15, "settling_gripper": gripper}
    if env_key == "env.train" and config.flag(f"{env_key}.use_ordered_reset_state_ids"):
        kwargs["start_order"] = "shuffled"
    return kwargs


#: Keys of the number of pictures that a policy takes.
_IMAGE_COUNTS = ("actor.model.openpi.num_images_in_input", "actor.model.num_images_in_input")
_SHAPED_REWARD = "RLinf adds up rewards of its own for grasping here; rlhpc takes the simulator's reward"
_OMITTED_ARGUMENTS = ("id", "num_envs", "max_episode_steps", "render_mode", "sim_backend")


def _fixed_reset_states(side: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        if not config.flag(f"env.{side}.use_fixed_reset_state_ids"):
            return UNSET
        if config.flag(f"env.{side}.auto_reset"):
            return True
        return config.omit(
            f"env.{side}.use_fixed_reset_state_ids",
            "without auto_reset both draw the states anew for every rollout, the same ones for a group of slots",
            False,
        )

    return rule


def _episodes(config: ForeignConfig) -> Any:
    slots, rounds = config.integer("env.eval.total_num_envs"), config.integer("env.eval.rollout_epoch", 1)
    steps = config.integer("env.eval.max_steps_per_rollout_epoch", 1)
    max_steps = max(1, config.integer("env.eval.max_episode_steps", 1))
    if steps < max_steps:
        config.omit(
            "env.eval.max_steps_per_rollout_epoch", "RLinf ends evaluation episodes so early, rlhpc does not", False
        )
    return slots * max(1, rounds) * max(1, steps // max_steps) if slots else UNSET


def _video_episodes(config: ForeignConfig) -> Any:
    if config.flag("env.eval.video_cfg.save_video"):
        config.omit(
            "env.eval.video_cfg.save_video", "RLinf records all slots; env.eval.video_episodes is set to 4", False
        )
        return 4
    return UNSET


def _ignore_terminations(config: ForeignConfig) -> Any:
    if (ignores_terminations := config.flag("env.train.ignore_terminations")) or is_grpo(config):
        config.omit("algorithm.bootstrap_type", "episodes run to their limit, or returns need no value", False)
    return ignores_terminations


def _reward_scale(config: ForeignConfig) -> Any:
    if uses_rlinf_class(config.leaves):
        return UNSET  # in RLinf's section
    if config.leaves.get("env.train.env_type") not in ("libero", "metaworld"):
        return config.omit("env.train.reward_coef", "RLinf uses it with LIBERO and MetaWorld only", False)
    return config.number("env.train.reward_coef", 1.0)


def _reward_model(config: ForeignConfig) -> Any:
    if not config.flag("reward.use_reward_model"):
        return UNSET
    if config.number("reward.env_reward_weight"):
        config.omit("reward.env_reward_weight", "the classifier's reward replaces the simulator's")
    if config.number("reward.reward_weight", 1.0) != 1:
        config.omit("reward.reward_weight", "set env.train.reward_scale")
    config.omit(
        "reward.model.model_path reward.use_reward_model",
        "RLinf's classifier has another format: train one here (model_type success)",
    )
    return str(config("reward.model.model_path", "runs/reward_model"))


#: Rows of the environments of evaluation.
EVALUATION: Rows = [
    ("runner.val_check_interval", "runner.val_check_interval"),
    ("env.eval.env_id", _env_id("eval")),
    ("env.eval.num_envs", "env.eval.total_num_envs"),
    ("env.eval.num_episodes", _episodes),
    ("env.eval.max_episode_steps", "env.eval.max_episode_steps"),
    ("env.eval.ignore_terminations", "env.eval.ignore_terminations"),
    ("env.eval.use_fixed_reset_state_ids", _fixed_reset_states("eval")),
    ("env.eval.kwargs", _env_arguments("eval")),
    ("env.eval.video_episodes", _video_episodes),
    ("env.eval.video_fps", "env.eval.video_cfg.fps"),
]
ENVIRONMENTS: Rows = [
    ("runner.enable_decoupled_mode", "runner.enable_decoupled_mode"),
    ("algorithm.rollout_steps", _rollout_steps),
    ("env.train.env_type", _env_type),
    ("env.train.env_id", _env_id("train")),
    ("env.train.num_envs", _num_env_slots),
    ("env.train.max_episode_steps", "env.train.max_episode_steps"),
    ("env.train.seed", "env.train.seed"),
    ("env.train.ignore_terminations", _ignore_terminations),
    ("env.train.use_fixed_reset_state_ids", _fixed_reset_states("train")),
    ("env.train.use_rel_reward", "env.train.use_rel_reward"),
    ("env.train.reward_scale", _reward_scale),
    ("env.train.kwargs", _env_arguments("train")),
    ("env.train.reward_model", _reward_model),
    *EVALUATION,
    ("rollout.pipeline_stage_num", "rollout.pipeline_stage_num"),
    ("actor.global_batch_size", "actor.global_batch_size"),
]
