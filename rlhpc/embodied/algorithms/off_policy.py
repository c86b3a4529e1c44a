"""What updates of off-policy learning have in common: an actor and critics of actions, an optimizer for each, target networks
that follow them, and means of what a step reports.

An update on several ranks is that of one rank: losses are sums over a rank's rows divided by the rows of all.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlhpc.algorithms.nonfinite import Skips, listed, nonfinite, tensors_of
from rlhpc.checkpoint.state import load_state, save_state
from rlhpc.embodied.models.off_policy import ActorCritic, flatten
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.backend import Named
from rlhpc.training.data_parallel import OPTIMIZER
from rlhpc.training.flat_parameters import AdamOptions, FlatModule, Reduce
from rlhpc.weights import frozen_names

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig

#: Target networks → where a checkpoint has them.
_KEYS = {"critics": "targets", "actor": "target_actor"}
Networks = TypeVar("Networks", bound=ActorCritic)


@dataclass
class TransitionBatch:
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


class TargetNetwork:
    """A copy of a network that follows it: Polyak averaging, on one flat tensor.

    Attributes:
        module: The copy.
    """

    def __init__(self, of: nn.Module, trained: FlatModule) -> None:
        self.module = copy.deepcopy(of).requires_grad_(False)
        self._of = trained
        parameters = list(self.module.parameters())
        self._weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        for parameter, part in zip(parameters, self._weights.split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape)

    def follow(self, tau: float) -> None:
        """Takes over a fraction of what the network has become; 1 is all of it."""
        if tau == 1:
            self._weights.copy_(self._of.weights)
        else:
            self._weights.lerp_(self._of.weights, tau)


class OffPolicyUpdate(ABC, Generic[Networks]):
    """Owns the optimizers and the target networks. A subclass says what critics and actor learn.

    Args:
        algorithm: Section `algorithm`.
        optim: Section `actor.optim`.
        policy: On its device; its actor and critics are trained.
        reduce: Sums a tensor over the ranks, in place.
        ranks: How many.
        rank: Of this process; the first one writes checkpoints.
        skip: Leaves out updates whose gradient is not finite, rather than raise.

    Attributes:
        networks: The policies that it can train.
        critic_metrics, actor_metrics: What an update of either reports; the last is the norm of its gradient.
        targets: The target networks, by name.
        updates: How many were made.
    """

    networks: ClassVar[type[ActorCritic]]
    critic_metrics: ClassVar[tuple[str, ...]] = ("q_loss", "q_value", "q_grad_norm")
    actor_metrics: ClassVar[tuple[str, ...]] = ("actor_loss", "actor_grad_norm")

    def __init__(
        self,
        algorithm: SacAlgorithmConfig,
        optim: SacOptimConfig,
        policy: Networks,
        reduce: Reduce = lambda t: t,
        ranks: int = 1,
        *,
        skip: bool = False,
        rank: int = 0,
    ) -> None:
        self.policy, self._reduce, self._ranks, self._rank = policy, reduce, ranks, rank
        self.skips = Skips(skip)
        self.value_lr = optim.lr if optim.value_lr is None else optim.value_lr
        options = AdamOptions.of(optim)
        self.actor = FlatModule(policy.actor, options, reduce, ranks, look=skip)
        self.critic = FlatModule(policy.critics, replace(options, lr=self.value_lr), reduce, ranks, look=skip)
        self._rate = 1.0
        self.targets = self.build_targets()
        self._trained = list(policy.actor.parameters())
        self.gamma, self.tau = algorithm.gamma, algorithm.tau
        self.actor_every, self.targets_every = algorithm.critic_actor_ratio, algorithm.target_update_freq
        self.updates = 0
        self._sums = self.critic.weights.new_zeros(len(self.critic_metrics) + len(self.actor_metrics))
        self._nothing = self._sums.new_zeros(())
        self._counts = [0, 0]

    def build_targets(self) -> dict[str, TargetNetwork]:
        """The target networks, by name: here those of the critics."""
        return {"critics": TargetNetwork(self.policy.critics, self.critic)}

    def reset_targets(self) -> None:
        """Makes the target networks equal to what they follow."""
        for target in self.targets.values():
            target.follow(1)

    # -- one update -----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_critics(self, obs: Tensor, next_obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the critics' optimizer; returns `critic_metrics`."""

    @abstractmethod
    def train_actor(self, obs: Tensor, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor's optimizer; returns `actor_metrics`."""

    def step(self, batch: TransitionBatch) -> None:
        """Critics, actor, target networks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        self.updates += 1
        obs, next_obs = flatten(batch.obs), flatten(batch.next_obs)
        critic = self.train_critics(obs, next_obs, batch)
        if self._refused("critics", self.critic, critic[-1]):
            return
        actor = self.train_actor(obs, batch) if self.updates % self.actor_every == 0 else None
        if actor is not None and self._refused("actor", self.actor, actor[-1]):
            actor = None
        else:
            self._counts[1] += actor is not None
            self.skips.took()
        if self.updates % self.targets_every == 0:
            for target in self.targets.values():
                target.follow(self.tau)
        self._counts[0] += 1
        with torch.no_grad():
            self._sums += torch.stack((*critic, *(actor or (self._nothing,) * len(self.actor_metrics))))

    def fit_critics(
        self, found: Tensor, following: Tensor, batch: TransitionBatch, besides: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Steps the critics towards reward and discounted value of what follows, by the sum of their mean squared errors.

        Args:
            found: Values `[2, b]` that they give.
            following: Value `[b]` of what follows, without a gradient.
            batch: The transitions.
            besides: A loss that is added, and not reported.

        Returns:
            Loss, mean value, norm of the gradient, to be added up over the ranks.
        """
        total = batch.total
        wanted = torch.where(batch.terminations, batch.rewards, batch.rewards + self.gamma * following)
        loss = (found - wanted).square().sum() / total
        self.critic.zero_grad()
        (loss if besides is None else loss + besides).backward()
        norm = self.critic.optimizer_step(self.critic.base_lr * self._rate)
        return loss.detach(), found.detach().sum() / (2 * total), norm / self._ranks

    def fit_actor(self, loss: Tensor) -> Tensor:
        """Steps the actor; returns the norm of its gradient."""
        self.actor.zero_grad()
        loss.backward(inputs=self._trained)  # the critics' own gradients are not even computed
        return self.actor.optimizer_step(self.actor.base_lr * self._rate)

    def _refused(self, who: str, backend: FlatModule, norm: Tensor) -> bool:
        """Whether the step of an optimizer was left out because its gradient is not finite."""
        if not backend.refuses(norm):
            return False

        def what() -> str:
            bad = backend.bad_gradients()
            return f"update {self.updates}: the gradient of the {who} is not finite ({listed(bad) or 'its norm'})"

        self.skips.left_out(what)
        return True

    def facts(self) -> dict[str, float]:
        """What the algorithm reports besides means."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, over all ranks.

        Raises:
            NonFinite: One of them was not finite; an accelerator's are read here, before any weight leaves the rank.
        """
        sums = self._sums.double()
        if self._ranks > 1:
            sums = self._reduce(sums)
        made, acted = self._counts
        names = (*self.critic_metrics, *self.actor_metrics)
        counts = [max(made, 1)] * len(self.critic_metrics) + [max(acted, 1)] * len(self.actor_metrics)
        means = {name: total / n for name, total, n in zip(names, sums.tolist(), counts, strict=True)}
        if bad := [name for name, mean in means.items() if not math.isfinite(mean)]:
            raise nonfinite(f"after update {self.updates}: {', '.join(bad)} not finite")
        self._sums.zero_()
        self._counts = [0, 0]
        return {**(means if made else {}), **self.facts(), "updates": float(self.updates), **self.skips.counted()}

    def set_lr(self, factor: float) -> None:
        """Scales the learning rates of the steps to come."""
        self._rate = factor

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, target networks, number of updates."""
        averages = {_KEYS[name]: target.module.state_dict() for name, target in self.targets.items()}
        own = {"actor": self.actor.state_dict(), "critic": self.critic.state_dict()}
        return {**own, **averages, "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned; a subclass adds what it has besides."""
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        for name, target in self.targets.items():
            target.module.load_state_dict(state[_KEYS[name]])
        self.updates = int(state["updates"])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            CheckpointError: It is of another model or algorithm.
        """
        try:
            self.restore(state)
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint's optimizer is not that of this model and algorithm: {error!r}"
            ) from error
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
        self.load_state_dict(load_state(folder / OPTIMIZER, map_location=str(self.critic.weights.device)))
