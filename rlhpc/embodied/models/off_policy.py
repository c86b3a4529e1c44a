"""Actor and Q-networks for off-policy learning from state vectors, or from images through an encoder that both share.

The encoder is part of the critics: their losses train it, and the actor gets its features without a gradient. Target networks
of the critics have a separate encoder.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.config import BcModelConfig, SacModelConfig
from rlhpc.embodied.config.model_options import CrossqOptions, EncoderOptions, model_options
from rlhpc.embodied.models.action_heads import BoundedGaussianHead, BoundedHead, DeterministicHead, SquashedGaussianHead
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.cnn import ImageEncoder, has_images, shift_images
from rlhpc.embodied.models.mlp import ACTIVATIONS, mlp
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.flat_parameters import Reduce

#: Constants from CrossQ's code: term added to variances, and bounds of the correction.
_EPS, _R_MAX, _D_MAX = 1e-3, 3.0, 5.0


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
    statistics after some batches; evaluation uses the running statistics.

    Args:
        width: Width of a row.
        rate, warmup: `actor.model.kwargs.renorm_rate` and `renorm_warmup`.

    Attributes:
        reduce: Sums a tensor over the ranks, in place; None for a single rank.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(
        self, width: int, rate: float = CrossqOptions.renorm_rate, warmup: int = CrossqOptions.renorm_warmup
    ) -> None:
        super().__init__()
        self.rate, self.warmup = rate, warmup
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.reduce: Reduce | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the normalised rows, and updates the running statistics in training."""
        if not self.training:
            return (rows - self.mean) * (self.variance + _EPS).rsqrt() * self.weight + self.bias
        mean, variance = self._compute_batch_statistics(rows)
        normalized_rows = (rows - mean) * (variance + _EPS).rsqrt()
        # Chosen on the device, because reading the count would wait for it.
        corrected_rows = self._correct(normalized_rows, mean.detach(), variance.detach())
        normalized_rows = torch.where(self.batches >= self.warmup, corrected_rows, normalized_rows)
        with torch.no_grad():
            self.mean.lerp_(mean, self.rate)
            self.variance.lerp_(variance, self.rate)
            self.batches += 1
        return normalized_rows * self.weight + self.bias

    def _correct(self, normalized_rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Corrects rows that were normalised by batch statistics towards normalisation by the running statistics."""
        running_std = (self.variance + _EPS).sqrt()
        scale_ratio = ((variance + _EPS).sqrt() / running_std).clamp(1 / _R_MAX, _R_MAX)
        return normalized_rows * scale_ratio + ((mean - self.mean) / running_std).clamp(-_D_MAX, _D_MAX)

    def _compute_batch_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and variance over the rows of all ranks."""
        if self.reduce is None:
            variance, mean = torch.var_mean(rows, 0, correction=0)
            return mean, variance
        sums_and_count: Tensor = _SumOverRanks.apply(
            torch.cat((rows.sum(0), rows.new_full((1,), rows.shape[0]))), self.reduce
        )
        mean = sums_and_count[:-1] / sums_and_count[-1]
        return mean, _SumOverRanks.apply((rows - mean).square().sum(0), self.reduce) / sums_and_count[-1].detach()


def _build_renorm_mlp(layer_sizes: list[int], outputs: int, activation: str, options: CrossqOptions) -> nn.Sequential:
    """Builds a perceptron with batch renormalisation before each linear layer."""

    def build_renorm(width: int) -> BatchRenorm:
        return BatchRenorm(width, options.renorm_rate, options.renorm_warmup)

    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(layer_sizes):
        layers += [build_renorm(num_inputs), nn.Linear(num_inputs, num_outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, build_renorm(layer_sizes[-1]), nn.Linear(layer_sizes[-1], outputs))


class _RenormTwinCritic(nn.Module):
    """Pair of Q-networks with batch renormalisation.

    Args:
        inputs: Total width of features and action.
        hidden_sizes: Widths of the hidden layers.
        activation: Name of the activation.
        options: Options of the renormalisation.
    """

    def __init__(self, inputs: int, hidden_sizes: list[int], activation: str, options: CrossqOptions) -> None:
        super().__init__()
        self.one, self.two = (
            _build_renorm_mlp([inputs, *hidden_sizes], 1, activation, options),
            _build_renorm_mlp([inputs, *hidden_sizes], 1, activation, options),
        )

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns Q-values `[2, B]` of features `[B, D]` and actions `[B, d]`."""
        rows = torch.cat((features, actions), -1)
        return torch.stack((self.one(rows).squeeze(-1), self.two(rows).squeeze(-1)))


def _count_obs_values(space: Any, model_type: str) -> int:
    """Returns the number of values in an observation.

    Raises:
        ConfigError: The observation contains something else.
    """
    boxes: dict[str, Any] = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for name, box in boxes.items():
        if not isinstance(box, spaces.Box) or len(box.shape) > 2:
            raise ConfigError(
                f"actor.model.model_type {model_type!r} takes observations of numbers and images; "
                f"{name or 'the observation'} is {box}"
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
        input_size: Total width of observation and action.
        hidden_sizes: Widths of the hidden layers.
        activation: Name of the activation.
        layer_norm: True applies layer norm in every hidden layer (RLPD, Ball et al. 2023).
    """

    def __init__(self, input_size: int, hidden_sizes: list[int], activation: str, layer_norm: bool) -> None:
        super().__init__()
        activation_class = ACTIVATIONS[activation]
        self.first = nn.Linear(input_size, 2 * hidden_sizes[0])
        self.width = hidden_sizes[0]

        def build_hidden_layers() -> nn.Sequential:
            layers: list[nn.Module] = [nn.LayerNorm(hidden_sizes[0])] if layer_norm else []
            layers.append(activation_class())
            for num_inputs, num_outputs in itertools.pairwise(hidden_sizes):
                layers.append(nn.Linear(num_inputs, num_outputs))
                layers += [nn.LayerNorm(num_outputs), activation_class()] if layer_norm else [activation_class()]
            return nn.Sequential(*layers, nn.Linear(hidden_sizes[-1], 1))

        self.one, self.two = build_hidden_layers(), build_hidden_layers()

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns Q-values `[2, B]` of features `[B, D]` and actions `[B, d]`."""
        first_hidden, second_hidden = self.first(torch.cat((features, actions), -1)).split(self.width, -1)
        return torch.stack((self.one(first_hidden).squeeze(-1), self.two(second_hidden).squeeze(-1)))


class EnsembleCritic(nn.Module):
    """Any number of Q-networks, computed by batched matrix products.

    Args:
        input_size: Total width of features and action.
        hidden_sizes: Widths of the hidden layers.
        activation: Name of the activation.
        layer_norm: True applies layer norm in every hidden layer.
        num_critics: Number of networks.
    """

    def __init__(
        self, input_size: int, hidden_sizes: list[int], activation: str, layer_norm: bool, num_critics: int
    ) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation]()
        layer_sizes = list(itertools.pairwise((input_size, *hidden_sizes, 1)))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.gains, self.offsets = nn.ParameterList(), nn.ParameterList()
        for num_inputs, num_outputs in layer_sizes:
            weight_bound = num_inputs**-0.5  # as nn.Linear
            self.weights.append(
                nn.Parameter(torch.empty(num_critics, num_inputs, num_outputs).uniform_(-weight_bound, weight_bound))
            )
            self.biases.append(
                nn.Parameter(torch.empty(num_critics, 1, num_outputs).uniform_(-weight_bound, weight_bound))
            )
        for width in hidden_sizes if layer_norm else ():
            self.gains.append(nn.Parameter(torch.ones(num_critics, 1, width)))
            self.offsets.append(nn.Parameter(torch.zeros(num_critics, 1, width)))

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns Q-values `[count, B]` of features `[B, D]` and actions `[B, d]`."""
        rows = torch.cat((features, actions), -1).expand(len(self.weights[0]), -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if i:
                if len(self.gains):
                    rows = nn.functional.layer_norm(rows, rows.shape[-1:]) * self.gains[i - 1] + self.offsets[i - 1]
                rows = self._activation(rows)
            rows = torch.baddbmm(bias, rows, weight)
        return rows.squeeze(-1)


class ActorCritic(Policy):
    """Actor with Q-networks. The value of an observation is the smallest Q-value of the actor's deterministic action.

    `actor.model.kwargs` are `EncoderOptions`, for observations with images.

    Raises:
        ConfigError: `actor.model.hidden_sizes` is empty.
    """

    head: BoundedHead  # type: ignore[assignment]
    has_head = False  # this class builds the head itself
    start_options = ("weights",)
    #: Dataclass of `actor.model.kwargs`.
    options_type: type[EncoderOptions] = EncoderOptions
    #: Name prefixes of the weights that acting needs.
    acting_prefixes: tuple[str, ...] = ("actor.",)

    def __init__(self, cfg: SacModelConfig | BcModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = self.build_head(cfg, action_space)
        hidden_sizes = list(cfg.hidden_sizes)
        if not hidden_sizes:
            raise ConfigError(
                f"actor.model.hidden_sizes is empty; model_type {cfg.model_type!r} needs at least one layer"
            )
        options, encoder = model_options(self.options_type, cfg), None
        if has_images(observation_space):
            encoder = ImageEncoder(cfg, observation_space, action_space, options)
            self.acting_prefixes = (*self.acting_prefixes, "critics.encoder.")
        width = _count_obs_values(observation_space, cfg.model_type) if encoder is None else encoder.width
        self.build_networks(cfg, width, hidden_sizes, list(cfg.critic_hidden_sizes or hidden_sizes))
        #: Encoder of images; None for observations of numbers.
        self.encodes_images = encoder is not None
        if encoder is not None:
            self.critics.add_module("encoder", encoder)

    def build_networks(
        self,
        cfg: SacModelConfig | BcModelConfig,
        num_inputs: int,
        hidden_sizes: list[int],
        critic_hidden_sizes: list[int],
    ) -> None:
        """Builds `actor` and `critics` for features of width `num_inputs`."""
        self.actor: nn.Module = mlp([num_inputs, *hidden_sizes], self.head.inputs, cfg.activation, cfg.ortho_init, 0.01)
        arguments = (num_inputs + self.head.dim, critic_hidden_sizes, cfg.activation, cfg.critic_layer_norm)
        self.critics: nn.Module = (
            TwinCritic(*arguments) if cfg.num_q_heads == 2 else EnsembleCritic(*arguments, cfg.num_q_heads)
        )

    @abstractmethod
    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> BoundedHead:
        """Builds the head that turns the actor's outputs into actions within their bounds."""

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`)."""
        encoding = self.encode(self.prepare(obs))
        inputs = self.actor(encoding)
        if not value:
            return inputs, None
        actions = self.head.act(inputs, None)[0].flatten(1)
        return inputs if policy else None, self.critics(encoding, actions).amin(0)

    def prepare(self, obs: Any, shifts: Tensor | None = None, limit: int = 0) -> Any:
        """Returns observations in the form that `encode` takes: flat rows, or observations with images, which are shifted by
        offsets `[B, 2]` (`shift_images`).
        """
        if not self.encodes_images:
            return flatten(obs)
        return obs if shifts is None else shift_images(obs, self.observation_space, shifts, limit)

    def encode(self, obs: Any, critics: nn.Module | None = None) -> Tensor:
        """Returns features `[B, D]` of prepared observations.

        Args:
            obs: Result of `prepare`.
            critics: Network whose encoder is used, such as the target network of the critics; None for `critics`.
        """
        if not self.encodes_images:
            flat_obs: Tensor = obs
            return flat_obs
        encoder: Any = (self.critics if critics is None else critics).encoder
        features: Tensor = encoder(obs)
        return features

    def executed(self, obs: Any, actions: Tensor) -> Tensor:
        """Returns the actions `[B, chunk, dim]` that the environment executes for the actor's `actions`; by default,
        `actions`.
        """
        del obs
        return actions

    def acting_weights(self) -> list[tuple[str, Tensor]]:
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
    layer. `actor.model.kwargs` are `CrossqOptions`.
    """

    options_type = CrossqOptions

    def build_networks(
        self,
        cfg: SacModelConfig | BcModelConfig,
        num_inputs: int,
        hidden_sizes: list[int],
        critic_hidden_sizes: list[int],
    ) -> None:
        """Builds renormalised networks (`ActorCritic.build_networks`)."""
        options = model_options(CrossqOptions, cfg)
        self.actor = (
            _build_renorm_mlp([num_inputs, *hidden_sizes], self.head.inputs, cfg.activation, options)
            if options.actor_renorm
            else mlp([num_inputs, *hidden_sizes], self.head.inputs, cfg.activation, cfg.ortho_init, 0.01)
        )
        critic_activation = options.critic_activation or cfg.activation
        self.critics = _RenormTwinCritic(num_inputs + self.head.dim, critic_hidden_sizes, critic_activation, options)


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
        num_outputs: Width of the mean.
    """

    def __init__(self, mean: nn.Module, num_outputs: int) -> None:
        super().__init__()
        self.mean = mean
        self.log_std = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Returns mean and log-std `[B, 2 · outputs]` for features `[B, D]`."""
        mean = self.mean(features)
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)


class _TwinValueCritic(TwinCritic):
    """Twin critics with a state-value network.

    Args:
        obs_dim: Width of the observation.
        dim: Width of the action.
        hidden_sizes, activation, layer_norm: Arguments of `TwinCritic`.
    """

    def __init__(self, obs_dim: int, dim: int, hidden_sizes: list[int], activation: str, layer_norm: bool) -> None:
        super().__init__(obs_dim + dim, hidden_sizes, activation, layer_norm)
        self.value = mlp([obs_dim, *hidden_sizes], 1, activation, False, 1.0)


class IQLPolicy(ActorCritic):
    """Actor, critics and value network of IQL (as in CORL's iql.py). The value network is part of `critics`."""

    head: BoundedGaussianHead
    critics: _TwinValueCritic

    def build_head(self, cfg: SacModelConfig | BcModelConfig, action_space: Any) -> BoundedGaussianHead:
        """Builds a bounded Gaussian head."""
        return BoundedGaussianHead(action_space, self.chunk)

    def build_networks(
        self,
        cfg: SacModelConfig | BcModelConfig,
        num_inputs: int,
        hidden_sizes: list[int],
        critic_hidden_sizes: list[int],
    ) -> None:
        """Builds actor, critics and value network (`ActorCritic.build_networks`)."""
        self.actor = _GaussianActor(
            mlp([num_inputs, *hidden_sizes], self.head.dim, cfg.activation, cfg.ortho_init, 0.01), self.head.dim
        )
        self.critics = _TwinValueCritic(
            num_inputs, self.head.dim, critic_hidden_sizes, cfg.activation, cfg.critic_layer_norm
        )
