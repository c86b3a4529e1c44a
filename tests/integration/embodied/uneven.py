"""CartPole whose last slots stand still in every rollout until the first slots have played it to its end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.envs.base import Step
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv

DECISIONS = 16


class Held(GymnasiumVectorEnv):
    """The env rank with the first slot tells by a file which rollout it has played, and the one with the last slot waits for
    that at its first step.

    Where who acts waits for all of them, nobody comes to that rollout's end.
    """

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        self._first, self._last, self._made = slot_offset == 0, slot_offset + num_envs == cfg.num_envs, 0
        self._folder = os.environ.get("RLHPC_TEST_HELD")

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        rollout, t = divmod(self._made, DECISIONS)
        self._made += 1
        if self._folder and self._last and t == 0:
            end = time.monotonic() + 60
            while not (Path(self._folder) / str(rollout)).exists():
                assert time.monotonic() < end, f"the others do not play rollout {rollout} without this rank"
                time.sleep(0.002)
        found = super().step(actions)
        if self._folder and self._first and t == DECISIONS - 1:
            (Path(self._folder) / str(rollout)).touch()
        return found
