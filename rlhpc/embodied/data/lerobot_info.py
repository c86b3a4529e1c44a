"""Facts of a dataset that its episodes do not contain: frame rate, robot, names of components and cameras, task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhpc.embodied.data.lerobot_reader import lerobot_facts
from rlhpc.embodied.data.trajectories import SUFFIXES, metadata
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files

#: Frames per second if neither a source nor an environment declares a rate; ManiSkill's control rate.
DEFAULT_FPS = 20


@dataclass(frozen=True)
class DatasetFacts:
    """Facts of a dataset that conversion, merging, splitting and recording retain.

    Attributes:
        fps: Frames per second; None if unknown.
        robot_type: LeRobot's name of the robot.
        names: Names of a column's components, as in LeRobot's `info.json`.
        cameras: Names of the camera columns, in the order of their channels in `rgb`.
        task: Text of the only task; None if the dataset has several tasks or no task.
    """

    fps: float | None = None
    robot_type: str | None = None
    names: dict[str, Any] = field(default_factory=dict)
    cameras: tuple[str, ...] = ()
    task: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the known facts as a JSON object."""
        facts = {"fps": self.fps, "robot_type": self.robot_type, "names": self.names, "task": self.task}
        return {name: fact for name, fact in facts.items() if fact} | (
            {"cameras": list(self.cameras)} if self.cameras else {}
        )


def facts_of(values: Mapping[str, Any]) -> DatasetFacts:
    """Builds facts from the JSON of `DatasetFacts.to_json`. Malformed facts count as unknown."""
    fps, names, cameras = values.get("fps"), values.get("names"), values.get("cameras")
    has_rate = isinstance(fps, int | float) and math.isfinite(fps) and fps > 0
    text_facts = {name: values[name] if isinstance(values.get(name), str) else None for name in ("robot_type", "task")}
    return DatasetFacts(
        fps=fps if has_rate else None,
        names=dict(names) if isinstance(names, Mapping) else {},
        cameras=tuple(map(str, cameras)) if isinstance(cameras, list) else (),
        **text_facts,
    )


def source_facts(paths: Iterable[str], key: str) -> list[tuple[str, DatasetFacts]]:
    """Returns the facts of each file or folder, from LeRobot's `info.json` or an HDF5 file's JSON."""
    sources: list[tuple[str, DatasetFacts]] = []
    for path in paths:
        folder = expand_home(path)
        if (folder / "meta" / "info.json").is_file():
            sources.append((str(folder), facts_of(lerobot_facts(folder))))
        elif not (folder / "data").exists():  # Minari's files contain no such facts
            for file in find_files(path, SUFFIXES, key):
                info = metadata(file).get("env_info") or {}
                recorded = info.get("dataset")
                sources.append((str(file), facts_of(recorded if isinstance(recorded, Mapping) else {})))
    return sources


def merge_facts(sources: Iterable[tuple[str, DatasetFacts]], fps: int | None = None) -> DatasetFacts:
    """Merges the facts of several sources. A source without a fact does not contradict the others.

    Args:
        sources: Name and facts of each source.
        fps: Frame rate from the user, which replaces the rates of the sources.

    Raises:
        ConfigError: Two sources contradict each other.
    """
    facts_by_name: dict[str, tuple[str, Any]] = {}
    tasks: set[str | None] = set()
    names: dict[str, Any] = {}
    for source, facts in sources:
        tasks.add(facts.task)
        for fact_name in ("fps", "robot_type", "cameras"):
            fact = getattr(facts, fact_name)
            if not fact or (fact_name == "fps" and fps is not None):
                continue
            first_source, first_value = facts_by_name.setdefault(fact_name, (source, fact))
            if first_value != fact:
                hint = "give --fps, which all frames then have" if fact_name == "fps" else "convert them one by one"
                raise ConfigError(
                    f"{source} has {fact_name} {_format(fact)}, {first_source} has {_format(first_value)}; {hint}"
                )
        for column, fact in facts.names.items():
            if names.setdefault(column, fact) != fact:
                raise ConfigError(
                    f"{source} names the components of {column} {fact}, sources before it {names[column]}; one dataset "
                    "has one order of components"
                )
    shared_facts = {fact_name: fact for fact_name, (_, fact) in facts_by_name.items()}
    if fps is not None:
        shared_facts["fps"] = fps
    return DatasetFacts(names=names, task=tasks.pop() if len(tasks) == 1 else None, **shared_facts)


def _format(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def whole_rate(fps: float) -> int | float:
    """Returns an integral rate as an int, as LeRobot writes it; other rates stay floats."""
    rounded_fps = round(fps)
    return rounded_fps if abs(fps - rounded_fps) < 1e-6 * fps else fps
