"""A simulator and a policy on one accelerator that is not there: `tests/stand_in_device.py`, in a folder that the environment
variable names; without it, both are on the CPU. Named in configurations as `near:…`; importable by the ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.embodied.models.mlp import MLPPolicy
from rlhpc.runtime.comm import device_memory
from tests.stand_in_device import StandIn

#: How often a row shows the same: messages of few bytes do not take the lane.
TIMES = 1500
FOLDER, ADDRESS = "RLHPC_TEST_LANE", "RLHPC_TEST_LANE_OF_POLICY"


def begin(address: str) -> StandIn | None:
    """Makes the stand-in this process's own."""
    if FOLDER in os.environ and device_memory.current_device() is None:
        device_memory.use(StandIn(Path(os.environ[FOLDER]), address))
    own: Any = device_memory.current_device()
    return own


class Wide(GymnasiumVectorEnv):
    """Shows everything many times over, on the device if it is asked to."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._device = begin("one")
        self.can_stay_on_device = self._device is not None
        box = self.observation_space
        self.observation_space = spaces.Box(-np.inf, np.inf, (TIMES * box.shape[0],), np.float32)

    def _wide(self, obs: Any) -> Any:
        wide = np.tile(obs, TIMES)
        if not self.on_device:
            return wide
        assert self._device is not None
        return self._device.tensor(torch.from_numpy(wide))

    def reset(self, seed: int | None = None) -> Any:
        obs, infos = super().reset(seed)
        return self._wide(obs), infos

    def chunk_step(self, actions: np.ndarray) -> Any:
        obs, *rest, infos = super().chunk_step(actions)
        if "final_obs" in infos:
            infos["final_obs"] = self._wide(infos["final_obs"])
        return self._wide(obs), *rest, infos


class Near(MLPPolicy):
    """Acts on the device, or on another one."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        begin(os.environ.get(ADDRESS, "one"))


class SharedDevice(StandIn):
    """Stand-in for an accelerator on which all of this process's tensors are."""

    def holds(self, tensor: torch.Tensor) -> bool:
        del tensor
        return True


class Shared(MLPPolicy):
    """Computes on the accelerator that the process was given, which it may share with another process."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        card = os.environ.get("CUDA_VISIBLE_DEVICES")
        if card and FOLDER in os.environ and device_memory.current_device() is None:
            device_memory.use(SharedDevice(Path(os.environ[FOLDER]), f"card {card}"))
