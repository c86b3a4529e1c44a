"""Advantages, losses and KL: functions of tensors, with registries. Needs torch and nothing else."""

from rlhpc.algorithms.advantages import calculate_adv_and_returns, masked_whiten
from rlhpc.algorithms.kl import kl_penalty
from rlhpc.algorithms.losses import aggregate, entropy_loss, policy_loss, value_loss
from rlhpc.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    register_advantage,
    register_policy_loss,
)
from rlhpc.algorithms.rewards import overlong_penalty, varied_groups

__all__ = [
    "ADVANTAGES", "POLICY_LOSSES", "aggregate", "calculate_adv_and_returns", "entropy_loss", "kl_penalty", "masked_whiten",
    "overlong_penalty", "policy_loss", "register_advantage", "register_policy_loss", "value_loss", "varied_groups",
]  # fmt: skip
