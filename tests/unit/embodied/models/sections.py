"""Configuration sections of small policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf

from rlhpc.embodied.config import ModelConfig

STATE = spaces.Box(-1, 1, (5,), np.float32)


def section(**changes: Any) -> DictConfig:
    return OmegaConf.structured(ModelConfig(**{"hidden_sizes": [16, 16], **changes}))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
