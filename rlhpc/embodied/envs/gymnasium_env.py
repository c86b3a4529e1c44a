"""Vector environment of environments from `gymnasium.make`, in this process and with little overhead.

The vector environment counts the step limit instead of gymnasium's wrapper, and gymnasium's checkers are off.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import (
    AtariPreprocessing,
    MaxAndSkipObservation,
    OrderEnforcing,
    PassiveEnvChecker,
    RecordEpisodeStatistics,
    TimeLimit,
)

from rlhpc.embodied.envs.base import Step, VectorEnv, merge_infos, similar_ids_hint
from rlhpc.embodied.envs.interface import reset_env, step_env, success_of
from rlhpc.embodied.envs.observations import Obs, boxes_of, encode_text, is_text, text_space
from rlhpc.embodied.envs.wrappers import wrap
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

_REMOVED_WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
#: Errors that numpy and dicts raise for an observation that does not fit its buffer.
_MISFIT_ERRORS = (ValueError, TypeError, KeyError)


def choose_renderer() -> None:
    """Makes MuJoCo render with EGL on Linux without a display, if libEGL is installed and `MUJOCO_GL` is not set.

    Call it before importing a simulator, because MuJoCo reads the setting at import.
    """
    if sys.platform == "linux" and not os.environ.get("DISPLAY") and "MUJOCO_GL" not in os.environ:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libEGL.so.1")
            os.environ["MUJOCO_GL"] = "egl"


def make_single_env(cfg: EnvSideConfig) -> tuple[gymnasium.Env[Any, Any], int]:
    """Builds one environment of a configuration section; returns the environment and its step limit (0 for none).

    Raises:
        ConfigError: The id is unknown, an extra is missing, or the environment does not accept its arguments.
    """
    env_id, kwargs = cfg.env_id, dict(cfg.kwargs or {})
    choose_renderer()
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is not installed ({error}); run: pip install 'rlhpc[embodied]'"
        ) from None
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        hint = similar_ids_hint(env_id, gymnasium.registry, "see gymnasium.registry for all ids.")
        if isinstance(error, ModuleNotFoundError) and cfg.simulator_python is None:
            hint = (
                "simulators with a Python of their own are named by env.train.simulator_python (make setup-simulators)"
            )
        raise ConfigError(f"env_id is {env_id!r}, which gymnasium does not know ({error}); {hint}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_id {env_id!r} refuses kwargs {kwargs}: {error}") from None
    registered_limit = env.spec.max_episode_steps if env.spec is not None else None
    limit = registered_limit if cfg.max_episode_steps is None else cfg.max_episode_steps
    while isinstance(env, _REMOVED_WRAPPERS):
        env = env.env
    if env.unwrapped.spec is not None:
        env.unwrapped.spec.max_episode_steps = limit or None  # wrappers such as `time` read it
    return wrap(env, cfg.wrappers), int(limit or 0)


def _statistics_wrapper(env: Any) -> RecordEpisodeStatistics[Any, Any] | None:
    """Returns the wrapper that counts returns, or None. The counted returns exclude reward changes by outer wrappers."""
    return next((layer for layer in _layers(env) if isinstance(layer, RecordEpisodeStatistics)), None)


def _control_hz(env: Any) -> float | None:
    """Returns an environment's control rate in actions per second, from its time step `dt` or its render rate and its frame
    skip; None if unknown.
    """
    *wrappers, env = _layers(env)
    skips = [wrapper._skip for wrapper in wrappers if isinstance(wrapper, MaxAndSkipObservation)]
    skips += [wrapper.frame_skip for wrapper in wrappers if isinstance(wrapper, AtariPreprocessing)]
    time_step, rate = getattr(env, "dt", None), (env.metadata or {}).get("render_fps")
    if isinstance(time_step, int | float) and time_step > 0:
        rate = 1.0 / time_step
    return float(rate) / math.prod(skips) if isinstance(rate, int | float) and rate > 0 else None


def _unsupported_space(env_id: str, space: Any) -> ConfigError:
    return ConfigError(
        f"env_id {env_id!r} has observations {space}; supported is Box, or a Dict of Box and Text: add "
        f"gymnasium.wrappers:FlattenObservation to env.train.wrappers"
    )


def write_row(rows: np.ndarray, i: int, obs: Any) -> None:
    """Writes an observation into row `i`.

    Raises:
        ValueError, TypeError: The observation does not fit the row's shape, or the row's type cannot represent its numbers.
    """
    obs = np.asarray(obs)
    has_same_kind = obs.dtype == rows.dtype or obs.dtype.kind == rows.dtype.kind == "f"
    if not has_same_kind or obs.shape != rows.shape[1:]:
        if obs.dtype.kind not in "biuf":
            raise TypeError(f"no numbers: {obs.dtype}")
        if obs.size != rows[i].size:
            raise ValueError(f"{obs.size} numbers in place of {rows[i].size}")
        if rows.dtype.kind != "f" and (obs.astype(rows.dtype) != obs).any():
            raise ValueError(f"numbers that {rows.dtype} cannot represent")
    rows[i] = obs


def row_spec(box: Any, count: int) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a buffer for the observations of `count` slots; float64 becomes float32."""
    return (count, *box.shape), np.float32 if box.dtype == np.float64 else box.dtype


def to_env_actions(space: Any, actions: np.ndarray) -> Any:
    """Converts a policy's actions `[N, dim]` to actions that the environments' `step` accepts.

    Policies number the actions of a discrete space from 0. Actions of a box are clipped to its bounds.
    """
    if isinstance(space, spaces.Discrete):
        return (actions.reshape(-1) + int(space.start)).tolist()
    shaped_actions = actions.reshape(len(actions), *space.shape)
    if isinstance(space, spaces.Box):
        return np.clip(shaped_actions, space.low, space.high).astype(space.dtype)
    return shaped_actions + getattr(space, "start", 0)


class GymnasiumVectorEnv(VectorEnv):
    """Vector environment of N independent Gymnasium environments.

    Slot i of the run is seeded by (seed, i), or by (seed, its group) with `group_size` > 1.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs = num_envs
        self._offset = slot_offset
        self._env_id = cfg.env_id
        envs_and_limits = [make_single_env(cfg) for _ in range(num_envs)]
        self.envs = [env for env, _ in envs_and_limits]
        self._statistics_wrappers = [_statistics_wrapper(env) for env in self.envs]
        self._step_limit = self.max_episode_steps = envs_and_limits[0][1]
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.control_hz = _control_hz(self.envs[0])
        self._has_dict_obs = isinstance(self.observation_space, spaces.Dict)
        self._text_sizes: dict[str, int] = {}
        if self._has_dict_obs:
            self.observation_space = self._box_space(cfg.env_id)
        elif not isinstance(self.observation_space, spaces.Box):
            raise _unsupported_space(cfg.env_id, self.observation_space)
        self._row_specs = {key: row_spec(box, num_envs) for key, box in boxes_of(self.observation_space).items()}
        self._ignore_terminations = cfg.ignore_terminations
        self._reward_scale = cfg.reward_scale
        self._group_size = max(1, cfg.group_size)
        self._repeats_first_state = cfg.use_fixed_reset_state_ids
        self._uses_relative_reward = cfg.use_rel_reward
        self._previous_rewards = [0.0] * num_envs
        self._has_succeeded = [False] * num_envs
        self._elapsed_steps = [0] * num_envs
        self._returns = [0.0] * num_envs
        self._num_episodes = [0] * num_envs
        self._seed = seed
        self._seeds_reset = True
        #: For simulators that are saved as replays: for each slot, the seed or generator state at the start of its episode,
        #: and the actions since the start. None for other simulators.
        self._replay_logs: list[tuple[Any, list[Any]]] | None = None
        if is_replayed(self.envs[0]):
            self._replay_logs = [(None, []) for _ in range(num_envs)]
        self.supports_state = can_save(self.envs[0], self._replay_log(0))

    def _box_space(self, env_id: str) -> spaces.Dict:
        """Returns the Dict observation space with a box for each text, and records the sizes of the encoded texts."""
        boxes: dict[str, spaces.Space[Any]] = {}
        for key, space in self.observation_space.spaces.items():
            if is_text(space):
                boxes[key] = text_space(space)
                self._text_sizes[key] = boxes[key].shape[0]  # type: ignore[index]
            elif isinstance(space, spaces.Box):
                boxes[key] = space
            else:
                raise _unsupported_space(env_id, self.observation_space)
        return spaces.Dict(boxes)

    def _allocate_rows(self) -> Any:
        """Allocates a buffer for the observations of all slots."""
        if self._has_dict_obs:
            return {key: np.zeros(*spec) for key, spec in self._row_specs.items()}
        return np.zeros(*self._row_specs[""])

    def _write_obs(self, rows: Any, i: int, obs: Any) -> None:
        """Writes the observation of slot `i` into its row of each buffer.

        Raises:
            ConfigError: The observation is outside the environment's observation space.
        """
        try:
            if not self._has_dict_obs:
                write_row(rows, i, obs)
                return
            for key, column in rows.items():
                value = obs[key]
                write_row(column, i, encode_text(value, self._text_sizes[key]) if key in self._text_sizes else value)
        except _MISFIT_ERRORS as error:
            raise self._misfit_error(obs, i) from error

    def _misfit_error(self, obs: Any, i: int) -> ConfigError:
        """Returns the error for an observation outside the environment's observation space."""

        def describe_value(value: Any) -> str:
            if isinstance(value, dict):
                return "{" + ", ".join(f"{key}: {describe_value(item)}" for key, item in value.items()) + "}"
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                return f"shape {tuple(value.shape)}, type {value.dtype}"
            return f"type {type(value).__name__}"

        return ConfigError(
            f"{self._env_id}: slot {i} gave an observation of {describe_value(obs)}, and its observation_space is "
            f"{self.envs[i].observation_space}; mend the environment, or wrap it (env.train.wrappers)"
        )

    def _slot_seed(self, index: int) -> int:
        group = (self._offset + index) // self._group_size
        return int(np.random.SeedSequence([self._seed, group]).generate_state(1)[0])

    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        if seed is not None:
            self._seed = seed
            self._seeds_reset = True
        obs = self._allocate_rows()
        for i in range(self.num_envs):
            self._write_obs(obs, i, self._reset(i, self._seeds_reset))
            self._elapsed_steps[i], self._returns[i], self._previous_rewards[i], self._has_succeeded[i] = (
                0,
                0.0,
                0.0,
                False,
            )
        self._seeds_reset = False
        return obs, {}

    def _reset(self, i: int, reseeds: bool = False) -> Any:
        seed = self._slot_seed(i) if reseeds or self._repeats_first_state else None
        if self._replay_logs is not None:
            self._replay_logs[i] = (seed if seed is not None else generator_state(self.envs[i]), [])
        return reset_env(self.envs[i], self._env_id, seed=seed)[0]

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`). Box actions are clipped to the space's bounds."""
        return self._advance(actions, range(self.num_envs), None)

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk (`VectorEnv.chunk_step`). A slot whose episode ends within the chunk is reset at once and takes no
        more actions of the chunk.
        """
        obs, rewards, terminations, truncations, infos = self.step(actions[:, 0])
        count = actions.shape[1]
        if count == 1:
            return obs, rewards, terminations, truncations, infos
        chunk_rewards, is_executed = np.zeros((self.num_envs, count), np.float32), np.ones((self.num_envs, count), bool)
        chunk_rewards[:, 0] = rewards
        for i in range(1, count):
            is_executed[:, i] = ~(terminations | truncations)
            active_slots = np.flatnonzero(is_executed[:, i]).tolist()
            obs, step_rewards, terminated, truncated, info = self._advance(actions[:, i], active_slots, obs)
            chunk_rewards[:, i] = step_rewards
            rewards += step_rewards
            is_done = terminated | truncated
            terminations |= terminated
            truncations |= truncated
            if is_done.any():
                merge_infos(infos, info, is_done)
        infos["chunk"] = {"rewards": chunk_rewards, "mask": is_executed}
        return obs, rewards, terminations, truncations, infos

    def _advance(self, actions: np.ndarray, slots: Sequence[int], obs: Any) -> Step:
        """Steps the slots in `slots`; other slots keep their row of `obs` and get reward 0."""
        n = self.num_envs
        env_actions = to_env_actions(self.action_space, actions)
        if obs is None:
            obs = self._allocate_rows()
        rewards = np.zeros(n, np.float32)
        terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
        infos: dict[str, Any] = {}
        limit, elapsed_steps, returns, write = self._step_limit, self._elapsed_steps, self._returns, self._write_obs
        replay_logs = self._replay_logs
        for i in slots:
            env = self.envs[i]
            slot_obs, reward, terminated, truncated, info = step_env(env, self._env_id, env_actions[i])
            if replay_logs is not None:
                replay_logs[i][1].append(env_actions[i])
            elapsed_steps[i] += 1
            returns[i] += reward
            rewards[i] = reward
            if self._uses_relative_reward:
                rewards[i], self._previous_rewards[i] = reward - self._previous_rewards[i], reward
            if info and (success := success_of(self._env_id, info)) is not None:
                infos.setdefault("success", np.zeros(n, bool))[i] = success
                self._has_succeeded[i] |= success
            if terminated and self._ignore_terminations:
                terminated = False
            if limit and elapsed_steps[i] >= limit:
                truncated = True
            if terminated or truncated:
                terminations[i], truncations[i] = terminated, truncated and not terminated
                is_life_lost = terminated and "life_lost" in info
                self._end_episode(i, slot_obs, info, infos, is_counted=not is_life_lost)
                slot_obs = self._reset(i)
                self._previous_rewards[i] = 0.0
                if not is_life_lost:
                    elapsed_steps[i], returns[i], self._has_succeeded[i] = 0, 0.0, False
            write(obs, i, slot_obs)
        if self._reward_scale != 1.0:
            rewards *= self._reward_scale
        return obs, rewards, terminations, truncations, infos

    def _end_episode(
        self, i: int, final_obs: Any, info: Mapping[str, Any], infos: dict[str, Any], is_counted: bool
    ) -> None:
        if "final_obs" not in infos:
            n = self.num_envs
            infos["final_obs"] = self._allocate_rows()
            infos["episode"] = {
                "return": np.zeros(n, np.float64),
                "length": np.zeros(n, np.int64),
                "mask": np.zeros(n, bool),
            }
        self._write_obs(infos["final_obs"], i, final_obs)
        episode, wrapper_statistics = infos["episode"], self._statistics_wrappers[i]
        episode_return = self._returns[i] if wrapper_statistics is None else wrapper_statistics.episode_returns
        episode["return"][i] = np.asarray(episode_return).item()  # some rewards are arrays with one number
        episode["length"][i], episode["mask"][i] = self._elapsed_steps[i], is_counted
        if (success := success_of(self._env_id, info)) is not None:
            for key, is_success in (("success_once", self._has_succeeded[i]), ("success_at_end", success)):
                episode.setdefault(key, np.zeros(self.num_envs, np.float64))[i] = float(is_success)
        self._num_episodes[i] += 1

    def _replay_log(self, i: int) -> tuple[Any, list[Any]] | None:
        return None if self._replay_logs is None else self._replay_logs[i]

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the slots' state, for a checkpoint (`VectorEnv.state_dict`)."""
        return {
            "slots": [
                {
                    "simulator": save_simulator(env, self._replay_log(i)),
                    "elapsed": self._elapsed_steps[i],
                    "return": self._returns[i],
                    "episodes": self._num_episodes[i],
                    "before": self._previous_rewards[i],
                    "once": self._has_succeeded[i],
                }
                for i, env in enumerate(self.envs)
            ]
        }

    def load_state_dict(self, state: Any) -> None:
        """Restores the slots from a checkpoint whose checksums were verified (`VectorEnv.load_state_dict`)."""
        slots = self.slots_of(state)
        for i, slot in enumerate(slots):
            replay_log = restore_simulator(self.envs[i], slot["simulator"])
            if self._replay_logs is not None and replay_log is not None:
                self._replay_logs[i] = replay_log
            self._elapsed_steps[i], self._returns[i] = int(slot["elapsed"]), float(slot["return"])
            self._num_episodes[i] = int(slot["episodes"])
            self._previous_rewards[i], self._has_succeeded[i] = (
                float(slot.get("before", 0.0)),
                bool(slot.get("once", False)),
            )
        self._seeds_reset = False

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`)."""
        frames: list[Any] = []
        for i in range(self.num_envs) if slots is None else slots:
            env: Any = self.envs[i].unwrapped
            if env.render_mode is None and "rgb_array" in env.metadata.get("render_modes", ()):
                env.render_mode = "rgb_array"  # environments read the mode only when they render
            frames.append(self.envs[i].render())
        return np.stack(frames).astype(np.uint8) if all(isinstance(frame, np.ndarray) for frame in frames) else None

    def close(self) -> None:
        """Closes all environments."""
        for env in self.envs:
            env.close()


_MUJOCO = ("model", "data", "mujoco_renderer")
_NOT_STATE = ("screen", "surf", "clock", "viewer", "window", "spec", "observation_space", "action_space")
#: Classes and packages of simulators whose state cannot be read or is large, but whose resets clear all earlier state, so
#: that a replay is exact. (BipedalWalker is not in the list, because its Box2D world outlives resets.)
_REPLAYED_SIMULATORS = ("LunarLander", "LunarLanderContinuous", "gym_hil", "gym_pusht", "gymnasium_robotics", "shimmy")


def is_replayed(env: Any) -> bool:
    """Returns whether a resume restores the environment by replaying its current episode."""
    env_class = type(env.unwrapped)
    return env_class.__name__ in _REPLAYED_SIMULATORS or env_class.__module__.partition(".")[0] in _REPLAYED_SIMULATORS


def generator_state(env: Any) -> Any:
    """Returns the state of the environment's random generator, which determines the next episode."""
    generator = env.unwrapped.np_random
    return (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.bit_generator.state
    )


def save_simulator(env: Any, replay_log: tuple[Any, list[Any]] | None) -> bytes:
    """Serializes an environment to bytes.

    Args:
        env: Environment with its wrappers.
        replay_log: For a replayed environment, the seed or generator state at its last reset, and the actions since the
            reset. None for other environments.
    """
    if replay_log is not None:
        return pickle.dumps((*replay_log, [_attributes(layer) for layer in _layers(env) if layer is not env.unwrapped]))
    return pickle.dumps([_attributes(layer) for layer in _layers(env)])


def can_save(env: Any, replay_log: tuple[Any, list[Any]] | None) -> bool:
    """Returns whether `save_simulator` can serialize the environment."""
    try:
        save_simulator(env, replay_log)
    except Exception:  # simulators hold handles of many kinds, and pickling them can raise any error
        return False
    return True


def restore_simulator(env: Any, content: bytes) -> tuple[Any, list[Any]] | None:
    """Restores an environment from the bytes of `save_simulator`; returns its replay log, or None if it is not replayed."""
    state = pickle.loads(content)
    if isinstance(state, list):
        _restore_attributes(env, state)
        return None
    start, actions, *wrappers = state
    seed = start if isinstance(start, int) else None
    if seed is None:
        generator = env.unwrapped.np_random
        if isinstance(generator, np.random.RandomState):
            generator.set_state(start)
        else:
            generator.bit_generator.state = start
    name = str(getattr(env.unwrapped.spec, "id", env.unwrapped))
    reset_env(env, name, seed=seed)
    for action in actions:
        step_env(env, name, action)
    _restore_attributes(env, wrappers[0] if wrappers else [])
    return start, actions


def _layers(env: Any) -> Iterator[Any]:
    """Yields the wrappers of an environment from the outermost to the innermost, then the environment itself."""
    while env is not env.unwrapped and isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _attributes(layer: Any) -> dict[str, Any]:
    """Returns the attributes that form the state of a wrapper or environment, without renderers, spaces and code."""
    attributes = {
        name: attribute for name, attribute in vars(layer).items() if name != "env" and not name.endswith(_NOT_STATE)
    }
    attributes = {name: attribute for name, attribute in attributes.items() if not _is_code(attribute)}
    if "mujoco_renderer" in attributes:
        attributes = {name: attribute for name, attribute in attributes.items() if name not in _MUJOCO}
        attributes["data"] = _mujoco_arrays(layer.data)
    if "ale" in attributes:
        attributes["ale"] = layer.ale.cloneState(include_rng=True)
    return attributes


def _is_code(value: Any) -> bool:
    """Returns whether a value is a module or an unpicklable function, which the constructor creates again."""
    return isinstance(value, ModuleType) or (isinstance(value, FunctionType) and "<" in value.__qualname__)


def _restore_attributes(env: Any, layer_attributes: list[dict[str, Any]]) -> None:
    for layer, attributes in zip(_layers(env), layer_attributes, strict=False):
        if "mujoco_renderer" in vars(layer):
            for name, attribute in attributes.pop("data").items():
                _set_mujoco(layer.data, name, attribute)
        if "ale" in attributes:
            layer.ale.restoreState(attributes.pop("ale"))
        vars(layer).update(attributes)


def _mujoco_arrays(data: Any) -> dict[str, Any]:
    """Returns all arrays and floats of an `MjData`. The derived quantities are included, because after a step their
    values come from the previous substep.
    """
    names = (name for name in dir(data) if not name.startswith("_"))
    attributes = ((name, getattr(data, name)) for name in names if name not in ("contact", "model"))
    return {
        n: array.copy() if isinstance(array, np.ndarray) else array
        for n, array in attributes
        if isinstance(array, (np.ndarray, float))
    }


def _set_mujoco(data: Any, name: str, value: Any) -> None:
    """Restores one value of an `MjData`. Skips arrays with a size that depends on the contacts, because the next step
    rebuilds these arrays.
    """
    if not isinstance(value, np.ndarray):
        setattr(data, name, value)
    elif (array := getattr(data, name)).shape == value.shape and array.flags.writeable:
        array[...] = value
