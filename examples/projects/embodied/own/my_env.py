"""Environment of this project: a point on a plane moves to a goal."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Reach(gymnasium.Env):
    """Observation: position and goal, `[4]`. Action: velocity, `[2]`. Reward: minus the distance. The goal ends an episode."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.position = self.goal = np.zeros(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 2))
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.position = np.clip(self.position + 0.2 * np.clip(action, -1.0, 1.0), -1.0, 1.0)
        distance = float(np.linalg.norm(self.goal - self.position))
        success = distance < 0.2
        return self._observation(), -distance, success, False, {"success": success}

    def render(self) -> np.ndarray:
        """Returns a picture, uint8 `[96, 96, 3]`: the goal is green, the point blue."""
        picture = np.full((96, 96, 3), 255, np.uint8)
        for place, color in ((self.goal, (0, 160, 0)), (self.position, (0, 0, 200))):
            column, row = np.round(44 * (place + 1.0)).astype(int)
            picture[row : row + 8, column : column + 8] = color
        return picture

    def _observation(self) -> np.ndarray:
        return np.concatenate([self.position, self.goal]).astype(np.float32)


gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=40)
