"""Translation tables of RLinf's off-policy runs: SAC, CrossQ and offline IQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.cli.foreign import rlinf_defaults
from rlhpc.cli.foreign.rlinf_embodied import optimizer_rows
from rlhpc.cli.foreign.rlinf_environments import (
    ENVIRONMENTS,
    EVALUATION,
    decisions,
    is_embodied,
    model_type_of,
    rollout_epochs,
)
from rlhpc.cli.foreign.rlinf_unsupported_embodied import BOOTSTRAP, OFF_POLICY, WEIGHT_SYNC, embodied_keys
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Requirement, Rows, Rule, RunKind, allow_only, is_null

_OFF_POLICY_LOSS = "embodied_sac"


def _is_crossq(leaves: Mapping[str, Any]) -> bool:
    return leaves.get("algorithm.q_head_type") == "crossq"


# -- SAC and CrossQ -----------------------------------------------------------------------------------------------------


def _transitions(config: ForeignConfig) -> int:
    """Returns the number of transitions of a step."""
    return max(1, config.integer("env.train.total_num_envs", 8)) * decisions(config) * rollout_epochs(config)


def _update_to_data(config: ForeignConfig) -> float:
    """Returns the number of updates per transition; RLinf configures updates per runner step."""
    return config.integer("algorithm.update_epoch") / _transitions(config)


def _trajectory_transitions(config: ForeignConfig) -> int:
    """Returns the number of transitions in one trajectory of RLinf's buffer: those of one env rank and stage in a step.

    A file that places as many env ranks as actor ranks gives each actor rank `stages` trajectories a step.
    """
    return max(1, _transitions(config) // max(1, config.integer("rollout.pipeline_stage_num", 1)))


def _buffer_size(config: ForeignConfig) -> int:
    trajectories = config.integer("algorithm.replay_buffer.sample_window_size", 100)
    config.omit(
        "algorithm.replay_buffer.sample_window_size",
        "RLinf counts trajectories, rlhpc counts transitions: converted for as many env ranks as actor ranks",
        False,
    )
    return max(_min_buffer_size(config), trajectories * _trajectory_transitions(config))


def _min_buffer_size(config: ForeignConfig) -> int:
    trajectories = config.integer("algorithm.replay_buffer.min_buffer_size", 100)
    return max(1, trajectories * _trajectory_transitions(config))


_ALPHA_TYPE = "algorithm.entropy_tuning.alpha_type"


def _trains_temperature(config: ForeignConfig) -> bool:
    return config.text(_ALPHA_TYPE) != "fixed_alpha"


def _trained_temperature_rule(key: str) -> Rule:
    """Returns the rule for a key that RLinf reads only if the temperature is trained."""
    return lambda config: config(key, UNSET) if _trains_temperature(config) else UNSET


def _initial_temperature(config: ForeignConfig) -> Any:
    return config.number("algorithm.entropy_tuning.initial_alpha")


def _has_pictures(leaves: Mapping[str, Any]) -> bool:
    """Returns whether the networks read pictures, which RLinf's ResNet-10 encodes."""
    return model_type_of(leaves) == "cnn_policy"


def _network_options(config: ForeignConfig) -> Any:
    options = _encoder(config)
    if _is_crossq(config.leaves):  # modules/q_head.py, modules/batch_renorm.py: renormalised from the first batch on
        options |= {"critic_activation": "relu", "actor_renorm": False, "renorm_rate": 0.001, "renorm_warmup": 0}
    return options or UNSET


def _encoder(config: ForeignConfig) -> dict[str, Any]:
    if not _has_pictures(config.leaves):
        return {}
    config.omit(
        "actor.model.encoder_config.ckpt_name",
        "RLinf encodes the state apart, in 64 numbers; here one layer joins it with the pictures' features",
        missing_feature=r"^off_policy key .*state_width",
    )
    weights = config("actor.model.encoder_config.ckpt_name")
    options: dict[str, Any] = {"encoder": "resnet10", "freeze": True}  # RLinf freezes its encoder
    return {**options, "weights": f"{config('actor.model.model_path')}/{weights}"} if weights else options


def _num_targets(config: ForeignConfig) -> Any:
    count, num_heads = (
        config.integer("algorithm.critic_subsample_size", -1),
        config.integer("actor.model.num_q_heads", 2),
    )
    if not 0 < count < num_heads:
        return UNSET
    config.omit(
        "algorithm.critic_subsample_size",
        "the critics of an update are different ones; RLinf may draw one twice",
        missing_feature=r"^off_policy key .*replacement",
    )
    return count


def _omit_unused(config: ForeignConfig) -> Any:
    """Omits keys that have no effect in this configuration but may have an effect in another one."""
    if config.leaves.get("actor.critic_optim.clip_grad") == config.leaves.get("actor.optim.clip_grad"):
        config.omit("actor.critic_optim.clip_grad", "actor and critics have the same limit", False)
    for name in ("adam_beta1", "adam_beta2", "adam_eps"):
        key = f"actor.critic_optim.{name}"
        if config.leaves.get(key) == config.leaves.get(f"actor.optim.{name}"):
            config.omit(key, "actor and critics have the same value", False)
    if not config.flag("env.train.auto_reset"):
        config.omit(
            "env.train.auto_reset", "a slot goes on with the next episode; RLinf's waits until the next rollout"
        )
    if config.flag("env.train.ignore_terminations"):
        config.omit("algorithm.bootstrap_type", "episodes run to their limit", False)
    if not _has_pictures(config.leaves):
        config.omit("algorithm.target_update_type", "the critics have no encoder", False)
    for name, default in _TORCH_ADAM.items():
        if _trains_temperature(config) and config.number(f"actor.optim.{name}") != default:
            config.omit(
                f"actor.optim.{name}", "the temperature is trained with it, too; RLinf trains it with torch's default"
            )
    return UNSET


#: Defaults of torch's Adam, with which RLinf trains the temperature (workers/actor/fsdp_sac_policy_worker.py).
_TORCH_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}


def _clip_grad(config: ForeignConfig) -> Any:
    config.omit(
        "actor.optim.clip_grad",
        "RLinf limits the norm of all gradients, with those that the last update of the other networks left behind, and takes "
        "the mean of the critics' losses, not their sum",
    )
    return config("actor.optim.clip_grad", UNSET)


SAC: Rows = [
    ("", _omit_unused),
    ("algorithm.name", lambda config: "crossq" if config("algorithm.q_head_type") == "crossq" else "sac"),
    ("algorithm.tau", lambda config: UNSET if _is_crossq(config.leaves) else config("algorithm.tau", UNSET)),
    ("algorithm.update_to_data", _update_to_data),
    ("algorithm.auto_entropy_tuning", _trains_temperature),
    ("algorithm.alpha_type", _trained_temperature_rule(_ALPHA_TYPE)),
    ("algorithm.alpha_clip_grad", _trained_temperature_rule("algorithm.entropy_tuning.optim.clip_grad")),
    ("algorithm.initial_alpha", _initial_temperature),
    ("algorithm.target_entropy", "algorithm.entropy_tuning.target_entropy"),
    ("algorithm.alpha_lr", "algorithm.entropy_tuning.optim.lr"),
    ("algorithm.backup_entropy", "algorithm.backup_entropy"),
    ("algorithm.critic_actor_ratio", "algorithm.critic_actor_ratio"),
    (
        "algorithm.target_update_freq",
        lambda config: UNSET if _is_crossq(config.leaves) else config("algorithm.target_update_freq"),
    ),
    ("algorithm.critic_subsample_size", _num_targets),
    ("algorithm.actor_agg_q", lambda config: config("algorithm.actor_agg_q") or UNSET),
    (
        "algorithm.random_shift",
        lambda config: (4 if config("actor.enable_drq", False) else 0) if _has_pictures(config.leaves) else UNSET,
    ),
    ("algorithm.random_steps", lambda config: 0),  # RLinf's policy acts from the first step on
    ("algorithm.replay_buffer.size", _buffer_size),
    ("algorithm.replay_buffer.min_buffer_size", _min_buffer_size),
    ("actor.model.model_type", lambda config: "crossq" if config("algorithm.q_head_type") == "crossq" else "sac"),
    ("actor.model.kwargs", _network_options),
    (
        "actor.model.num_q_heads",
        lambda config: UNSET if _is_crossq(config.leaves) else config("actor.model.num_q_heads") or UNSET,
    ),
    ("actor.model.hidden_sizes", lambda config: [256, 256, 256] if config("actor.model.model_type", True) else UNSET),
    ("actor.model.activation", lambda config: "tanh"),
    ("actor.model.ortho_init", lambda config: True),
    ("actor.model.critic_layer_norm", lambda config: UNSET if _is_crossq(config.leaves) else True),
    ("actor.model.num_action_chunks", "actor.model.num_action_chunks"),
    ("actor.optim.name", lambda config: "adam"),
    ("actor.optim.value_lr", "actor.critic_optim.lr"),
    *optimizer_rows("actor"),
    ("actor.optim.clip_grad", _clip_grad),
]


_SAC_REQUIREMENTS: Sequence[Requirement] = (
    Requirement(
        "actor.model.openpi.use_dsrl",
        lambda leaves: (
            "DSRL on π0 is missing; rlhpc's DSRL (model_type dsrl) steers flow policies that rlhpc has cloned"
            if leaves.get("actor.model.openpi.use_dsrl") is True
            else ""
        ),
        r"dsrl.*(π0|lerobot)|option dsrl\..*π0",
    ),
    allow_only(
        "actor.model.model_type",
        ("mlp_policy", "cnn_policy"),
        "SAC with an actor that acts by a flow is missing",
        r"sac.?flow",
    ),
    allow_only(_ALPHA_TYPE, ("softplus", "exp", "fixed_alpha"), "rlhpc has no such form of the temperature"),
    allow_only(
        "algorithm.q_head_type", ("default", "crossq"), "rlhpc has no such critics", r"^off_policy key .*q_head_type"
    ),
    Requirement(
        "actor.model.q_head_type",
        lambda leaves: (
            f"algorithm.q_head_type is {leaves.get('algorithm.q_head_type', 'default')}; RLinf has one critic for both"
            if not is_null(value := leaves.get("actor.model.q_head_type"))
            and value != (leaves.get("algorithm.q_head_type") or "default")
            else ""
        ),
    ),
    allow_only(
        "algorithm.agg_q", ("min",), "the targets of rlhpc's off-policy algorithms take the smallest value",
        r"^off_policy key algorithm\.agg_q",
    ),
    allow_only(
        "algorithm.actor_agg_q", ("min", "mean"), "rlhpc's SAC increases the smallest value or the mean",
        r"^off_policy key .*first_critic",
    ),
    Requirement(
        "actor.model.num_q_heads",
        lambda leaves: (
            "rlhpc's CrossQ has two critics"
            if _is_crossq(leaves) and leaves.get("actor.model.num_q_heads") not in (None, 2)
            else ""
        ),
        r"^off_policy key .*crossq_heads",
    ),
    Requirement(
        "algorithm.entropy_tuning.initial_alpha",
        lambda leaves: (
            "a temperature of 0 is no SAC; rlhpc's is above 0"
            if leaves.get("algorithm.entropy_tuning.initial_alpha") in (0, 0.0)
            else ""
        ),
    ),
)  # fmt: skip


# -- offline IQL --------------------------------------------------------------------------------------------------------

#: Task of D4RL (the first word of its data set's name) → (environment of Gymnasium, prefix of Minari's data set).
_D4RL_TASKS = {
    "halfcheetah": ("HalfCheetah-v5", "mujoco/halfcheetah"),
    "hopper": ("Hopper-v5", "mujoco/hopper"),
    "walker2d": ("Walker2d-v5", "mujoco/walker2d"),
    "ant": ("Ant-v5", "mujoco/ant"),
    "pen": ("gymnasium_robotics:AdroitHandPen-v1", "D4RL/pen"),
    "door": ("gymnasium_robotics:AdroitHandDoor-v1", "D4RL/door"),
    "hammer": ("gymnasium_robotics:AdroitHandHammer-v1", "D4RL/hammer"),
    "relocate": ("gymnasium_robotics:AdroitHandRelocate-v1", "D4RL/relocate"),
}


def _d4rl_task(leaves: Mapping[str, Any]) -> tuple[str, str] | None:
    task, _, _ = str(leaves.get("data.task_name", "")).partition("-")
    return _D4RL_TASKS.get(task)


def _data_path(config: ForeignConfig) -> Any:
    if (path := config("data.dataset_path")) is not None:
        config.omit("data.dataset_path", "convert D4RL's file to Minari's format: rlhpc reads that")
        return str(path)
    task = _d4rl_task(config.leaves)
    quality = str(config("data.task_name")).partition("-")[2].rpartition("-")[0]
    config.omit(
        "data.task_name",
        "D4RL's data are Minari's here: download the data set, whose episodes are not always D4RL's, or name another one",
    )
    return f"~/.minari/datasets/{task[1] if task else 'D4RL'}/{quality}-v0"


def _runner_step_rule(key: str) -> Any:
    """Returns the rule for a key that counts updates in RLinf's offline runs; one step of rlhpc has `offline_updates`."""

    def rule(config: ForeignConfig) -> Any:
        count = config.integer(key, -1)
        return count if count < 0 else max(1, count // max(1, config.integer("runner.local_update_steps", 1000)))

    return rule


def _offline_steps(config: ForeignConfig) -> int:
    limits = [config.integer(key, -1) for key in ("runner.max_steps", "runner.max_epochs")]
    updates = min([limit for limit in limits if limit >= 0], default=1)
    return max(1, updates // max(1, config.integer("runner.local_update_steps", 1000)))


def _omit_same_rates(config: ForeignConfig) -> Any:
    for name in ("lr", "adam_beta1", "adam_beta2", "adam_eps", "lr_scheduler", "lr_warmup_steps"):
        if config.leaves.get(f"actor.value_optim.{name}") == config.leaves.get(f"actor.critic_optim.{name}"):
            config.omit(f"actor.value_optim.{name}", "critics and value network have the same value", False)
        if name != "lr" and config.leaves.get(f"actor.critic_optim.{name}") == config.leaves.get(f"actor.optim.{name}"):
            config.omit(f"actor.critic_optim.{name}", "actor and critics have the same value", False)
    return UNSET


IQL: Rows = [
    ("", _omit_same_rates),
    ("runner.max_steps", _offline_steps),
    ("runner.save_interval", _runner_step_rule("runner.save_interval")),
    *EVALUATION,
    ("runner.val_check_interval", _runner_step_rule("runner.val_check_interval")),
    ("algorithm.name", lambda config: "iql"),
    ("algorithm.tau", "algorithm.tau"),
    ("algorithm.expectile", "algorithm.expectile"),
    ("algorithm.inverse_temperature", "algorithm.temperature"),
    ("algorithm.max_weight", lambda config: 100.0),
    ("algorithm.offline_steps", _offline_steps),
    ("algorithm.offline_updates", lambda config: max(1, config.integer("runner.local_update_steps", 1000))),
    ("algorithm.demo_buffer.load_path", _data_path),
    ("env.train.env_type", lambda config: "gymnasium"),
    (
        "env.train.env_id",
        lambda config: task[0] if (task := _d4rl_task(config.leaves)) else config.text("data.task_name"),
    ),
    ("env.eval.env_id", lambda config: UNSET),
    ("env.eval.num_episodes", lambda config: max(1, config.integer("runner.eval_episodes", 10))),
    ("env.eval.max_episode_steps", lambda config: UNSET),
    ("rollout.pipeline_stage_num", "rollout.pipeline_stage_num"),
    ("actor.model.model_type", lambda config: "iql" if config("actor.model.model_type", True) else UNSET),
    ("actor.model.num_action_chunks", "actor.model.num_action_chunks"),
    (
        "actor.model.hidden_sizes",
        lambda config: config("algorithm.hidden_dims") or config("actor.model.iql_config.hidden_dims"),
    ),
    ("actor.model.activation", lambda config: "relu"),
    ("actor.global_batch_size", "actor.global_batch_size"),
    ("actor.optim.name", lambda config: "adam"),
    ("actor.optim.value_lr", "actor.critic_optim.lr"),
    *optimizer_rows("actor"),
]
_IQL_REQUIREMENTS: Sequence[Requirement] = (
    Requirement(
        "data.task_name",
        lambda leaves: (
            "rlhpc has no environment for D4RL's task with observations of one vector"
            if is_null(leaves.get("data.dataset_path")) and _d4rl_task(leaves) is None
            else ""
        ),
        r"^name d4rl$",
    ),
    *(
        allow_only(key, (0, 0.0), "the policy of rlhpc's IQL has no dropout", r"^off_policy key .*dropout")
        for key in ("algorithm.dropout_rate", "actor.model.iql_config.dropout_rate")
    ),
    allow_only(
        "actor.model.iql_config.state_dependent_std",
        (False,),
        "the spread of rlhpc's IQL policy does not depend on the observation",
        r"^off_policy key .*dependent_std",
    ),
)


KINDS: Sequence[RunKind] = (
    RunKind(
        lambda leaves: (
            f"off_policy ({'CrossQ' if _is_crossq(leaves) else 'SAC'})" if leaves else "loss_type embodied_sac"
        ),
        "off_policy",
        lambda leaves: is_embodied(leaves) and leaves.get("algorithm.loss_type") == _OFF_POLICY_LOSS,
        lambda leaves: [*ENVIRONMENTS, *SAC],
        lambda leaves: [*OFF_POLICY, *embodied_keys(leaves)],
        lambda leaves: rlinf_defaults.SAC,
        _SAC_REQUIREMENTS,
        (BOOTSTRAP, WEIGHT_SYNC),
    ),
    RunKind(
        lambda leaves: "off_policy (offline IQL)" if leaves else "task_type offline with loss_type offline_iql",
        "off_policy",
        lambda leaves: (
            leaves.get("runner.task_type") == "offline" and leaves.get("algorithm.loss_type") == "offline_iql"
        ),
        lambda leaves: IQL,
        lambda leaves: [*OFF_POLICY, *embodied_keys(leaves)],
        lambda leaves: rlinf_defaults.IQL,
        _IQL_REQUIREMENTS,
    ),
)
