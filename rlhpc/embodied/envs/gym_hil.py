"""States and a scripted expert of gym-hil's Panda arm. Exported policies contain this file, so that it imports only
numpy and gymnasium.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

#: Centre of the cube's start area, in metres.
_CENTER = np.array([0.4, 0.0, 0.1])
_OFFSET_SCALE, _POSITION_SCALE = 20.0, 10.0
#: Command of a closed gripper; 0 opens it.
_CLOSED = 255.0
#: Distance in metres of an action of 1.
_STEP = 0.025


class PandaState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that replaces gym-hil's observation by numbers of similar magnitude, float32 `[10]`: the gripper's
    closure, the gripper's position, the cube's position, and the vector from gripper to cube.

    The environment's generator determines the cube's position, instead of NumPy's global generator. The infos report
    success as `success`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (10,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        np.random.seed(int(self.np_random.integers(1 << 31)))
        obs, info = self.env.reset(options=options)
        return _state_vector(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the simulator."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return _state_vector(obs), reward, terminated, truncated, {**info, "success": bool(info["succeed"])}

    def render(self) -> Any:
        """Renders both cameras, side by side."""
        cameras: Any = self.env.render()
        return np.concatenate(cameras, axis=1)


def _state_vector(obs: dict[str, np.ndarray]) -> np.ndarray:
    arm, cube = obs["agent_pos"], obs["environment_state"]
    tcp, closure = arm[-3:], arm[-4] / _CLOSED
    state_parts = (
        [closure],
        _POSITION_SCALE * (tcp - _CENTER),
        _POSITION_SCALE * (cube - _CENTER),
        _OFFSET_SCALE * (cube - tcp),
    )
    return np.concatenate(state_parts).astype(np.float32)


def pick(obs: np.ndarray) -> np.ndarray:
    """Returns the actions `[N, 4]` of an expert that picks up the cube (over the cube, down, grasp, up). Actions lie
    between
    -1 and 1; observations `[N, 10]` are those of `PandaState`.
    """
    closure, offset = obs[:, 0], obs[:, 7:10] / _OFFSET_SCALE
    horizontal_distance, height = np.linalg.norm(offset[:, :2], axis=1), np.abs(offset[:, 2])
    is_above = horizontal_distance < 0.015
    is_at_cube = is_above & (height < 0.015)
    is_holding = (closure > 0.9) & (horizontal_distance < 0.03) & (height < 0.03)
    move = offset.copy()
    move[:, 2] += np.where(is_above, 0.0, 0.08)
    actions = np.empty((len(obs), 4), np.float32)
    actions[:, :3] = np.clip(0.5 * move / _STEP, -1, 1)
    actions[is_holding, :3] = (0, 0, 1)
    actions[:, 3] = np.where(is_at_cube | is_holding, 1, -1)
    return actions
