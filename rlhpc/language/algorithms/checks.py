"""Checks of section `algorithm` of a run by RL. The module does not import torch or write files."""

from __future__ import annotations

from rlhpc.algorithms.registry import COMPARE_WITHIN_GROUPS, DISCOUNTED
from rlhpc.config.constraints import Fail
from rlhpc.language.config.run import GrpoConfig


def check_algorithm(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the keys of `algorithm` against each other and against the rollout.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm = cfg.algorithm
    _check_groups(cfg, fail)
    _check_kl(cfg, fail)
    if algorithm.overlong_buffer >= cfg.rollout.max_new_tokens:
        raise fail(
            "algorithm.overlong_buffer", f"it must be below rollout.max_new_tokens ({cfg.rollout.max_new_tokens})"
        )
    if algorithm.overlong_buffer and cfg.agent.kind != "inline":
        raise fail("algorithm.overlong_buffer", f"agent.kind={cfg.agent.kind} ends its answers by itself: set it 0")
    if algorithm.credit != "episode" and algorithm.adv_type.lower() in DISCOUNTED:
        raise fail(
            "algorithm.credit",
            f"algorithm.adv_type={algorithm.adv_type} credits each token with what follows it, turns' rewards too: "
            "leave it, or take an estimator that compares, such as rloo",
        )
    if algorithm.loss_type.lower() == "decoupled_ppo" and not algorithm.recompute_logprobs:
        raise fail("algorithm.recompute_logprobs", "decoupled_ppo takes its proximal policy from there: set it true")
    if algorithm.tis_cap is not None and not algorithm.recompute_logprobs:
        raise fail(
            "algorithm.tis_cap", "it weighs recomputed log-probs: set algorithm.recompute_logprobs=true, or null"
        )
    if cfg.actor.offload_in_rollout and algorithm.max_staleness:
        raise fail("actor.offload_in_rollout", "async generation goes on while the actor trains: set it false")


def _check_groups(cfg: GrpoConfig, fail: Fail) -> None:
    """Refuses groups of one answer for estimators that compare answers: every advantage would be 0."""
    algorithm = cfg.algorithm
    if algorithm.group_size >= 2:
        return
    if algorithm.filter_groups:
        raise fail("algorithm.group_size", "algorithm.filter_groups compares within groups: it must be at least 2")
    name = algorithm.name.lower()
    estimates = name == "policy_gradient" or (name == "distillation" and algorithm.distillation.task_reward_coef)
    if estimates and algorithm.adv_type.lower() in COMPARE_WITHIN_GROUPS:
        raise fail(
            "algorithm.group_size",
            f"algorithm.adv_type={algorithm.adv_type} compares the responses to a prompt, and one alone has the advantage 0: "
            "it must be at least 2; or take an estimator that does not compare, such as reinforce++",
        )


def _check_kl(cfg: GrpoConfig, fail: Fail) -> None:
    """Refuses k1 as a loss: E[∇(log p − log q)] = E[∇ log p] = 0 for any reference q."""
    algorithm = cfg.algorithm
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_type.lower() in ("k1", "kl"):
        raise fail(
            "algorithm.kl_type",
            "in the loss k1 has no effect: the expected gradient of log p - log q is 0, whatever the reference q is. Take k2, "
            "whose gradient is that of the KL, or k3; or set algorithm.kl_in=reward",
        )
