"""CNN actor-critic for image observations (Mnih et al. 2015's network, one trunk for policy and value)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.models.base import Policy, layer
from rlhpc.models.registry import register_model
from rlhpc.runtime.errors import ConfigError

#: Below this, nothing is left after the convolutions.
_SMALLEST = 5


@register_model("cnn")
class CNNPolicy(Policy):
    """Images `[B, H, W, C]` or `[B, C, H, W]`, uint8 (scaled to 0..1) or float."""

    def __init__(self, cfg: Any, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        shape = observation_space.shape
        if len(shape) != 3:
            raise ConfigError(f"model_type 'cnn' needs images [H, W, C] or [C, H, W]; observations are {tuple(shape)}")
        self._channel_last = shape[-1] <= shape[0]
        channels = shape[-1] if self._channel_last else shape[0]
        height, width = (shape[0], shape[1]) if self._channel_last else (shape[1], shape[2])
        if min(height, width) < _SMALLEST:
            raise ConfigError(
                f"model_type 'cnn' needs images of at least {_SMALLEST} pixels a side; these are {tuple(shape)}"
            )
        self._integers = observation_space.dtype.kind in "ui"
        orthogonal = bool(cfg.ortho_init)
        if min(height, width) >= 36:
            convolutions = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        else:
            convolutions = [(channels, 16, 3, 1), (16, 32, 3, 2)]
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, stride in convolutions:
            conv = nn.Conv2d(inputs, outputs, kernel, stride)
            if orthogonal:
                nn.init.orthogonal_(conv.weight, math.sqrt(2))
                conv.bias.data.zero_()  # type: ignore[union-attr]
            layers += [conv, nn.ReLU()]
        trunk = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            width_out = trunk(torch.zeros(1, channels, height, width)).shape[1]
        hidden = int(list(cfg.hidden_sizes)[-1]) if len(cfg.hidden_sizes) else 512
        self.trunk = nn.Sequential(trunk, layer(width_out, hidden, math.sqrt(2), orthogonal), nn.ReLU())
        self.actor = layer(hidden, self.head.inputs, 0.01, orthogonal)
        self.critic = layer(hidden, self.value_width, 1.0, orthogonal)

    def features(self, obs: Tensor, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`."""
        images = obs.permute(0, 3, 1, 2) if self._channel_last else obs
        hidden = self.trunk(images.float() / 255 if self._integers else images.float())
        return self.actor(hidden) if policy else None, self.critic(hidden).squeeze(-1) if value else None
