"""Vector environment of LIBERO's tasks, with images and instructions. It needs a separate Python for the env group
(docs/how-to/simulators.md).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rlhpc.config.options import read_options
from rlhpc.embodied.envs.base import similar_ids_hint
from rlhpc.embodied.envs.observations import encode_text, orient, text_bytes
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SuiteVectorEnv
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import COUNT, NOT_NEGATIVE, ORIENTATIONS, Choices

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


@dataclass(frozen=True)
class LiberoOptions:
    """Options of `libero`: `env.train.kwargs`."""

    package: Annotated[str, Choices("libero", "liberopro", "liberoplus")] = "libero"
    """Python package that has the suites: `libero`, or RLinf's distributions of LIBERO-PRO and LIBERO-Plus."""
    task_ids: list[int] | None = None
    """Tasks of the suite; null for all."""
    obs_mode: Annotated[str, Choices("rgb", "state")] = "rgb"
    """`rgb` for images, states and instructions; `state` for states alone."""
    cameras: list[str] = field(default_factory=lambda: ["agentview", "robot0_eye_in_hand"])
    """Cameras of the images."""
    width: Annotated[int, COUNT] = 256
    """Width of the images in pixels."""
    height: Annotated[int, COUNT] = 256
    """Height of the images in pixels."""
    image_orientation: Annotated[str, ORIENTATIONS] = "rotate_180"
    """Orientation of the images (`orient`)."""
    settling_steps: Annotated[int, COUNT] = 10
    """Number of idle steps after a reset, in which objects come to rest; RLinf takes 15."""
    settling_gripper: Annotated[str, Choices("open", "still")] = "open"
    """Gripper's command in these steps: `open`, or `still`, a command of 0."""
    start_order: Annotated[str, Choices("random", "shuffled")] = "random"
    """Order of the initial states in training: `random`, drawn for each episode; `shuffled`, in which each state of the suite
    is played once before any is played again."""
    initial_state: Annotated[int | None, NOT_NEGATIVE] = None
    """Initial state from which all episodes start, counted from 0 through the states of the suite's tasks, in place of
    `task_ids`; null for all."""


#: Step limits as in OpenVLA's evaluation: length of a suite's longest demonstration, rounded up, without the settling steps.
_STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Suites that consist of the tasks of others, in this order. The task lists of LIBERO's own `libero_100` are empty.
_COMBINED_SUITES = {
    "libero_100": ("libero_90", "libero_10"),
    "libero_130": ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10"),
}
#: Command of the gripper while objects come to rest, by `kwargs.settling_gripper`.
_SETTLING_COMMANDS = {"open": -1.0, "still": 0.0}


class LiberoVectorEnv(SuiteVectorEnv):
    """Vector environment of N slots of a suite such as `libero_spatial`, or of `libero_100` or `libero_130`, the tasks of
    several suites.

    An episode starts from a recorded initial state of one of the suite's tasks (`SuiteVectorEnv`). Each episode builds a
    new simulator, as LIBERO's hard resets do, so that episodes are independent.

    Observations: `state` float32 `[8]` (gripper position 3, axis-angle 3, fingers 2), `rgb` uint8
    `[H, W, 3 x cameras]`, `instruction`; with `obs_mode: state` the state as an array. The reward is 1 at success. `kwargs`
    are `LiberoOptions`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
        stage: "train" or "eval".

    Raises:
        ConfigError: `env.train.kwargs.task_ids` names a task that the suite does not have.
    """

    control_hz = 20.0

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, stage: str = "train") -> None:
        options = read_options(LiberoOptions, cfg.kwargs, "env.train.kwargs", "env_type libero")
        self._tasks = _load_tasks(cfg.env_id, options.package)
        takes_all_tasks = options.task_ids is None or options.initial_state is not None
        task_ids = list(range(len(self._tasks))) if takes_all_tasks else options.task_ids
        if not task_ids or not all(0 <= i < len(self._tasks) for i in task_ids):
            raise ConfigError(
                f"env.train.kwargs.task_ids is {task_ids}; {cfg.env_id} has tasks 0 to {len(self._tasks) - 1}"
            )
        self._package = options.package
        self._cameras, self._size = options.cameras, (options.height, options.width)
        self._has_images = options.obs_mode == "rgb"
        self._frames: dict[int, np.ndarray] = {}
        self._orientation = options.image_orientation
        self._settling_steps = options.settling_steps
        self._idle_action = np.array([0, 0, 0, 0, 0, 0, _SETTLING_COMMANDS[options.settling_gripper]])
        self._initial_states = {task: self._tasks[task].initial_states() for task in dict.fromkeys(task_ids)}
        if options.initial_state is not None:
            self._initial_states = _single_state(self._initial_states, options.initial_state)
        super().__init__(
            cfg,
            num_envs,
            slot_offset,
            seed,
            cfg.max_episode_steps or _step_limit(cfg.env_id),
            stage=stage,
            task_names=[str(task.facts.name) for task in self._tasks],
            starts={task: len(states) for task, states in self._initial_states.items()},
            shuffles=options.start_order == "shuffled",
        )
        instructions = {task: str(self._tasks[task].facts.language) for task in self._initial_states}
        size = text_bytes(instructions.values())
        self._instructions = {task: encode_text(instruction, size) for task, instruction in instructions.items()}
        rgb = spaces.Box(0, 255, (*self._size, 3 * len(self._cameras)), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (8,), np.float32)
        text_box = spaces.Box(0, 255, (size,), np.uint8)
        self.observation_space = (
            spaces.Dict({"state": state, "rgb": rgb, "instruction": text_box}) if self._has_images else state
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _build_simulator(self, task: Any) -> Any:
        library = _import_library(self._package)
        simulators = _import_library(self._package, "envs")
        file = Path(library.get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        height, width = self._size
        np.random.seed(0)  # determines the positions that the recorded states do not contain
        env = simulators.OffScreenRenderEnv(
            bddl_file_name=str(file),
            camera_names=self._cameras,
            camera_heights=height,
            camera_widths=width,
            hard_reset=False,  # unnecessary, because the simulator is new
        )
        env.seed(0)
        env.reset()
        return env

    def begin_slot(self, slot: int, seed: int) -> Any:
        """Starts an episode in a slot (`SlotwiseVectorEnv.begin_slot`)."""
        task, state = self.draw_start(slot, seed)
        if self._envs[slot] is not None:
            self._envs[slot].close()
        env = self._envs[slot] = self._build_simulator(self._tasks[task].facts)
        env.set_init_state(self._initial_states[task][state])
        for _ in range(self._settling_steps):
            obs = env.step(self._idle_action)[0]
        return self._convert_obs(slot, obs)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps a slot by one action (`SlotwiseVectorEnv.step_slot`)."""
        obs, _, _, _ = self._envs[slot].step(action)
        success = bool(self._envs[slot].check_success())
        return SlotStep(self._convert_obs(slot, obs), float(success), success)

    def _convert_obs(self, slot: int, obs: dict[str, np.ndarray]) -> Any:
        end_effector_state = [obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"]]
        state = np.concatenate(end_effector_state).astype(np.float32)
        views = [orient(obs[f"{camera}_image"], self._orientation) for camera in self._cameras]
        self._frames[slot] = views[0]
        if not self._has_images:
            return state
        return {
            "state": state,
            "rgb": np.concatenate(views, -1),
            "instruction": self._instructions[int(self.slot_tasks[slot])],
        }

    def picture(self, slot: int) -> np.ndarray:
        """Returns a slot's last image of the first camera (`SlotwiseVectorEnv.picture`)."""
        return self._frames[slot]


def _single_state(initial_states: dict[int, np.ndarray], number: int) -> dict[int, np.ndarray]:
    """Returns the task that has the state of this number, with only that state.

    Raises:
        ConfigError: The suite has fewer states.
    """
    first = 0
    for task, states in initial_states.items():
        if number < first + len(states):
            return {task: states[number - first :][:1]}
        first += len(states)
    raise ConfigError(f"env.train.kwargs.initial_state is {number}; the suite has states 0 to {first - 1}")


def _step_limit(suite: str) -> int:
    """Returns the step limit of a suite; LIBERO-PRO's variants, such as `libero_goal_swap`, have the limit of the
    original suite.
    """
    names = [name for name in _STEP_LIMITS if suite == name or suite.startswith(f"{name}_")]
    return _STEP_LIMITS[names[0]] if names else max(_STEP_LIMITS.values())


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Returns the rotation vector of a quaternion `[x, y, z, w]`."""
    axis, cos_half_angle = np.asarray(quaternion[:3], np.float64), float(np.clip(quaternion[3], -1, 1))
    length = float(np.linalg.norm(axis))
    return np.zeros(3) if length < 1e-9 else axis / length * (2 * np.arctan2(length, cos_half_angle))


class _Task(NamedTuple):
    """Task of one of LIBERO's suites: name, language and files (`facts`), and its recorded initial states."""

    suite: Any
    number: int

    @property
    def facts(self) -> Any:
        return self.suite.get_task(self.number)

    def initial_states(self) -> np.ndarray:
        return np.asarray(self.suite.get_task_init_states(self.number))


def _load_tasks(name: str, package: str) -> list[_Task]:
    """Returns the tasks of a suite of a package, or of several suites (`_COMBINED_SUITES`).

    Raises:
        ConfigError: The package is missing, or does not have the suite.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        suites = _import_library(package, "benchmark").get_benchmark_dict()
    except ImportError as error:
        if package != "libero":
            raise ConfigError(
                f"env.train.kwargs.package is {package!r}, which cannot be imported ({error}): install rlinf-{package} with "
                "its assets in the simulators' Python (docs/how-to/simulators.md)"
            ) from None
        raise ConfigError(
            f"env_type libero needs LIBERO ({error}), in a Python of its own: see envs/libero.txt and "
            f"cluster.node_groups[].python_interpreter"
        ) from None
    names = _COMBINED_SUITES.get(name, (name,))
    if any(part not in suites for part in names):
        available_suites = list(dict.fromkeys([*suites, *_COMBINED_SUITES]))
        hint = similar_ids_hint(name, available_suites, f"there are: {', '.join(available_suites)}")
        raise ConfigError(f"env_id is {name!r}, which LIBERO does not know; {hint}")
    parts = [suites[part]() for part in names]
    return [_Task(suite, number) for suite in parts for number in range(suite.n_tasks)]


def _import_library(package: str, module: str = "") -> Any:
    return importlib.import_module(f"{package}.{package}{module and f'.{module}'}")
