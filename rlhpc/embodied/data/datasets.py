"""Datasets of trajectories, whatever their format: what is in them, and others made of them. `rlhpc data` calls this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.facts import DEFAULT_FPS, DatasetFacts, merge_facts, source_facts, whole_rate
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.minari import MinariWriter, minari_spaces
from rlhpc.embodied.data.trajectories import SUFFIXES, TrajectoryWriter, metadata, read_trajectories
from rlhpc.embodied.data.trajectory import Trajectory, shapes
from rlhpc.embodied.data.writing import EpisodeWriter
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files

FORMATS = ("hdf5", "lerobot", "minari")
_KEY = "rlhpc data"


@dataclass(frozen=True)
class Options:
    """How a dataset is written.

    Attributes:
        to: One of `FORMATS`.
        fps: LeRobot: frames a second; None takes those of the sources, or of the environment.
        task: LeRobot: what is done, in words; by default the name of the environment.
        videos: LeRobot: pictures go into mp4 files.
    """

    to: str = "hdf5"
    fps: int | None = None
    task: str | None = None
    videos: bool = False

    def lerobot_writer(self, folder: Path, env_id: str, facts: DatasetFacts) -> LeRobotWriter:
        """Writes episodes of an environment, or of sources with these facts, into a LeRobot dataset."""
        fps = self.fps if self.fps is not None else facts.fps
        if fps is None:
            fps = DEFAULT_FPS
            note(f"{folder}: nothing says the frame rate; {fps} frames a second are written (--fps)")
        return LeRobotWriter(
            folder, fps=whole_rate(fps), task=self.task or facts.task or env_id, videos=self.videos,
            robot=facts.robot_type or env_id, names=facts.names, cameras=facts.cameras,
        )  # fmt: skip


def read(paths: Sequence[str]) -> Iterator[Trajectory]:
    """The episodes of files and folders (see `read_trajectories`), one after the other.

    Raises:
        ConfigError: See there.
    """
    return read_trajectories(paths, require=("actions",), key=_KEY)


def inspect(paths: Sequence[str]) -> dict[str, Any]:
    """What the datasets have: episodes, steps, shapes, and, where they are known, returns, successes and ends."""
    lengths, returns, successes, cut, shape = list[int](), list[float](), list[bool](), 0, ""
    for trajectory in read(paths):
        shape = shape or shapes(trajectory)
        lengths.append(len(trajectory["actions"]))
        cut += bool(trajectory["truncations"].any())
        if trajectory["rewards"] is not None:
            returns.append(float(trajectory["rewards"].sum()))
        if trajectory["success"] is not None:
            successes.append(bool(trajectory["success"].any()))
    found: dict[str, Any] = {
        "env_id": _env_info(paths).get("env_id"), "episodes": len(lengths), "steps": sum(lengths),
        "length": [min(lengths), max(lengths)], "of_a_step": shape, "truncated": cut,
    }  # fmt: skip
    if returns:
        found["return"] = {"mean": float(np.mean(returns)), "min": min(returns), "max": max(returns)}
    if successes:
        found["success_once"] = float(np.mean(successes))
    return found


def convert(paths: Sequence[str], output: str, options: Options) -> int:
    """Writes the episodes of all datasets into one; returns how many.

    Raises:
        ConfigError: They are of several tasks or shapes, or lack what the format needs.
    """
    found = read(paths)
    with _writer(paths, output, options) as writer:
        for trajectory in found:
            writer.add(trajectory)
        return len(writer)


def split(paths: Sequence[str], output: str, parts: int, options: Options) -> list[tuple[str, int]]:
    """Deals the episodes out to `parts` datasets in a folder: the first to the first, the second to the second, and so on.

    Returns:
        Of each part, its path and how many episodes it has.

    Raises:
        ConfigError: There are fewer episodes than parts, or what `convert` raises.
    """
    count = sum(1 for _ in read(paths))
    if count < parts:
        raise ConfigError(f"--parts is {parts}, but there are {count} episodes")
    ending = ".h5" if options.to == "hdf5" else ""
    names = [str(Path(output) / f"{number}{ending}") for number in range(parts)]
    with ExitStack() as stack:
        writers = [stack.enter_context(_writer(paths, name, options)) for name in names]
        for number, trajectory in enumerate(read(paths)):
            writers[number % parts].add(trajectory)
        return [(name, len(writer)) for name, writer in zip(names, writers, strict=True)]


def _writer(paths: Sequence[str], output: str, options: Options) -> EpisodeWriter:
    info, target = _env_info(paths), Path(output)
    env_id = str(info.get("env_id") or "unknown")
    if options.to == "hdf5" and target.exists():
        raise ConfigError(f"{target} is there already; name another file")
    facts = merge_facts(source_facts(paths, _KEY), options.fps)
    makers: dict[str, Callable[[], EpisodeWriter]] = {
        "hdf5": lambda: TrajectoryWriter(
            target, env_id=env_id, env_kwargs=info.get("env_kwargs"), max_episode_steps=info.get("max_episode_steps"),
            source_type="converted", source_desc=", ".join(paths), facts=facts.known(),
        ),
        "lerobot": lambda: options.lerobot_writer(target, env_id, facts),
        "minari": lambda: MinariWriter(target, env_id=env_id, spaces=minari_spaces(paths)),
    }  # fmt: skip
    return makers[options.to]()


def _env_info(paths: Sequence[str]) -> dict[str, Any]:
    """What ManiSkill's files say of their environment; {} where none of the datasets is one.

    Raises:
        ConfigError: They say different things.
    """
    found: dict[str, Any] = {}
    source: Path | None = None
    for path in paths:
        folder = expand_home(path)
        if folder.is_dir() and any((folder / name).exists() for name in ("meta", "data")):
            continue
        for file in find_files(path, SUFFIXES, _KEY):
            info = metadata(file).get("env_info") or {}
            if source is not None and info.get("env_id") != found.get("env_id"):
                raise ConfigError(
                    f"{file} is of {info.get('env_id')}, {source} of {found.get('env_id')}; one data set has one task"
                )
            source, found = (source, found) if source is not None else (file, dict(info))
    return found
