"""Trajectory format: a dict with the same fields for all file formats.

obs            array [T+1, ...], or a dict of arrays ("state" [T+1, D] float32, "rgb" [T+1, H, W, C] uint8, "depth", …);
               an `EpisodeSource` gives `Frames` in place of arrays of images
actions        [T, A]; a discrete action is one integer, [T, 1]
rewards        [T] float32, or None if not recorded
terminations, truncations   [T] bool
success        [T] bool, or None if the simulator does not report it
taken          [T] bool, steps of an intervention; only in recordings with interventions
env_states     nested dict of arrays [T+1, ...] as from ManiSkill's `get_state_dict`, or None
seed           seed of the episode's reset, or None
source         file and episode, for messages
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.embodied.data.frames import FramePool, Frames, load_frames, load_obs
from rlhpc.embodied.envs.observations import bad_rows
from rlhpc.runtime.errors import ConfigError

Trajectory = dict[str, Any]


def check(trajectory: Trajectory) -> Trajectory:
    """Checks that the lengths of a trajectory's fields agree, and returns the trajectory.

    Raises:
        ConfigError: Two lengths differ; the message names the field and both lengths.
    """
    source_name, T = trajectory["source"], len(trajectory["actions"])
    for name in ("rewards", "terminations", "truncations", "success"):
        if trajectory[name] is not None and trajectory[name].shape != (T,):
            raise ConfigError(
                f"{source_name}: {T} actions, but {name} {list(trajectory[name].shape)}; it has one a step"
            )
    obs = trajectory["obs"]
    for name, array in obs.items() if isinstance(obs, Mapping) else [("", obs)]:
        if array is not None and len(array) != T + 1:
            raise ConfigError(
                f"{source_name}: {T} actions, but {len(array)} observations {name}; there is one more than actions"
            )
    return trajectory


def shapes(trajectory: Trajectory) -> str:
    """Returns the shapes of one step's observation and action, for messages and comparisons."""
    obs = trajectory["obs"]
    if isinstance(obs, Mapping):
        obs_text = "observations " + ", ".join(f"{name} {list(obs_array.shape[1:])}" for name, obs_array in obs.items())
    else:
        obs_text = "no observations" if obs is None else f"observations {list(obs.shape[1:])}"
    return f"{obs_text} and actions {list(trajectory['actions'].shape[1:])}"


def describe_nonfinite(trajectory: Trajectory, fields: Sequence[str]) -> str:
    """Returns a message about the first non-finite number in the fields; empty if all numbers are finite."""
    for field in fields:
        for name, array in _iter_arrays(field, trajectory[field]):
            if (rows := bad_rows(array)).any():
                return f"{trajectory['source']}: {name} of step {int(np.argmax(rows))} is not finite"
    return ""


def finite_part(trajectory: Trajectory) -> Trajectory:
    """Returns the steps before the first non-finite number of the observations and actions, which are arrays."""
    num_steps = len(trajectory["actions"])
    for field, num_rows in (("obs", num_steps + 1), ("actions", num_steps)):
        for _, array in _iter_arrays(field, trajectory[field]):
            rows = np.append(bad_rows(array), True)
            # A step needs the observation after it.
            num_steps = min(num_steps, max(int(np.argmax(rows)) - (num_rows - len(trajectory["actions"])), 0))
    return {
        name: value if name == "source" else _first_rows(value, num_steps + (name in ("obs", "env_states")))
        for name, value in trajectory.items()
    }


def _first_rows(data: Any, num_rows: int) -> Any:
    if isinstance(data, Mapping):
        return {name: _first_rows(child, num_rows) for name, child in data.items()}
    return data[:num_rows] if isinstance(data, np.ndarray) else data


def _iter_arrays(name: str, data: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a field, at any depth, with their dotted names; images that stay in their files only if they can
    be non-finite.
    """
    if isinstance(data, Mapping):
        for key, child in data.items():
            yield from _iter_arrays(f"{name}.{key}", child)
    elif isinstance(data, Frames):
        if data.dtype.kind == "f":
            pool = FramePool()
            yield name, load_frames(data, pool)
            pool.close()
    elif data is not None:
        yield name, data


class EpisodeSource(ABC):
    """Episodes of a file or a dataset, read by number. A source holds an index of its episodes, but no episode."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of episodes."""

    @abstractmethod
    def episode(self, number: int) -> Trajectory:
        """Returns an episode, with `Frames` in place of arrays of images.

        Raises:
            ConfigError: The episode is damaged or incomplete.
        """


def iter_episodes(episode_source: EpisodeSource) -> Iterator[Trajectory]:
    """Yields the episodes of a source, with their images, one after the other."""
    pool = FramePool()
    try:
        for episode_number in range(len(episode_source)):
            trajectory = episode_source.episode(episode_number)
            yield {**trajectory, "obs": load_obs(trajectory["obs"], pool)}
    finally:
        pool.close()


class EpisodeWriter(ABC):
    """Writer of episodes, for use in a `with` statement, in which an error discards them."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of episodes so far."""

    @abstractmethod
    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode, with the fields of `rlhpc.embodied.data.trajectory`.

        Raises:
            ConfigError: The format cannot store the episode.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes the dataset and renames it to its final name."""

    @abstractmethod
    def discard(self) -> None:
        """Removes the unfinished dataset."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class _DiscardFolder(Exception):
    """Exception that makes `FolderWriter` discard its folder."""


class FolderWriter(EpisodeWriter):
    """Writer of a dataset's folder. The folder gets its final name when `close` is called.

    Args:
        folder: Folder that does not exist yet or is empty.

    Attributes:
        root: Temporary folder that the writer fills.
        commit: Context that renames the temporary folder at its end, unless its body fails.

    Raises:
        ConfigError: The folder contains files.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already; give a folder that is not, or is empty")
        self.commit = ExitStack()
        self.root = self.commit.enter_context(filled_folder(folder))

    def discard(self) -> None:
        """Removes the unfinished folder (`EpisodeWriter.discard`)."""
        with suppress(_DiscardFolder), self.commit:
            raise _DiscardFolder
