"""LIBERO's tasks, in pictures and words. Run the env group with a Python of its own (docs/how-to/simulators.md)."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.envs.observations import TEXT_BYTES, encode_text
from rlhpc.embodied.envs.slotwise import SlotStep, SlotwiseVectorEnv, only_known
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

_DEFAULTS = {"task_ids": None, "cameras": ["agentview", "robot0_eye_in_hand"], "width": 128, "height": 128}
#: Steps of the longest demonstration of a suite, rounded up, as OpenVLA's evaluation has them.
_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Steps in which objects come to rest after a reset, with the gripper open and nothing else moving.
_SETTLING = 10
_REST = np.array([0, 0, 0, 0, 0, 0, -1.0])


class LiberoVectorEnv(SlotwiseVectorEnv):
    """N slots of a suite such as `libero_spatial`; neighbouring slots (or groups of slots) have its tasks in turn.

    An episode starts from one of the task's recorded initial states, drawn by its seed. Observations: `state` float32 `[8]`
    (gripper position 3, axis-angle 3, fingers 2), `rgb` uint8 `[H, W, 3 x cameras]` upright, `instruction`. The reward is 1
    at success. `kwargs`: task_ids (all), cameras, width, height.

    Episodes do not go on after a resume: robosuite's resets leave something behind unless they build the whole scene anew.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Slots here.
        slot_offset: Global number of the first.
        seed: Of the run.
    """

    supports_state = False

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        limit = cfg.max_episode_steps or _LIMITS.get(cfg.env_id, 520)
        super().__init__(cfg, num_envs, slot_offset, seed, limit)
        kwargs = only_known(cfg.kwargs, _DEFAULTS, "libero")
        suite = _suite(cfg.env_id)
        chosen = list(range(suite.n_tasks)) if kwargs["task_ids"] is None else [int(i) for i in kwargs["task_ids"]]
        if not chosen or not all(0 <= i < suite.n_tasks for i in chosen):
            raise ConfigError(f"env.train.kwargs.task_ids is {chosen}; {cfg.env_id} has tasks 0 to {suite.n_tasks - 1}")
        self._cameras = [str(name) for name in kwargs["cameras"]]
        self._size = (int(kwargs["height"]), int(kwargs["width"]))
        groups = [(slot_offset + slot) // cfg.group_size for slot in range(num_envs)]
        tasks = [chosen[group % len(chosen)] for group in groups]
        self._starts = [np.asarray(suite.get_task_init_states(task)) for task in tasks]
        self._texts = [encode_text(suite.get_task(task).language, TEXT_BYTES) for task in tasks]
        self._envs = [self._build(suite.get_task(task)) for task in tasks]
        rgb = spaces.Box(0, 255, (*self._size, 3 * len(self._cameras)), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (8,), np.float32)
        text = spaces.Box(0, 255, (TEXT_BYTES,), np.uint8)
        self.observation_space = spaces.Dict({"state": state, "rgb": rgb, "instruction": text})
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _build(self, task: Any) -> Any:
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv

        file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        height, width = self._size
        env = OffScreenRenderEnv(
            bddl_file_name=str(file),
            camera_names=self._cameras,
            camera_heights=height,
            camera_widths=width,
            hard_reset=False,
        )
        env.seed(0)  # it moves things that the recorded states do not contain; the same in every slot
        return env

    def begin_slot(self, slot: int, seed: int) -> dict[str, np.ndarray]:
        """Starts an episode in a slot (`SlotwiseVectorEnv.begin_slot`)."""
        env, starts = self._envs[slot], self._starts[slot]
        env.seed(0)
        env.reset()
        env.set_init_state(starts[seed % len(starts)])
        for _ in range(_SETTLING):
            obs = env.step(_REST)[0]
        return self._observe(slot, obs)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps a slot by one action (`SlotwiseVectorEnv.step_slot`)."""
        obs, _, _, _ = self._envs[slot].step(action)
        success = bool(self._envs[slot].check_success())
        return SlotStep(self._observe(slot, obs), float(success), success)

    def _observe(self, slot: int, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        hand = [obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"]]
        views = [obs[f"{camera}_image"][::-1] for camera in self._cameras]  # OpenGL's rows go upwards
        rgb = np.ascontiguousarray(np.concatenate(views, -1))
        return {"state": np.concatenate(hand).astype(np.float32), "rgb": rgb, "instruction": self._texts[slot]}

    def picture(self, slot: int) -> np.ndarray:
        """A picture of a slot (`SlotwiseVectorEnv.picture`): the first camera."""
        frame: np.ndarray = self._seen[slot]["rgb"][..., :3]
        return frame

    def close(self) -> None:
        """Closes the simulators."""
        for env in self._envs:
            env.close()


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector of a quaternion `[x, y, z, w]`."""
    vector, w = np.asarray(quaternion[:3], np.float64), float(np.clip(quaternion[3], -1, 1))
    length = float(np.linalg.norm(vector))
    return np.zeros(3) if length < 1e-9 else vector / length * (2 * np.arctan2(length, w))


def _suite(name: str) -> Any:
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
        near = difflib.get_close_matches(name, list(suites), 3, 0.5)
        raise ConfigError(
            f"env_id is {name!r}, which LIBERO does not know; {'did you mean ' + ', '.join(near) + '?' if near else ''}"
        )
    return suites[name]()
