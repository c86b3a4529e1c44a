"""Batches of off-policy learning: samples from the replay buffer and a fixed fraction from demonstrations (RLPD, Ball et al.
2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.data.replay_buffer import ReplayBuffer, StoredReplay, describe, gather, row_type
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home


@dataclass
class MixtureDraw:
    """Rows of one batch on a rank.

    Attributes:
        columns: Arrays `[b, ...]` by name. They are views that the next draw overwrites.
        noise: `[2, b, d]` float32, standard normal.
        total: Number of rows over all ranks.
    """

    columns: dict[str, np.ndarray]
    noise: np.ndarray
    total: int


class Mixture:
    """Sampler of batches. Rows and noise depend only on seed, update and the length of the buffer.

    Args:
        replay: Buffer of this rank.
        demos: Demonstrated transitions `[n]` in the buffer's dtype, the same on all ranks; None for no demonstrations.
        batch_size: Number of rows over all ranks.
        demo_ratio: Fraction of the rows that come from the demonstrations.
        action_dim: Number of action components, d.
        seed: Seed of the run.
        rank, ranks: Rank in the actor group, and its size.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        demos: np.ndarray | None,
        *,
        batch_size: int,
        demo_ratio: float,
        action_dim: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.replay = replay
        self.batch_size = batch_size
        self.seed = seed
        self.action_dim = action_dim
        self.demos = None if demos is None else demos.view(np.uint8).reshape(len(demos), demos.dtype.itemsize)
        self._demo_dtype = None if demos is None else demos.dtype
        self.demo_rows = 0 if demos is None else round(demo_ratio * batch_size)
        self._rank = rank
        self._ranks = ranks
        self._out = np.empty((0, 0), np.uint8)

    def draw(self, update: int, *, alone: bool = False) -> MixtureDraw:
        """Draws the batch of an update.

        Args:
            update: Number of the update.
            alone: Draw all rows from the demonstrations.

        Raises:
            ConfigError: The columns of the demonstrations differ from those of this run.
        """
        dtype = self._demo_dtype if alone else self.replay.dtype
        assert dtype is not None
        if self._demo_dtype is not None and self._demo_dtype != dtype:
            raise ConfigError(
                f"algorithm.demo_buffer.load_path: the demonstrations have {describe(self._demo_dtype)}; this run's "
                f"transitions have {describe(dtype)}"
            )
        generator = np.random.Generator(np.random.Philox(key=[self.seed, update]))
        num_demos = self.batch_size if alone else self.demo_rows
        local_demo_positions = np.arange(
            num_demos * self._rank // self._ranks, num_demos * (self._rank + 1) // self._ranks
        )
        demo_rows = (
            generator.integers(0, len(self.demos), num_demos)[local_demo_positions] if self.demos is not None else None
        )
        replay_positions = (
            np.empty(0, np.int64) if alone else generator.integers(0, len(self.replay), self.batch_size - num_demos)
        )
        local_replay_positions, rows = self.replay.local_rows(replay_positions)
        noise = generator.standard_normal((2, self.batch_size, self.action_dim), np.float32)
        num_local_demos = len(local_demo_positions)
        num_rows = num_local_demos + len(rows)
        if self._out.shape != (num_rows, dtype.itemsize):
            self._out = np.empty((num_rows, dtype.itemsize), np.uint8)
        if demo_rows is not None and self.demos is not None:
            gather(self.demos, demo_rows, self._out[:num_local_demos])
        if len(rows):
            gather(self.replay.table, rows, self._out[num_local_demos:])
        if num_rows != self.batch_size:
            noise = noise[:, np.concatenate((local_demo_positions, local_replay_positions + num_demos))]
        batch = self._out.view(dtype)[:, 0]
        return MixtureDraw({name: batch[name] for name in dtype.names or ()}, noise, self.batch_size)


def load_demos(path: str, *, reward_scale: float, ignore_terminations: bool, skip: bool = False) -> np.ndarray:
    """Loads demonstrated transitions in the form of the replay buffer.

    Args:
        path: HDF5 trajectories in ManiSkill's format (a file, a folder, a pattern), or a stored replay buffer (see
            `replay_buffer`), whose transitions stay unchanged.
        reward_scale, ignore_terminations: Options of the training environments, which also apply to the demonstrations.
        skip: Skip episodes with non-finite numbers; otherwise they raise an error.

    Returns:
        Structured array `[n]`.

    Raises:
        ConfigError: The path contains no transitions, or rewards are missing.
    """
    key = "algorithm.demo_buffer.load_path"
    folder = expand_home(path)
    if any(folder.glob("index-*.json")) or any(folder.glob("replay/index-*.json")):
        replay = StoredReplay(folder)
        if replay.dtype is None:
            raise ConfigError(f"{key}: {folder} is empty")
        return replay.transitions()
    from rlhpc.embodied.data.trajectories import read_trajectories

    needed = ("obs", "actions", "rewards")
    trajectories = read_trajectories(path, require=needed, key=key, left_out=[] if skip else None)
    return transitions_of(trajectories, reward_scale=reward_scale, ignore_terminations=ignore_terminations)


def fit(demos: np.ndarray, observation_space: Any, action_space: Any, chunk: int) -> np.ndarray:
    """Returns the demonstrations with exactly the columns of this run's transitions.

    Args:
        demos: Result of `load_demos`.
        observation_space, action_space: Spaces of one environment slot.
        chunk: Number of actions of a decision.

    Raises:
        ConfigError: A column is missing or has another shape; the message shows the columns of both.
    """
    boxes = {"obs": observation_space}
    if isinstance(observation_space, spaces.Dict):
        boxes = {f"obs.{name}": box for name, box in observation_space.items()}
    columns = {name: _as_float32(np.zeros((1, *box.shape), box.dtype)) for name, box in boxes.items()}
    columns |= {f"next_{name}": column for name, column in columns.items()}
    columns["actions"] = np.zeros((1, chunk, int(np.prod(action_space.shape))), np.float32)
    columns |= {"rewards": np.zeros(1, np.float32), "terminations": np.zeros(1, bool)}
    required_dtype = row_type(columns, 1)
    demo_fields: Any = demos.dtype.fields or {}
    required_fields: Any = required_dtype.fields or {}
    if any(name not in demo_fields or demo_fields[name][0] != dtype for name, (dtype, *_) in required_fields.items()):
        raise ConfigError(
            f"algorithm.demo_buffer.load_path: the demonstrations have {describe(demos.dtype)}; this run's transitions have "
            f"{describe(required_dtype)}"
        )
    rows = np.zeros(len(demos), required_dtype)
    for name in required_fields:
        rows[name] = demos[name]
    return rows


def transitions_of(
    trajectories: Iterable[Mapping[str, Any]], *, reward_scale: float = 1.0, ignore_terminations: bool = False
) -> np.ndarray:
    """Converts trajectories (see `rlhpc.embodied.data.trajectories`) to transitions `[n]`.

    The observation after the last action is the last next observation, so that a truncated episode can be bootstrapped.
    """
    columns_by_trajectory: list[dict[str, np.ndarray]] = []
    for trajectory in trajectories:
        obs = trajectory["obs"]
        obs_columns = (
            {f"obs.{name}": array for name, array in obs.items()} if isinstance(obs, Mapping) else {"obs": obs}
        )
        columns = {name: np.asarray(array)[:-1] for name, array in obs_columns.items()}
        columns |= {f"next_{name}": np.asarray(array)[1:] for name, array in obs_columns.items()}
        actions = np.asarray(trajectory["actions"], np.float32)
        terminations = np.asarray(trajectory["terminations"], bool)
        columns |= {
            "actions": actions.reshape(len(actions), 1, -1),
            "rewards": np.asarray(trajectory["rewards"], np.float32) * np.float32(reward_scale),
            "terminations": np.zeros_like(terminations) if ignore_terminations else terminations,
        }
        columns_by_trajectory.append({name: _as_float32(column) for name, column in columns.items()})
    columns = {
        name: np.concatenate([trajectory_columns[name] for trajectory_columns in columns_by_trajectory])
        for name in columns_by_trajectory[0]
    }
    rows = np.zeros(len(columns["rewards"]), row_type(columns, 1))
    for name, column in columns.items():
        rows[name] = column
    return rows


def _as_float32(column: np.ndarray) -> np.ndarray:
    return column.astype(np.float32) if column.dtype == np.float64 else column
