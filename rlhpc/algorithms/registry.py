"""Registries of advantage estimators, policy losses, corrections and losses of reward models. Users add entry points, or
name a `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhpc.runtime.plugins import Registry

#: Estimators that compare the members of a group; the advantage in a group of one is 0.
COMPARE_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
#: Estimators that credit each token with the later rewards, discounted by `algorithm.gamma`.
DISCOUNTED = ("gae", "raw", "reinforce++", "reinforce++_baseline")
ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage estimator",
    "algorithm.adv_type",
    "rlhpc.advantages",
    {
        "gae": "rlhpc.algorithms.advantages:gae",
        "grpo": "rlhpc.algorithms.advantages:grpo",
        "dr_grpo": "rlhpc.algorithms.advantages:dr_grpo",
        "rloo": "rlhpc.algorithms.advantages:rloo",
        "reinforce++": "rlhpc.algorithms.advantages:reinforce_plus_plus",
        "reinforce++_baseline": "rlhpc.algorithms.advantages:reinforce_plus_plus_baseline",
        "raw": "rlhpc.algorithms.advantages:raw",
    },
    form="module:function",
)
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    "algorithm.loss_type",
    "rlhpc.policy_losses",
    {
        "ppo": "rlhpc.algorithms.losses:ppo",
        "actor": "rlhpc.algorithms.losses:ppo",
        "actor_critic": "rlhpc.algorithms.losses:ppo",
        "gspo": "rlhpc.algorithms.losses:gspo",
        "cispo": "rlhpc.algorithms.losses:cispo",
        "decoupled_ppo": "rlhpc.algorithms.losses:decoupled_ppo",
    },
    form="module:function",
)
_TYPES = "rlhpc.algorithms.correction_types"
#: Corrections for the gap between trainer and rollout engine (`rlhpc.algorithms.corrections`). verl's names are those of its
#: `rollout_rs`.
CORRECTIONS: Registry[Callable[..., Any]] = Registry(
    "correction",
    "algorithm.corrections[].name",
    "rlhpc.corrections",
    {
        "token_tis": f"{_TYPES}:TokenTruncation",
        "sequence_tis": f"{_TYPES}:SequenceTruncation",
        "sequence_mis": f"{_TYPES}:SequenceMasking",
        "icepop": f"{_TYPES}:IcePop",
        "token_rejection": f"{_TYPES}:TokenRejection",
        "geometric": f"{_TYPES}:GeometricRejection",
        "seq_mean_k1": f"{_TYPES}:GeometricRejection",
        "k2": f"{_TYPES}:K2Rejection",
        "seq_mean_k2": f"{_TYPES}:K2Rejection",
        "k3": f"{_TYPES}:K3Rejection",
        "seq_mean_k3": f"{_TYPES}:K3Rejection",
        "binary_tv": f"{_TYPES}:BinaryTV",
    },
)
#: Dataclass of the options (`algorithm.corrections[].kwargs`) of each correction: the correction itself.
CORRECTION_OPTIONS = dict(CORRECTIONS.built_in)
REWARD_LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss of a reward model",
    "algorithm.loss_type",
    "rlhpc.reward_losses",
    {
        "bradley_terry": "rlhpc.algorithms.preference_losses:bradley_terry",
        "regression": "rlhpc.algorithms.preference_losses:regression",
    },
    form="module:function",
)

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
register_correction = CORRECTIONS.register
register_reward_loss = REWARD_LOSSES.register
