"""Vector environment of MetaWorld v3 tasks. Their mujoco version needs a separate Python for the env group
(docs/how-to/simulators.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from gymnasium import spaces

from rlhpc.config.options import read_options
from rlhpc.embodied.envs.base import similar_ids_hint
from rlhpc.embodied.envs.observations import oriented
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import COUNT, ORIENTATIONS, Choices

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


@dataclass(frozen=True)
class MetaWorldOptions:
    """Options of `metaworld`: `env.train.kwargs`."""

    reward_mode: Annotated[str, Choices("dense", "sparse")] = "dense"
    """`dense` (0 to 10), or `sparse` (1 at success)."""
    camera_name: str = "corner2"
    """Camera of the images."""
    width: Annotated[int, COUNT] = 480
    """Width of the images in pixels."""
    height: Annotated[int, COUNT] = 480
    """Height of the images in pixels."""
    image_orientation: Annotated[str, ORIENTATIONS] = "rotate_180"
    """Orientation of the images (`oriented`): MetaWorld's cameras are mounted upside down."""


#: Step limit of MetaWorld's environments, which refuse longer episodes.
_MAX_STEPS = 500


class MetaWorldVectorEnv(SlotwiseVectorEnv):
    """Vector environment of N slots of a task such as `reach-v3`, with a visible goal; each episode draws objects and goal.

    Observations are MetaWorld's 39 numbers; `kwargs` are `MetaWorldOptions`. An episode ends with success, unless
    `ignore_terminations`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        limit = min(cfg.max_episode_steps or _MAX_STEPS, _MAX_STEPS)
        super().__init__(cfg, num_envs, slot_offset, seed, limit)
        options = read_options(MetaWorldOptions, cfg.kwargs, "env.train.kwargs", "env_type metaworld")
        self._orientation, self._has_sparse_reward = options.image_orientation, options.reward_mode == "sparse"
        os.environ.setdefault("MUJOCO_GL", "egl")
        tasks = _load_tasks()
        name = cfg.env_id
        if name not in tasks:
            hint = similar_ids_hint(name, tasks, "tasks are named as reach-v3")
            raise ConfigError(f"env_id is {name!r}, which MetaWorld does not know; {hint}")
        self._envs = [_build_task(tasks[name], options) for _ in range(num_envs)]
        self.control_hz = 1.0 / float(self._envs[0].dt)
        space = self._envs[0].sawyer_observation_space
        self.observation_space = spaces.Box(np.float32(space.low), np.float32(space.high), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def begin_slot(self, slot: int, seed: int) -> np.ndarray:
        """Starts an episode in a slot (`SlotwiseVectorEnv.begin_slot`)."""
        env = self._envs[slot]
        env.seed(seed)
        return np.asarray(env.reset()[0], np.float32)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps a slot by one action (`SlotwiseVectorEnv.step_slot`)."""
        obs, reward, _, _, info = self._envs[slot].step(action)
        success = bool(info["success"])
        return SlotStep(
            np.asarray(obs, np.float32), float(success) if self._has_sparse_reward else float(reward), success
        )

    def picture(self, slot: int) -> np.ndarray:
        """Renders a slot (`SlotwiseVectorEnv.picture`)."""
        frame: np.ndarray = self._envs[slot].render()
        return oriented(frame, self._orientation)


def _load_tasks() -> Any:
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise ConfigError(
            f"env_type metaworld needs MetaWorld ({error}), in a Python of its own: see envs/metaworld.txt and "
            f"cluster.node_groups[].python_interpreter"
        ) from None
    return ALL_V3_ENVIRONMENTS


def _build_task(task: Any, options: MetaWorldOptions) -> Any:
    """Builds a task with a visible goal. The task draws objects and goal of each episode from its random generator."""
    camera_options = {"camera_name": options.camera_name, "width": options.width, "height": options.height}
    env = task(render_mode="rgb_array", **camera_options)
    env._partially_observable = False
    env._freeze_rand_vec, env.seeded_rand_vec, env._set_task_called = False, True, True
    del env.sawyer_observation_space  # the cached space lacks the goal
    env.max_path_length = _MAX_STEPS + 1  # `SlotwiseVectorEnv` counts the limit
    return env
