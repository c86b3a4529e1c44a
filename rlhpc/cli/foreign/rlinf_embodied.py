"""Translation tables of RLinf's embodied runs: environments, PPO and GRPO, SAC, policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.cli.foreign.rules import UNSET, Reading, Rows, Rule

LOSSES = {"actor_critic": "ppo", "actor": "ppo", "decoupled_actor_critic": "decoupled_ppo"}
ADVANTAGES = {"gae": "gae", "grpo": "grpo", "raw": "raw", "reinpp": "reinforce++"}
DTYPES = {"32": "float32", "fp32": "float32", "bf16": "bfloat16", "16": "float16", "fp16": "float16"}


def optimizer_rows(group: str) -> Rows:
    """Returns the rows of a group's optimizer settings, which have the same names in both projects."""
    names = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    return [(key, key) for key in (f"{group}.optim.{name}" for name in names)]


def adapter_rows() -> Rows:
    """Returns the rows of LoRA adapters, whose scale is 1: RLinf sets `lora_alpha` to the rank (models/__init__.py)."""

    def rank(read: Reading) -> Any:
        return int(read("actor.model.lora_rank", 32)) if read("actor.model.is_lora", False) else UNSET

    return [("actor.lora.rank", rank), ("actor.lora.alpha", rank)]


def choice(key: str, values_by_name: Mapping[str, Any]) -> Rule:
    """Returns a rule that translates the value of `key` by `values_by_name`.

    The rule returns an unknown value unchanged, because a plugin may register a component under this name.
    """

    def rule(read: Reading) -> Any:
        value = read(key)
        if value is None:
            return UNSET
        if str(value).lower() not in values_by_name:
            read.omit(key, f"rlhpc has no {value}; register one of that name, or choose another")
            return value
        return values_by_name[str(value).lower()]

    return rule


#: Policies that start from random weights.
_RANDOM_START_POLICIES = ("mlp_policy", "cnn_policy", "flow_policy")
_MODELS = {"mlp_policy": "mlp", "cnn_policy": "resnet"}
#: RLinf model type → action head of rlhpc's `openvla`.
_OPENVLA = {"openvla": "tokens", "openvla_oft": "parallel"}
#: The control mode of RLinf's ManiSkill robots, by `policy_setup`.
_CONTROL_MODES = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
}
_SIMULATORS = ("maniskill", "libero", "metaworld")


def _is_grpo(read: Reading) -> bool:
    return read.leaves.get("algorithm.adv_type") in ("grpo", "raw", "reinpp")


# -- environments and rollouts ------------------------------------------------------------------------------------------


def _decisions(read: Reading) -> int:
    """Returns the number of decisions (action chunks) per slot in one rollout epoch of RLinf."""
    chunk = int(read("actor.model.num_action_chunks", 1))
    max_steps = int(read("env.train.max_steps_per_rollout_epoch", 0) or read("env.train.max_episode_steps", 1))
    return max(1, max_steps // chunk)


def _rollout_epochs(read: Reading) -> int:
    return int(read("env.train.rollout_epoch", 0) or read("algorithm.rollout_epoch", 1))


def _has_rollout_parts(read: Reading) -> bool:
    """Returns whether RLinf's rollout epochs become `algorithm.rollout_parts`."""
    return bool(read("env.train.auto_reset", False)) or read("algorithm.loss_type") in ("actor", "actor_critic")


def _num_env_slots(read: Reading) -> int:
    """Returns the number of env slots.

    Without rollout parts, a slot plays one episode per rollout, and each further rollout epoch of RLinf adds slots.
    """
    slots, rounds = int(read("env.train.total_num_envs", 8)), 1
    if not _has_rollout_parts(read) and (rounds := _rollout_epochs(read)) > 1:
        read.omit(
            "env.train.rollout_epoch",
            f"a slot plays one episode a step here: {rounds} rounds of {slots} slots became {rounds * slots} slots; if that "
            "is too many, lower env.train.num_envs and actor.global_batch_size by the same factor",
        )
    return slots * rounds


def _rollout_steps(read: Reading) -> int:
    return _decisions(read) * (_rollout_epochs(read) if _has_rollout_parts(read) else 1)


def _env_id(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        for key in ("init_params.id", "task_suite_name", "task_config.task_name", "task_name", "init_params.task_name"):
            if (value := read(f"env.{side}.{key}")) is not None:
                return str(value)
        return str(read("env.train.env_type")) if side == "train" else UNSET

    return rule


def _env_type(read: Reading) -> Any:
    value = str(read("env.train.env_type"))
    if value not in _SIMULATORS:
        read.omit(
            "env.train.env_type", f"rlhpc has no simulator {value}: register yours (docs/how-to/add-environment.md)"
        )
    elif value == "metaworld":
        read.omit("env.train.task_suite_name", "an environment is one task of MetaWorld, such as reach-v3: name it")
    return value


def _env_arguments(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        env_key = f"env.{side}"
        if (env_type := read.leaves.get("env.train.env_type")) == "libero":
            sizes = {
                "height": read(f"{env_key}.init_params.camera_heights"),
                "width": read(f"{env_key}.init_params.camera_widths"),
            }
            return {name: size for name, size in sizes.items() if size is not None} or UNSET
        if env_type != "maniskill":
            return UNSET
        kwargs: dict[str, Any] = {}
        for name, value in read.below(f"{env_key}.init_params").items():
            argument, _, nested_name = name.partition(".")
            if argument in _OMITTED_ARGUMENTS:
                read.read_keys.discard(f"{env_key}.init_params.{name}")
            elif nested_name and value is not None:
                kwargs.setdefault(argument, {})[nested_name] = value
            elif value not in (None, "None"):
                kwargs[argument] = value
        if (setup := read("actor.model.policy_setup")) in _CONTROL_MODES and "control_mode" not in kwargs:
            kwargs["control_mode"] = _CONTROL_MODES[setup]
        if (mode := read(f"{env_key}.reward_mode")) == "only_success":
            kwargs["reward_mode"] = "sparse"
        elif mode != "raw":
            read.omit(f"{env_key}.reward_mode", _SHAPED_REWARD)
        return kwargs or UNSET

    return rule


_SHAPED_REWARD = "RLinf adds up rewards of its own for grasping here; rlhpc takes the simulator's reward"
_OMITTED_ARGUMENTS = ("id", "num_envs", "max_episode_steps", "render_mode", "sim_backend")


def _fixed_reset_states(side: str) -> Rule:
    def rule(read: Reading) -> Any:
        if not read(f"env.{side}.use_fixed_reset_state_ids", False):
            return UNSET
        if read(f"env.{side}.auto_reset", False):
            return True
        return read.omit(
            f"env.{side}.use_fixed_reset_state_ids",
            "without auto_reset both draw the states anew for every rollout, the same ones for a group of slots",
            False,
        )

    return rule


def _episodes(read: Reading) -> Any:
    slots, rounds = int(read("env.eval.total_num_envs", 0)), int(read("env.eval.rollout_epoch", 1))
    steps, max_steps = read("env.eval.max_steps_per_rollout_epoch", 1), read("env.eval.max_episode_steps", 1)
    return slots * rounds * max(1, int(steps) // int(max_steps)) if slots else UNSET


def _video_episodes(read: Reading) -> Any:
    if read("env.eval.video_cfg.save_video", False):
        read.omit("env.eval.video_cfg.save_video", "RLinf films all slots; env.eval.video_episodes is set to 4", False)
        return 4
    return UNSET


def _ignore_terminations(read: Reading) -> Any:
    if (ignores_terminations := bool(read("env.train.ignore_terminations", False))) or _is_grpo(read):
        read.omit("algorithm.bootstrap_type", "no episode ends before its limit, or nothing is bootstrapped", False)
    return ignores_terminations


def _reward_scale(read: Reading) -> Any:
    if read.leaves.get("env.train.env_type") not in ("libero", "metaworld"):
        return read.omit("env.train.reward_coef", "RLinf uses it with LIBERO and MetaWorld only", False)
    return float(read("env.train.reward_coef", 1.0))


ENVIRONMENTS: Rows = [
    ("runner.val_check_interval", "runner.val_check_interval"),
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
    ("env.eval.env_id", _env_id("eval")),
    ("env.eval.num_envs", "env.eval.total_num_envs"),
    ("env.eval.num_episodes", _episodes),
    ("env.eval.max_episode_steps", "env.eval.max_episode_steps"),
    ("env.eval.ignore_terminations", "env.eval.ignore_terminations"),
    ("env.eval.use_fixed_reset_state_ids", _fixed_reset_states("eval")),
    ("env.eval.kwargs", _env_arguments("eval")),
    ("env.eval.video_episodes", _video_episodes),
    ("env.eval.video_fps", "env.eval.video_cfg.fps"),
    ("rollout.pipeline_stage_num", "rollout.pipeline_stage_num"),
    ("actor.global_batch_size", "actor.global_batch_size"),
]


# -- PPO and GRPO -------------------------------------------------------------------------------------------------------


def _embodied_normalization(read: Reading) -> str:
    if _is_grpo(read):
        read.omit("algorithm.normalize_advantages", "group estimators divide by the group's spread in both", False)
        return "none"
    return "batch" if read("algorithm.normalize_advantages") else "none"


def _decoupled(key: str) -> Rule:
    def rule(read: Reading) -> Any:
        if read.leaves.get("algorithm.loss_type") != "decoupled_actor_critic":
            return UNSET
        return int(read(key, 0))

    return rule


def _value_clip(read: Reading) -> Any:
    clip = read("algorithm.value_clip")
    return UNSET if _is_grpo(read) or clip is None else clip


def _omit_unused(read: Reading) -> Any:
    """Omits keys that have no effect in this configuration but may have an effect in another one."""
    if read.leaves.get("actor.optim.value_lr") == read.leaves.get("actor.optim.lr"):
        read.omit("actor.optim.value_lr", "policy and critic share one learning rate", False)
    if _is_grpo(read):
        for key in ("actor.optim.value_lr", "algorithm.huber_delta", "actor.optim.critic_warmup_steps"):
            read.omit(key, "for a critic, which group estimators do without", False)
    if not read.leaves.get("algorithm.filter_rewards"):
        for key in ("algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound"):
            read.omit(key, "nothing is filtered", False)
    return UNSET


PPO: Rows = [
    ("", _omit_unused),
    ("algorithm.adv_type", choice("algorithm.adv_type", ADVANTAGES)),
    ("algorithm.loss_type", choice("algorithm.loss_type", LOSSES)),
    ("algorithm.gae_lambda", lambda read: UNSET if _is_grpo(read) else read("algorithm.gae_lambda")),
    ("algorithm.normalize_advantages", _embodied_normalization),
    ("algorithm.clip_ratio_low", "algorithm.clip_ratio_low"),
    ("algorithm.clip_ratio_high", "algorithm.clip_ratio_high"),
    ("algorithm.value_clip", _value_clip),
    ("algorithm.value_coef", lambda read: 0.0 if read("algorithm.loss_type") == "actor" else 1.0),
    ("algorithm.entropy_coef", "algorithm.entropy_bonus"),
    ("algorithm.update_epochs", lambda read: int(read("algorithm.update_epoch"))),
    ("algorithm.logprob_type", "algorithm.logprob_type"),
    ("algorithm.reward_type", "algorithm.reward_type"),
    ("algorithm.max_staleness", _decoupled("algorithm.staleness_threshold")),
    ("algorithm.rollout_parts", lambda read: _rollout_epochs(read) if _has_rollout_parts(read) else UNSET),
    ("env.train.group_size", lambda read: int(read("env.train.group_size", 0) or read("algorithm.group_size", 1))),
    ("actor.micro_batch_size", lambda read: read("actor.micro_batch_size", UNSET)),
    ("actor.optim.name", lambda read: "adamw" if read("actor.optim.weight_decay") else "adam"),
    *optimizer_rows("actor"),
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
]


# -- SAC ----------------------------------------------------------------------------------------------------------------


def _update_to_data(read: Reading) -> float:
    """Returns the number of updates per transition; RLinf configures updates per runner step."""
    transitions = int(read("env.train.total_num_envs", 8)) * _decisions(read) * _rollout_epochs(read)
    return int(read("algorithm.update_epoch")) / transitions


SAC: Rows = [
    ("algorithm.tau", "algorithm.tau"),
    ("algorithm.update_to_data", _update_to_data),
    ("algorithm.auto_entropy_tuning", lambda r: r("algorithm.entropy_tuning.alpha_type") != "fixed_alpha"),
    ("algorithm.initial_alpha", "algorithm.entropy_tuning.initial_alpha"),
    ("algorithm.target_entropy", "algorithm.entropy_tuning.target_entropy"),
    ("algorithm.alpha_lr", "algorithm.entropy_tuning.optim.lr"),
    ("algorithm.backup_entropy", "algorithm.backup_entropy"),
    ("algorithm.critic_actor_ratio", "algorithm.critic_actor_ratio"),
    ("algorithm.target_update_freq", "algorithm.target_update_freq"),
    ("algorithm.random_steps", lambda read: 0),  # RLinf's policy acts from the first step on
    ("actor.optim.name", lambda read: "adam"),
    ("actor.optim.value_lr", "actor.critic_optim.lr"),
    *optimizer_rows("actor"),
]


# -- policies -----------------------------------------------------------------------------------------------------------


def _model_type(read: Reading) -> str:
    name = str(read("actor.model.model_type", "mlp_policy"))
    sac = read.leaves.get("algorithm.loss_type") == "embodied_sac"
    if name == "openpi" and str(read("actor.model.openpi.config_name", "pi0")).startswith("pi0_") and not sac:
        read.omit("actor.model.model_path", "rlhpc's pi0 reads folders of its own format: openpi's weights do not fit")
        return "pi0"
    if name in _OPENVLA and not sac:
        return "openvla"
    if name in _MODELS and not (sac and name != "mlp_policy"):
        return "sac" if sac else _MODELS[name]
    read.omit(
        "actor.model.model_type", f"rlhpc has no such policy: register yours as {name} (docs/how-to/add-model.md)"
    )
    return name


def _is_mlp(read: Reading) -> bool:
    return read.leaves.get("actor.model.model_type", "mlp_policy") == "mlp_policy"


def _for_vla(rule: str | Rule) -> Rule:
    """Returns the rule restricted to vision-language-action models."""

    def rule_for_vla(read: Reading) -> Any:
        if read.leaves.get("actor.model.model_type", "mlp_policy") in _RANDOM_START_POLICIES:
            return UNSET
        return read(rule, UNSET) if isinstance(rule, str) else rule(read)

    return rule_for_vla


def _policy_dtype(read: Reading) -> Any:
    if not read("actor.model.is_lora", False):
        return read.omit("actor.model.precision", "all weights are trained in float32; bfloat16 needs adapters")
    return DTYPES.get(str(read("actor.model.precision", "32")), "float32")


def _policy_options(read: Reading) -> Any:
    if _is_mlp(read) and read.leaves.get("algorithm.loss_type") != "embodied_sac":
        return {"actor_gain": 0.01414}
    name = read.leaves.get("actor.model.model_type")
    if name in _OPENVLA:
        return _openvla_options(read, _OPENVLA[name])
    if name != "openpi":
        return UNSET
    options = {
        "num_steps": read("actor.model.num_steps") or read("actor.model.openpi.num_steps"),
        "noise_level": read("actor.model.openpi.noise_level"),
    }
    return {name: value for name, value in options.items() if value is not None} or UNSET


def _openvla_options(read: Reading, head: str) -> dict[str, Any]:
    if read.leaves.get("actor.model.use_film"):
        read.omit("actor.model.use_film", "rlhpc's openvla has no FiLM")
    if head == "parallel" and read.leaves.get("actor.model.implement_version", "rlinf") == "rlinf":
        read.omit(
            "actor.model.implement_version",
            "rlhpc follows OFT's own code, not RLinf's: evaluate the model before training",
        )
    options: dict[str, Any] = {"head": head, "proprio": bool(read("actor.model.use_proprio", False))}
    if (key := read("actor.model.unnorm_key")) is not None:
        options["unnorm_key"] = key
    if read("actor.model.center_crop", False):
        options["center_crop"] = True
    if read.leaves.get("env.train.env_type") == "libero":
        options["gripper"] = "rlds"
    return options


def _attention(read: Reading) -> Any:
    implementation = read("actor.model.attn_implementation", UNSET)
    return "sdpa" if read.leaves.get("actor.model.model_type") == "openvla_oft" else implementation


POLICY: Rows = [
    ("actor.model.model_type", _model_type),
    ("actor.model.hidden_sizes", lambda read: [256, 256, 256] if _is_mlp(read) else UNSET),
    ("actor.model.num_action_chunks", "actor.model.num_action_chunks"),
    ("actor.model.kwargs", _policy_options),
]
#: Additional keys of PPO and GRPO. In SAC, environments always reset automatically, and policies take no text and learn
#: their standard deviation.
VLA: Rows = [
    ("actor.model.log_std_init", lambda read: -0.5 if _is_mlp(read) else UNSET),
    ("env.train.auto_reset", lambda read: bool(read("env.train.auto_reset", False))),
    ("actor.training_backend", lambda read: "local" if read("actor.training_backend") else UNSET),
    (
        "actor.model.value_per_action",
        lambda read: (
            True
            if not _is_grpo(read)
            and read.leaves.get("algorithm.reward_type") == "action_level"
            and int(read.leaves.get("actor.model.num_action_chunks") or 1) > 1
            else UNSET
        ),
    ),
    ("actor.model.add_value_head", _for_vla("actor.model.add_value_head")),
    ("actor.model.model_path", _for_vla("actor.model.model_path")),
    ("actor.model.dtype", _for_vla(_policy_dtype)),
    ("actor.model.gradient_checkpointing", _for_vla("actor.fsdp_config.gradient_checkpointing")),
    ("actor.model.attn_implementation", _for_vla(_attention)),
    *((key, _for_vla(rule)) for key, rule in adapter_rows()),
]
