"""The CrossQ update (Bhatt et al. 2024), as SB3-Contrib's CrossQ has it: SAC without target networks.

The critics value what follows themselves, in one batch with what is; that this batch is normalised keeps them stable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.embodied.models.actor_critic import CrossQPolicy
from rlhpc.embodied.models.renorm import BatchRenorm
from rlhpc.embodied.update.off_policy import Target, TransitionBatch
from rlhpc.embodied.update.sac import SacUpdate

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig


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

    def build_targets(self) -> dict[str, Target]:
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
