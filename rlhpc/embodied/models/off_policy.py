"""Actor and twin Q-networks for off-policy learning from state observations."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.config import BcModelConfig, SacModelConfig
from rlhpc.embodied.models.action_heads import BoundedGaussianHead, BoundedHead, DeterministicHead, SquashedGaussianHead
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.mlp import ACTIVATIONS, mlp
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.flat_parameters import Reduce

#: Constants from CrossQ's code: update rate of the running statistics, term added to variances, number of initial
#: batches that only the batch statistics normalise, and bounds of the correction.
_MOMENTUM, _EPS, WARM_UP, _R_MAX, _D_MAX = 0.01, 1e-3, 100_000, 3.0, 5.0


class _SumOverRanks(torch.autograd.Function):
    """Differentiable sum over the ranks: its backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return reduce(summand.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.reduce(gradient.clone()), None


class BatchRenorm(nn.Module):
    """Batch renormalisation of rows `[B, width]`. Training uses the batch's mean and variance, corrected towards the running
    statistics after `WARM_UP` batches; evaluation uses the running statistics.

    Attributes:
        reduce: Sums a tensor over the ranks, in place; None for a single rank.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.reduce: Reduce | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the normalised rows, and updates the running statistics in training."""
        if not self.training:
            return (rows - self.mean) * (self.variance + _EPS).rsqrt() * self.weight + self.bias
        mean, variance = self._batch_statistics(rows)
        normalized_rows = (rows - mean) * (variance + _EPS).rsqrt()
        # Chosen on the device, because reading the count would wait for it.
        corrected_rows = self._correct(normalized_rows, mean.detach(), variance.detach())
        normalized_rows = torch.where(self.batches >= WARM_UP, corrected_rows, normalized_rows)
        with torch.no_grad():
            self.mean.lerp_(mean, _MOMENTUM)
            self.variance.lerp_(variance, _MOMENTUM)
            self.batches += 1
        return normalized_rows * self.weight + self.bias

    def _correct(self, normalized_rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Corrects rows that were normalised by batch statistics towards normalisation by the running statistics."""
        running_std = (self.variance + _EPS).sqrt()
        scale_ratio = ((variance + _EPS).sqrt() / running_std).clamp(1 / _R_MAX, _R_MAX)
        return normalized_rows * scale_ratio + ((mean - self.mean) / running_std).clamp(-_D_MAX, _D_MAX)

    def _batch_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and variance over the rows of all ranks."""
        if self.reduce is None:
            variance, mean = torch.var_mean(rows, 0, correction=0)
            return mean, variance
        sums_and_count: Tensor = _SumOverRanks.apply(
            torch.cat((rows.sum(0), rows.new_full((1,), rows.shape[0]))), self.reduce
        )
        mean = sums_and_count[:-1] / sums_and_count[-1]
        return mean, _SumOverRanks.apply((rows - mean).square().sum(0), self.reduce) / sums_and_count[-1].detach()


def _build_renorm_mlp(sizes: list[int], outputs: int, activation: str) -> nn.Sequential:
    """Builds a perceptron with batch renormalisation before each linear layer."""
    layers: list[nn.Module] = []
    for inputs, hidden in itertools.pairwise(sizes):
        layers += [BatchRenorm(inputs), nn.Linear(inputs, hidden), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, BatchRenorm(sizes[-1]), nn.Linear(sizes[-1], outputs))


class _RenormTwinCritic(nn.Module):
    """Pair of Q-networks with batch renormalisation.

    Args:
        inputs: Total width of observation and action.
        hidden: Widths of the hidden layers.
        activation: Name of the activation.
    """

    def __init__(self, inputs: int, hidden: list[int], activation: str) -> None:
        super().__init__()
        self.one, self.two = (
            _build_renorm_mlp([inputs, *hidden], 1, activation),
            _build_renorm_mlp([inputs, *hidden], 1, activation),
        )

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Returns Q-values `[2, B]` of flat observations `[B, D]` and actions `[B, d]`."""
        rows = torch.cat((obs, actions), -1)
        return torch.stack((self.one(rows).squeeze(-1), self.two(rows).squeeze(-1)))


def _flat_width(space: Any, model_type: str) -> int:
    """Returns the number of values in an observation.

    Raises:
        ConfigError: The observation contains images.
    """
    boxes: dict[str, Any] = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for name, box in boxes.items():
        if not isinstance(box, spaces.Box) or len(box.shape) > 2:
            raise ConfigError(
                f"actor.model.model_type {model_type!r} takes observations of numbers; {name or 'the observation'} is {box}"
            )
    return sum(math.prod(box.shape) for box in boxes.values())


def flatten(obs: Any) -> Tensor:
    """Flattens observations to float rows `[B, D]`; concatenates several observations in the order of their names.
    Floating-point tensors keep their dtype.
    """
    arrays = [obs[name] for name in sorted(obs)] if isinstance(obs, dict) else [obs]
    rows = [array.flatten(1) if array.is_floating_point() else array.flatten(1).float() for array in arrays]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


class TwinCritic(nn.Module):
    """Pair of Q-networks that share one wide first linear layer; each network uses half of its outputs. On a CPU this
    is faster than batched matrix products.

    Args:
        inputs: Total width of observation and action.
        hidden: Widths of the hidden layers.
        activation: Name of the activation.
        layer_norm: True applies layer norm in every hidden layer (RLPD, Ball et al. 2023).
    """

    def __init__(self, inputs: int, hidden: list[int], activation: str, layer_norm: bool) -> None:
        super().__init__()
        activation_class = ACTIVATIONS[activation]
        self.first = nn.Linear(inputs, 2 * hidden[0])
        self.width = hidden[0]

        def hidden_layers() -> nn.Sequential:
            layers: list[nn.Module] = [nn.LayerNorm(hidden[0])] if layer_norm else []
            layers.append(activation_class())
            for num_inputs, num_outputs in itertools.pairwise(hidden):
                layers.append(nn.Linear(num_inputs, num_outputs))
                layers += [nn.LayerNorm(num_outputs), activation_class()] if layer_norm else [activation_class()]
            return nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

        self.one, self.two = hidden_layers(), hidden_layers()

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Returns Q-values `[2, B]` of flat observations `[B, D]` and actions `[B, d]`."""
        first_hidden, second_hidden = self.first(torch.cat((obs, actions), -1)).split(self.width, -1)
        return torch.stack((self.one(first_hidden).squeeze(-1), self.two(second_hidden).squeeze(-1)))


class ActorCritic(Policy):
    """Actor with twin Q-networks. The value of an observation is the smaller Q-value of the actor's deterministic action."""

    head: BoundedHead  # type: ignore[assignment]
    has_head = False  # this class builds the head itself
    #: Name prefixes of the weights that acting needs.
    acting_prefixes: tuple[str, ...] = ("actor.",)

    def __init__(self, cfg: SacModelConfig | BcModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = self.build_head(cfg, action_space)
        hidden = list(cfg.hidden_sizes)
        if not hidden:
            raise ConfigError(
                f"actor.model.hidden_sizes is empty; model_type {cfg.model_type!r} needs at least one layer"
            )
        self.build_networks(
            cfg, _flat_width(observation_space, cfg.model_type), hidden, list(cfg.critic_hidden_sizes or hidden)
        )

    def build_networks(
        self, cfg: SacModelConfig | BcModelConfig, inputs: int, hidden: list[int], critic_hidden: list[int]
    ) -> None:
        """Builds `actor` and `critics` for flat observations of width `inputs`."""
        self.actor: nn.Module = mlp([inputs, *hidden], self.head.inputs, cfg.activation, cfg.ortho_init, 0.01)
        self.critics: nn.Module = TwinCritic(
            inputs + self.head.dim, critic_hidden, cfg.activation, cfg.critic_layer_norm
        )

    @abstractmethod
    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> BoundedHead:
        """Builds the head that turns the actor's outputs into actions within their bounds."""

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`)."""
        flat_obs = flatten(obs)
        inputs = self.actor(flat_obs)
        if not value:
            return inputs, None
        actions = self.head.act(inputs, None)[0].flatten(1)
        return inputs if policy else None, self.critics(flat_obs, actions).amin(0)

    def executed(self, obs: Any, actions: Tensor) -> Tensor:
        """Returns the actions `[B, chunk, dim]` that the environment executes for the actor's `actions`; by default,
        `actions`.
        """
        del obs
        return actions

    def acting(self) -> list[tuple[str, Tensor]]:
        """Returns the names and tensors of the weights that acting needs."""
        return [(name, tensor) for name, tensor in self.state_dict().items() if name.startswith(self.acting_prefixes)]


class SACPolicy(ActorCritic):
    """Actor and critics of SAC (as in CleanRL's sac_continuous_action.py)."""

    head: SquashedGaussianHead

    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> SquashedGaussianHead:
        """Builds a squashed Gaussian head."""
        return SquashedGaussianHead(action_space, self.chunk)


class CrossQPolicy(SACPolicy):
    """Actor and critics of CrossQ (Bhatt et al. 2024): networks as in SAC, with batch renormalisation before each
    layer.
    """

    def build_networks(
        self, cfg: SacModelConfig | BcModelConfig, inputs: int, hidden: list[int], critic_hidden: list[int]
    ) -> None:
        """Builds renormalised networks (`ActorCritic.build_networks`)."""
        self.actor = _build_renorm_mlp([inputs, *hidden], self.head.inputs, cfg.activation)
        self.critics = _RenormTwinCritic(inputs + self.head.dim, critic_hidden, cfg.activation)


class TD3Policy(ActorCritic):
    """Actor and critics of TD3 (as in CleanRL's td3_continuous_action.py)."""

    head: DeterministicHead

    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> DeterministicHead:
        """Builds a deterministic head with exploration noise."""
        return DeterministicHead(action_space, cfg.exploration_noise, self.chunk)


class _GaussianActor(nn.Module):
    """Actor with a state-independent log-std; outputs mean and log-std, concatenated.

    Args:
        mean: Network that computes the mean.
        outputs: Width of the mean.
    """

    def __init__(self, mean: nn.Module, outputs: int) -> None:
        super().__init__()
        self.mean = mean
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, obs: Tensor) -> Tensor:
        """Returns mean and log-std `[B, 2 · outputs]` for flat observations `[B, D]`."""
        mean = self.mean(obs)
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)


class _TwinValueCritic(TwinCritic):
    """Twin critics with a state-value network.

    Args:
        obs: Width of the observation.
        dim: Width of the action.
        hidden, activation, layer_norm: Arguments of `TwinCritic`.
    """

    def __init__(self, obs: int, dim: int, hidden: list[int], activation: str, layer_norm: bool) -> None:
        super().__init__(obs + dim, hidden, activation, layer_norm)
        self.value = mlp([obs, *hidden], 1, activation, False, 1.0)


class IQLPolicy(ActorCritic):
    """Actor, critics and value network of IQL (as in CORL's iql.py). The value network is part of `critics`."""

    head: BoundedGaussianHead
    critics: _TwinValueCritic

    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> BoundedGaussianHead:
        """Builds a bounded Gaussian head."""
        return BoundedGaussianHead(action_space, self.chunk)

    def build_networks(
        self, cfg: SacModelConfig | BcModelConfig, inputs: int, hidden: list[int], critic_hidden: list[int]
    ) -> None:
        """Builds actor, critics and value network (`ActorCritic.build_networks`)."""
        self.actor = _GaussianActor(
            mlp([inputs, *hidden], self.head.dim, cfg.activation, cfg.ortho_init, 0.01), self.head.dim
        )
        self.critics = _TwinValueCritic(inputs, self.head.dim, critic_hidden, cfg.activation, cfg.critic_layer_norm)
