"""SAC update (Haarnoja et al. 2018), as in CleanRL's sac_continuous_action.py, and CrossQ.

The update differs from CleanRL in two ways, which do not affect the results: every update trains critics and actor
(CleanRL trains the actor twice in every second update), and the temperature is trained on the same sample as the actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TargetNetwork, TransitionBatch
from rlhpc.embodied.models.off_policy import BatchRenorm, CrossQPolicy, SACPolicy
from rlhpc.training.captured_passes import Record, record_cuda_graph
from rlhpc.training.flat_parameters import AdamOptions, FlatAdam

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig


class Temperature(NamedTuple):
    """Form of the temperature α(x) of a trained number x: the value, its inverse, and its slope at (x, α)."""

    value: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


#: Forms of the temperature (`algorithm.alpha_type`).
TEMPERATURES = {
    "exp": Temperature(torch.exp, torch.log, lambda x, alpha: alpha),
    "softplus": Temperature(functional.softplus, lambda alpha: alpha.expm1().log(), lambda x, alpha: x.sigmoid()),
}


class SacUpdate(OffPolicyUpdate[SACPolicy]):
    """SAC update of critics, actor and temperature. Takes the arguments of `OffPolicyUpdate`."""

    networks = SACPolicy
    actor_metrics = ("actor_loss", "entropy", "actor_grad_norm")

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: SACPolicy, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *args, **kwargs)
        self.actor_agg_q = algorithm.actor_agg_q
        self.backup_entropy, self.tune = algorithm.backup_entropy, algorithm.auto_entropy_tuning
        target_entropy = algorithm.target_entropy
        self.target_entropy = -float(policy.head.dim) if target_entropy is None else target_entropy
        self._temperature = TEMPERATURES[algorithm.alpha_type]
        self.raw_alpha = self._temperature.inverse(self.critic.weights.new_full((1,), algorithm.initial_alpha))
        self._alpha_clip = algorithm.alpha_clip_grad
        self._alpha_gradient = torch.zeros_like(self.raw_alpha)
        alpha_lr = self.value_lr if algorithm.alpha_lr is None else algorithm.alpha_lr
        options = replace(AdamOptions.from_config(optim), lr=alpha_lr, weight_decay=0.0)
        self._alpha_adam = FlatAdam(self.raw_alpha, self._alpha_gradient, options)
        self.alpha = self._temperature.value(self.raw_alpha)

    def train_critics(self, obs: Any, next_obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the critics towards the reward plus the discounted soft value of the next state (`soft_values`)."""
        return self.step_critics(self.run_pass(self._critic_pass, (obs, next_obs, batch.without_obs())))

    def _critic_pass(self, inputs: tuple[Any, Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, next_obs, batch = inputs
        targets = self.targets["critics"].module
        with torch.no_grad():
            next_actions, logprobs = self.policy.head.act(self.policy.actor(self.encode(next_obs)), batch.noise[0])
            next_values = targets(self.encode(next_obs, targets), next_actions.flatten(1))
            next_soft_values = self.soft_values(next_values, logprobs, batch)
        predicted_values = self.policy.critics(self.policy.encode(obs), batch.actions.flatten(1))
        return self.critic_gradients(predicted_values, next_soft_values, batch)

    def soft_values(self, next_values: Tensor, logprobs: Tensor, batch: TransitionBatch) -> Tensor:
        """Returns the smallest of the Q-values `[critics, b]`, minus α · log-prob if the targets include the entropy."""
        min_value = self.smallest_target(next_values, batch)
        return min_value - self.alpha * logprobs if self.backup_entropy else min_value

    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor towards higher Q-values and entropy, then steps the temperature."""
        metrics = self.run_pass(self._actor_pass, (obs, batch.without_obs()))
        norm, entropy = self.step_actor(), metrics["entropy"]
        with torch.no_grad():
            if self.tune and not self.actor.is_step_skipped(norm):
                mean = self._reduce(entropy.clone()) if self._ranks > 1 else entropy
                # d/dx of −α(x)·(log π + H), Haarnoja et al. 2018b; α = exp(x) is CleanRL's parametrisation.
                slope = self._temperature.slope(self.raw_alpha, self.alpha)
                self._alpha_gradient.copy_((mean - self.target_entropy) * slope)
                if self._alpha_clip is not None:
                    self._alpha_gradient.clamp_(-self._alpha_clip, self._alpha_clip)
                self._alpha_adam.step()
                self.alpha.copy_(self._temperature.value(self.raw_alpha))
        return metrics["loss"], entropy, norm / self._ranks

    def _actor_pass(self, inputs: tuple[Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, batch = inputs
        features = self.encode(obs)
        actions, logprobs = self.policy.head.act(self.policy.actor(features), batch.noise[1])
        action_values = self.policy.critics(features, actions.flatten(1))
        action_value = action_values.mean(0) if self.actor_agg_q == "mean" else action_values.amin(0)
        loss = (self.alpha * logprobs - action_value).sum() / batch.total
        self.actor_gradients(loss)
        return {"loss": loss.detach(), "entropy": -logprobs.detach().sum() / batch.total}

    def facts(self) -> dict[str, float]:
        """Returns the temperature α as metric `alpha`."""
        return {"alpha": float(self.alpha)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizers, temperature and target networks, and the number of updates."""
        adam = self._alpha_adam
        return {
            **super().state_dict(),
            "log_alpha": self.raw_alpha.clone(),
            "alpha_adam": [adam.exp_avg.clone(), adam.exp_avg_sq.clone(), adam.steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Loads the state that `state_dict` returned (`OffPolicyUpdate.restore`)."""
        super().restore(state)
        exp_avg, exp_avg_sq, steps = state["alpha_adam"]
        self.raw_alpha.copy_(state["log_alpha"])
        self._alpha_adam.exp_avg.copy_(exp_avg)
        self._alpha_adam.exp_avg_sq.copy_(exp_avg_sq)
        self._alpha_adam.resume_at(int(steps))
        self.alpha.copy_(self._temperature.value(self.raw_alpha))


class CrossQUpdate(SacUpdate):
    """CrossQ update: SAC without target networks. Takes the arguments of `OffPolicyUpdate`.

    A network uses batch statistics only in its optimizer steps, and running statistics otherwise.
    """

    networks = CrossQPolicy

    def __init__(
        self, algorithm: SacAlgorithmConfig, optim: SacOptimConfig, policy: CrossQPolicy, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(algorithm, optim, policy, *args, **kwargs)
        policy.eval()
        for module in policy.modules():
            if isinstance(module, BatchRenorm) and self._ranks > 1:
                module.reduce = self._reduce

    def capture_passes(self, record: Record = record_cuda_graph) -> None:
        """Records passes if there is one rank. With several ranks, a pass sums batch statistics over the ranks."""
        if self._ranks == 1:
            super().capture_passes(record)

    def build_targets(self) -> dict[str, TargetNetwork]:
        """Returns {}, because CrossQ has no target networks."""
        return {}

    def train_critics(self, obs: Any, next_obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the critics towards the reward plus the discounted soft value of the next state. The critics compute
        this value in the same pass.
        """
        return self.step_critics(self.run_pass(self._joint_pass, (obs, next_obs, batch.without_obs())))

    def _joint_pass(self, inputs: tuple[Any, Any, TransitionBatch]) -> dict[str, Tensor]:
        obs, next_obs, batch = inputs
        with torch.no_grad():
            next_features = self.encode(next_obs)
            next_actions, logprobs = self.policy.head.act(self.policy.actor(next_features), batch.noise[0])
        actions = torch.cat((batch.actions.flatten(1), next_actions.flatten(1)))
        critics = self.policy.critics.train()
        joint_values = critics(torch.cat((self.policy.encode(obs), next_features)), actions)
        critics.eval()
        predictions, next_values = joint_values.chunk(2, 1)
        return self.critic_gradients(predictions, self.soft_values(next_values.detach(), logprobs, batch), batch)

    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor in training mode (`SacUpdate.train_actor`)."""
        self.policy.actor.train()
        try:
            return super().train_actor(obs, batch)
        finally:
            self.policy.actor.eval()
