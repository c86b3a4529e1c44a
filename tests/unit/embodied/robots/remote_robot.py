"""A robot on a rail, its machine, and a run that waits for it, in threads of one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.robots.joining import Key, invite
from rlhpc.embodied.robots.robot_env import Observation, Robot, Verdict
from rlhpc.embodied.robots.server import RobotRoute, RobotServer
from rlhpc.runtime.errors import RlhpcError

SHOWN: dict[str, Any] = {"state": 1, "rgb": [2, 2, 3]}
ACTS = {"low": [-1], "high": [1]}


class Rail(Robot):
    """A carriage on a rail, which goes where it is told, with a camera."""

    observation_space = spaces.Dict(
        {"state": spaces.Box(-1, 1, (1,), np.float32), "rgb": spaces.Box(0, 255, (2, 2, 3), np.uint8)}
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    control_mode = "velocity"

    def __init__(self) -> None:
        self.told: list[float] = []
        self.stops, self.closed, self.broken = 0, False, False

    def reset(self, seed: int) -> None:
        """To the middle."""
        self.place = np.zeros(1, np.float32)

    def act(self, action: np.ndarray) -> None:
        """Moves."""
        if self.broken:
            raise OSError("the wire is cut")
        self.told.append(float(action[0]))
        self.place = self.place + action / 4

    def observe(self) -> Observation:
        """Place and picture."""
        picture = np.full((2, 2, 3), int(100 + 100 * self.place[0]), np.uint8)
        return Observation({"state": self.place, "rgb": picture}, time.monotonic())

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """Done near the right end."""
        return Verdict(float(obs["state"][0]), success=bool(obs["state"][0] > 0.95))

    def stop(self) -> None:
        """Holds."""
        self.stops += 1

    def close(self) -> None:
        """Lets go."""
        self.closed = True


class Outside(threading.Thread):
    """The robot's machine."""

    def __init__(self, key: Key, robot: Rail, patience_s: float = 20.0, **bounds: float) -> None:
        super().__init__(daemon=True)
        self.way, self.said, self.error = RobotRoute(key), list[str](), RlhpcError("none")
        self._served, self._key, self._patience_s = RobotServer(robot, bounds, self.said.append), key, patience_s
        self.start()

    def run(self) -> None:
        """Serves."""
        try:
            self._served.serve(self._key, self.way, self._patience_s)
        except RlhpcError as error:
            self.error = error


class Inside:
    """A run's environment, which is waited for by nobody; keys for it."""

    def __init__(self, folder: Path, wait_s: float = 20.0) -> None:
        self.folder, self._made = folder / "meeting", 0
        kwargs = {"observes": SHOWN, "acts": ACTS, "hz": 200.0, "stale_s": 30.0, "wait_s": wait_s}
        section = EnvSideConfig(
            env_type="distant_robot", env_id="rail", max_episode_steps=6, kwargs={**kwargs, "folder": str(self.folder)}
        )
        self.env: Any = make_env(OmegaConf.structured(section), 1, slot_offset=2, seed=3)
        self.first: Any = None
        self.error = ""
        self._waiting = threading.Thread(target=self._reset, daemon=True)
        self._waiting.start()

    def _reset(self) -> None:
        try:
            self.first = self.env.reset()[0]
        except RlhpcError as error:
            self.error = str(error)

    def key(self, minutes: float = 1.0) -> Key:
        self._made += 1
        file = self.folder.parent / f"{self._made}.key"
        made = invite(self.folder, file, slot=None, minutes=minutes, wait_s=20, run="here")
        assert file.stat().st_mode & 0o777 == 0o600 and Key.read(file) == made
        return made

    def joined(self) -> None:
        self._waiting.join(20)
        assert self.first is not None, self.error

    def refusal(self) -> str:
        """Why it could not wait, or not any longer."""
        self._waiting.join(20)
        assert self.first is None
        return self.error

    def move(self, to: float) -> Any:
        return self.env.step(np.float32([[to]]))
