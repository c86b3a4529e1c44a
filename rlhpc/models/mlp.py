"""MLP actor-critic for state observations."""

from __future__ import annotations

import itertools
import math
from typing import Any

from torch import Tensor, nn

from rlhpc.models.base import Policy, layer
from rlhpc.models.registry import register_model
from rlhpc.runtime.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def mlp(sizes: list[int], outputs: int, activation: str, orthogonal: bool, gain: float) -> nn.Sequential:
    """Linear layers with activations between; `gain` is that of the last."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"actor.model.activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for inputs, hidden in itertools.pairwise(sizes):
        layers += [layer(inputs, hidden, math.sqrt(2), orthogonal), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, layer(sizes[-1], outputs, gain, orthogonal))


@register_model("mlp")
class MLPPolicy(Policy):
    """Separate networks for policy and value (as CleanRL's ppo.py); the observation is flattened."""

    def __init__(self, cfg: Any, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        inputs = math.prod(observation_space.shape)
        sizes = [inputs, *map(int, cfg.hidden_sizes)]
        orthogonal, activation = bool(cfg.ortho_init), str(cfg.activation)
        self.critic = mlp(sizes, 1, activation, orthogonal, 1.0)
        self.actor = mlp(sizes, self.head.inputs, activation, orthogonal, 0.01)

    def features(self, obs: Tensor, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`."""
        flat = obs.reshape(obs.shape[0], -1).float()
        return self.actor(flat) if policy else None, self.critic(flat).squeeze(-1) if value else None
