"""Small worlds with what each wrapper asks of an environment: `toy_worlds:Numbers-v0` and so on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class World(gymnasium.Env[Any, Any]):
    """A point that actions push; the reward is how near it is, and depends on `gain`."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space: Any = spaces.Box(-2, 2, (2,), np.float32)
    observation_space: Any = spaces.Box(-20, 20, (3,), np.float32)

    def __init__(self, gain: float = 1.0, render_mode: str | None = None) -> None:
        self.gain, self.render_mode = gain, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1, 1, 3), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        push = np.asarray(action, float).reshape(-1)
        self.steps += 1
        self.place = 0.95 * self.place + 0.1 * self.gain * np.resize(push, 3) + 0.02 * self.np_random.standard_normal(3)
        ended = self.steps >= 30 or abs(self.place).max() > 3
        return self._seen(), float(-abs(self.place).sum()), bool(ended), False, {"success": bool(ended)}

    def render(self) -> Any:
        picture = np.zeros((40, 40, 3), np.uint8)
        y, x = np.clip(20 + 6 * self.place[:2], 0, 39).astype(int)
        picture[y, x] = 255
        picture[..., 1] = np.clip(128 + 40 * self.place[2], 0, 255)
        return picture

    def _seen(self) -> Any:
        return self.place.astype(np.float32)


class Parts(World):
    observation_space = spaces.Dict({"near": spaces.Box(-20, 20, (2,), np.float64),
                                     "far": spaces.Box(-20, 20, (1,), np.float32)})  # fmt: skip

    def _seen(self) -> Any:
        return {"near": self.place[:2], "far": self.place[2:].astype(np.float32)}


class Told(World):
    """A picture and words."""

    observation_space = spaces.Dict({"view": spaces.Box(0, 255, (40, 40, 3), np.uint8), "words": spaces.Text(9)})

    def _seen(self) -> Any:
        return {"view": self.render(), "words": "left" if self.place[0] < 0 else "right é"}


class Pictures(World):
    observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    action_space = spaces.Discrete(4, start=1)

    def _seen(self) -> Any:
        return self.render()


class Screen:
    """What Atari's wrappers ask of an emulator."""

    def __init__(self, game: Game) -> None:
        self.game = game

    def lives(self) -> int:
        return self.game.remaining

    def getScreenGrayscale(self, buffer: Any) -> None:  # noqa: N802
        buffer[:] = self.game.render()[..., 1]


class Game(Pictures):
    """Three lives, of which one is lost every tenth step."""

    action_space = spaces.Discrete(4)
    _frameskip = 1

    def __init__(self, gain: float = 1.0, render_mode: str | None = None) -> None:
        super().__init__(gain, render_mode)
        self.ale, self.remaining = Screen(self), 3

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "LEFT", "FIRE", "RIGHT"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.remaining = 3
        obs, _ = super().reset(seed=seed)
        return obs, {"lives": 3}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, _ = super().step(action)
        self.remaining -= self.steps % 10 == 0
        return obs, reward, self.remaining == 0, False, {"lives": self.remaining}


class Brave(World):
    """Numbers, and three lives."""

    def __init__(self, gain: float = 1.0, render_mode: str | None = None) -> None:
        super().__init__(gain, render_mode)
        self.remaining = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.remaining = 3
        return super().reset(seed=seed)[0], {"lives": 3}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, _ = super().step(action)
        self.remaining -= self.steps % 7 == 0
        return obs, reward, self.remaining == 0, False, {"lives": self.remaining}


class Panda(World):
    observation_space = spaces.Dict({"agent_pos": spaces.Box(-9, 9, (6,), np.float32),
                                     "environment_state": spaces.Box(-9, 9, (3,), np.float32)})  # fmt: skip

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=int(np.random.randint(1 << 30)))
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"succeed": terminated}

    def _seen(self) -> Any:
        arm = np.concatenate([self.place, self.place]).astype(np.float32)
        return {"agent_pos": arm, "environment_state": 0.5 * self.place.astype(np.float32)}


for world in (World, Parts, Told, Pictures, Game, Brave, Panda):
    name = "Numbers" if world is World else world.__name__
    gymnasium.register(f"{name}-v0", entry_point=world, max_episode_steps=25)
