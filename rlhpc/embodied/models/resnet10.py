"""Actor-critic with a ResNet-10 for images, as in SERL (Luo et al. 2024) and RLinf's `cnn_policy`, from pretrained weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.config.model_options import Resnet10Options
from rlhpc.embodied.models.cnn import ImagePolicy
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

#: Number of channel groups of the normalisation.
_GROUPS = 4
#: Widths of the four blocks.
_WIDTHS = (64, 128, 256, 512)
#: Number of learned weightings of the last feature map.
_NUM_POOLINGS = 8
#: Mean and standard deviation of ImageNet's colours, by which pretrained networks expect images to be normalised.
_COLOR_MEAN, _COLOR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_KEY = "actor.model.kwargs.weights"


class _Block(nn.Module):
    """Residual block of two convolutions. Its parameters have torchvision's names (BasicBlock)."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(_GROUPS, num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.bn2 = nn.GroupNorm(_GROUPS, num_outputs)
        self.downsample: nn.Module | None = None
        if stride != 1:
            convolution = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.GroupNorm(_GROUPS, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return F.relu(identity + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet10(nn.Module):
    """ResNet with one block of each width and group normalisation, without the layers after the last block. Its parameters
    have torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.GroupNorm(_GROUPS, _WIDTHS[0])
        for i, (inputs, outputs) in enumerate(zip((_WIDTHS[0], *_WIDTHS), _WIDTHS, strict=False), 1):
            setattr(self, f"layer{i}", nn.Sequential(_Block(inputs, outputs, 1 if i == 1 else 2)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Returns features `[B, 512, H / 32, W / 32]` of images `[B, 3, H, W]`, whose sides are rounded up."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for i in range(1, len(_WIDTHS) + 1):
            x = getattr(self, f"layer{i}")(x)
        return x


class _CameraEncoder(nn.Module):
    """Encoder of the images of several cameras, which share a network. Learned weightings of each camera's feature map sum
    it up, so that features tell where something is (SERL's spatial embeddings).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, num_cameras: int, height: int, width: int, options: Resnet10Options) -> None:
        super().__init__()
        self.num_cameras, self._is_frozen = num_cameras, options.freeze
        self.backbone = ResNet10()
        if options.weights is not None:
            load_backbone(self.backbone, expand_home(options.weights))
        if options.freeze:
            self.backbone.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(_COLOR_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(_COLOR_STD)[:, None, None], persistent=False)
        with torch.no_grad():
            shape = self.backbone(torch.zeros(1, 3, height, width)).shape[1:]
        weights = torch.randn(num_cameras, *shape, _NUM_POOLINGS) / (shape[1] * shape[2]) ** 0.5
        self.poolings = nn.Parameter(weights)
        self.norm = nn.LayerNorm(num_cameras * shape[0] * _NUM_POOLINGS)

    def forward(self, images: Tensor) -> Tensor:
        """Returns features `[B, num_cameras * 512 * 8]` of images `[B, num_cameras * 3, H, W]`, float between 0 and 1."""
        camera_images = images.reshape(-1, 3, *images.shape[2:])
        maps = self.backbone((camera_images - self.mean) / self.std)
        if self._is_frozen:
            maps = maps.detach()
        maps = maps.reshape(-1, self.num_cameras, *maps.shape[1:])
        return self.norm(torch.einsum("bnchw,nchwf->bncf", maps, self.poolings).flatten(1))


def load_backbone(backbone: ResNet10, path: Path) -> None:
    """Loads pretrained weights; those of a classifier (`fc`) are left out.

    Raises:
        ConfigError: The file cannot be read, or has other weights.
    """
    if path.suffix == ".safetensors":
        tensors: Any = load_tensors(path)
    else:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise ConfigError(f"{_KEY} is {str(path)!r}, which cannot be read: {error.strerror or error}") from None
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{_KEY} is {str(path)!r}, which is no file of torch's weights: {reason}") from None
    expected_tensors = backbone.state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    for name in sorted(expected_tensors.keys() | tensors.keys()):
        shapes = [
            tuple(state_dict[name].shape) if name in state_dict else None for state_dict in (expected_tensors, tensors)
        ]
        if shapes[0] != shapes[1]:
            problem = "which it lacks" if shapes[1] is None else f"whose shape is {shapes[1]} there"
            problem = problem if shapes[0] is not None else "which a ResNet-10 does not have"
            raise ConfigError(
                f"{_KEY} is {str(path)!r}, which has no weights of a ResNet-10: they differ in {name!r}, {problem}"
            )
    backbone.load_state_dict(tensors)


class ResNet10Policy(ImagePolicy):
    """Actor-critic for RGB images of one or several cameras with a ResNet-10. Images of several cameras, or of several times,
    follow one another in the channels. `actor.model.kwargs` are `Resnet10Options`.
    """

    options_type = Resnet10Options
    start_options = ("weights",)

    def encoder(self, num_channels: int, height: int, width: int) -> nn.Sequential:
        """Builds the network that encodes images (`ImagePolicy.encoder`).

        Raises:
            ConfigError: The number of channels is not a multiple of 3.
        """
        if num_channels % 3:
            raise ConfigError(
                f"model_type resnet10 needs RGB images; these have {num_channels} channels: choose resnet or cnn"
            )
        return nn.Sequential(_CameraEncoder(num_channels // 3, height, width, self._options))
