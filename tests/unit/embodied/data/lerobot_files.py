"""Datasets in LeRobot's layout, with videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlhpc.embodied.data.lerobot_writer import LeRobotWriter

NAMES = {"action": ["shoulder", "gripper"], "observation.state": {"motors": ["a", "b", "c"]}}
CAMERAS = ("observation.images.wrist", "observation.images.front")


def episode(length: int, seed: int = 0, size: int = 16) -> dict[str, Any]:
    """With two cameras whose pictures tell camera, episode and time."""
    pictures = np.zeros((length + 1, size, size, 6), np.uint8)
    for t in range(length + 1):
        pictures[t, ..., :3], pictures[t, ..., 3:] = 40 + 10 * (seed % 8) + t, 180 - 10 * (seed % 8) - t
    return {
        "source": "made", "obs": {"state": np.full((length + 1, 3), seed, np.float32), "rgb": pictures},
        "actions": np.full((length, 2), seed, np.float32), "rewards": np.zeros(length, np.float32),
        "terminations": np.zeros(length, bool), "truncations": np.arange(length) == length - 1, "success": None,
        "env_states": None, "seed": seed,
    }  # fmt: skip


def dataset(folder: Path, episodes: int = 2, length: int = 6, **changes: Any) -> Path:
    facts: dict[str, Any] = {"fps": 50, "task": "fold the cloth", "robot": "so100", "names": NAMES, "cameras": CAMERAS}
    with LeRobotWriter(folder, **(facts | changes)) as writer:
        for seed in range(episodes):
            writer.add(episode(length, seed))
    return folder


def info(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "meta/info.json").read_text())
    return found


class Clocked(gymnasium.Env[Any, Any]):
    """A simulator with a time step, and another rate at which it is shown."""

    metadata = {"render_modes": [], "render_fps": 30}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    dt = 0.01

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Shown(Clocked):
    """One that says only at which rate it is shown."""

    dt = None  # type: ignore[assignment]
