"""Demonstrations of behaviour cloning: reading, checks against the environment, and training targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.batches import permutation
from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.data.trajectory import Trajectory, shapes
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.runtime.errors import ConfigError


def read_demos(cfg: BcConfig, left_out: list[str] | None = None) -> Iterator[Trajectory]:
    """Reads the episodes of section `demos`.

    Args:
        cfg: Configuration.
        left_out: List that collects messages about episodes with non-finite numbers, which are skipped; None raises an error.

    Raises:
        ConfigError: `demos.path` is not set, or its files cannot be read.
    """
    path = cfg.demos.path
    if not path:
        raise ConfigError("demos.path is not set; name trajectories: a .h5 file, a folder, or a LeRobot dataset")
    return read_trajectories(
        path if isinstance(path, str) else [str(demo_path) for demo_path in path],
        only_success=cfg.demos.only_success,
        limit=cfg.demos.limit,
        key="demos.path",
        require=("obs", "actions", *_list_required_fields(cfg)),
        left_out=left_out,
    )


def _list_required_fields(cfg: BcConfig) -> list[str]:
    """Returns the fields that an episode must have in addition to observations and actions."""
    rewards = ["rewards"] if cfg.algorithm.bc_value_coef or cfg.algorithm.value_model else []
    return [*rewards, *(["success"] if cfg.actor.model.model_type.lower() == "success" else [])]


def check_fit(trajectory: Trajectory, observation_space: Any, action_space: Any) -> None:
    """Checks that a trajectory fits the observation and action space of the environment.

    Raises:
        ConfigError: The trajectory does not fit; the message shows both shapes.
    """
    obs, actions = windows_of(trajectory["obs"], observation_space), trajectory["actions"]
    if isinstance(observation_space, spaces.Dict):
        boxes = observation_space.spaces
        is_compatible = isinstance(obs, dict) and all(
            name in obs and obs[name].shape[1:] == boxes[name].shape for name in boxes
        )
        expected = "observations " + ", ".join(f"{name} {list(box.shape or ())}" for name, box in boxes.items())
    else:
        is_compatible = not isinstance(obs, dict) and obs.shape[1:] == observation_space.shape
        expected = f"observations {list(observation_space.shape or ())}"
    is_discrete = not isinstance(action_space, spaces.Box)
    action_dim = 1 if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape or ())
    if not is_compatible or actions.shape[1] != action_dim or is_discrete != (actions.dtype.kind in "iu"):
        raise ConfigError(
            f"demos.path: {trajectory['source']} has {shapes(trajectory)} ({actions.dtype}); env.train has {expected} and "
            f"actions {action_space}"
        )


def held_out_of(episodes: int, cfg: BcConfig) -> set[int]:
    """Returns the indices of the episodes that are held out of training."""
    order = permutation(episodes, cfg.runner.seed).tolist()
    return set(order[: int(episodes * cfg.demos.holdout)])


def returns_to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the discounted sum of rewards from each step to the episode's end, `[T]`, without a bootstrap value."""
    sums, total = np.empty(len(rewards), np.float32), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = float(rewards[t]) + gamma * total
        sums[t] = total
    return sums


def chunks_of(actions: np.ndarray, chunk: range) -> tuple[np.ndarray, np.ndarray]:
    """Returns an action chunk for each step of an episode, and a mask of padding.

    Args:
        actions: Actions of the episode, `[T, dim]`.
        chunk: Offsets of a chunk's actions from the step.

    Returns:
        Chunks `[T, chunk, dim]`, and a bool mask `[T, chunk]` of positions outside the episode. These positions repeat the
        first or last action.
    """
    steps, last_step = np.arange(len(actions))[:, None] + np.asarray(chunk), len(actions) - 1
    return actions[steps.clip(0, last_step)], (steps < 0) | (steps > last_step)


def windows_of(obs: Any, space: Any) -> Any:
    """Converts observations of an episode `[T, ...]` to the form of the environment's space.

    If a box of the space has a time axis, each step gets its last n observations, `[T, n, ...]`. The first observation is
    repeated before the start of the episode, as in `frame_stack`.
    """
    boxes, arrays = boxes_of(space), obs if isinstance(obs, dict) else {"": obs}
    windows = {}
    for name, array in arrays.items():
        if name == "instruction" and name in boxes and array.ndim == 2:  # the dataset's texts may have another length
            text_length = boxes[name].shape[-1]
            array = np.pad(array[:, :text_length], ((0, 0), (0, max(0, text_length - array.shape[1]))))
        windows[name] = array
        if name in boxes and 1 < array.ndim == len(boxes[name].shape) and boxes[name].shape[1:] == array.shape[1:]:
            steps = np.arange(len(array))[:, None] + np.arange(1 - boxes[name].shape[0], 1)
            windows[name] = array[steps.clip(0)]
    return windows if isinstance(obs, dict) else windows[""]
