"""How a network sees numbers, or images by a convolutional encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.mlp import flat_numbers
from rlhpc.embodied.models.registry import MODELS


def encoder_of(cfg: PolicyConfig, observation_space: Any, action_space: Any, options: Mapping[str, Any]) -> Any:
    """The encoder of observations with images, of the kind that `options` names (`encoder`: cnn or resnet); None where there
    are numbers alone."""
    if not any(len(box.shape) == 3 for box in boxes_of(observation_space).values()):
        return None
    return MODELS.find(str(options.get("encoder", "cnn")))(cfg, observation_space, action_space, heads=False)


def seen_by(encoder: Any, obs: PolicyObs) -> Tensor:
    """What is seen of observations, `[B, width]`: their numbers, where there is no encoder."""
    found: Tensor = flat_numbers(obs) if encoder is None else encoder.see(obs)
    return found
