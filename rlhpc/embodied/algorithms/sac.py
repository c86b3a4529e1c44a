"""The SAC update (Haarnoja et al. 2018), as CleanRL's sac_continuous_action.py has it, but for two things that its results do
not depend on: every update trains critics and actor (CleanRL: the actor twice every second time), and the temperature
learns from the same sample as the actor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TransitionBatch
from rlhpc.embodied.models.off_policy import SACPolicy
from rlhpc.training.flat_parameters import AdamOptions, FlatAdam

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig
from typing import TYPE_CHECKING

from rlhpc.embodied.algorithms.off_policy import TargetNetwork
from rlhpc.embodied.models.off_policy import BatchRenorm, CrossQPolicy

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig


class SacUpdate(OffPolicyUpdate[SACPolicy]):
    """Owns the temperature besides. Arguments as `OffPolicyUpdate`'s."""

    networks = SACPolicy
    actor_metrics = ("actor_loss", "entropy", "actor_grad_norm")

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: SACPolicy, *rest: Any, **more: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *rest, **more)
        self.backup_entropy, self.tune = algorithm.backup_entropy, algorithm.auto_entropy_tuning
        wanted = algorithm.target_entropy
        self.target_entropy = -float(policy.head.dim) if wanted is None else wanted
        self.log_alpha = self.critic.weights.new_full((1,), algorithm.initial_alpha).log()
        self._alpha_gradient = torch.zeros_like(self.log_alpha)
        alpha_lr = self.value_lr if algorithm.alpha_lr is None else algorithm.alpha_lr
        options = replace(AdamOptions.of(optim), lr=alpha_lr, weight_decay=0.0)
        self._alpha_adam = FlatAdam(self.log_alpha, self._alpha_gradient, options)
        self.alpha = self.log_alpha.exp()

    def train_critics(self, obs: Tensor, next_obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Towards reward and the smaller of the target networks' values, less what the action's log-prob costs."""
        with torch.no_grad():
            following, logprobs = self.policy.head.act(self.policy.actor(next_obs), batch.noise[0])
            value = self.soft(self.targets["critics"].module(next_obs, following.flatten(1)), logprobs)
        return self.fit_critics(self.policy.critics(obs, batch.actions.flatten(1)), value, batch)

    def soft(self, values: Tensor, logprobs: Tensor) -> Tensor:
        """The smaller of the critics' values `[2, b]`, less what the action's log-prob costs if targets contain it."""
        value = values.amin(0)
        return value - self.alpha * logprobs if self.backup_entropy else value

    def train_actor(self, obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Towards higher values and entropy; then the temperature."""
        actions, logprobs = self.policy.head.act(self.policy.actor(obs), batch.noise[1])
        value = self.policy.critics(obs, actions.flatten(1)).amin(0)
        loss = (self.alpha * logprobs - value).sum() / batch.total
        norm = self.fit_actor(loss)
        with torch.no_grad():
            entropy = -logprobs.detach().sum() / batch.total
            if self.tune and not self.actor.refuses(norm):
                mean = self._reduce(entropy.clone()) if self._ranks > 1 else entropy
                # d/d(log α) of −α·(log π + H), Haarnoja et al. 2018b with CleanRL's parametrisation.
                self._alpha_gradient.copy_((mean - self.target_entropy) * self.alpha)
                self._alpha_adam.step()
                self.alpha = self.log_alpha.exp()
        return loss.detach(), entropy, norm / self._ranks

    def facts(self) -> dict[str, float]:
        """The temperature."""
        return {"alpha": float(self.alpha)}

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, temperature, target networks, number of updates."""
        adam = self._alpha_adam
        return {
            **super().state_dict(),
            "log_alpha": self.log_alpha.clone(),
            "alpha_adam": [adam.exp_avg.clone(), adam.exp_avg_sq.clone(), adam.steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `OffPolicyUpdate.restore`."""
        super().restore(state)
        first, second, steps = state["alpha_adam"]
        self.log_alpha.copy_(state["log_alpha"])
        self._alpha_adam.exp_avg.copy_(first)
        self._alpha_adam.exp_avg_sq.copy_(second)
        self._alpha_adam.steps = int(steps)
        self.alpha = self.log_alpha.exp()


class CrossQUpdate(SacUpdate):
    """Arguments as `OffPolicyUpdate`'s. Between its steps, networks use their running statistics."""

    networks = CrossQPolicy

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: CrossQPolicy, *rest: Any, **more: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *rest, **more)
        policy.eval()
        for module in policy.modules():
            if isinstance(module, BatchRenorm) and self._ranks > 1:
                module.reduce = self._reduce

    def build_targets(self) -> dict[str, TargetNetwork]:
        """None."""
        return {}

    def train_critics(self, obs: Tensor, next_obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Towards reward and the smaller of their own values of what follows, less what the action's log-prob costs."""
        with torch.no_grad():
            following, logprobs = self.policy.head.act(self.policy.actor(next_obs), batch.noise[0])
        actions = torch.cat((batch.actions.flatten(1), following.flatten(1)))
        critics = self.policy.critics.train()
        values = critics(torch.cat((obs, next_obs)), actions)
        critics.eval()
        found, after = values[:, : len(obs)], values[:, len(obs) :].detach()
        return self.fit_critics(found, self.soft(after, logprobs), batch)

    def train_actor(self, obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """See `SacUpdate.train_actor`."""
        self.policy.actor.train()
        try:
            return super().train_actor(obs, batch)
        finally:
            self.policy.actor.eval()
