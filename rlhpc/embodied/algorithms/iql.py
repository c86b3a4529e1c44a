"""IQL update (Kostrikov et al. 2022), as in CORL's iql.py: the critics evaluate only actions that the data contains.

Value network and critics form one module with one optimizer. Adam computes the same result with one optimizer as with
two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TransitionBatch
from rlhpc.embodied.models.off_policy import IQLPolicy

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig


class IqlUpdate(OffPolicyUpdate[IQLPolicy]):
    """IQL update: expectile regression of a value network, and advantage-weighted regression of the actor.

    Takes the arguments of `OffPolicyUpdate`.
    """

    networks = IQLPolicy
    critic_metrics = ("q_loss", "q_value", "value_loss", "advantage", "q_grad_norm")

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: IQLPolicy, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *args, **kwargs)
        self.expectile, self.temperature = algorithm.expectile, algorithm.inverse_temperature
        self.max_weight = algorithm.max_weight

    def train_critics(self, obs: Any, next_obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the value network and the critics.

        The value network moves towards an expectile of the smaller target Q-value; the critics move towards the reward plus
        the discounted value of the next state.
        """
        critics, actions, targets = self.policy.critics, batch.actions.flatten(1), self.targets["critics"].module
        features = self.policy.encode(obs)
        with torch.no_grad():
            next_values = critics.value(self.encode(next_obs)).squeeze(-1)
            target_values = targets(self.encode(obs, targets), actions).amin(0)
        errors = target_values - critics.value(features).squeeze(-1)
        self._advantages = errors.detach()
        weights = torch.where(self._advantages < 0, 1 - self.expectile, self.expectile)
        loss = (weights * errors.square()).sum() / batch.total
        *critic_metrics, norm = self.fit_critics(critics(features, actions), next_values, batch, extra_loss=loss)
        return *critic_metrics, loss.detach(), self._advantages.sum() / batch.total, norm

    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor towards the actions in the data, weighted by exp(temperature · advantage)."""
        weights = (self.temperature * self._advantages).exp().clamp(max=self.max_weight)
        logprobs, _ = self.policy.head.evaluate(self.policy.actor(self.encode(obs)), batch.actions, False)
        loss = -(weights * logprobs).sum() / batch.total
        return loss.detach(), self.fit_actor(loss) / self._ranks
