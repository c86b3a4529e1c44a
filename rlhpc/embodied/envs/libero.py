"""Vector environment of LIBERO's tasks, with images and instructions. It needs a separate Python for the env group
(docs/how-to/simulators.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from gymnasium import spaces

from rlhpc.config.options import read_options
from rlhpc.embodied.envs.base import similar_ids_hint
from rlhpc.embodied.envs.observations import encode_text, oriented, text_bytes
from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import COUNT, ORIENTATIONS

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


@dataclass(frozen=True)
class LiberoOptions:
    """Options of `libero`: `env.train.kwargs`."""

    task_ids: list[int] | None = None
    """Tasks of the suite; null for all."""
    cameras: list[str] = field(default_factory=lambda: ["agentview", "robot0_eye_in_hand"])
    """Cameras of the images."""
    width: Annotated[int, COUNT] = 256
    """Width of the images in pixels."""
    height: Annotated[int, COUNT] = 256
    """Height of the images in pixels."""
    image_orientation: Annotated[str, ORIENTATIONS] = "rotate_180"
    """Orientation of the images (`oriented`)."""


#: Step limits as in OpenVLA's evaluation: length of a suite's longest demonstration, rounded up, without the settling steps.
_STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Number of idle steps after a reset, with the gripper open, in which objects come to rest.
_NUM_SETTLING_STEPS = 10
_IDLE_ACTION = np.array([0, 0, 0, 0, 0, 0, -1.0])


class LiberoVectorEnv(SlotwiseVectorEnv):
    """Vector environment of N slots of a suite such as `libero_spatial`.

    An episode starts from a recorded initial state of one of the suite's tasks. In training the episode's seed
    determines task and state, so that the slots of a group get the same task and state. In evaluation the suite's
    (task, state) pairs are enumerated over slots and episodes, beginning with the first state of every task. If the
    number of episodes equals the number of pairs, each pair is played once. With fewer episodes, all tasks get about
    the same number; with more, the enumeration repeats.

    Each episode builds a new simulator, as LIBERO's hard resets do, so that episodes are independent.

    Observations: `state` float32 `[8]` (gripper position 3, axis-angle 3, fingers 2), `rgb` uint8
    `[H, W, 3 x cameras]`, `instruction`. The reward is 1 at success. `kwargs` are `LiberoOptions`.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
        stage: "train" or "eval".
    """

    takes_stage = True
    control_hz = 20.0

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, stage: str = "train") -> None:
        super().__init__(cfg, num_envs, slot_offset, seed, cfg.max_episode_steps or _step_limit(cfg.env_id))
        options = read_options(LiberoOptions, cfg.kwargs, "env.train.kwargs", "env_type libero")
        self._suite = suite = _load_suite(cfg.env_id)
        task_ids = list(range(suite.n_tasks)) if options.task_ids is None else options.task_ids
        if not task_ids or not all(0 <= i < suite.n_tasks for i in task_ids):
            raise ConfigError(
                f"env.train.kwargs.task_ids is {task_ids}; {cfg.env_id} has tasks 0 to {suite.n_tasks - 1}"
            )
        self._cameras, self._size = options.cameras, (options.height, options.width)
        self._orientation = options.image_orientation
        self._initial_states = {task: np.asarray(suite.get_task_init_states(task)) for task in dict.fromkeys(task_ids)}
        self._pairs = task_state_pairs({task: len(states) for task, states in self._initial_states.items()})
        instructions = {task: str(suite.get_task(task).language) for task in self._initial_states}
        size = text_bytes(instructions.values())
        self._instructions = {task: encode_text(instruction, size) for task, instruction in instructions.items()}
        self._enumerates = stage == "eval" and not cfg.use_fixed_reset_state_ids
        self._stride = cfg.num_envs
        self._slot_offset = slot_offset
        #: Task of each slot's episode.
        self._slot_tasks = [task_ids[0]] * num_envs
        rgb = spaces.Box(0, 255, (*self._size, 3 * len(self._cameras)), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (8,), np.float32)
        text_box = spaces.Box(0, 255, (size,), np.uint8)
        self.observation_space = spaces.Dict({"state": state, "rgb": rgb, "instruction": text_box})
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _build_simulator(self, task: Any) -> Any:
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv

        file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        height, width = self._size
        np.random.seed(0)  # determines the positions that the recorded states do not contain
        env = OffScreenRenderEnv(
            bddl_file_name=str(file),
            camera_names=self._cameras,
            camera_heights=height,
            camera_widths=width,
            hard_reset=False,  # unnecessary, because the simulator is new
        )
        env.seed(0)
        env.reset()
        return env

    def pair_of(self, slot: int, seed: int) -> tuple[int, int]:
        """Returns (task, initial state) of the episode that a slot begins with `seed`."""
        index = seed
        if self._enumerates:
            index = (int(self.episodes.num_begun[slot]) - 1) * self._stride + self._slot_offset + slot
        return self._pairs[index % len(self._pairs)]

    def continue_episodes(self, counts: np.ndarray) -> None:
        """Sets the number of episodes that each slot has begun (`VectorEnv.continue_episodes`)."""
        self.episodes.num_begun[:] = counts

    def begin_slot(self, slot: int, seed: int) -> dict[str, np.ndarray]:
        """Starts an episode in a slot (`SlotwiseVectorEnv.begin_slot`)."""
        task, state = self.pair_of(slot, seed)
        if self._envs[slot] is not None:
            self._envs[slot].close()
        self._slot_tasks[slot] = task
        env = self._envs[slot] = self._build_simulator(self._suite.get_task(task))
        env.set_init_state(self._initial_states[task][state])
        for _ in range(_NUM_SETTLING_STEPS):
            obs = env.step(_IDLE_ACTION)[0]
        return self._convert_obs(slot, obs)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps a slot by one action (`SlotwiseVectorEnv.step_slot`)."""
        obs, _, _, _ = self._envs[slot].step(action)
        success = bool(self._envs[slot].check_success())
        return SlotStep(self._convert_obs(slot, obs), float(success), success)

    def _convert_obs(self, slot: int, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        end_effector_state = [obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"]]
        views = [oriented(obs[f"{camera}_image"], self._orientation) for camera in self._cameras]
        rgb = np.concatenate(views, -1)
        return {
            "state": np.concatenate(end_effector_state).astype(np.float32),
            "rgb": rgb,
            "instruction": self._instructions[self._slot_tasks[slot]],
        }

    def picture(self, slot: int) -> np.ndarray:
        """Renders a slot with the first camera (`SlotwiseVectorEnv.picture`)."""
        frame: np.ndarray = self._last_obs[slot]["rgb"][..., :3]
        return frame


def task_state_pairs(counts: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the (task, initial state) pairs of a suite, from the number of states of each task: state 0 of every task,
    then state 1, and so on."""
    return [(task, i) for i in range(max(counts.values())) for task, count in counts.items() if i < count]


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


def _load_suite(name: str) -> Any:
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        from libero.libero import benchmark
    except ImportError as error:
        raise ConfigError(
            f"env_type libero needs LIBERO ({error}), in a Python of its own: see envs/libero.txt and "
            f"cluster.node_groups[].python_interpreter"
        ) from None
    suites = benchmark.get_benchmark_dict()
    if name not in suites:
        hint = similar_ids_hint(name, suites, f"there are: {', '.join(suites)}")
        raise ConfigError(f"env_id is {name!r}, which LIBERO does not know; {hint}")
    return suites[name]()
