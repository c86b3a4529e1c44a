"""Actor-critics for images: policy and value share a convolutional trunk, whose features are joined with state vectors if the
observation contains them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.config.typed import changed
from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import ResnetOptions, SuccessOptions, model_options
from rlhpc.embodied.envs.observations import boxes_of, is_channel_last
from rlhpc.embodied.models.base import Obs, Policy, build_linear
from rlhpc.embodied.models.mlp import flat_numbers
from rlhpc.embodied.models.registry import MODELS
from rlhpc.runtime.errors import ConfigError

#: Minimum height and width of images in pixels; the convolutions would reduce smaller images to nothing.
_MIN_IMAGE_SIZE = 5


class ImagePolicy(Policy):
    """Actor-critic for images `[B, H, W, C]` or `[B, C, H, W]`, of integers (scaled to [0, 1] by their range) or
    floats.

    In a dict of observations each image has a separate encoder, all other entries except texts are state vectors, and
    one layer joins the features.

    Args:
        cfg, observation_space, action_space: See `Policy`.
        heads: True builds actor and critic heads; False builds only the encoder, for another policy.

    Attributes:
        hidden: Width of the features that `encode` returns.
    """

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any, heads: bool = True) -> None:
        self.has_head = heads
        super().__init__(cfg, observation_space, action_space)
        self._model_type = cfg.model_type
        self._orthogonal = cfg.ortho_init
        self._channels = model_options(ResnetOptions, cfg).channels
        self.hidden = hidden = cfg.hidden_sizes[-1] if len(cfg.hidden_sizes) else 512
        boxes = boxes_of(observation_space)
        if "" in boxes:
            self.trunk = self._build_image_encoder(boxes[""], hidden)
        else:
            self._build_encoders(boxes, hidden)
        if heads:
            self.actor = build_linear(hidden, self.head.inputs, 0.01, self._orthogonal)
            self.critic = build_linear(hidden, self.value_width, 1.0, self._orthogonal)

    @abstractmethod
    def encoder(self, channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes images `[B, channels, height, width]` as features `[B, ...]`."""

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`)."""
        hidden = self.encode(obs)
        return self.actor(hidden) if policy else None, self.critic(hidden).squeeze(-1) if value else None

    def _build_image_encoder(self, box: Any, hidden: int) -> nn.Sequential:
        shape = box.shape
        if len(shape) != 3:
            raise ConfigError(
                f"model_type {self._model_type!r} needs images [H, W, C] or [C, H, W]; observations are {tuple(shape)}"
            )
        channels, height, width = (shape[2], *shape[:2]) if is_channel_last(shape) else shape
        if min(height, width) < _MIN_IMAGE_SIZE:
            raise ConfigError(
                f"model_type {self._model_type!r} needs images of at least {_MIN_IMAGE_SIZE} pixels a side; "
                f"these are {tuple(shape)}"
            )
        encoder = self.encoder(channels, height, width)
        with torch.no_grad():
            num_features = encoder(torch.zeros(1, channels, height, width)).shape[1]
        return nn.Sequential(encoder, build_linear(num_features, hidden, math.sqrt(2), self._orthogonal), nn.ReLU())

    def _build_encoders(self, boxes: dict[str, Any], hidden: int) -> None:
        images = {key: box for key, box in boxes.items() if len(box.shape) == 3}
        if not images:
            raise ConfigError(
                f"model_type {self._model_type!r} needs images; the observations are {', '.join(boxes)}: choose mlp"
            )
        self._state_keys = [key for key, box in boxes.items() if key not in images and np.dtype(box.dtype) != np.uint8]
        num_state_values = sum(math.prod(boxes[key].shape) for key in self._state_keys)
        self.eyes = nn.ModuleDict({key: self._build_image_encoder(box, hidden) for key, box in images.items()})
        width = hidden * (len(images) + bool(num_state_values))
        if num_state_values:
            self.numbers = nn.Sequential(
                build_linear(num_state_values, hidden, math.sqrt(2), self._orthogonal), nn.ReLU()
            )
        self.join = nn.Sequential(build_linear(width, hidden, math.sqrt(2), self._orthogonal), nn.ReLU())

    def encode(self, obs: Any) -> Tensor:
        """Returns features `[B, hidden]` of observations."""
        if not isinstance(obs, dict):
            return self.trunk(_prepare_images(obs, self.observation_space))
        features = [
            image_encoder(_prepare_images(obs[key], self.observation_space[key]))
            for key, image_encoder in self.eyes.items()
        ]
        if self._state_keys:
            features.append(self.numbers(torch.cat([obs[key].flatten(1).float() for key in self._state_keys], 1)))
        return self.join(torch.cat(features, 1))


class CNNPolicy(ImagePolicy):
    """Actor-critic with the convolutions of Mnih et al. 2015, or with two smaller ones for images under 36 pixels."""

    def encoder(self, channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes an image (`ImagePolicy.encoder`)."""
        if min(height, width) >= 36:
            convolutions = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        else:
            convolutions = [(channels, 16, 3, 1), (16, 32, 3, 2)]
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, stride in convolutions:
            conv = nn.Conv2d(inputs, outputs, kernel, stride)
            if self._orthogonal:
                nn.init.orthogonal_(conv.weight, math.sqrt(2))
                conv.bias.data.zero_()  # type: ignore[union-attr]
            layers += [conv, nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten())


class Residual(nn.Module):
    """Residual block x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns features `[B, channels, H, W]` for features of the same shape."""
        return x + self.second(F.relu(self.first(F.relu(x))))


class ResNetPolicy(ImagePolicy):
    """Actor-critic with IMPALA's residual network (Espeholt et al. 2018, fig. 3): each entry of `channels` adds a
    convolution, max pooling that halves the image, and two residual blocks. The network uses no batch statistics, so
    that acting and training agree. `actor.model.kwargs` are `ResnetOptions`.
    """

    def encoder(self, channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes an image (`ImagePolicy.encoder`)."""
        layers: list[nn.Module] = []
        for outputs in self._channels:
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            layers += [Residual(outputs), Residual(outputs)]
            channels = outputs
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


def _prepare_images(images: Tensor, box: Any) -> Tensor:
    """Converts images to float `[B, C, H, W]`. A permuted view has channels-last layout, which convolutions support."""
    view = images.permute(0, 3, 1, 2) if is_channel_last(box.shape) else images
    dtype = np.dtype(box.dtype)
    return view.float() / np.iinfo(dtype).max if dtype.kind in "ui" else view.float()


def build_obs_encoder(cfg: PolicyConfig, observation_space: Any, action_space: Any, options: SuccessOptions) -> Any:
    """Builds the encoder `options.encoder` for observations with images; returns None for observations without images."""
    if not any(len(box.shape) == 3 for box in boxes_of(observation_space).values()):
        return None
    encoder_cfg = changed(cfg, "kwargs", {"channels": options.channels})
    return MODELS.find(options.encoder)(encoder_cfg, observation_space, action_space, heads=False)


def encode_obs(encoder: Any, obs: Obs) -> Tensor:
    """Returns encoded observations `[B, width]`; without an encoder, the flattened state vectors."""
    return flat_numbers(obs) if encoder is None else encoder.encode(obs)
