"""Vector environment of MetaWorld v3: single tasks, and suites of tasks. Their mujoco version needs a separate Python for the
env group (docs/how-to/simulators.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from gymnasium import spaces

from rlhpc.config.options import read_options
from rlhpc.embodied.envs.base import similar_ids_hint
from rlhpc.embodied.envs.observations import encode_text, orient, text_bytes
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SuiteVectorEnv
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import COUNT, ORIENTATIONS, Choices

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


@dataclass(frozen=True)
class MetaWorldOptions:
    """Options of `metaworld`: `env.train.kwargs`."""

    obs_mode: Annotated[str, Choices("state", "rgb")] = "state"
    """`state` (MetaWorld's 39 numbers), or `rgb` (an image, 4 numbers of the gripper, and the instruction)."""
    task_one_hot: bool = True
    """Appends the one-hot of the task to the 39 numbers in a suite. With false, a policy also fits other suites."""
    reward_mode: Annotated[str, Choices("dense", "sparse")] = "dense"
    """`dense` (0 to 10), or `sparse` (1 at success)."""
    camera_name: str = "corner2"
    """Camera of the images."""
    camera_position: list[float] | None = None
    """Position of the camera; null leaves it where MetaWorld has it. LeRobot and RLinf put corner2 at [0.75, 0.075, 0.7]."""
    width: Annotated[int, COUNT] = 480
    """Width of the images in pixels."""
    height: Annotated[int, COUNT] = 480
    """Height of the images in pixels."""
    image_orientation: Annotated[str, ORIENTATIONS] = "rotate_180"
    """Orientation of the images (`orient`): MetaWorld's cameras are mounted upside down."""


#: Step limit of MetaWorld's environments, which refuse longer episodes.
_MAX_STEPS = 500
#: Number of values of the gripper at the beginning of a state: position and opening.
_GRIPPER_WIDTH = 4
#: Suites by name: dictionary of `metaworld.env_dict`, and its part in the benchmarks of meta-learning. RLinf's names of ML45's
#: tasks for training and for test are `metaworld_45_ind` and `metaworld_45_ood`.
_SUITES = {
    "mt10": ("MT10_V3", None),
    "mt50": ("MT50_V3", None),
    "metaworld_50": ("MT50_V3", None),
    "metaworld_45_ind": ("ML45_V3", "train"),
    "metaworld_45_ood": ("ML45_V3", "test"),
}
#: Instructions by task, as in LeRobot and in the data sets of policies that take instructions.
_INSTRUCTIONS = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "hand-insert-v3": "Insert the gripper into a hole",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "push-back-v3": "Push the puck to a goal",
    "push-v3": "Push the puck to a goal",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}


class MetaWorldVectorEnv(SuiteVectorEnv):
    """Vector environment of N slots of a task such as `reach-v3`, or of a suite such as `metaworld_50` (`SuiteVectorEnv`).

    Each episode draws objects and goal; the goal is visible. Observations are MetaWorld's 39 numbers, in a suite followed by
    the one-hot of the task; or `state` float32 `[4]` (gripper position 3, opening 1), `rgb` uint8 `[H, W, 3]` and
    `instruction`. `kwargs` are `MetaWorldOptions`. An episode ends with success, unless `ignore_terminations`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
        stage: "train" or "eval".

    Raises:
        ConfigError: `camera_position` does not have three numbers.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, stage: str = "train") -> None:
        options = read_options(MetaWorldOptions, cfg.kwargs, "env.train.kwargs", "env_type metaworld")
        if options.camera_position is not None and len(options.camera_position) != 3:
            raise ConfigError(
                f"env.train.kwargs.camera_position is {list(options.camera_position)}; allowed: three numbers [x, y, z], "
                "or null"
            )
        self._options = options
        os.environ.setdefault("MUJOCO_GL", "egl")
        self._tasks = _load_tasks(cfg.env_id)
        super().__init__(
            cfg,
            num_envs,
            slot_offset,
            seed,
            min(cfg.max_episode_steps or _MAX_STEPS, _MAX_STEPS),
            stage=stage,
            task_names=list(self._tasks),
            starts=dict.fromkeys(range(len(self._tasks)), 1),
        )
        #: Task of each slot's simulator; -1 before the first.
        self._simulated_tasks = np.full(num_envs, -1)
        self._begin_task(0, 0)
        self.control_hz = 1.0 / float(self._envs[0].dt)
        text_size = text_bytes(_INSTRUCTIONS.values())
        self._instructions = [encode_text(_INSTRUCTIONS.get(name, ""), text_size) for name in self._tasks]
        has_one_hot = len(self._tasks) > 1 and options.task_one_hot
        self._one_hots = np.eye(len(self._tasks) if has_one_hot else 0, dtype=np.float32)
        space = self._envs[0].sawyer_observation_space
        self.observation_space = self._build_observation_space(space, text_size)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def _build_observation_space(self, space: Any, text_size: int) -> Any:
        low, high = (np.asarray(bound, np.float32) for bound in (space.low, space.high))
        if self._options.obs_mode == "state":
            num_tasks = len(self._one_hots)
            if len(self._tasks) > 1:  # the goal's bounds differ between tasks
                low, high = np.full_like(low, -np.inf), np.full_like(high, np.inf)
            low = np.concatenate([low, np.zeros(num_tasks, np.float32)])
            high = np.concatenate([high, np.ones(num_tasks, np.float32)])
            return spaces.Box(low, high, dtype=np.float32)
        return spaces.Dict(
            {
                "state": spaces.Box(-np.inf, np.inf, (_GRIPPER_WIDTH,), np.float32),
                "rgb": spaces.Box(0, 255, (self._options.height, self._options.width, 3), np.uint8),
                "instruction": spaces.Box(0, 255, (text_size,), np.uint8),
            }
        )

    def _begin_task(self, slot: int, task: int) -> Any:
        """Returns the slot's simulator of a task; builds a new one if the slot simulated another task."""
        if self._simulated_tasks[slot] != task:
            if self._envs[slot] is not None:
                _close(self._envs[slot])
            self._envs[slot] = _build_task(list(self._tasks.values())[task], self._options)
            self._simulated_tasks[slot] = task
        return self._envs[slot]

    def begin_slot(self, slot: int, seed: int) -> Any:
        """Starts an episode in a slot (`SlotwiseVectorEnv.begin_slot`)."""
        task, _ = self.draw_start(slot, seed)
        env = self._begin_task(slot, task)
        env.seed(seed)
        obs = env.reset()[0]
        if self._options.obs_mode == "rgb":
            import mujoco

            mujoco.mj_forward(env.model, env.data)  # tasks place some objects after the reset's own pass
        return self._convert_obs(slot, obs)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps a slot by one action (`SlotwiseVectorEnv.step_slot`)."""
        obs, reward, _, _, info = self._envs[slot].step(action)
        success = bool(info["success"])
        has_sparse_reward = self._options.reward_mode == "sparse"
        return SlotStep(self._convert_obs(slot, obs), float(success if has_sparse_reward else reward), success)

    def _convert_obs(self, slot: int, obs: np.ndarray) -> Any:
        state, task = np.asarray(obs, np.float32), int(self.slot_tasks[slot])
        if self._options.obs_mode == "state":
            return np.concatenate([state, self._one_hots[task]]) if len(self._one_hots) else state
        return {
            "state": state[:_GRIPPER_WIDTH],
            "rgb": self.picture(slot),
            "instruction": self._instructions[task],
        }

    def picture(self, slot: int) -> np.ndarray:
        """Renders a slot (`SlotwiseVectorEnv.picture`)."""
        env = self._envs[slot]
        if (viewer := env.mujoco_renderer.viewer) is not None:
            viewer.make_context_current()  # Gymnasium's renderer uses the current context, which may be another slot's
        frame: np.ndarray = env.render()
        return orient(frame, self._options.image_orientation)


def _load_tasks(name: str) -> Mapping[str, Any]:
    """Returns the environment classes of a suite, or of a single task, by name of the task.

    Raises:
        ConfigError: MetaWorld is missing, or does not have the suite or task.
    """
    try:
        from metaworld import env_dict
    except ImportError as error:
        raise ConfigError(
            f"env_type metaworld needs MetaWorld ({error}), in a Python of its own: see envs/metaworld.txt and "
            f"cluster.node_groups[].python_interpreter"
        ) from None
    if name in _SUITES:
        suite_name, part = _SUITES[name]
        suite = getattr(env_dict, suite_name)
        tasks: Mapping[str, Any] = suite if part is None else suite[part]
        return tasks
    single_tasks = env_dict.ALL_V3_ENVIRONMENTS
    if name not in single_tasks:
        hint = similar_ids_hint(
            name, [*single_tasks, *_SUITES], f"tasks are named as reach-v3; the suites are {', '.join(_SUITES)}"
        )
        raise ConfigError(f"env_id is {name!r}, which MetaWorld does not know; {hint}")
    return {name: single_tasks[name]}


def _build_task(task: Any, options: MetaWorldOptions) -> Any:
    """Builds a task with a visible goal. The task draws objects and goal of each episode from its random generator."""
    camera_options = {"camera_name": options.camera_name, "width": options.width, "height": options.height}
    env = task(render_mode="rgb_array", **camera_options)
    env._partially_observable = False
    env._freeze_rand_vec, env.seeded_rand_vec, env._set_task_called = False, True, True
    del env.sawyer_observation_space  # the cached space lacks the goal
    env.max_path_length = _MAX_STEPS + 1  # `SlotwiseVectorEnv` counts the limit
    if options.camera_position is not None:
        env.model.cam_pos[env.model.camera(options.camera_name).id] = options.camera_position
    return env


def _close(env: Any) -> None:
    """Closes a simulator and frees the resources of its renderer, without an effect on the contexts of other simulators."""
    if (viewer := env.mujoco_renderer.viewer) is not None:
        viewer.make_context_current()
        viewer.con.free()
    env.close()
