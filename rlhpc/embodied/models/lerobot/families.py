"""LeRobot's policies by family."""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.lerobot.act import ActPolicy
from rlhpc.embodied.models.lerobot.base import LerobotPolicy
from rlhpc.embodied.models.lerobot.diffusion import DiffusionPolicy
from rlhpc.embodied.models.lerobot.folder import describe
from rlhpc.embodied.models.lerobot.pi import PiPolicy
from rlhpc.embodied.models.lerobot.smolvla import SmolVlaPolicy

_KINDS: dict[str, type[LerobotPolicy]] = {
    "act": ActPolicy, "diffusion": DiffusionPolicy, "smolvla": SmolVlaPolicy, "pi0": PiPolicy, "pi05": PiPolicy,
}  # fmt: skip


def lerobot_policy(cfg: ModelConfig, observation_space: Any, action_space: Any) -> LerobotPolicy:
    """The policy of the folder `actor.model.model_path`, of any family that is here.

    Raises:
        ConfigError: It cannot be loaded, or is of another task.
    """
    return _KINDS[describe(cfg, observation_space, action_space).family](cfg, observation_space, action_space)
