"""Vector environment of MetaWorld v3 tasks. Their mujoco version needs a separate Python for the env group
(docs/how-to/simulators.md).
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.envs.observations import check_orientation, oriented
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv, merge_kwargs
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

_DEFAULTS = {
    "reward_mode": "dense",
    "camera_name": "corner2",
    "width": 480,
    "height": 480,
    "image_orientation": "rotate_180",
}
#: MetaWorld's own limit; its environments refuse more.
_LONGEST = 500


class MetaWorldVectorEnv(SlotwiseVectorEnv):
    """Vector environment of N slots of a task such as `reach-v3`, with a visible goal; each episode draws objects and goal.

    Observations are MetaWorld's 39 numbers. `kwargs`: reward_mode `dense` (0 to 10) or `sparse` (1 at success),
    camera_name, width, height and image_orientation (`oriented`) of pictures: MetaWorld's cameras are mounted upside down, so
    that pictures rotated by 180 degrees show the scene as it is. An episode ends with success, unless `ignore_terminations`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Slots here.
        slot_offset: Global number of the first.
        seed: Seed of the run.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        limit = min(cfg.max_episode_steps or _LONGEST, _LONGEST)
        super().__init__(cfg, num_envs, slot_offset, seed, limit)
        kwargs = merge_kwargs(cfg.kwargs, _DEFAULTS, "metaworld")
        self._orientation = check_orientation(kwargs.pop("image_orientation"))
        self._sparse = kwargs.pop("reward_mode") == "sparse"
        os.environ.setdefault("MUJOCO_GL", "egl")
        tasks = _tasks()
        name = cfg.env_id
        if name not in tasks:
            similar_names = difflib.get_close_matches(name, list(tasks), 3, 0.5)
            raise ConfigError(
                f"env_id is {name!r}, which MetaWorld does not know; "
                f"{'did you mean ' + ', '.join(similar_names) if similar_names else 'tasks are named as reach-v3'}"
            )
        self._envs = [_build(tasks[name], kwargs) for _ in range(num_envs)]
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
        return SlotStep(np.asarray(obs, np.float32), float(success) if self._sparse else float(reward), success)

    def picture(self, slot: int) -> np.ndarray:
        """Renders a slot (`SlotwiseVectorEnv.picture`)."""
        frame: np.ndarray = self._envs[slot].render()
        return oriented(frame, self._orientation)

    def close(self) -> None:
        """Closes the simulators."""
        for env in self._envs:
            env.close()


def _tasks() -> Any:
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise ConfigError(
            f"env_type metaworld needs MetaWorld ({error}), in a Python of its own: see envs/metaworld.txt and "
            f"cluster.node_groups[].python_interpreter"
        ) from None
    return ALL_V3_ENVIRONMENTS


def _build(task: Any, kwargs: dict[str, Any]) -> Any:
    """Builds a task with its goal visible, which draws each episode's objects and goal from its own generator."""
    env = task(render_mode="rgb_array", **kwargs)
    env._partially_observable = False
    env._freeze_rand_vec, env.seeded_rand_vec, env._set_task_called = False, True, True
    del env.sawyer_observation_space  # cached, without the goal
    env.max_path_length = _LONGEST + 1  # the limit is counted here
    return env
