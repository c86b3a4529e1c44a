"""What must hold of the policy of an embodied run, and of what it is trained on. Nothing here imports torch, or writes."""

from __future__ import annotations

from typing import Any

from rlhpc.config.rules import Fail

#: Policies that come with the package.
MODELS = ("mlp", "cnn", "resnet", "flow", "sac", "vla", "pi0")
#: Those that adapters can be attached to.
_ADAPTED = ("vla", "pi0")
#: Estimators that compare the outcomes of a group.
_BY_GROUP = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
#: Options of the `mlp`.
MLP_GAINS = ("actor_gain", "critic_gain")


def validate(cfg: Any, fail: Fail) -> None:
    """Checks chunks, levels, and what estimators by group need.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm, model, train = cfg.algorithm, cfg.actor.model, cfg.env.train
    if cfg.actor.lora.rank:
        if str(model.model_type).lower() not in _ADAPTED:
            raise fail("actor.lora.rank", f"adapters are for {' and '.join(_ADAPTED)}; the others train all weights: 0")
        if cfg.actor.lora.dropout:
            raise fail("actor.lora.dropout", "acting and training must agree on log-probs: it must be 0")
    elif str(model.model_type).lower() in _ADAPTED and str(model.dtype) != "float32":
        raise fail("actor.model.dtype", "all weights are trained in float32; bfloat16 needs adapters (actor.lora.rank)")
    if model.num_action_chunks > 1:
        _chunks(cfg, fail)
    if str(algorithm.adv_type).lower() in _BY_GROUP:
        if train.group_size < 2:
            raise fail(
                "env.train.group_size",
                f"algorithm.adv_type {algorithm.adv_type} compares slots that share a reset: it must be at least 2",
            )
        if train.auto_reset:
            raise fail(
                "env.train.auto_reset",
                f"algorithm.adv_type {algorithm.adv_type} compares whole episodes: it must be false",
            )


def _chunks(cfg: Any, fail: Fail) -> None:
    algorithm, model = cfg.algorithm, cfg.actor.model
    by_action = str(algorithm.reward_type).lower() == "action_level"
    if by_action and str(algorithm.logprob_type).lower() == "chunk_level":
        raise fail("algorithm.logprob_type", "algorithm.reward_type action_level needs action_level or token_level")
    valued = str(algorithm.adv_type).lower() == "gae" or algorithm.value_coef > 0
    if by_action and valued and not model.value_per_action:
        raise fail(
            "actor.model.value_per_action", "algorithm.reward_type action_level needs a value for each action: true"
        )
    if model.value_per_action and not by_action:
        raise fail("actor.model.value_per_action", "it is for algorithm.reward_type action_level")


def check_options(model: Any, fail: Fail) -> None:
    """`actor.model.kwargs` of the models that have none, or few; the others say it themselves when they are built."""
    name, options = str(model.model_type).lower(), model.kwargs
    if name == "cnn" and options:
        raise fail("actor.model.kwargs", "the cnn takes none; they are for a model of your own")
    if name != "mlp":
        return
    if unknown := sorted(set(options) - set(MLP_GAINS)):
        raise fail("actor.model.kwargs", f"the mlp does not take {', '.join(unknown)}; allowed: {', '.join(MLP_GAINS)}")
    for option, found in options.items():
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found <= 0:
            raise fail(f"actor.model.kwargs.{option}", "it must be a number greater than 0")
