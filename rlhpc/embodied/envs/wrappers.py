"""Gymnasium wrappers by name and with settings: `env.train.wrappers`.

An entry is a name, a class's path (`module:Class`), or a mapping of one of these to its settings:

    wrappers: [statistics, {atari: {screen_size: 84}}, "minigrid.wrappers:ImgObsWrapper", {frame_stack: {stack_size: 4}}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlhpc.config.typed import plain
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

_GYMNASIUM = {
    "atari": "AtariPreprocessing", "clip_action": "ClipAction", "clip_reward": "ClipReward", "dtype": "DtypeObservation",
    "filter": "FilterObservation", "flatten": "FlattenObservation", "frame_skip": "MaxAndSkipObservation",
    "frame_stack": "FrameStackObservation", "grayscale": "GrayscaleObservation", "normalize": "NormalizeObservation",
    "normalize_reward": "NormalizeReward", "pixels": "AddRenderObservation", "rescale": "RescaleObservation",
    "rescale_action": "RescaleAction", "resize": "ResizeObservation", "statistics": "RecordEpisodeStatistics",
    "time": "TimeAwareObservation",
}  # fmt: skip

#: Wrappers that need no registration. The modules of rlhpc's own import nothing else of it: exports carry them.
BUILT_IN = {
    **{name: f"gymnasium.wrappers:{wrapper}" for name, wrapper in _GYMNASIUM.items()},
    "fire_reset": "rlhpc.embodied.envs.wrappers:FireReset",
    "life_loss": "rlhpc.embodied.envs.wrappers:LifeLoss",
    "panda_state": "rlhpc.embodied.envs.wrappers:PandaState",
}

#: Classes or functions `(env, **settings) -> env`, by name.
WRAPPERS: Registry[Any] = Registry("wrapper", "env.wrappers", "rlhpc.wrappers", BUILT_IN)


def entry(item: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Returns name and settings of an entry.

    Raises:
        ConfigError: It has another form.
    """
    if isinstance(item, str):
        return item, {}
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, settings),) = item.items()
        if isinstance(name, str) and (settings is None or isinstance(settings, Mapping)):
            return name, {str(setting): _value(value) for setting, value in (settings or {}).items()}
    raise ConfigError(
        f"{key} is {plain(item)!r}; allowed: a name, module:Class, or one of them with its settings: "
        "{frame_stack: {stack_size: 4}}"
    )


def _value(value: Any) -> Any:
    """Returns plain values, with lists as tuples, which wrappers need for shapes."""
    value = plain(value)
    return tuple(value) if isinstance(value, list) else value


def wrap(env: Any, wrappers: Sequence[Any] | None, key: str = "env.wrappers") -> Any:
    """Wraps an environment, the first wrapper innermost.

    Raises:
        ConfigError: One is unknown, cannot be imported, lacks a package, or refuses its settings or the environment.
    """
    from gymnasium.error import DependencyNotInstalled

    for i, item in enumerate(wrappers or []):
        at = f"{key}[{i}]"
        name, settings = entry(item, at)
        wrapper = WRAPPERS.find(name, at)
        try:
            env = wrapper(env, **settings)
        except (DependencyNotInstalled, ImportError) as error:
            missing = f"{at} is {name!r}, which needs a package that is not installed ({error})"
            raise ConfigError(f"{missing}; those of simulators come with pip install 'rlhpc[embodied]'") from None
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            raise ConfigError(f"{at} is {name!r}, which refuses {settings or 'the environment'}: {error}") from None
    return env


class LifeLoss(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that ends an episode at the loss of a life; the next episode continues the game. Put it over `atari`.

    Its `info["life_lost"]` marks that the game continues: the vector environment counts returns and lengths of complete games.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._lives = 0
        self._goes_on = False

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the game; a lost life ends the episode."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = info["lives"]
        self._goes_on = 0 < lives < self._lives and not (terminated or truncated)
        self._lives = lives
        if self._goes_on:
            info = {**info, "life_lost": True}
        return obs, reward, terminated or self._goes_on, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Continues the game, or starts one."""
        game_over = not self._goes_on or seed is not None
        if not game_over:
            obs, _, terminated, truncated, info = self.env.step(0)
            game_over = terminated or truncated
        if game_over:
            obs, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        self._goes_on = False
        return obs, info


class FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that presses FIRE when an episode begins, in games that wait for it. Put it over `life_loss`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            obs, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                obs, info = self.env.reset(seed=seed, options=options)
        return obs, info


#: Metres: the middle of where the cube may lie.
_MIDDLE = np.array([0.4, 0.0, 0.1])
_APART, _FROM_MIDDLE = 20.0, 10.0
#: Command of a closed gripper; 0 opens it.
_CLOSED = 255.0
#: Metres of an action of 1.
_STEP = 0.025


class PandaState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that replaces gym-hil's observation by numbers of like size: how far the gripper is closed, its position,
    the cube's, and the vector from it to the cube, float32 `[10]`.

    Cubes are drawn from the environment's generator instead of NumPy's, and success is reported as `success`.
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
        return _numbers(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the simulator."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return _numbers(obs), reward, terminated, truncated, {**info, "success": bool(info["succeed"])}

    def render(self) -> Any:
        """Renders both cameras, side by side."""
        cameras: Any = self.env.render()
        return np.concatenate(cameras, axis=1)


def _numbers(obs: dict[str, np.ndarray]) -> np.ndarray:
    arm, cube = obs["agent_pos"], obs["environment_state"]
    tcp, closed = arm[-3:], arm[-4] / _CLOSED
    parts = ([closed], _FROM_MIDDLE * (tcp - _MIDDLE), _FROM_MIDDLE * (cube - _MIDDLE), _APART * (cube - tcp))
    return np.concatenate(parts).astype(np.float32)


def pick(obs: np.ndarray) -> np.ndarray:
    """Returns a pick expert's actions (over the cube, down, grasp, up) `[N, 4]` within -1 to 1 for `PandaState`'s
    observations `[N, 10]`.
    """
    closed, way = obs[:, 0], obs[:, 7:10] / _APART
    aside, height = np.linalg.norm(way[:, :2], axis=1), np.abs(way[:, 2])
    over = aside < 0.015
    at = over & (height < 0.015)
    held = (closed > 0.9) & (aside < 0.03) & (height < 0.03)
    move = way.copy()
    move[:, 2] += np.where(over, 0.0, 0.08)
    actions = np.empty((len(obs), 4), np.float32)
    actions[:, :3] = np.clip(0.5 * move / _STEP, -1, 1)
    actions[held, :3] = (0, 0, 1)
    actions[:, 3] = np.where(at | held, 1, -1)
    return actions
