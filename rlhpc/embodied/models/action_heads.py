"""Action distributions, implemented without torch.distributions; callers pass the noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.envs.observations import require_bounded
from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)
#: Range of the log-std of squashed Gaussians (CleanRL).
_LOG_STD = (-5.0, 2.0)
#: Levels of log-probabilities: one per component of each action `[B, chunk, d]`, one per action `[B, chunk]`, or one per
#: chunk `[B]`.
LEVELS = ("token_level", "action_level", "chunk_level")


def sum_to_level(components: Tensor, logprob_level: str, chunk: int) -> Tensor:
    """Sums values per component, `[B, chunk · d]` or `[B, chunk, d]`, to one of `LEVELS`."""
    if logprob_level == "chunk_level":
        return components.flatten(1).sum(-1)
    chunk_components = components.reshape(components.shape[0], chunk, -1)
    return chunk_components.sum(-1) if logprob_level == "action_level" else chunk_components


class CategoricalHead(nn.Module):
    """Distribution of Discrete and MultiDiscrete actions: independent categoricals over slices of the logits.

    Actions are `[B, chunk, d]` int64, where d is the number of components. `sizes` holds the number of choices of each
    component of the whole chunk.
    """

    def __init__(self, sizes: list[int], chunk: int = 1) -> None:
        super().__init__()
        self.sizes = sizes
        self.inputs = sum(sizes)
        self.chunk = chunk

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws Gumbel noise `[*shape, sum(sizes)]`; argmax(logits + noise) is a sample (Gumbel-max trick)."""
        uniform = torch.rand((*shape, self.inputs), generator=generator, device=generator.device).clamp_(min=1e-20)
        return -torch.log((-torch.log(uniform)).clamp_(min=1e-20))

    def act(self, logits: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes the most likely
        actions.
        """
        actions, logprobs, offset = [], [], 0
        for num_choices in self.sizes:
            component_logits = logits[:, offset : offset + num_choices]
            index = (
                component_logits if noise is None else component_logits + noise[:, offset : offset + num_choices]
            ).argmax(-1, keepdim=True)
            logprobs.append(torch.log_softmax(component_logits, -1).gather(-1, index))
            actions.append(index)
            offset += num_choices
        chunk_actions = (actions[0] if len(actions) == 1 else torch.cat(actions, -1)).reshape(
            logits.shape[0], self.chunk, -1
        )
        return chunk_actions, self._sum_to_level(logprobs, level)

    def evaluate(
        self, logits: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies, both at `level`."""
        flat_actions, offset = actions.reshape(actions.shape[0], -1), 0
        logprobs, entropies = [], []
        for i, num_choices in enumerate(self.sizes):
            component_logprobs = torch.log_softmax(logits[:, offset : offset + num_choices], -1)
            logprobs.append(component_logprobs.gather(-1, flat_actions[:, i : i + 1]))
            if compute_entropy:
                entropies.append(-(component_logprobs.exp() * component_logprobs).sum(-1, keepdim=True))
            offset += num_choices
        return self._sum_to_level(logprobs, level), self._sum_to_level(entropies, level) if compute_entropy else None

    def _sum_to_level(self, columns: list[Tensor], logprob_level: str) -> Tensor:
        if logprob_level == "chunk_level":  # adds the few columns one by one
            column_sum = columns[0].squeeze(-1)
            for column in columns[1:]:
                column_sum = column_sum + column.squeeze(-1)
            return column_sum
        return sum_to_level(torch.cat(columns, -1), logprob_level, self.chunk)


class GaussianHead(nn.Module):
    """Distribution of Box actions: a diagonal Gaussian with a state-independent log-std (as in CleanRL). Actions are
    `[B, chunk, d]` float32.

    The environment clips actions to its bounds; log-probabilities are computed from the unclipped actions.
    """

    def __init__(self, dim: int, log_std_init: float, chunk: int = 1) -> None:
        super().__init__()
        self.inputs = chunk * dim
        self.chunk = chunk
        self.log_std = nn.Parameter(torch.full((self.inputs,), float(log_std_init)))

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, chunk · d]`."""
        return torch.randn((*shape, self.inputs), generator=generator, device=generator.device)

    def act(self, mean: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes the mean."""
        noise = torch.zeros_like(mean) if noise is None else noise
        actions = mean + self.log_std.exp() * noise
        logprobs = sum_to_level(-0.5 * noise**2 - self.log_std - 0.5 * _LOG_2PI, level, self.chunk)
        return actions.reshape(mean.shape[0], self.chunk, -1), logprobs

    def evaluate(
        self, mean: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies, both at `level`."""
        noise = (actions.reshape(mean.shape) - mean) * (-self.log_std).exp()
        logprobs = sum_to_level(-0.5 * noise**2 - self.log_std - 0.5 * _LOG_2PI, level, self.chunk)
        if not compute_entropy:
            return logprobs, None
        return logprobs, sum_to_level((self.log_std + 0.5 + 0.5 * _LOG_2PI).unsqueeze(0), level, self.chunk).expand(
            logprobs.shape
        )


class BoundedHead(nn.Module):
    """Distribution of Box actions within their bounds, `[B, chunk, d]` float32.

    Args:
        space: Bounded Box of one slot's actions.
        chunk: Number of actions per decision.

    Attributes:
        inputs: Width of the head's input, which the network outputs.
        dim: Number of components of a chunk, chunk · d.

    Raises:
        ConfigError: The space is not a Box, or is unbounded.
    """

    low: Tensor
    high: Tensor
    inputs: int

    def __init__(self, space: Any, chunk: int = 1) -> None:
        super().__init__()
        require_bounded(space)
        self.dim = chunk * math.prod(space.shape)
        self.chunk = chunk
        for name, space_bound in (("low", space.low), ("high", space.high)):
            self.register_buffer(
                name, torch.as_tensor(space_bound, dtype=torch.float32).reshape(-1).repeat(chunk), persistent=False
            )

    @property
    def scale(self) -> Tensor:
        """Half the range of each component, `[chunk · d]`."""
        return (self.high - self.low) / 2

    @property
    def center(self) -> Tensor:
        """Middle of the range of each component, `[chunk · d]`."""
        return (self.high + self.low) / 2

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, chunk · d]`."""
        return torch.randn((*shape, self.dim), generator=generator, device=generator.device)

    def act(self, inputs: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes the
        deterministic actions.
        """
        raise NotImplementedError

    def evaluate(
        self, inputs: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies, both at `level`."""
        raise NotImplementedError

    def uniform_actions(self, noise: Tensor) -> Tensor:
        """Converts standard normal noise to actions `[B, chunk, d]` that are uniform within the bounds."""
        return self.scale_to_bounds(torch.erf(noise / math.sqrt(2)))

    def scale_to_bounds(self, unit_values: Tensor) -> Tensor:
        """Converts numbers `[B, chunk · d]` in [-1, 1] to actions `[B, chunk, d]` within the bounds."""
        return (unit_values * self.scale + self.center).unflatten(-1, (self.chunk, -1))

    def scale_to_unit(self, actions: Tensor) -> Tensor:
        """Converts actions to numbers `[B, chunk · d]` in [-1, 1]; inverts `scale_to_bounds`."""
        return (actions.flatten(1) - self.center) / self.scale


class SquashedGaussianHead(BoundedHead):
    """Scaled tanh of a diagonal Gaussian (Haarnoja et al. 2018, as in CleanRL's SAC). The network outputs the mean and
    the log-std, which is squashed into [-5, 2]. Takes the arguments of `BoundedHead`.
    """

    def __init__(self, space: Any, chunk: int = 1) -> None:
        super().__init__(space, chunk)
        self.inputs = 2 * self.dim

    def act(self, inputs: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes tanh of the
        mean.
        """
        mean, log_std = self._split(inputs)
        noise = torch.zeros_like(mean) if noise is None else noise
        unit_actions = torch.tanh(mean + log_std.exp() * noise)
        return self.scale_to_bounds(unit_actions), sum_to_level(
            self._logprobs(unit_actions, noise, log_std), level, self.chunk
        )

    def evaluate(
        self, inputs: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies of the Gaussian before tanh,
        both at `level`.
        """
        mean, log_std = self._split(inputs)
        # Keeps a small distance from the bounds, where atanh is infinite.
        unit_actions = self.scale_to_unit(actions).clamp(-1 + 1e-6, 1 - 1e-6)
        noise = (torch.atanh(unit_actions) - mean) * (-log_std).exp()
        logprobs = sum_to_level(self._logprobs(unit_actions, noise, log_std), level, self.chunk)
        return logprobs, sum_to_level(log_std + 0.5 + 0.5 * _LOG_2PI, level, self.chunk) if compute_entropy else None

    def _split(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = inputs.chunk(2, -1)
        return mean, _LOG_STD[0] + 0.5 * (_LOG_STD[1] - _LOG_STD[0]) * (torch.tanh(log_std) + 1)

    def _logprobs(self, squashed_actions: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
        log_det = torch.log(self.scale * (1 - squashed_actions**2) + 1e-6)
        return -0.5 * noise**2 - log_std - 0.5 * _LOG_2PI - log_det


class DeterministicHead(BoundedHead):
    """Scaled tanh of the network's output, with normal exploration noise (Fujimoto et al. 2018, as in CleanRL's TD3).

    Log-probabilities are computed from the noise, before actions are clipped to the bounds.

    Args:
        space, chunk: Arguments of `BoundedHead`.
        std: Standard deviation of the noise, as a fraction of half the range.
    """

    def __init__(self, space: Any, std: float, chunk: int = 1) -> None:
        super().__init__(space, chunk)
        self.inputs = self.dim
        self.std = std

    def offset_actions(self, inputs: Tensor, offset: Tensor) -> Tensor:
        """Returns the deterministic actions plus `offset`, clipped to the bounds, `[B, chunk, d]`. `offset [B, chunk · d]` is
        a fraction of half the range.
        """
        return self.scale_to_bounds((torch.tanh(inputs) + offset).clamp(-1, 1))

    def act(self, inputs: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes the
        deterministic actions.
        """
        if noise is None:
            return self.scale_to_bounds(torch.tanh(inputs)), sum_to_level(
                self._logprobs(torch.zeros_like(inputs)), level, self.chunk
            )
        return self.offset_actions(inputs, self.std * noise), sum_to_level(self._logprobs(noise), level, self.chunk)

    def evaluate(
        self, inputs: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies, both at `level`."""
        logprobs = sum_to_level(
            self._logprobs((self.scale_to_unit(actions) - torch.tanh(inputs)) / self.std), level, self.chunk
        )
        if not compute_entropy:
            return logprobs, None
        entropies = (self.std * self.scale).log() + 0.5 + 0.5 * _LOG_2PI
        return logprobs, sum_to_level(entropies.expand_as(inputs), level, self.chunk)

    def _logprobs(self, noise: Tensor) -> Tensor:
        return -0.5 * noise**2 - (self.std * self.scale).log() - 0.5 * _LOG_2PI


class BoundedGaussianHead(BoundedHead):
    """Diagonal Gaussian around the scaled tanh of the network's output (Kostrikov et al. 2022, as in CORL's IQL). The
    network outputs the mean before tanh, and the log-std relative to half the range, clamped to [-20, 2]. Takes the
    arguments of `BoundedHead`.

    Log-probabilities are computed from the Gaussian, before actions are clipped to the bounds.
    """

    def __init__(self, space: Any, chunk: int = 1) -> None:
        super().__init__(space, chunk)
        self.inputs = 2 * self.dim

    def act(self, inputs: Tensor, noise: Tensor | None, level: str = "chunk_level") -> tuple[Tensor, Tensor]:
        """Returns actions `[B, chunk, d]` and their log-probabilities at `level`. Without noise, takes the mean."""
        mean, log_std = self._split(inputs)
        noise = torch.zeros_like(mean) if noise is None else noise
        actions = self.scale_to_bounds((mean + log_std.exp() * noise).clamp(-1, 1))
        return actions, sum_to_level(self._logprobs(noise, log_std), level, self.chunk)

    def evaluate(
        self, inputs: Tensor, actions: Tensor, compute_entropy: bool, level: str = "chunk_level"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of `actions` and, if `compute_entropy`, the entropies, both at `level`."""
        mean, log_std = self._split(inputs)
        noise = (self.scale_to_unit(actions) - mean) * (-log_std).exp()
        logprobs = sum_to_level(self._logprobs(noise, log_std), level, self.chunk)
        if not compute_entropy:
            return logprobs, None
        return logprobs, sum_to_level(log_std + self.scale.log() + 0.5 + 0.5 * _LOG_2PI, level, self.chunk)

    @staticmethod
    def _split(inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = inputs.chunk(2, -1)
        return torch.tanh(mean), log_std.clamp(-20.0, 2.0)

    def _logprobs(self, noise: Tensor, log_std: Tensor) -> Tensor:
        return -0.5 * noise**2 - log_std - self.scale.log() - 0.5 * _LOG_2PI


def make_head(space: Any, log_std_init: float, chunk: int = 1) -> CategoricalHead | GaussianHead:
    """Builds the head for chunks of `chunk` actions in an action space.

    Raises:
        ConfigError: The space is not supported.
    """
    if isinstance(space, spaces.Discrete):
        return CategoricalHead([int(space.n)] * chunk, chunk)
    if isinstance(space, spaces.MultiDiscrete):
        return CategoricalHead([int(n) for n in space.nvec.reshape(-1)] * chunk, chunk)
    if isinstance(space, spaces.MultiBinary):
        return CategoricalHead([2] * int(torch.tensor(space.shape).prod()) * chunk, chunk)
    if isinstance(space, spaces.Box):
        return GaussianHead(int(torch.tensor(space.shape).prod()), log_std_init, chunk)
    raise ConfigError(f"action space {space} is not supported; supported: Discrete, MultiDiscrete, MultiBinary, Box")
