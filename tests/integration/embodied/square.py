"""A small world with a picture, a text and numbers: move a dot onto the square of the colour that the instruction names."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


class Square(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Success is to be within `reach` of the centre; the reward is the way that was made towards it.

    Args:
        size: Pixels a side.
        state: Whether the dot's position is shown in numbers, too.
    """

    def __init__(self, size: int = 16, state: bool = True, reach: float = 0.3) -> None:
        self.size, self.with_state, self.reach = size, state, reach
        parts: dict[str, spaces.Space[Any]] = {
            "rgb": spaces.Box(0, 255, (size, size, 3), np.uint8),
            "instruction": spaces.Text(40),
        }
        if state:
            parts["state"] = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.at = self.goal = np.zeros(2, np.float32)
        self.colour = "red"

    def _paint(self, image: np.ndarray, where: np.ndarray, colour: tuple[int, int, int], half: int) -> None:
        x, y = ((where + 1) / 2 * (self.size - 1)).round().astype(int)
        image[max(0, y - half) : y + half + 1, max(0, x - half) : x + half + 1] = colour

    def _observe(self) -> dict[str, Any]:
        image = np.zeros((self.size, self.size, 3), np.uint8)
        self._paint(image, self.goal, COLOURS[self.colour], max(1, self.size // 8))
        self._paint(image, self.at, (255, 255, 255), 0)
        found: dict[str, Any] = {"rgb": image, "instruction": f"go to the {self.colour} square"}
        if self.with_state:
            found["state"] = self.at.copy()
        return found

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.colour = ("red", "blue")[int(self.np_random.integers(2))]
        self.at = np.zeros(2, np.float32)
        self.goal = self.np_random.uniform(-0.9, 0.9, 2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        before = float(np.abs(self.goal - self.at).max())
        self.at = np.clip(self.at + 0.25 * action, -1, 1).astype(np.float32)
        after = float(np.abs(self.goal - self.at).max())
        success = after < self.reach
        return self._observe(), before - after, success, False, {"success": success}


gymnasium.register("Square-v0", entry_point=Square, max_episode_steps=12)


class NumbersOnly(gymnasium.ObservationWrapper[dict[str, Any], np.ndarray, dict[str, Any]]):
    """Two numeric inputs instead of the picture."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        place = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({"position": place, "goal": place})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Position of the dot and of the square."""
        world: Any = self.unwrapped
        return {"position": world.at, "goal": world.goal}


def expert(obs: dict[str, np.ndarray]) -> np.ndarray:
    """Actions `[N, 2]` straight to the square that is seen."""
    coloured = (obs["rgb"].max(-1) > 0) & (obs["rgb"].min(-1) == 0)
    rows, side = len(coloured), coloured.shape[1] - 1
    places = [np.argwhere(coloured[i]).mean(0)[::-1] / side * 2 - 1 for i in range(rows)]
    actions: np.ndarray = np.clip((np.stack(places) - obs["state"]) / 0.25, -1, 1).astype(np.float32)
    return actions


class Silent(gymnasium.ObservationWrapper[dict[str, Any], np.ndarray, dict[str, Any]]):
    """Without the instruction: the square's colour does not matter."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        parts = {key: part for key, part in env.observation_space.spaces.items() if key != "instruction"}
        self.observation_space = spaces.Dict(parts)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Picture and numbers."""
        return {key: part for key, part in observation.items() if key != "instruction"}
