"""Base of off-policy updates: actor and critics with one optimizer each, target networks, and averaged metrics.

An update on several ranks equals an update on one rank, because each rank's loss is the sum over its rows, divided by
the number of rows on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlhpc.algorithms.nonfinite import SkippedSteps, nonfinite, tensors_of
from rlhpc.checkpoint.state import load_state, save_state
from rlhpc.embodied.models.off_policy import ActorCritic
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.text import format_names
from rlhpc.training.backend import Named
from rlhpc.training.captured_passes import CapturedPasses, Record, record_cuda_graph
from rlhpc.training.data_parallel import OPTIMIZER
from rlhpc.training.flat_parameters import AdamOptions, FlatModule, Reduce
from rlhpc.weights import frozen_names

if TYPE_CHECKING:
    from rlhpc.embodied.config import SacAlgorithmConfig, SacOptimConfig

#: Keys of the target networks in a checkpoint, by name.
_CHECKPOINT_KEYS = {"critics": "targets", "actor": "target_actor"}
PolicyNetworks = TypeVar("PolicyNetworks", bound=ActorCritic)


@dataclass
class TransitionBatch:
    """One rank's rows of a batch of transitions, on the device.

    Attributes:
        obs, next_obs: Observations `[b, ...]`, or dicts of such tensors.
        actions: Actions `[b, ...]`.
        rewards: Rewards `[b]`.
        terminations: Bool `[b]`; False for truncated transitions, which bootstrap from their true next observation.
        noise: Standard normal noise `[2, b, d]`, for the next and the current actions.
        total: Number of rows on all ranks.
        steps: Number of decisions `[b]` whose discounted rewards `rewards` sums up; None for 1 everywhere.
        shifts: Offsets `[2, b, 2]` of the images of observations and next observations (`ActorCritic.prepare`);
            None if there are no images.
        critics: Indices of the critics whose values count in the targets; None for all.
    """

    obs: Any
    actions: Tensor
    rewards: Tensor
    next_obs: Any
    terminations: Tensor
    noise: Tensor
    total: int
    steps: Tensor | None = None
    shifts: Tensor | None = None
    critics: Tensor | None = None

    def without_obs(self) -> TransitionBatch:
        """Returns the batch without observations, which a pass gets prepared."""
        return replace(self, obs=None, next_obs=None, shifts=None)


class TargetNetwork:
    """Target network: copy of a network that follows it by Polyak averaging on one flat tensor.

    Attributes:
        module: Target network.
    """

    def __init__(self, source: nn.Module, flat_source: FlatModule) -> None:
        self.module = copy.deepcopy(source).requires_grad_(False)
        self._source = flat_source
        pairs = zip(self.module.parameters(), source.parameters(), strict=True)
        parameters = [copied for copied, target_parameter in pairs if target_parameter.requires_grad]
        self._weights = torch.cat([weight.detach().reshape(-1) for weight in parameters])
        for parameter, weight_slice in zip(
            parameters, self._weights.split([weight.numel() for weight in parameters]), strict=True
        ):
            parameter.data = weight_slice.view(parameter.shape)

    def follow(self, tau: float) -> None:
        """Moves the target towards the network by a fraction `tau`; 1 copies the network."""
        if tau == 1:
            self._weights.copy_(self._source.weights)
        else:
            self._weights.lerp_(self._source.weights, tau)


class OffPolicyUpdate(ABC, Generic[PolicyNetworks]):
    """Optimizers and target networks of an off-policy algorithm. A subclass defines the losses of critics and actor.

    Args:
        algorithm: Section `algorithm`.
        optim: Section `actor.optim`.
        policy: Policy on its device; its actor and critics are trained.
        reduce: Sums a tensor over the ranks, in place.
        num_ranks: Number of ranks.
        rank: Rank of this process; rank 0 writes checkpoints.
        skips_nonfinite: True skips updates with a non-finite gradient; False raises an error.

    Attributes:
        networks: Policy class that the algorithm can train.
        critic_metrics, actor_metrics: Names of the metrics of critic and actor updates; the last metric is the gradient
            norm.
        targets: Target networks by name.
        num_updates: Number of completed updates.
    """

    networks: ClassVar[type[ActorCritic]]
    critic_metrics: ClassVar[tuple[str, ...]] = ("q_loss", "q_value", "q_grad_norm")
    actor_metrics: ClassVar[tuple[str, ...]] = ("actor_loss", "actor_grad_norm")

    def __init__(
        self,
        algorithm: SacAlgorithmConfig,
        optim: SacOptimConfig,
        policy: PolicyNetworks,
        reduce: Reduce = lambda t: t,
        num_ranks: int = 1,
        *,
        skips_nonfinite: bool = False,
        rank: int = 0,
    ) -> None:
        self.policy, self._reduce, self._ranks, self._rank = policy, reduce, num_ranks, rank
        self.skips = SkippedSteps(skips_nonfinite)
        self.value_lr = optim.lr if optim.value_lr is None else optim.value_lr
        options = AdamOptions.from_config(optim)
        self.actor = FlatModule(policy.actor, options, reduce, num_ranks, reads_norm=skips_nonfinite)
        self.critic = FlatModule(
            policy.critics, replace(options, lr=self.value_lr), reduce, num_ranks, reads_norm=skips_nonfinite
        )
        self._lr_factor = 1.0
        self.targets = self.build_targets()
        self._actor_parameters = list(policy.actor.parameters())
        self.gamma, self.tau = algorithm.gamma, algorithm.tau
        self.bootstraps_always = algorithm.bootstrap_type == "always"
        self.random_shift = algorithm.random_shift
        self.actor_every, self.targets_every = algorithm.critic_actor_ratio, algorithm.target_update_freq
        self.num_updates = 0
        self._sums = self.critic.weights.new_zeros(len(self.critic_metrics) + len(self.actor_metrics))
        self._zero = self._sums.new_zeros(())
        self._counts = [0, 0]
        self._captured_passes: CapturedPasses | None = None

    def build_targets(self) -> dict[str, TargetNetwork]:
        """Builds the target networks by name; by default, only the critics have a target network."""
        return {"critics": TargetNetwork(self.policy.critics, self.critic)}

    def reset_targets(self) -> None:
        """Copies the trained networks to the target networks."""
        for target in self.targets.values():
            target.follow(1)

    # -- one update -----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_critics(self, obs: Any, next_obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the critics' optimizer; returns the values of `critic_metrics`. Observations are prepared
        (`ActorCritic.prepare`).
        """

    @abstractmethod
    def train_actor(self, obs: Any, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Steps the actor's optimizer; returns the values of `actor_metrics`. Observations are prepared."""

    @torch.no_grad()
    def encode(self, obs: Any, critics: nn.Module | None = None) -> Tensor:
        """Returns features of prepared observations without a gradient (`ActorCritic.encode`)."""
        return self.policy.encode(obs, critics)

    def smallest_target(self, critic_values: Tensor, batch: TransitionBatch) -> Tensor:
        """Returns the smallest of the Q-values `[critics, b]` that count in the targets, `[b]`."""
        return (critic_values if batch.critics is None else critic_values[batch.critics]).amin(0)

    def step(self, batch: TransitionBatch) -> None:
        """Updates critics, actor and target networks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        self.num_updates += 1
        shifts, next_shifts = (None, None) if batch.shifts is None else batch.shifts.unbind()
        obs = self.policy.prepare(batch.obs, shifts, self.random_shift)
        next_obs = self.policy.prepare(batch.next_obs, next_shifts, self.random_shift)
        critic_values = self.train_critics(obs, next_obs, batch)
        if self._is_skipped("critics", self.critic, critic_values[-1]):
            return
        actor_values = self.train_actor(obs, batch) if self.num_updates % self.actor_every == 0 else None
        if actor_values is not None and self._is_skipped("actor", self.actor, actor_values[-1]):
            actor_values = None
        else:
            self._counts[1] += actor_values is not None
            self.skips.record_step()
        if self.num_updates % self.targets_every == 0:
            for target in self.targets.values():
                target.follow(self.tau)
        self._counts[0] += 1
        metric_values = (*critic_values, *(actor_values or (self._zero,) * len(self.actor_metrics)))
        with torch.no_grad():  # norms that decide about a step are on the host
            self._sums += torch.stack([value.to(self._sums.device) for value in metric_values])

    def critic_gradients(
        self, predicted_values: Tensor, next_values: Tensor, batch: TransitionBatch, extra_loss: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Computes the gradients of the critics towards reward plus discounted next value, with the sum of their mean squared
        errors as loss.

        Args:
            predicted_values: Q-values `[critics, b]`.
            next_values: Values `[b]` of the next states, without a gradient.
            batch: Transitions.
            extra_loss: Additional loss; the returned loss does not include it.

        Returns:
            Loss and mean value, to be summed over the ranks.
        """
        num_transitions = batch.total
        discounts = self.gamma if batch.steps is None else self.gamma**batch.steps
        targets = batch.rewards + discounts * next_values
        if not self.bootstraps_always:
            targets = torch.where(batch.terminations, batch.rewards, targets)
        loss = (predicted_values - targets).square().sum() / num_transitions
        self.critic.zero_grad()
        (loss if extra_loss is None else loss + extra_loss).backward()
        return {
            "loss": loss.detach(),
            "value": predicted_values.detach().sum() / (len(predicted_values) * num_transitions),
        }

    def step_critics(self, metrics: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Steps the critics' optimizer; returns the metrics of `critic_gradients` and the gradient norm."""
        norm = self.critic.optimizer_step(self.critic.base_lr * self._lr_factor)
        return *metrics.values(), norm / self._ranks

    def actor_gradients(self, loss: Tensor) -> None:
        """Computes the gradients of the actor."""
        self.actor.zero_grad()
        loss.backward(inputs=self._actor_parameters)  # computes no gradients for the critics

    def step_actor(self) -> Tensor:
        """Steps the actor's optimizer with the gradients of `actor_gradients`; returns their norm."""
        return self.actor.optimizer_step(self.actor.base_lr * self._lr_factor)

    def run_pass(self, compute_pass: Callable[[Any], dict[str, Tensor]], inputs: Any) -> dict[str, Tensor]:
        """Runs a forward and backward pass `compute_pass(inputs)`: by a replay, if passes are captured."""
        return (
            compute_pass(inputs)
            if self._captured_passes is None
            else self._captured_passes.run(compute_pass, inputs, compute_pass)
        )

    def capture_passes(self, record: Record = record_cuda_graph) -> None:
        """Records the passes that go through `run_pass`, and replays them from then on."""

        def list_changed_tensors() -> list[Tensor]:
            return [self.actor.gradients, self.critic.gradients, *self.policy.buffers()]

        self._captured_passes = CapturedPasses(list_changed_tensors, record)

    def _is_skipped(self, network: str, backend: FlatModule, norm: Tensor) -> bool:
        """Returns whether an optimizer step was skipped because of a non-finite gradient, and records it."""
        if not backend.is_step_skipped(norm):
            return False

        def format_message() -> str:
            bad_names = backend.bad_gradients()
            place_text = format_names(bad_names) or "its norm"
            return f"update {self.num_updates}: the gradient of the {network} is not finite ({place_text})"

        self.skips.record_skip(format_message)
        return True

    def facts(self) -> dict[str, float]:
        """Returns metrics of the algorithm that are not means over updates."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics' means over the updates since the last call and over all ranks.

        Raises:
            NonFinite: A mean is not finite. Only this method reads metrics from the accelerator; it runs before weights
                are sent.
        """
        sums = self._sums.double()
        if self._ranks > 1:
            sums = self._reduce(sums)
        num_updates, num_actor_updates = self._counts
        metric_names = (*self.critic_metrics, *self.actor_metrics)
        update_counts = [max(num_updates, 1)] * len(self.critic_metrics) + [max(num_actor_updates, 1)] * len(
            self.actor_metrics
        )
        means = {
            name: metric_total / n
            for name, metric_total, n in zip(metric_names, sums.tolist(), update_counts, strict=True)
        }
        if nonfinite_names := [name for name, mean in means.items() if not math.isfinite(mean)]:
            raise nonfinite(f"after update {self.num_updates}: {', '.join(nonfinite_names)} not finite")
        self._sums.zero_()
        self._counts = [0, 0]
        return {
            **(means if num_updates else {}),
            **self.facts(),
            "updates": float(self.num_updates),
            **self.skips.pop_metrics(),
        }

    def set_lr(self, lr_factor: float) -> None:
        """Scales the learning rates of all later steps."""
        self._lr_factor = lr_factor

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizers and target networks, and the number of updates."""
        target_states = {_CHECKPOINT_KEYS[name]: target.module.state_dict() for name, target in self.targets.items()}
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            **target_states,
            "updates": self.num_updates,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Loads the state that `state_dict` returned; subclasses load their additional state."""
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        for name, target in self.targets.items():
            target.module.load_state_dict(state[_CHECKPOINT_KEYS[name]])
        self.num_updates = int(state["updates"])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state that `state_dict` returned, and resets the metrics.

        Raises:
            CheckpointError: The state belongs to another model or algorithm.
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
        """Does nothing: off-policy actors stay on their device."""

    def reload(self) -> None:
        """Does nothing, because `offload` does nothing."""

    def keep_on_device(self) -> contextlib.AbstractContextManager[None]:
        """Returns an empty context, because the networks are never offloaded."""
        return contextlib.nullcontext()

    # -- interface `PolicyLearner` --------------------------------------------------------------------------------

    def named_weights(self, excluded_names: Container[str] = ()) -> Named:
        """Yields all weights under the policy's names."""
        yield from ((name, tensor) for name, tensor in self.policy.state_dict().items() if name not in excluded_names)

    def frozen_names(self) -> frozenset[str]:
        """Returns the names of the weights that never change."""
        return frozen_names(self.policy)

    def replace_weights(self, tensors: dict[str, Tensor]) -> None:
        """Replaces all weights; optimizers and target networks stay unchanged."""
        self.policy.load_state_dict(tensors)

    def local_tensors(self) -> Named:
        """Yields the tensors that the optimizers hold."""
        yield from tensors_of(self.state_dict(), "optimizer")

    def save(self, folder: Path) -> None:
        """Writes the optimizers' state on rank 0; all ranks have the same state."""
        if self._rank == 0:
            save_state(folder / OPTIMIZER, self.state_dict())

    def load(self, folder: Path) -> None:
        """Loads the state that `save` wrote.

        Raises:
            CheckpointError: The state belongs to another model or algorithm.
        """
        self.load_state_dict(load_state(folder / OPTIMIZER, map_location=str(self.critic.weights.device)))
