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
    #: Advantages of the batch whose critics were trained last, `[b]`.
    _advantages: Tensor
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
        metrics = self.run_pass(self._critic_pass, (obs, next_obs, batch.without_obs()))
        self._advantages = metrics.pop("advantages")
        return self.step_critics(metrics)

    def _critic_pass(self, inputs: tuple[Any, Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, next_obs, batch = inputs
        critics, actions, targets = self.policy.critics, batch.actions.flatten(1), self.targets["critics"].module
        features = self.policy.encode(obs)
        with torch.no_grad():
            next_values = critics.value(self.encode(next_obs)).squeeze(-1)
            target_values = targets(self.encode(obs, targets), actions).amin(0)
        errors = target_values - critics.value(features).squeeze(-1)
        advantages = errors.detach()
        weights = torch.full_like(advantages, self.expectile).masked_fill(advantages < 0, 1 - self.expectile)
        loss = (weights * errors.square()).sum() / batch.total
        return {
            **self.critic_gradients(critics(features, actions), next_values, batch, extra_loss=loss),
            "value_loss": loss.detach(),
            "advantage": advantages.sum() / batch.total,
            "advantages": advantages,
        }

    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor towards the actions in the data, weighted by exp(temperature · advantage)."""
        metrics = self.run_pass(self._actor_pass, (obs, self._advantages, batch.without_obs()))
        return metrics["loss"], self.step_actor() / self._ranks

    def _actor_pass(self, inputs: tuple[Any, Tensor, TransitionBatch]) -> dict[str, Tensor]:
        obs, advantages, batch = inputs
        weights = (self.temperature * advantages).exp().clamp(max=self.max_weight)
        logprobs, _ = self.policy.head.evaluate(self.policy.actor(self.encode(obs)), batch.actions, False)
        loss = -(weights * logprobs).sum() / batch.total
        self.actor_gradients(loss)
        return {"loss": loss.detach()}
