"""Conditional keys of runs with simulators: keys that are read only under a condition (`ConfigChecks.conditions`). This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhpc.config.conditional_keys import Condition
from rlhpc.embodied.algorithms.registry import ALGORITHMS
from rlhpc.embodied.checks import MODELS
from rlhpc.runs.conditional_keys import CLIPPED, COMMON, estimator_conditions, trainer_conditions

#: Model types with a pretrained model.
_PRETRAINED = ("vla", "pi0", "openvla", "lerobot")
_TYPE = "actor.model.model_type"


def _has_model(*names: str) -> Callable[[Any], bool]:
    """Returns the condition that the policy has one of these model types, or a model type from outside the package."""
    return lambda cfg: cfg.actor.model.model_type.lower() in names or cfg.actor.model.model_type.lower() not in MODELS


def _has_algorithm(*names: str) -> Callable[[Any], bool]:
    """Returns the condition that a run uses one of these off-policy algorithms, or one from outside the package."""
    return lambda cfg: cfg.algorithm.name.lower() in names or cfg.algorithm.name.lower() not in ALGORITHMS.built_in


def _excludes(*names: str) -> Callable[[Any], bool]:
    return lambda cfg: cfg.algorithm.name.lower() not in names


def _has_chunks(cfg: Any) -> bool:
    return int(cfg.actor.model.num_action_chunks) > 1


#: Conditions of every run with simulators.
_SIMULATOR_CONDITIONS = (
    *COMMON,
    Condition(("env.eval.video_fps",), lambda cfg: cfg.env.eval.video_episodes > 0, "with env.eval.video_episodes"),
    Condition(
        ("env.eval.reward_scale", "env.eval.use_rel_reward"), lambda cfg: False,
        "by learners: evaluations report the simulator's own rewards",
    ),
)  # fmt: skip
#: Conditions of runs that record episodes, before or after training.
_RECORDING_CONDITION = Condition(
    ("workflow.record_only_success",), lambda cfg: cfg.workflow.record_episodes > 0, "with workflow.record_episodes"
)
_DEMONSTRATION_CONDITIONS = (
    Condition(("workflow.demos_episodes",), lambda cfg: cfg.workflow.demos_expert is not None, "with workflow.demos_expert"),
    Condition(
        ("workflow.record_only_success",),
        lambda cfg: cfg.workflow.record_episodes > 0 or cfg.workflow.demos_expert is not None,
        "with workflow.record_episodes or workflow.demos_expert",
    ),
)  # fmt: skip
#: Conditions of runs whose policy any backend can train.
_POLICY_CONDITIONS = (
    *trainer_conditions("actor"),
    Condition(
        ("actor.model.model_path", "actor.model.attn_implementation", "actor.model.trust_remote_code"),
        _has_model(*_PRETRAINED), f"by policies on a pretrained model: {_TYPE} {', '.join(_PRETRAINED)}",
    ),
    Condition(
        ("actor.capture_graphs",), lambda cfg: cfg.actor.training_backend.lower() == "local", "by actor.training_backend=local"
    ),
    Condition(
        ("actor.model.dtype",),
        lambda cfg: _has_model(*_PRETRAINED)(cfg) or cfg.actor.training_backend.lower() != "local",
        f"by policies on a pretrained model, {_TYPE} {', '.join(_PRETRAINED)}, and by actor.training_backend fsdp, deepspeed",
    ),
    Condition(
        ("actor.model.hidden_sizes", "actor.model.activation", "actor.model.ortho_init"),
        lambda cfg: cfg.actor.model.model_type.lower() not in _PRETRAINED, f"by networks from nothing: {_TYPE} mlp, flow, …",
    ),
    Condition(
        ("actor.model.add_value_head",), _has_model(*_PRETRAINED), f"by {_TYPE} {', '.join(_PRETRAINED)}"
    ),
    Condition(
        ("env.eval.real_time_chunking.execution_horizon", "env.eval.real_time_chunking.max_guidance_weight"),
        lambda cfg: cfg.env.eval.real_time_chunking.inference_delay is not None,
        "with env.eval.real_time_chunking.inference_delay",
    ),
)  # fmt: skip
PPO = (
    *_SIMULATOR_CONDITIONS,
    _RECORDING_CONDITION,
    *_POLICY_CONDITIONS,
    Condition(
        ("algorithm.tis_cap",), lambda cfg: cfg.algorithm.loss_type.lower() == "decoupled_ppo",
        "by algorithm.loss_type=decoupled_ppo",
    ),
    *estimator_conditions(),
    CLIPPED,
    Condition(("algorithm.value_clip",), lambda cfg: cfg.algorithm.value_coef > 0, "with algorithm.value_coef"),
    Condition(
        ("actor.model.value_per_action", "algorithm.reward_type"), _has_chunks,
        "where several actions are decided at once: actor.model.num_action_chunks of 2 or more",
    ),
)  # fmt: skip
OFF_POLICY = (
    *_SIMULATOR_CONDITIONS,
    *_DEMONSTRATION_CONDITIONS,
    Condition(
        ("algorithm.auto_entropy_tuning", "algorithm.initial_alpha", "algorithm.target_entropy", "algorithm.alpha_lr",
         "algorithm.backup_entropy"),
        _has_algorithm("sac", "crossq"), "by algorithm.name sac, crossq",
    ),
    Condition(
        ("algorithm.target_entropy", "algorithm.alpha_lr"), lambda cfg: cfg.algorithm.auto_entropy_tuning,
        "with algorithm.auto_entropy_tuning",
    ),
    Condition(("algorithm.policy_noise", "algorithm.noise_clip"), _has_algorithm("td3"), "by algorithm.name=td3"),
    Condition(
        ("algorithm.expectile", "algorithm.inverse_temperature", "algorithm.max_weight"), _has_algorithm("iql"),
        "by algorithm.name=iql",
    ),
    Condition(
        ("algorithm.tau", "algorithm.target_update_freq"), _excludes("crossq"), "by target networks, which crossq has not"
    ),
    Condition(("algorithm.offline_updates",), lambda cfg: cfg.algorithm.offline_steps > 0, "with algorithm.offline_steps"),
    Condition(
        ("algorithm.demo_buffer.ratio",), lambda cfg: cfg.algorithm.demo_buffer.load_path is not None,
        "with algorithm.demo_buffer.load_path",
    ),
    Condition(("actor.model.exploration_noise",), _has_model("td3"), f"by {_TYPE}=td3"),
    Condition(
        ("actor.model.critic_layer_norm",), lambda cfg: cfg.actor.model.model_type.lower() != "crossq",
        f"by {_TYPE} sac, td3, iql: crossq normalises in another way",
    ),
    Condition(
        ("actor.model.ortho_init",), lambda cfg: cfg.actor.model.model_type.lower() != "crossq", f"by {_TYPE} sac, td3, iql"
    ),
)  # fmt: skip
BC = (
    *_SIMULATOR_CONDITIONS,
    *_DEMONSTRATION_CONDITIONS,
    *_POLICY_CONDITIONS,
    Condition(
        ("algorithm.advantage_steps", "algorithm.improved_fraction"), lambda cfg: cfg.algorithm.value_model is not None,
        "with algorithm.value_model",
    ),
    Condition(
        ("algorithm.gamma", "env.train.reward_scale"),
        lambda cfg: cfg.algorithm.bc_value_coef > 0 or cfg.algorithm.value_model is not None,
        "where returns are learned: algorithm.bc_value_coef or algorithm.value_model",
    ),
    Condition(("actor.model.exploration_noise",), _has_model("td3"), f"by {_TYPE}=td3"),
    Condition(
        ("actor.model.critic_hidden_sizes", "actor.model.critic_layer_norm"), _has_model("sac", "td3", "iql"),
        f"by {_TYPE} sac, td3, iql",
    ),
    Condition(
        ("actor.model.value_per_action",), _has_chunks,
        "where several actions are decided at once: actor.model.num_action_chunks of 2 or more",
    ),
)  # fmt: skip
