"""MLP actor-critic for state observations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import MlpOptions, model_options
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.base import Policy, build_linear
from rlhpc.embodied.models.normalization import ObservationNormaliser
from rlhpc.runtime.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def mlp(sizes: list[int], outputs: int, activation: str, is_orthogonal: bool, gain: float) -> nn.Sequential:
    """Builds linear layers with activations between them; `gain` is the gain of the last layer's orthogonal weights.

    Raises:
        ConfigError: The activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"actor.model.activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        layers += [build_linear(num_inputs, num_outputs, math.sqrt(2), is_orthogonal), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, build_linear(sizes[-1], outputs, gain, is_orthogonal))


def normalizes_observations(cfg: PolicyConfig) -> bool:
    """Returns `actor.model.normalize_observations`; False if the section lacks the key (off-policy runs, older
    versions).
    """
    return bool(getattr(cfg, "normalize_observations", False))


def flat_width(space: Any) -> int:
    """Returns the number of values in a flattened observation.

    Raises:
        ConfigError: An entry of a dict observation is an image or a text.
    """
    boxes = boxes_of(space)
    for key, box in boxes.items():
        if key and np.dtype(box.dtype) == np.uint8:
            raise ConfigError(
                f"actor.model: the observation {key!r} is an image or a text, and only numbers are wanted; choose cnn or "
                "resnet, or wrap the environment (env.train.wrappers)"
            )
    return sum(math.prod(box.shape) for box in boxes.values())


def flat_numbers(obs: Any) -> Tensor:
    """Flattens observations to floats `[B, flat_width]`; concatenates several observations in the order of their names."""
    arrays = [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]
    rows = [array.reshape(array.shape[0], -1).float() for array in arrays]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


class MLPPolicy(Policy):
    """Actor-critic with separate networks for policy and value (as in CleanRL's ppo.py). Observations are flattened and
    concatenated in the order of their names. `actor.model.kwargs` are `MlpOptions`.
    """

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = model_options(MlpOptions, cfg)
        inputs = flat_width(observation_space)
        if normalizes_observations(cfg):
            self.normaliser = ObservationNormaliser(inputs)
        layer_sizes = [inputs, *cfg.hidden_sizes]
        is_orthogonal, activation = cfg.ortho_init, cfg.activation
        self.critic = mlp(layer_sizes, self.value_width, activation, is_orthogonal, options.critic_gain)
        self.actor = mlp(layer_sizes, self.head.inputs, activation, is_orthogonal, options.actor_gain)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`)."""
        flat_obs = flat_numbers(obs)
        if self.normaliser is not None:
            flat_obs = self.normaliser(flat_obs)
        return self.actor(flat_obs) if policy else None, self.critic(flat_obs).squeeze(-1) if value else None
