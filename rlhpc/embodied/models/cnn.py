"""Networks of images: actor-critics whose policy and value share a convolutional trunk, whose features are joined with state
vectors if the observation contains them; the encoder of off-policy learning; and random shifts of images.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.config.options import NoOptions
from rlhpc.config.typed import with_value
from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import EncoderOptions, ResnetOptions, model_options
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
        has_heads: True builds actor and critic heads; False builds only the encoder, for another policy.

    Attributes:
        hidden: Width of the features that `encode` returns.
    """

    #: Dataclass of `actor.model.kwargs`.
    options_type: type[Any] = NoOptions

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any, has_heads: bool = True) -> None:
        self.has_head = has_heads
        super().__init__(cfg, observation_space, action_space)
        self._model_type = cfg.model_type
        self._orthogonal = cfg.ortho_init
        self._options = model_options(self.options_type, cfg)
        self.hidden = hidden_size = cfg.hidden_sizes[-1] if len(cfg.hidden_sizes) else 512
        boxes = boxes_of(observation_space)
        if "" in boxes:
            self.trunk = self._build_image_encoder(boxes[""], hidden_size)
        else:
            self._build_encoders(boxes, hidden_size)
        if has_heads:
            self.actor = build_linear(hidden_size, self.head.inputs, 0.01, self._orthogonal)
            self.critic = build_linear(hidden_size, self.value_width, 1.0, self._orthogonal)

    @abstractmethod
    def encoder(self, num_channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes images `[B, channels, height, width]` as features `[B, ...]`."""

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input and the values (`Policy.features`)."""
        features = self.encode(obs)
        return self.actor(features) if policy else None, self.critic(features).squeeze(-1) if value else None

    def _build_image_encoder(self, box: Any, hidden_size: int) -> nn.Sequential:
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
        return nn.Sequential(
            encoder, build_linear(num_features, hidden_size, math.sqrt(2), self._orthogonal), nn.ReLU()
        )

    def _build_encoders(self, boxes: dict[str, Any], hidden_size: int) -> None:
        images = {key: box for key, box in boxes.items() if len(box.shape) == 3}
        if not images:
            raise ConfigError(
                f"model_type {self._model_type!r} needs images; the observations are {', '.join(boxes)}: choose mlp"
            )
        self._state_keys = [key for key, box in boxes.items() if key not in images and np.dtype(box.dtype) != np.uint8]
        num_state_values = sum(math.prod(boxes[key].shape) for key in self._state_keys)
        self.eyes = nn.ModuleDict({key: self._build_image_encoder(box, hidden_size) for key, box in images.items()})
        width = hidden_size * (len(images) + bool(num_state_values))
        if num_state_values:
            self.numbers = nn.Sequential(
                build_linear(num_state_values, hidden_size, math.sqrt(2), self._orthogonal), nn.ReLU()
            )
        self.join = nn.Sequential(build_linear(width, hidden_size, math.sqrt(2), self._orthogonal), nn.ReLU())

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

    def encoder(self, num_channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes an image (`ImagePolicy.encoder`)."""
        if min(height, width) >= 36:
            convolutions = [(num_channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        else:
            convolutions = [(num_channels, 16, 3, 1), (16, 32, 3, 2)]
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

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(num_channels, num_channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns features `[B, channels, H, W]` for features of the same shape."""
        return x + self.second(F.relu(self.first(F.relu(x))))


class ResNetPolicy(ImagePolicy):
    """Actor-critic with IMPALA's residual network (Espeholt et al. 2018, fig. 3): each entry of `channels` adds a
    convolution, max pooling that halves the image, and two residual blocks. The network uses no batch statistics, so
    that acting and training agree. `actor.model.kwargs` are `ResnetOptions`.
    """

    options_type = ResnetOptions

    def encoder(self, num_channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes an image (`ImagePolicy.encoder`)."""
        layers: list[nn.Module] = []
        for outputs in self._options.channels:
            layers += [nn.Conv2d(num_channels, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            layers += [Residual(outputs), Residual(outputs)]
            num_channels = outputs
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


def _prepare_images(images: Tensor, box: Any) -> Tensor:
    """Converts images to float `[B, C, H, W]`. A permuted view has channels-last layout, which convolutions support."""
    channels_first = images.permute(0, 3, 1, 2) if is_channel_last(box.shape) else images
    dtype = np.dtype(box.dtype)
    return channels_first.float() / np.iinfo(dtype).max if dtype.kind in "ui" else channels_first.float()


def build_obs_encoder(cfg: PolicyConfig, observation_space: Any, action_space: Any, options: EncoderOptions) -> Any:
    """Builds the encoder `options.encoder` for observations with images; returns None for observations without images."""
    if not has_images(observation_space):
        return None
    encoder_type = MODELS.find(options.encoder)
    encoder_options = {
        option_field.name: getattr(options, option_field.name) for option_field in fields(encoder_type.options_type)
    }
    return encoder_type(with_value(cfg, "kwargs", encoder_options), observation_space, action_space, has_heads=False)


def encode_obs(encoder: Any, obs: Obs) -> Tensor:
    """Returns encoded observations `[B, width]`; without an encoder, the flattened state vectors."""
    return flat_numbers(obs) if encoder is None else encoder.encode(obs)


def has_images(space: Any) -> bool:
    """Returns whether an observation space has images."""
    return any(len(box.shape) == 3 for box in boxes_of(space).values())


class ImageEncoder(nn.Module):
    """Encoder of observations with images as features between −1 and 1: a policy's convolutional network, layer norm and tanh,
    as in DrQ (Yarats et al. 2021) and SERL (Luo et al. 2024).

    Args:
        cfg, observation_space, action_space: See `Policy`.
        options: Network of the images, and its options.

    Attributes:
        width: Number of features.
    """

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any, options: EncoderOptions) -> None:
        super().__init__()
        self.images = build_obs_encoder(cfg, observation_space, action_space, options)
        self.width: int = self.images.hidden
        self.norm = nn.LayerNorm(self.width)

    def forward(self, obs: Obs) -> Tensor:
        """Returns features `[B, width]` of observations."""
        return torch.tanh(self.norm(self.images.encode(obs)))


def shift_images(obs: Obs, space: Any, offsets: Tensor, max_shift: int) -> Obs:
    """Shifts the images of observations, whose edges are continued (DrQ's random crop of a padded image).

    Args:
        obs: Observations of `space`; other entries than images stay unchanged.
        space: Observation space of a slot.
        offsets: Offsets `[B, 2]` of rows and columns, 0 to twice `max_shift`; `max_shift` leaves an image as it is. All
            images of an observation have the same offset.
        max_shift: Maximum shift in pixels.
    """
    if not isinstance(obs, dict):
        return _shift(obs, offsets, max_shift) if len(space.shape) == 3 else obs
    return {
        name: _shift(array, offsets, max_shift) if len(space[name].shape) == 3 else array for name, array in obs.items()
    }


def _shift(images: Tensor, offsets: Tensor, max_shift: int) -> Tensor:
    is_last = is_channel_last(images.shape[1:])
    height, width = images.shape[1:3] if is_last else images.shape[2:4]
    rows, columns = (
        (torch.arange(axis_size, device=images.device) + offsets[:, i : i + 1] - max_shift).clamp_(0, axis_size - 1)
        for i, axis_size in enumerate((height, width))
    )
    batch = torch.arange(len(images), device=images.device)
    if is_last:
        return images[batch[:, None, None], rows[:, :, None], columns[:, None, :]]
    channels = torch.arange(images.shape[1], device=images.device)
    return images[
        batch[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]
