"""The IQL update (Kostrikov et al. 2022), as CORL's iql.py has it: no action is valued that the data does not have.

Value network and critics are one module with one optimizer: Adam makes of that what it makes of two.
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
    """Arguments as `OffPolicyUpdate`'s."""

    networks = IQLPolicy
    critic_metrics = ("q_loss", "q_value", "value_loss", "advantage", "q_grad_norm")

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: IQLPolicy, *rest: Any, **more: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *rest, **more)
        self.expectile, self.temperature = algorithm.expectile, algorithm.inverse_temperature
        self.most = algorithm.max_weight

    def train_critics(self, obs: Tensor, next_obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """The value towards an expectile of the target networks' smaller values; the critics towards reward and value."""
        critics, actions = self.policy.critics, batch.actions.flatten(1)
        with torch.no_grad():
            following = critics.value(next_obs).squeeze(-1)
            wanted = self.targets["critics"].module(obs, actions).amin(0)
        apart = wanted - critics.value(obs).squeeze(-1)
        self._advantages = apart.detach()
        weights = torch.where(self._advantages < 0, 1 - self.expectile, self.expectile)
        loss = (weights * apart.square()).sum() / batch.total
        *found, norm = self.fit_critics(critics(obs, actions), following, batch, besides=loss)
        return *found, loss.detach(), self._advantages.sum() / batch.total, norm

    def train_actor(self, obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Towards the actions of the data, each by how much better than the value it is."""
        weights = (self.temperature * self._advantages).exp().clamp(max=self.most)
        logprobs, _ = self.policy.head.evaluate(self.policy.actor(obs), batch.actions, False)
        loss = -(weights * logprobs).sum() / batch.total
        norm = self.fit_actor(loss)
        return loss.detach(), norm / self._ranks
