"""Vector environment of RLinf's own simulator classes (`rlinf.envs`), in a Python that has RLinf and the simulator.

RLinf's classes simulate all slots of a rank together. The adapter calls them in the order of RLinf's env worker
(workers/env/env_worker.py) and prepares actions by RLinf's own function (envs/action_utils.py).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from gymnasium import spaces

from rlhpc.config.options import read_options
from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import COUNT
from rlhpc.runtime.text import short_repr

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

#: RLinf's names of images, in the order in which its policies take them, and of all entries of its observations.
_IMAGES = ("main_images", "wrist_images", "extra_view_images")
_OBSERVATIONS = ("states", *_IMAGES, "task_descriptions")
#: Keys of a section that follow from rlhpc's own keys.
_SECTION_KEYS = (
    "seed",
    "group_size",
    "max_episode_steps",
    "ignore_terminations",
    "use_fixed_reset_state_ids",
    "auto_reset",
)
#: Bytes of an instruction.
_INSTRUCTION_BYTES = 512


@dataclass(frozen=True)
class RlinfOptions:
    """Options of `rlinf`: `env.train.kwargs`."""

    action_dim: Annotated[int | None, COUNT] = None
    """Number of components of an action of the policy (RLinf's `action_dim`); required."""
    section: dict[str, Any] = field(default_factory=dict)
    """RLinf's section `env.train` or `env.eval`, without the keys that rlhpc's section has, too."""
    model_type: str = "mlp_policy"
    """RLinf's name of the policy, by which its `prepare_actions` converts actions."""
    policy_setup: str | None = None
    """RLinf's `policy_setup`, by which `prepare_actions` converts actions."""
    observations: list[str] = field(default_factory=lambda: list(_OBSERVATIONS))
    """Entries of RLinf's observations that the policy sees: `states`, `main_images`, `wrist_images`, `extra_view_images`,
    `task_descriptions`; those that the simulator does not have are passed over."""
    max_cameras: Annotated[int | None, COUNT] = None
    """Number of cameras that the policy sees, in the order of `observations`; null for all."""
    state_components: list[list[int]] = field(default_factory=list)
    """Components of RLinf's `states` that the policy sees, in its order, counted from 0; several components of an entry stand
    for their sum. Empty for all."""
    sign_actions: list[int] = field(default_factory=list)
    """Components of an action, counted from 0, of which the simulator gets the sign, such as a gripper that opens or
    closes."""

    def __post_init__(self) -> None:
        for entry in self.state_components:
            if not entry or min(entry) < 0:
                raise ValueError(f"state_components has {short_repr(entry)}; allowed: lists of components from 0 on")
        if self.sign_actions and min(self.sign_actions) < 0:
            raise ValueError(f"sign_actions has {min(self.sign_actions)}; allowed: components from 0 on")


class RlinfVectorEnv(VectorEnv):
    """Vector environment of N slots of an environment class of RLinf; `env_id` is RLinf's `env_type`, such as `robotwin`.

    Observations: RLinf's `states` as `state` float32 `[D]`, its images as `rgb` uint8 `[H, W, 3 x images]` (as one entry each
    if their sizes differ), and its `task_descriptions` as `instruction`. An environment of states alone has an array.
    Rewards, ends and the choice of first states are RLinf's. A chunk is executed by RLinf's class, and counts as a whole.
    `kwargs` are `RlinfOptions`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.

    Raises:
        ConfigError: RLinf is missing, does not have the environment, or its class refuses the section.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs = num_envs
        self._options = read_options(RlinfOptions, cfg.kwargs, "env.train.kwargs", "env_type rlinf")
        if unknown_names := [name for name in self._options.observations if name not in _OBSERVATIONS]:
            raise ConfigError(
                f"env.train.kwargs.observations has {unknown_names[0]!r}; allowed: {', '.join(_OBSERVATIONS)}"
            )
        if self._options.action_dim is None:
            raise ConfigError(
                "env.train.kwargs.action_dim is null; env_type rlinf needs the number of components of an action"
            )
        self._env_id, self._reward_scale, self._offset = cfg.env_id, cfg.reward_scale, slot_offset
        self.max_episode_steps = cfg.max_episode_steps
        self._env, self._prepare_actions = self._build(cfg, seed)
        self.action_space = spaces.Box(-np.inf, np.inf, (self._options.action_dim,), np.float32)
        self._last_obs = self._restart()
        rows = self._last_obs if isinstance(self._last_obs, dict) else {"": self._last_obs}
        boxes: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(0, 255, rows_of_key.shape[1:], np.uint8)
            if rows_of_key.dtype == np.uint8
            else spaces.Box(-np.inf, np.inf, rows_of_key.shape[1:], np.float32)
            for key, rows_of_key in rows.items()
        }
        self.observation_space = boxes.get("") or spaces.Dict(boxes)

    def _build(self, cfg: EnvSideConfig, seed: int) -> tuple[Any, Any]:
        """Builds RLinf's environment; returns it with RLinf's function `prepare_actions`."""
        try:
            from omegaconf import OmegaConf

            library = importlib.import_module("rlinf.envs")
            action_utils = importlib.import_module("rlinf.envs.action_utils")
        except ImportError as error:
            raise ConfigError(
                f"env_type rlinf needs RLinf with all that it imports ({error}): name RLinf's own Python as "
                "env.train.simulator_python (docs/how-to/from-rlinf.md)"
            ) from None
        section = OmegaConf.create(
            {
                "use_rel_reward": cfg.use_rel_reward,
                **{name: value for name, value in self._options.section.items() if name not in _SECTION_KEYS},
                "env_type": self._env_id,
                "seed": seed,
                "group_size": cfg.group_size,
                "max_episode_steps": cfg.max_episode_steps,
                "ignore_terminations": cfg.ignore_terminations,
                "use_fixed_reset_state_ids": cfg.use_fixed_reset_state_ids,
                "enable_offload": False,
                "auto_reset": True,  # a slot whose episode ended begins the next one, as a VectorEnv's does
            }
        )
        OmegaConf.update(section, "video_cfg.save_video", False, force_add=True)
        if OmegaConf.select(section, "init_params.max_episode_steps") is not None:
            section.init_params.max_episode_steps = cfg.max_episode_steps
        self._section = section
        try:
            env_class = library.get_env_cls(self._env_id, section)
        except (ValueError, ImportError, AssertionError) as error:
            raise ConfigError(f"env_id is {self._env_id!r}, which RLinf does not provide here: {error}") from None
        rank, num_ranks = self._offset // self.num_envs, max(1, cfg.num_envs // self.num_envs)
        env = env_class(section, self.num_envs, rank, num_ranks, worker_info=None)
        return env, action_utils.prepare_actions

    # -- episodes ---------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts new episodes in all slots, from states that RLinf's class draws (`VectorEnv.reset`)."""
        if seed is not None:
            self._reseed(seed)
        self._last_obs = self._restart()
        return self._last_obs, {}

    def _reseed(self, seed: int) -> None:
        """Restarts the generator from which RLinf's class draws first states, if it has one."""
        generator: Any = getattr(self._env, "_generator", None)
        if isinstance(generator, np.random.Generator):
            self._env._generator = np.random.default_rng([seed, self._offset])
        elif hasattr(generator, "manual_seed"):
            generator.manual_seed(seed + self._offset)

    def _restart(self) -> Any:
        if hasattr(self._env, "update_reset_state_ids"):
            self._env.update_reset_state_ids()
        self._env.is_start = True
        return self._convert_obs(self._env.reset()[0])

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""
        return self.chunk_step(actions.reshape(self.num_envs, 1, -1))

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk by RLinf's `chunk_step` (`VectorEnv.chunk_step`)."""
        chunk = actions.shape[1]
        prepared_actions = self._prepare_actions(
            raw_chunk_actions=self._apply_signs(np.array(actions, np.float32).reshape(self.num_envs, chunk, -1)),
            env_type=self._env_id,
            model_type=self._options.model_type,
            num_action_chunks=chunk,
            action_dim=self._options.action_dim,
            policy=self._options.policy_setup,
            wm_env_type=self._section.get("wm_env_type"),
            env_cfg=self._section,
        )
        observations, chunk_rewards, terminations, truncations, chunk_infos = self._env.chunk_step(prepared_actions)
        rewards = _array(chunk_rewards).astype(np.float32).reshape(self.num_envs, -1) * np.float32(self._reward_scale)
        terminated: Any
        truncated: Any
        terminated, truncated = (
            _array(ends).astype(bool).reshape(self.num_envs, -1).any(1) for ends in (terminations, truncations)
        )
        truncated &= ~terminated
        self._last_obs = self._convert_obs(_last(observations))
        infos: dict[str, Any] = {}
        is_done = terminated | truncated
        if is_done.any():
            rlinf_infos = _last(chunk_infos)
            infos["final_obs"] = self._convert_obs(rlinf_infos["final_observation"])
            infos["episode"] = _episode(rlinf_infos["final_info"].get("episode", {}), is_done)
        if chunk > 1:
            # RLinf rewards some simulators' chunks once, at the end.
            per_action = np.zeros((self.num_envs, chunk), np.float32)
            per_action[:, chunk - rewards.shape[1] :] = rewards
            infos["chunk"] = {"rewards": per_action, "mask": np.ones((self.num_envs, chunk), bool)}
        return self._last_obs, rewards.sum(1), terminated, truncated, infos

    def _apply_signs(self, actions: np.ndarray) -> np.ndarray:
        """Returns the actions `[N, chunk, dim]` with the signs of the components `sign_actions`."""
        if components := self._options.sign_actions:
            actions[..., components] = np.sign(actions[..., components])
        return actions

    def _select_state(self, states: np.ndarray) -> np.ndarray:
        """Returns the components of the states `[N, D]` that the policy sees.

        Raises:
            ConfigError: The simulator's states have fewer components.
        """
        if not (groups := self._options.state_components):
            return states
        if (highest := max(map(max, groups))) >= states.shape[1]:
            raise ConfigError(
                f"env.train.kwargs.state_components has {highest}; the states of {self._env_id} have {states.shape[1]} "
                "components, counted from 0"
            )
        return np.stack([states[:, group].sum(1) for group in groups], 1)

    def _convert_obs(self, obs: dict[str, Any]) -> Any:
        """Converts RLinf's observations of all slots."""
        columns: dict[str, np.ndarray] = {}
        obs = {name: obs.get(name) for name in self._options.observations}
        if obs.get("states") is not None:
            columns["state"] = self._select_state(_array(obs["states"]).astype(np.float32).reshape(self.num_envs, -1))
        views: dict[str, np.ndarray] = {}
        num_remaining = self._options.max_cameras or math.inf
        for name in _IMAGES:
            if obs.get(name) is None or num_remaining <= 0:
                continue
            cameras = _cameras(obs[name])
            cameras = cameras[: int(min(num_remaining, len(cameras)))]
            num_remaining -= len(cameras)
            views[name] = np.concatenate(cameras, -1)
        if len({pictures.shape[1:3] for pictures in views.values()}) == 1:
            views = {"rgb": np.concatenate(list(views.values()), -1)}
        columns |= views
        if (texts := obs.get("task_descriptions")) is not None:
            texts = [texts] * self.num_envs if isinstance(texts, str) else texts
            columns["instruction"] = np.stack([encode_text(str(text), _INSTRUCTION_BYTES) for text in texts])
        return columns["state"] if list(columns) == ["state"] else columns

    def render(self, slots: Any = None) -> np.ndarray | None:
        """Returns the last images of the first camera (`VectorEnv.render`)."""
        images = (
            self._last_obs.get("rgb", self._last_obs.get("main_images")) if isinstance(self._last_obs, dict) else None
        )
        if images is None:
            return None
        frames: np.ndarray = images[list(range(self.num_envs)) if slots is None else list(slots)][..., :3]
        return frames

    def close(self) -> None:
        """Frees the simulators (`VectorEnv.close`)."""
        if hasattr(self._env, "close"):
            self._env.close()


def _array(values: Any) -> np.ndarray:
    """Returns a tensor, an array or a list of them as an array in host memory."""
    if isinstance(values, list | tuple):
        return np.stack([_array(value) for value in values])
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def _cameras(images: Any) -> list[np.ndarray]:
    """Returns the uint8 images `[N, H, W, 3]` of each camera.

    RLinf's simulators give one camera `[N, …]` or several `[N, cameras, …]`, channels first or last, and numbers up to 255 or
    floats up to 1.
    """
    pictures = _array(images)
    if np.issubdtype(pictures.dtype, np.floating):
        pictures = 255 * pictures
    pictures = pictures.astype(np.uint8)
    if pictures.ndim == 4:
        pictures = pictures[:, None]
    if pictures.shape[2] == 3 and pictures.shape[-1] != 3:
        pictures = np.moveaxis(pictures, 2, -1)
    return list(np.moveaxis(pictures, 1, 0))


def _last(items: Any) -> Any:
    return items[-1] if isinstance(items, list | tuple) else items


def _episode(metrics: dict[str, Any], is_done: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `infos["episode"]` from RLinf's metrics of the episodes that ended."""
    names = {
        "return": "return",
        "length": "episode_len",
        "success_once": "success_once",
        "success_at_end": "success_at_end",
    }
    episode = {
        name: _array(metrics[rlinf_name]).astype(np.float64).reshape(-1)
        for name, rlinf_name in names.items()
        if rlinf_name in metrics
    }
    for name in ("return", "length"):
        episode.setdefault(name, np.zeros(len(is_done)))
    return {**episode, "length": episode["length"].astype(np.int64), "mask": is_done.copy()}
