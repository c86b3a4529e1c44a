"""SAC's networks for state observations: a squashed Gaussian actor and twin critics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.config import BcModelConfig, SacModelConfig
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.heads import SquashedGaussianHead
from rlhpc.embodied.models.mlp import ACTIVATIONS, mlp
from rlhpc.runtime.errors import ConfigError


def flat_width(space: Any) -> int:
    """Numbers in an observation.

    Raises:
        ConfigError: It has images.
    """
    boxes: dict[str, Any] = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for name, box in boxes.items():
        if not isinstance(box, spaces.Box) or len(box.shape) > 2:
            raise ConfigError(
                f"actor.model.model_type 'sac' takes observations of numbers; {name or 'the observation'} is {box}"
            )
    return sum(math.prod(box.shape) for box in boxes.values())


def flatten(obs: Any) -> Tensor:
    """Observations as float rows `[B, D]`; several, by name, one after the other."""
    parts = [obs[name] for name in sorted(obs)] if isinstance(obs, dict) else [obs]
    rows = [part.flatten(1) if part.is_floating_point() else part.flatten(1).float() for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


class TwinCritic(nn.Module):
    """Two Q-networks. Their first layers are one wide layer, the others two products: on a CPU that is faster than
    batched products, forward and backward.

    Args:
        inputs: Width of observation and action.
        hidden: Widths of the hidden layers.
        activation: Its name.
        layer_norm: Normalises after every hidden layer (RLPD, Ball et al. 2023).
    """

    def __init__(self, inputs: int, hidden: list[int], activation: str, layer_norm: bool) -> None:
        super().__init__()
        kind = ACTIVATIONS[activation]
        self.first = nn.Linear(inputs, 2 * hidden[0])
        self.width = hidden[0]

        def rest() -> nn.Sequential:
            layers: list[nn.Module] = [nn.LayerNorm(hidden[0])] if layer_norm else []
            layers.append(kind())
            for wide, narrow in itertools.pairwise(hidden):
                layers.append(nn.Linear(wide, narrow))
                layers += [nn.LayerNorm(narrow), kind()] if layer_norm else [kind()]
            return nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

        self.one, self.two = rest(), rest()

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values `[2, B]` of flat observations `[B, D]` and actions `[B, d]`."""
        first, second = self.first(torch.cat((obs, actions), -1)).split(self.width, -1)
        return torch.stack((self.one(first).squeeze(-1), self.two(second).squeeze(-1)))


class SACPolicy(Policy):
    """Actor and critics of SAC (as CleanRL's sac_continuous_action.py). The value that it gives an observation is the
    smaller of the critics' values of the actor's deterministic action."""

    head: SquashedGaussianHead  # type: ignore[assignment]

    def __init__(self, cfg: SacModelConfig | BcModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = SquashedGaussianHead(action_space, self.chunk)
        hidden, activation = list(cfg.hidden_sizes), cfg.activation
        if not hidden:
            raise ConfigError("actor.model.hidden_sizes is empty; model_type 'sac' needs at least one layer")
        inputs = flat_width(observation_space)
        self.actor = mlp([inputs, *hidden], self.head.inputs, activation, cfg.ortho_init, 0.01)
        self.critics = TwinCritic(inputs + self.head.dim, hidden, activation, cfg.critic_layer_norm)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """The head's input and the values (`Policy.features`)."""
        flat = flatten(obs)
        inputs = self.actor(flat)
        if not value:
            return inputs, None
        actions = self.head.act(inputs, None)[0].flatten(1)
        return inputs if policy else None, self.critics(flat, actions).amin(0)

    def acting(self) -> list[tuple[str, Tensor]]:
        """The weights that acting needs."""
        return [(name, tensor) for name, tensor in self.state_dict().items() if name.startswith("actor.")]
