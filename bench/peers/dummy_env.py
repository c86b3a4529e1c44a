"""Environment without cost, which isolates the overhead of the loop around it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Dummy(gymnasium.Env[np.ndarray, np.ndarray]):
    """Environment with random observations `[17]`, actions `[6]`, reward 0 and episodes of 1000 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (17,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._obs = self.np_random.random(17, np.float32)
        return self._obs.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._obs.copy(), 0.0, False, False, {}


gymnasium.register("RlhpcDummy-v0", entry_point="bench.peers.dummy_env:Dummy", max_episode_steps=1000)
