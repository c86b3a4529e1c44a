"""TD3 update (Fujimoto et al. 2018), as in CleanRL's td3_continuous_action.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TargetNetwork, TransitionBatch
from rlhpc.embodied.models.off_policy import TD3Policy

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig


class Td3Update(OffPolicyUpdate[TD3Policy]):
    """TD3 update, with target networks of critics and actor. Takes the arguments of `OffPolicyUpdate`."""

    networks = TD3Policy

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: TD3Policy, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *args, **kwargs)
        self.policy_noise, self.noise_clip = algorithm.policy_noise, algorithm.noise_clip

    def build_targets(self) -> dict[str, TargetNetwork]:
        """Builds the target networks of the critics and of the actor."""
        return {**super().build_targets(), "actor": TargetNetwork(self.policy.actor, self.actor)}

    def train_critics(self, obs: Any, next_obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the critics towards the reward plus the discounted target value of the next state: the smaller target
        Q-value of the target actor's noisy action.
        """
        return self.step_critics(self.run_pass(self._critic_pass, (obs, next_obs, batch.without_obs())))

    def _critic_pass(self, inputs: tuple[Any, Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, next_obs, batch = inputs
        targets = self.targets["critics"].module
        with torch.no_grad():
            next_features = self.encode(next_obs, targets)
            noise = (self.policy_noise * batch.noise[0]).clamp(-self.noise_clip, self.noise_clip)
            next_actions = self.policy.head.offset_actions(self.targets["actor"].module(next_features), noise)
            next_value = self.smallest_target(targets(next_features, next_actions.flatten(1)), batch)
        predicted_values = self.policy.critics(self.policy.encode(obs), batch.actions.flatten(1))
        return self.critic_gradients(predicted_values, next_value, batch)

    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor towards higher Q-values of the first critic."""
        metrics = self.run_pass(self._actor_pass, (obs, batch.without_obs()))
        return metrics["loss"], self.step_actor() / self._ranks

    def _actor_pass(self, inputs: tuple[Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, batch = inputs
        features = self.encode(obs)
        actions = self.policy.head.act(self.policy.actor(features), None)[0]
        loss = -self.policy.critics(features, actions.flatten(1))[0].sum() / batch.total
        self.actor_gradients(loss)
        return {"loss": loss.detach()}
