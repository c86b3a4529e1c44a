"""Advantage estimators, losses and KL estimators: functions of tensors, with registries. They need only torch. Each
name is imported at its first use, so that listing the names needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

_HOMES = {
    "rlhpc.algorithms.advantages": ["calculate_adv_and_returns", "masked_whiten", "overlong_penalty", "varied_groups"],
    "rlhpc.algorithms.corrections": ["Correction", "CorrectionFactors", "CorrectionInputs", "make_corrections"],
    "rlhpc.algorithms.losses": ["aggregate", "entropy_loss", "kl_penalty", "policy_loss", "value_loss"],
    "rlhpc.algorithms.registry": [
        "ADVANTAGES",
        "CORRECTIONS",
        "POLICY_LOSSES",
        "REWARD_LOSSES",
        "register_advantage",
        "register_correction",
        "register_policy_loss",
        "register_reward_loss",
    ],
    "rlhpc.algorithms.preference_losses": ["bradley_terry", "find_reward_loss", "regression"],
}
__all__ = sorted(name for home_names in _HOMES.values() for name in home_names)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from rlhpc.algorithms.advantages import calculate_adv_and_returns as calculate_adv_and_returns
    from rlhpc.algorithms.advantages import masked_whiten as masked_whiten
    from rlhpc.algorithms.advantages import overlong_penalty as overlong_penalty
    from rlhpc.algorithms.advantages import varied_groups as varied_groups
    from rlhpc.algorithms.corrections import Correction as Correction
    from rlhpc.algorithms.corrections import CorrectionFactors as CorrectionFactors
    from rlhpc.algorithms.corrections import CorrectionInputs as CorrectionInputs
    from rlhpc.algorithms.corrections import make_corrections as make_corrections
    from rlhpc.algorithms.losses import aggregate as aggregate
    from rlhpc.algorithms.losses import entropy_loss as entropy_loss
    from rlhpc.algorithms.losses import kl_penalty as kl_penalty
    from rlhpc.algorithms.losses import policy_loss as policy_loss
    from rlhpc.algorithms.losses import value_loss as value_loss
    from rlhpc.algorithms.preference_losses import bradley_terry as bradley_terry
    from rlhpc.algorithms.preference_losses import find_reward_loss as find_reward_loss
    from rlhpc.algorithms.preference_losses import regression as regression
    from rlhpc.algorithms.registry import ADVANTAGES as ADVANTAGES
    from rlhpc.algorithms.registry import CORRECTIONS as CORRECTIONS
    from rlhpc.algorithms.registry import POLICY_LOSSES as POLICY_LOSSES
    from rlhpc.algorithms.registry import REWARD_LOSSES as REWARD_LOSSES
    from rlhpc.algorithms.registry import register_advantage as register_advantage
    from rlhpc.algorithms.registry import register_correction as register_correction
    from rlhpc.algorithms.registry import register_policy_loss as register_policy_loss
    from rlhpc.algorithms.registry import register_reward_loss as register_reward_loss
