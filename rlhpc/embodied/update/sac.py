"""The SAC update (Haarnoja et al. 2018), as CleanRL's sac_continuous_action.py has it, but for two things that its results do
not depend on: every update trains critics and actor (CleanRL: the actor twice every second time), and the temperature
learns from the same sample as the actor.

An update on several ranks is that of one rank: losses are sums over a rank's rows divided by the rows of all.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.algorithms.finite import Skips, listed, nonfinite, tensors_of
from rlhpc.checkpoint.state import load_state, save_state
from rlhpc.embodied.models.sac import SACPolicy, flatten
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.adam import AdamOptions, FlatAdam
from rlhpc.training.contract import Named
from rlhpc.training.flat import FlatModule, Reduce
from rlhpc.training.replicated import OPTIMIZER
from rlhpc.weights import frozen_names

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig

METRICS = ("q_loss", "q_value", "actor_loss", "entropy", "q_grad_norm", "actor_grad_norm")


@dataclass
class SacBatch:
    """A rank's rows of one batch, on the device.

    Attributes:
        obs, next_obs: `[b, ...]`, or dicts of such tensors.
        actions: `[b, ...]`.
        rewards: `[b]`.
        terminations: `[b]` bool; a truncated transition is none: it bootstraps from its true next observation.
        noise: `[2, b, d]` standard normal, for the next and the present actions.
        total: Rows over all ranks.
    """

    obs: Any
    actions: Tensor
    rewards: Tensor
    next_obs: Any
    terminations: Tensor
    noise: Tensor
    total: int


class SacUpdate:
    """Owns the optimizers, the temperature and the target networks.

    Args:
        algorithm: Section `algorithm`.
        optim: Section `actor.optim`.
        policy: On its device; its actor and critics are trained.
        reduce: Sums a tensor over the ranks, in place.
        ranks: How many.
        rank: Of this process; the first one writes checkpoints.
        skip: Leaves out updates whose gradient is not finite, rather than raise.
    """

    def __init__(
        self,
        algorithm: SacAlgorithmConfig,
        optim: SacOptimConfig,
        policy: SACPolicy,
        reduce: Reduce = lambda t: t,
        ranks: int = 1,
        *,
        skip: bool = False,
        rank: int = 0,
    ) -> None:
        self.policy, self._reduce, self._ranks, self._rank = policy, reduce, ranks, rank
        self.skips = Skips(skip)
        value_lr = optim.lr if optim.value_lr is None else optim.value_lr
        options = AdamOptions.of(optim)
        self.actor = FlatModule(policy.actor, options, reduce, ranks, look=skip)
        self.critic = FlatModule(policy.critics, replace(options, lr=value_lr), reduce, ranks, look=skip)
        self._rate = 1.0
        self.targets = copy.deepcopy(policy.critics).requires_grad_(False)
        self._target_weights = torch.cat([p.detach().reshape(-1) for p in self.targets.parameters()])
        sizes = [p.numel() for p in self.targets.parameters()]
        for parameter, part in zip(self.targets.parameters(), self._target_weights.split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
        self._trained = list(policy.actor.parameters())
        self.gamma, self.tau = algorithm.gamma, algorithm.tau
        self.backup_entropy = algorithm.backup_entropy
        self.actor_every, self.targets_every = algorithm.critic_actor_ratio, algorithm.target_update_freq
        self.tune = algorithm.auto_entropy_tuning
        wanted = algorithm.target_entropy
        self.target_entropy = -float(policy.head.dim) if wanted is None else wanted
        self.log_alpha = self._target_weights.new_full((1,), algorithm.initial_alpha).log()
        self._alpha_gradient = torch.zeros_like(self.log_alpha)
        alpha_lr = value_lr if algorithm.alpha_lr is None else algorithm.alpha_lr
        self._alpha_adam = FlatAdam(
            self.log_alpha, self._alpha_gradient, replace(options, lr=alpha_lr, weight_decay=0.0)
        )
        self.alpha = self.log_alpha.exp()
        self.updates = 0
        self._sums = self._target_weights.new_zeros(len(METRICS))
        self._counts = [0, 0]

    def reset_targets(self) -> None:
        """Makes the target networks equal to the critics."""
        self._target_weights.copy_(self.critic.weights)

    # -- one update -----------------------------------------------------------------------------------------------

    def step(self, batch: SacBatch) -> None:
        """Critics, actor and temperature, target networks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        self.updates += 1
        obs, next_obs = flatten(batch.obs), flatten(batch.next_obs)
        critic = self._train_critics(obs, next_obs, batch)
        if self._refused("critics", self.critic, critic[2]):
            return
        actor = self._train_actor(obs, batch) if self.updates % self.actor_every == 0 else None
        if actor is not None and self._refused("actor", self.actor, actor[2]):
            actor = None
        else:
            self._counts[1] += actor is not None
            self.skips.took()
        if self.updates % self.targets_every == 0:
            self._target_weights.lerp_(self.critic.weights, self.tau)
        self._counts[0] += 1
        with torch.no_grad():
            zero = self.log_alpha[0] * 0
            loss, entropy, norm = actor or (zero, zero, zero)
            self._sums += torch.stack((critic[0], critic[1], loss, entropy, critic[2], norm))

    def _refused(self, who: str, backend: FlatModule, norm: Tensor) -> bool:
        """Whether the step of an optimizer was left out because its gradient is not finite."""
        if not backend.refuses(norm):
            return False

        def what() -> str:
            bad = backend.bad_gradients()
            return f"update {self.updates}: the gradient of the {who} is not finite ({listed(bad) or 'its norm'})"

        self.skips.left_out(what)
        return True

    def _train_critics(self, obs: Tensor, next_obs: Tensor, batch: SacBatch) -> tuple[Tensor, ...]:
        with torch.no_grad():
            following, logprobs = self.policy.head.act(self.policy.actor(next_obs), batch.noise[0])
            value = self.targets(next_obs, following.flatten(1)).amin(0)
            if self.backup_entropy:
                value = value - self.alpha * logprobs
            wanted = torch.where(batch.terminations, batch.rewards, batch.rewards + self.gamma * value)
        self.critic.zero_grad()
        found = self.policy.critics(obs, batch.actions.flatten(1))
        loss = (found - wanted).square().sum() / batch.total  # the sum of the two critics' mean squared errors
        loss.backward()
        norm = self.critic.optimizer_step(self.critic.base_lr * self._rate)
        return loss.detach(), found.detach().sum() / (2 * batch.total), norm / self._ranks

    def _train_actor(self, obs: Tensor, batch: SacBatch) -> tuple[Tensor, ...]:
        self.actor.zero_grad()
        actions, logprobs = self.policy.head.act(self.policy.actor(obs), batch.noise[1])
        value = self.policy.critics(obs, actions.flatten(1)).amin(0)
        loss = (self.alpha * logprobs - value).sum() / batch.total
        loss.backward(inputs=self._trained)  # the critics' own gradients are not even computed
        norm = self.actor.optimizer_step(self.actor.base_lr * self._rate)
        with torch.no_grad():
            entropy = -logprobs.detach().sum() / batch.total
            if self.tune and not self.actor.refuses(norm):
                mean = self._reduce(entropy.clone()) if self._ranks > 1 else entropy
                # d/d(log α) of −α·(log π + H), Haarnoja et al. 2018b with CleanRL's parametrisation.
                self._alpha_gradient.copy_((mean - self.target_entropy) * self.alpha)
                self._alpha_adam.step()
                self.alpha = self.log_alpha.exp()
        return loss.detach(), entropy, norm / self._ranks

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, over all ranks.

        Raises:
            NonFinite: One of them was not finite; an accelerator's are read here, before any weight leaves the rank.
        """
        sums = self._sums.double()
        if self._ranks > 1:
            sums = self._reduce(sums)
        critics, actors = (max(count, 1) for count in self._counts)
        counts = (critics, critics, actors, actors, critics, actors)
        made = self._counts[0]
        means = {name: total / n for name, total, n in zip(METRICS, sums.tolist(), counts, strict=True)}
        if bad := [name for name, mean in means.items() if not math.isfinite(mean)]:
            raise nonfinite(f"after update {self.updates}: {', '.join(bad)} not finite")
        self._sums.zero_()
        self._counts = [0, 0]
        facts = {"alpha": float(self.alpha), "updates": float(self.updates)}
        return {**(means if made else {}), **facts, **self.skips.counted()}

    def set_lr(self, factor: float) -> None:
        """Scales the learning rates of the steps to come."""
        self._rate = factor

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, temperature, target networks, number of updates."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "targets": self.targets.state_dict(),
            "log_alpha": self.log_alpha.clone(),
            "alpha_adam": [
                self._alpha_adam.exp_avg.clone(),
                self._alpha_adam.exp_avg_sq.clone(),
                self._alpha_adam.steps,
            ],
            "updates": self.updates,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            CheckpointError: It is of another model or algorithm.
        """
        try:
            self.actor.load_state_dict(state["actor"])
            self.critic.load_state_dict(state["critic"])
            self.targets.load_state_dict(state["targets"])
            first, second, steps = state["alpha_adam"]
            self.log_alpha.copy_(state["log_alpha"])
            self._alpha_adam.exp_avg.copy_(first)
            self._alpha_adam.exp_avg_sq.copy_(second)
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's optimizer is not that of this SAC model: {error!r}") from error
        self._alpha_adam.steps, self.updates = int(steps), int(state["updates"])
        self.alpha = self.log_alpha.exp()
        self._sums.zero_()
        self._counts = [0, 0]

    lockstep = False

    def offload(self) -> None:
        """Off-policy actors stay where they are."""

    def reload(self) -> None:
        """Takes back what `offload` moved away."""

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """They are."""
        return contextlib.nullcontext()

    # -- what a trainer asks of whoever holds its weights ---------------------------------------------------------

    def named_weights(self, without: Container[str] = ()) -> Named:
        """All weights, by the policy's names."""
        yield from ((name, tensor) for name, tensor in self.policy.state_dict().items() if name not in without)

    def frozen_names(self) -> frozenset[str]:
        """Names of the weights that never change."""
        return frozen_names(self.policy)

    def replace_weights(self, tensors: dict[str, Tensor]) -> None:
        """Takes over all weights; optimizers and target networks stay as they are."""
        self.policy.load_state_dict(tensors)

    def held_tensors(self) -> Named:
        """The tensors that the optimizers hold."""
        yield from tensors_of(self.state_dict(), "optimizer")

    def save(self, folder: Path) -> None:
        """Rank 0 writes the optimizers' state, which all ranks share."""
        if self._rank == 0:
            save_state(folder / OPTIMIZER, self.state_dict())

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote.

        Raises:
            CheckpointError: It is of another model or algorithm.
        """
        self.load_state_dict(load_state(folder / OPTIMIZER, map_location=str(self.log_alpha.device)))
