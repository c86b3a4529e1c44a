"""Advantage estimators and policy losses by name; others are entry points or `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhpc.runtime.lookup import Registry

ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage estimator", "algorithm.adv_type", "rlhpc.advantages", form="module:function"
)
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy loss", "algorithm.loss_type", "rlhpc.policy_losses", form="module:function"
)

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
