"""Any `gymnasium.make` environment, vectorised in this process with little overhead.

The step limit is counted here instead of by a wrapper; gymnasium's checkers are off; buffers are reused.
"""

from __future__ import annotations

import difflib
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rlhpc.envs.base import Step, VectorEnv, merge_infos
from rlhpc.envs.observations import Obs, boxes_of, encode_text, is_text, text_space
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import load_attribute

_STRIPPED = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
_EXTRAS = {"box2d": "embodied", "mujoco": "embodied", "ale_py": "atari", "mani_skill": "embodied"}
_NOT_STATE = ("screen", "surf", "clock", "viewer", "window", "spec", "observation_space", "action_space")


def nearest_ids(env_id: str) -> list[str]:
    """Registered ids that look like `env_id`."""
    return difflib.get_close_matches(env_id, list(gymnasium.registry), 3, 0.5)


def make_one(cfg: Any) -> tuple[gymnasium.Env[Any, Any], int]:
    """One environment of a section and its step limit (0 for none).

    Raises:
        ConfigError: Unknown id, missing extra, or arguments that the environment refuses.
    """
    env_id, kwargs = str(cfg.env_id), dict(cfg.kwargs or {})
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env_id {env_id!r} needs a package that is not installed ({error}); run: pip install 'rlhpc[embodied]'"
        ) from None
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        near = nearest_ids(env_id)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "see gymnasium.registry for all ids."
        raise ConfigError(f"env_id is {env_id!r}, which gymnasium does not know ({error}); {hint}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_id {env_id!r} refuses kwargs {kwargs}: {error}") from None
    limit = cfg.max_episode_steps
    if limit is None:
        limit = env.spec.max_episode_steps if env.spec is not None else None
    while isinstance(env, _STRIPPED):
        env = env.env
    for path in cfg.wrappers or []:
        env = load_attribute(str(path), "env.wrappers")(env)
    return env, int(limit or 0)


def _unsupported(env_id: str, space: Any) -> ConfigError:
    return ConfigError(
        f"env_id {env_id!r} has observations {space}; supported is Box, or a Dict of Box and Text: add "
        f"gymnasium.wrappers:FlattenObservation to env.train.wrappers"
    )


def _form(box: Any, count: int) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the observations of `count` slots."""
    return (count, *box.shape), np.float32 if box.dtype == np.float64 else box.dtype


class GymnasiumVectorEnv(VectorEnv):
    """N independent environments; slot i of the run is seeded by (seed, i), or by its group where `group_size` > 1.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Slots here.
        slot_offset: Global number of the first.
        seed: Of the run.
    """

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs, self._offset = num_envs, slot_offset
        made = [make_one(cfg) for _ in range(num_envs)]
        self.envs = [env for env, _ in made]
        self._limit = made[0][1]
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        self._several = isinstance(self.observation_space, spaces.Dict)
        self._texts: dict[str, int] = {}
        if self._several:
            self.observation_space = self._boxes(str(cfg.env_id))
        elif not isinstance(self.observation_space, spaces.Box):
            raise _unsupported(str(cfg.env_id), self.observation_space)
        self._forms = {key: _form(box, num_envs) for key, box in boxes_of(self.observation_space).items()}
        self._write: Callable[[Any, int, Any], None] = self._write_parts if self._several else operator.setitem
        self._discrete = isinstance(self.action_space, spaces.Discrete)
        # Policies count actions from 0.
        self._start: Any = getattr(self.action_space, "start", 0)
        self._box = isinstance(self.action_space, spaces.Box)
        self._ignore_terminations = bool(cfg.ignore_terminations)
        self._scale = float(cfg.reward_scale)
        self._group = max(1, int(cfg.group_size))
        self._elapsed = [0] * num_envs
        self._returns = [0.0] * num_envs
        self._episodes = [0] * num_envs
        self._seed = seed
        self._fresh = True
        self.supports_state = self._can_save()

    def _boxes(self, env_id: str) -> spaces.Dict:
        """The space of several observations; texts are encoded."""
        boxes: dict[str, spaces.Space[Any]] = {}
        for key, space in self.observation_space.spaces.items():
            if is_text(space):
                boxes[key] = text_space(space)
                self._texts[key] = boxes[key].shape[0]  # type: ignore[index]
            elif isinstance(space, spaces.Box):
                boxes[key] = space
            else:
                raise _unsupported(env_id, self.observation_space)
        return spaces.Dict(boxes)

    def _rows(self) -> Any:
        """Room for the observation of all slots."""
        if self._several:
            return {key: np.zeros(*form) for key, form in self._forms.items()}
        return np.zeros(*self._forms[""])

    def _write_parts(self, rows: dict[str, np.ndarray], i: int, observed: Any) -> None:
        for key, room in rows.items():
            room[i] = encode_text(observed[key], self._texts[key]) if key in self._texts else observed[key]

    def _slot_seed(self, index: int) -> int:
        group = (self._offset + index) // self._group
        return int(np.random.SeedSequence([self._seed, group]).generate_state(1)[0])

    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """See `VectorEnv.reset`."""
        if seed is not None:
            self._seed, self._fresh = seed, True
        obs = self._rows()
        for i, env in enumerate(self.envs):
            self._write(obs, i, env.reset(seed=self._slot_seed(i) if self._fresh else None)[0])
            self._elapsed[i], self._returns[i] = 0, 0.0
        self._fresh = False
        return obs, {}

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`. Box actions are clipped to the space's bounds."""
        return self._advance(actions, range(self.num_envs), None)

    def chunk_step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.chunk_step`. A slot whose episode ended waits at the first observation of the next."""
        obs, rewards, terminations, truncations, infos = self.step(actions[:, 0])
        count = actions.shape[1]
        if count == 1:
            return obs, rewards, terminations, truncations, infos
        each, executed = np.zeros((self.num_envs, count), np.float32), np.ones((self.num_envs, count), bool)
        each[:, 0] = rewards
        for i in range(1, count):
            executed[:, i] = ~(terminations | truncations)
            active = np.flatnonzero(executed[:, i]).tolist()
            obs, reward, terminated, truncated, info = self._advance(actions[:, i], active, obs)
            each[:, i] = reward
            rewards += reward
            ended = terminated | truncated
            terminations |= terminated
            truncations |= truncated
            if ended.any():
                merge_infos(infos, info, ended)
        infos["chunk"] = {"rewards": each, "mask": executed}
        return obs, rewards, terminations, truncations, infos

    def _advance(self, actions: np.ndarray, slots: Sequence[int], obs: Any) -> Step:
        """One step of the given slots; the others keep their row of `obs` and get no reward."""
        n = self.num_envs
        if self._discrete:
            chosen: Any = (actions.reshape(-1) + int(self._start)).tolist()
        elif self._box:
            shaped = actions.reshape(n, *self.action_space.shape)
            chosen = np.clip(shaped, self.action_space.low, self.action_space.high).astype(self.action_space.dtype)
        else:
            chosen = actions.reshape(n, *self.action_space.shape) + self._start
        if obs is None:
            obs = self._rows()
        rewards = np.zeros(n, np.float32)
        terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
        infos: dict[str, Any] = {}
        limit, elapsed, returns, write = self._limit, self._elapsed, self._returns, self._write
        for i in slots:
            env = self.envs[i]
            observed, reward, terminated, truncated, info = env.step(chosen[i])
            elapsed[i] += 1
            returns[i] += float(reward)
            rewards[i] = reward
            if terminated and self._ignore_terminations:
                terminated = False
            if limit and elapsed[i] >= limit:
                truncated = True
            if terminated or truncated:
                terminations[i], truncations[i] = terminated, truncated and not terminated
                self._end(i, observed, info, infos)
                observed = env.reset()[0]
                elapsed[i], returns[i] = 0, 0.0
            write(obs, i, observed)
        if self._scale != 1.0:
            rewards *= self._scale
        return obs, rewards, terminations, truncations, infos

    def _end(self, i: int, final: Any, info: dict[str, Any], infos: dict[str, Any]) -> None:
        if "final_obs" not in infos:
            n = self.num_envs
            infos["final_obs"] = self._rows()
            infos["episode"] = {
                "return": np.zeros(n, np.float64), "length": np.zeros(n, np.int64), "mask": np.zeros(n, bool),
            }  # fmt: skip
        self._write(infos["final_obs"], i, final)
        episode = infos["episode"]
        episode["return"][i], episode["length"][i], episode["mask"][i] = self._returns[i], self._elapsed[i], True
        for name in ("success", "is_success"):
            if name in info:
                episode.setdefault("success", np.zeros(self.num_envs, np.float64))[i] = float(info[name])
        self._episodes[i] += 1

    # -- state ----------------------------------------------------------------------------------------------------

    def _simulator(self, env: gymnasium.Env[Any, Any]) -> bytes:
        """The pickled attributes of an environment and its wrappers, without what draws and without spaces."""
        layers = []
        layer: Any = env
        while True:
            layers.append({k: v for k, v in vars(layer).items() if k != "env" and not k.endswith(_NOT_STATE)})
            if layer is layer.unwrapped or not hasattr(layer, "env"):
                return pickle.dumps(layers)
            layer = layer.env

    def _can_save(self) -> bool:
        try:
            self._simulator(self.envs[0])
        except Exception:  # simulators hold handles of every kind, and pickling them fails in as many ways
            return False
        # MuJoCo's handles pickle, but a restored step differs: its state lives outside the attributes.
        return not hasattr(self.envs[0].unwrapped, "mujoco_renderer")

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`."""
        return {
            "slots": [
                {"simulator": self._simulator(env), "elapsed": self._elapsed[i], "return": self._returns[i],
                 "episodes": self._episodes[i]}
                for i, env in enumerate(self.envs)
            ]
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        """See `VectorEnv.load_state_dict`. The bytes come from a checkpoint whose checksums were verified."""
        slots = state["slots"]
        if len(slots) != self.num_envs:
            raise ValueError(f"state of {len(slots)} slots for {self.num_envs}")
        for i, (env, slot) in enumerate(zip(self.envs, slots, strict=True)):
            layer: Any = env
            for attributes in pickle.loads(slot["simulator"]):
                vars(layer).update(attributes)
                layer = getattr(layer, "env", layer)
            self._elapsed[i], self._returns[i] = int(slot["elapsed"]), float(slot["return"])
            self._episodes[i] = int(slot["episodes"])
        self._fresh = False

    def close(self) -> None:
        """Closes all environments."""
        for env in self.envs:
            env.close()
