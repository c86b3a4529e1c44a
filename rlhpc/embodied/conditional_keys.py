"""Conditional keys of runs with simulators: keys that are read only under a condition (`ConfigChecks.conditions`). This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhpc.algorithms.registry import ADVANTAGES
from rlhpc.config.conditional_keys import Condition
from rlhpc.embodied.algorithms.registry import ALGORITHMS
from rlhpc.embodied.checks import MODELS
from rlhpc.runs.conditional_keys import CLIPPED, COMMON, estimator_conditions, trainer_conditions

#: Model types with a pretrained model.
_PRETRAINED = ("vla", "pi0", "openvla", "lerobot")
_TYPE = "actor.model.model_type"


def _has_model(*model_types: str) -> Callable[[Any], bool]:
    """Returns the condition that the policy has one of these model types, or a model type from outside the package."""
    return lambda cfg: cfg.actor.model.model_type in model_types or cfg.actor.model.model_type not in MODELS


def _has_algorithm(*algorithm_names: str) -> Callable[[Any], bool]:
    """Returns the condition that a run uses one of these off-policy algorithms, or one from outside the package."""
    return lambda cfg: cfg.algorithm.name in algorithm_names or cfg.algorithm.name not in ALGORITHMS.built_in


def _excludes_algorithms(*excluded_names: str) -> Callable[[Any], bool]:
    return lambda cfg: cfg.algorithm.name not in excluded_names


def _has_chunks(cfg: Any) -> bool:
    return int(cfg.actor.model.num_action_chunks) > 1


def _lowers_rate(cfg: Any) -> bool:
    optim = cfg.actor.optim
    return bool(cfg.algorithm.anneal_lr) or getattr(optim, "lr_scheduler", "constant") != "constant"


def _has_interventions(cfg: Any) -> bool:
    return cfg.env.train.intervene.source is not None


#: Keys of the section `algorithm.success_classifier`, besides `train`.
_CLASSIFIER_KEYS = ("init_from", "min_marks", "min_accuracy", "updates", "batch_size", "lr", "size")
#: Conditions of every run with simulators.
_SIMULATOR_CONDITIONS = (
    *COMMON,
    Condition(("env.eval.video_fps",), lambda cfg: cfg.env.eval.video_episodes > 0, "with env.eval.video_episodes"),
    Condition(
        ("env.eval.reward_scale", "env.eval.use_rel_reward"), lambda cfg: False,
        "by learners: evaluations report the simulator's own rewards",
    ),
    Condition(("actor.optim.min_lr",), _lowers_rate, "with algorithm.anneal_lr, or actor.optim.lr_scheduler where it is"),
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
        ("actor.optim.lr_decay_steps",), _lowers_rate, "with algorithm.anneal_lr, or actor.optim.lr_scheduler linear or cosine"
    ),
    Condition(
        ("actor.model.model_path", "actor.model.attn_implementation", "actor.model.trust_remote_code"),
        _has_model(*_PRETRAINED), f"by policies on a pretrained model: {_TYPE} {', '.join(_PRETRAINED)}",
    ),
    Condition(
        ("actor.capture_graphs",), lambda cfg: cfg.actor.training_backend == "local", "by actor.training_backend=local"
    ),
    Condition(
        ("actor.model.dtype",),
        lambda cfg: _has_model(*_PRETRAINED)(cfg) or cfg.actor.training_backend != "local",
        f"by policies on a pretrained model, {_TYPE} {', '.join(_PRETRAINED)}, and by actor.training_backend fsdp, deepspeed",
    ),
    Condition(
        ("actor.model.hidden_sizes", "actor.model.activation", "actor.model.ortho_init"),
        lambda cfg: cfg.actor.model.model_type not in _PRETRAINED, f"by networks from nothing: {_TYPE} mlp, flow, …",
    ),
    Condition(
        ("actor.model.add_value_head",), _has_model(*_PRETRAINED), f"by {_TYPE} {', '.join(_PRETRAINED)}"
    ),
    Condition(
        ("actor.lora.init", "actor.lora.path"), lambda cfg: cfg.actor.lora.rank > 0,
        "with adapters: actor.lora.rank of 1 or more",
    ),
    Condition(
        ("actor.lora.alpha", "actor.lora.target_modules", "actor.lora.init"), lambda cfg: cfg.actor.lora.path is None,
        "for new adapters: those of actor.lora.path have their own",
    ),
    Condition(
        ("env.eval.real_time_chunking.execution_horizon", "env.eval.real_time_chunking.max_guidance_weight"),
        lambda cfg: cfg.env.eval.real_time_chunking.inference_delay is not None,
        "with env.eval.real_time_chunking.inference_delay",
    ),
)  # fmt: skip
PPO = (
    *_SIMULATOR_CONDITIONS,
    Condition(("env.train.intervene.kwargs",), _has_interventions, "with env.train.intervene.source"),
    _RECORDING_CONDITION,
    *_POLICY_CONDITIONS,
    Condition(
        ("algorithm.tis_cap", "algorithm.behave_weight_threshold", "algorithm.proximal_policy"),
        lambda cfg: cfg.algorithm.loss_type == "decoupled_ppo",
        "by algorithm.loss_type=decoupled_ppo",
    ),
    *estimator_conditions(),
    CLIPPED,
    Condition(
        ("algorithm.value_clip", "algorithm.huber_delta", "actor.optim.value_lr"),
        lambda cfg: cfg.algorithm.value_coef > 0, "with algorithm.value_coef",
    ),
    Condition(
        ("algorithm.bootstrap_type",),
        lambda cfg: cfg.algorithm.adv_type == "gae" or cfg.algorithm.adv_type not in ADVANTAGES.built_in,
        "by algorithm.adv_type=gae",
    ),
    Condition(
        ("algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound", "algorithm.count_filtered_groups"),
        lambda cfg: cfg.algorithm.filter_rewards,
        "with algorithm.filter_rewards",
    ),
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
         "algorithm.alpha_type", "algorithm.alpha_clip_grad", "algorithm.backup_entropy"),
        _has_algorithm("sac", "crossq"), "by algorithm.name sac, crossq",
    ),
    Condition(
        ("algorithm.target_entropy", "algorithm.alpha_lr", "algorithm.alpha_type", "algorithm.alpha_clip_grad"),
        lambda cfg: cfg.algorithm.auto_entropy_tuning,
        "with algorithm.auto_entropy_tuning",
    ),
    Condition(
        ("algorithm.critic_subsample_size",), _has_algorithm("sac", "td3"), "by algorithm.name sac, td3"
    ),
    Condition(("algorithm.actor_agg_q",), _has_algorithm("sac", "crossq"), "by algorithm.name sac, crossq"),
    Condition(("algorithm.policy_noise", "algorithm.noise_clip"), _has_algorithm("td3"), "by algorithm.name=td3"),
    Condition(
        ("algorithm.expectile", "algorithm.inverse_temperature", "algorithm.max_weight"), _has_algorithm("iql"),
        "by algorithm.name=iql",
    ),
    Condition(
        ("algorithm.tau", "algorithm.target_update_freq"), _excludes_algorithms("crossq"),
        "by target networks, which crossq has not"
    ),
    Condition(("algorithm.offline_updates",), lambda cfg: cfg.algorithm.offline_steps > 0, "with algorithm.offline_steps"),
    Condition(
        ("algorithm.demo_buffer.ratio",),
        lambda cfg: cfg.algorithm.demo_buffer.load_path is not None or _has_interventions(cfg),
        "with algorithm.demo_buffer.load_path or env.train.intervene.source",
    ),
    Condition(
        tuple(f"algorithm.success_classifier.{name}" for name in _CLASSIFIER_KEYS),
        lambda cfg: cfg.algorithm.success_classifier.train, "with algorithm.success_classifier.train",
    ),
    Condition(("algorithm.demo_buffer.size",), _has_interventions, "with env.train.intervene.source"),
    Condition(("env.train.intervene.kwargs",), _has_interventions, "with env.train.intervene.source"),
    Condition(("actor.model.exploration_noise",), _has_model("td3"), f"by {_TYPE}=td3"),
    Condition(("actor.model.num_q_heads",), _has_model("sac", "td3", "dsrl"), f"by {_TYPE} sac, td3, dsrl"),
    Condition(
        ("actor.model.critic_layer_norm",), lambda cfg: cfg.actor.model.model_type != "crossq",
        f"by {_TYPE} sac, td3, iql: crossq normalises in another way",
    ),
    Condition(
        ("actor.model.ortho_init",),
        lambda cfg: cfg.actor.model.model_type != "crossq" or cfg.actor.model.kwargs.get("actor_renorm") is False,
        f"by {_TYPE} sac, td3, iql, and crossq with kwargs.actor_renorm=false",
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
    Condition(("actor.model.num_q_heads",), _has_model("sac", "td3"), f"by {_TYPE} sac, td3"),
    Condition(
        ("actor.model.value_per_action",), _has_chunks,
        "where several actions are decided at once: actor.model.num_action_chunks of 2 or more",
    ),
)  # fmt: skip
