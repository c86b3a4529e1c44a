"""Trajectories in ManiSkill's format, and the reader of all formats (`read_trajectories`).

A ManiSkill dataset is an HDF5 file with a group `traj_<i>` per episode, and a JSON file.

https://maniskill.readthedocs.io/en/latest/user_guide/datasets/demos.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlhpc.checkpoint.hdf5 import has, member, members, open_hdf5, require_local
from rlhpc.embodied.data.frames import FramePool, Frames, concatenate, hdf5_frames, load_frames, load_obs
from rlhpc.embodied.data.lerobot_reader import LeRobotEpisodes
from rlhpc.embodied.data.minari import MAIN, MinariEpisodes, numbers
from rlhpc.embodied.data.trajectory import (
    EpisodeSource,
    EpisodeWriter,
    Trajectory,
    check,
    describe_nonfinite,
    iter_episodes,
    shapes,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files, fsync_folder, read_json, rename, replace_durably
from rlhpc.runtime.text import first_line

SUFFIXES = (".h5", ".hdf5")
_IMAGES = ("rgb", "depth", "segmentation", "seg")
_MAX_DEPTH = 16
_SENSORS = ("sensor_data", "sensor_param")


def read_trajectories(
    path: str | Path | Sequence[str | Path],
    *,
    only_success: bool = False,
    limit: int | None = None,
    require: Sequence[str] = ("obs", "actions"),
    key: str = "trajectories.path",
    left_out: list[str] | None = None,
    load_images: bool = True,
) -> Iterator[Trajectory]:
    """Yields the episodes of ManiSkill files, Minari and LeRobot datasets, one after the other.

    Args:
        path: A `.h5` file, a pattern, a folder of such files, the folder of a LeRobot dataset (with `meta/info.json`) or of a
            Minari dataset (with `data/main_data.hdf5`), or a list of these.
        only_success: Skip episodes that never succeeded.
        limit: Maximum number of episodes.
        require: Fields that may not be None.
        key: Name of the path in messages.
        left_out: List that collects messages about episodes with non-finite numbers, which are skipped.
        load_images: Whether images are read; otherwise observations contain `Frames` in their place.

    Raises:
        ConfigError: No file matches, a file is damaged, a required field is missing, or (without `left_out`) a number is not
            finite. The message names file and episode. Errors of the paths are raised at once, others at the episode.
    """
    episode_sources = open_sources(path, key, states=True)
    episode_filter = EpisodeFilter(key, only_success=only_success, limit=limit, require=require, left_out=left_out)
    return _iter_checked(episode_sources, episode_filter, load_images)


def open_sources(path: str | Path | Sequence[str | Path], key: str, *, states: bool = False) -> list[EpisodeSource]:
    """Returns the sources of the episodes of a path or of several (`read_trajectories`), in order.

    Args:
        path: See `read_trajectories`.
        key: Name of the path in messages.
        states: Whether ManiSkill's episodes include `env_states`.

    Raises:
        ConfigError: No file matches, or a file is damaged.
    """
    paths = [path] if isinstance(path, str | Path) else path
    episode_sources = [
        episode_source for source_path in paths for episode_source in _open(str(source_path), key, states)
    ]
    if not episode_sources:
        raise ConfigError(f"{key} is empty; it names files of trajectories ({', '.join(SUFFIXES)}) or LeRobot datasets")
    return episode_sources


def _open(path: str, key: str, load_states: bool) -> Iterator[EpisodeSource]:
    folder = expand_home(path)
    if (folder / "meta" / "info.json").is_file():
        yield LeRobotEpisodes(folder)
        return
    files = [folder / MAIN] if (folder / MAIN).is_file() else find_files(path, SUFFIXES, key)
    for file in files:
        with open_hdf5(file) as hdf5_file:
            is_minari = bool(numbers(hdf5_file))
        yield MinariEpisodes(file) if is_minari else ManiSkillEpisodes(file, states=load_states)


@dataclass(frozen=True)
class EpisodeFacts:
    """Facts of an episode that decide whether it is used.

    Attributes:
        source: Name of the episode in messages.
        length: Number of steps.
        shapes: Shapes of a step (`rlhpc.embodied.data.trajectory.shapes`).
        step_bytes: Bytes of a step without images.
        missing: Names of the fields that the episode does not have.
        success: True if it succeeded at any step.
        problem: Message about a number that is not finite; "" if there is none.
        error: Message of the error that reading it raised; "" if there was none.
    """

    source: str
    length: int = 0
    shapes: str = ""
    step_bytes: int = 0
    missing: tuple[str, ...] = ()
    success: bool = False
    problem: str = ""
    error: str = ""


def facts_of(trajectory: Trajectory, required_fields: Sequence[str]) -> EpisodeFacts:
    """Returns the facts of an episode whose fields `required_fields` are needed."""
    missing_fields = tuple(name for name, field in trajectory.items() if field is None)
    obs = trajectory["obs"]
    arrays = list(obs.values()) if isinstance(obs, Mapping) else [obs]
    rows = [array[:1] for array in (*arrays, trajectory["actions"]) if isinstance(array, np.ndarray)]
    return EpisodeFacts(
        source=trajectory["source"],
        length=len(trajectory["actions"]),
        shapes=shapes(trajectory),
        step_bytes=sum(row.nbytes for row in rows),
        missing=missing_fields,
        success=trajectory["success"] is not None and bool(np.any(trajectory["success"])),
        problem="" if set(required_fields) & set(missing_fields) else describe_nonfinite(trajectory, required_fields),
    )


class EpisodeFilter:
    """Filter of the episodes of a run, which sees them in order.

    Args:
        key: Name of the path in messages.
        only_success: Skip episodes that never succeeded.
        limit: Maximum number of episodes.
        require: Fields that may not be None.
        left_out: List that collects messages about episodes with non-finite numbers, which are skipped.
    """

    def __init__(
        self,
        key: str,
        *,
        only_success: bool = False,
        limit: int | None = None,
        require: Sequence[str] = ("obs", "actions"),
        left_out: list[str] | None = None,
    ) -> None:
        self.require = tuple(require)
        self._key, self._only_success, self._limit, self._left_out = key, only_success, limit, left_out
        self._first_facts: EpisodeFacts | None = None
        self._num_read = self._count = 0

    @property
    def is_full(self) -> bool:
        """True if the limit is reached."""
        return self._limit is not None and self._count >= self._limit

    def accepts(self, episode_facts: EpisodeFacts) -> bool:
        """Returns whether the next episode is used.

        Raises:
            ConfigError: The episode cannot be read, lacks a field, differs from the first episode, or is not finite.
        """
        self._num_read += 1
        if episode_facts.error:
            raise ConfigError(episode_facts.error)
        for field in (*self.require, "success") if self._only_success else self.require:
            if field in episode_facts.missing:
                raise ConfigError(f"{episode_facts.source} has no {field}{_HINTS.get(field, '')}")
        if self._only_success and not episode_facts.success:
            return False
        if episode_facts.problem:
            if self._left_out is None:
                raise ConfigError(episode_facts.problem)
            self._left_out.append(episode_facts.problem)
            return False
        first_facts = self._first_facts = self._first_facts or episode_facts
        if first_facts.shapes != episode_facts.shapes:
            raise ConfigError(
                f"{episode_facts.source} has {episode_facts.shapes}, {first_facts.source} has {first_facts.shapes}; "
                f"one data set has one shape"
            )
        self._count += 1
        return True

    def check_not_empty(self) -> None:
        """Checks that an episode was accepted, unless the limit is 0.

        Raises:
            ConfigError: No episode was accepted.
        """
        if self._limit != 0 and self._count == 0:
            reason = (
                f" among its {self._num_read} episodes none succeeded" if self._num_read else " it holds no episode"
            )
            raise ConfigError(f"{self._key}:{reason}")


def _iter_checked(
    episode_sources: Sequence[EpisodeSource], episode_filter: EpisodeFilter, load_images: bool
) -> Iterator[Trajectory]:
    pool = FramePool()
    try:
        for episode_source in episode_sources:
            for episode_number in range(len(episode_source)):
                if episode_filter.is_full:
                    return
                trajectory = episode_source.episode(episode_number)
                if episode_filter.accepts(facts_of(trajectory, episode_filter.require)):
                    if load_images:
                        trajectory = {**trajectory, "obs": load_obs(trajectory["obs"], pool)}
                    yield trajectory
            pool.close()
    finally:
        pool.close()
    episode_filter.check_not_empty()


_REPLAY = "; replay it with ManiSkill: python -m mani_skill.trajectory.replay_trajectory --traj-path FILE --save-traj "
_HINTS = {
    "obs": f"{_REPLAY}-o state",
    "rewards": f"{_REPLAY}--record-rewards --reward-mode normalized_dense",
}


# -- ManiSkill ----------------------------------------------------------------------------------------------------------


def read_maniskill(path: Path) -> Iterator[Trajectory]:
    """Yields the episodes of one file, in the order of its JSON file or, without a JSON file, by number."""
    yield from iter_episodes(ManiSkillEpisodes(path))


class ManiSkillEpisodes(EpisodeSource):
    """Episodes of one file, in the order of its JSON file or, without a JSON file, by number.

    Args:
        path: Path of the HDF5 file.
        states: Whether episodes include `env_states`.

    Raises:
        ConfigError: The file has no episodes, or not those that its JSON file names.
    """

    def __init__(self, path: Path, *, states: bool = True) -> None:
        self._path, self._states = path, states
        episodes = metadata(path).get("episodes")
        if episodes is None:
            with open_hdf5(path) as file:
                trajectory_numbers = sorted(
                    int(name[5:]) for name in file if name.startswith("traj_") and name[5:].isdigit()
                )
                if not trajectory_numbers:
                    raise ConfigError(f"{path} has no group traj_0, traj_1, …; it has: {', '.join(file) or 'nothing'}")
            episodes = [{"episode_id": trajectory_number} for trajectory_number in trajectory_numbers]
        self._episodes: list[dict[str, Any]] = episodes

    def __len__(self) -> int:
        return len(self._episodes)

    def episode(self, number: int) -> Trajectory:
        """Returns an episode (`EpisodeSource.episode`).

        Raises:
            ConfigError: The file does not have ManiSkill's format.
        """
        path, episode = self._path, self._episodes[number]
        name = f"traj_{episode['episode_id']}"
        with open_hdf5(path) as file:
            if not has(file, name):
                raise ConfigError(f"{path} has no group {name!r}, which {path.with_suffix('.json').name} names")
            group = member(file, name)
            if not isinstance(group, h5py.Group):
                raise ConfigError(f"{path}, {name} is no group")
            try:
                return _read_group(group, f"{path}, {name}", episode, self._states)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                raise ConfigError(f"{path}, {name} is not what ManiSkill writes: {error}") from None


def metadata(path: Path) -> dict[str, Any]:
    """Reads the JSON file of an HDF5 file: `env_info` (`env_id`, `env_kwargs`, `max_episode_steps`) and `episodes`. Returns
    {} if the JSON file does not exist.

    Raises:
        ConfigError: The JSON file does not have ManiSkill's format.
    """
    json_file = path.with_suffix(".json")
    if not json_file.is_file():
        return {}
    try:
        metadata_content = read_json(json_file.read_bytes())
        ids = [episode["episode_id"] for episode in metadata_content.get("episodes", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{json_file} is not what ManiSkill writes beside a .h5 file: {error!r}") from None
    del ids
    return dict(metadata_content)


def _read_group(group: Any, source_name: str, episode: Mapping[str, Any], load_states: bool) -> Trajectory:
    try:
        group_names = set(group)  # `in group` would follow a link
        missing_names = [name for name in ("actions", "terminated", "truncated") if name not in group_names]
        if missing_names:
            raise ConfigError(
                f"{source_name} lacks {', '.join(missing_names)}; it has: {', '.join(group) or 'nothing'}"
            )
        actions = member(group, "actions")
        if isinstance(actions, h5py.Group):
            raise ConfigError(f"{source_name} has actions of several robots ({', '.join(actions)}); supported is one")
        arrays = {
            name: _load(node, images=name == "obs")
            for name, node in members(group)
            if load_states or name != "env_states"
        }
    except (OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source_name} is damaged: {first_line(error)}") from None
    actions = arrays["actions"].reshape(len(arrays["actions"]), -1)
    seed = episode.get("episode_seed", (episode.get("reset_kwargs") or {}).get("seed"))
    return check(
        {
            "obs": observation(arrays["obs"]) if "obs" in arrays else None,
            "actions": actions if actions.dtype.kind in "iu" else actions.astype(np.float32),
            "rewards": arrays["rewards"].astype(np.float32) if "rewards" in arrays else None,
            "terminations": arrays["terminated"].astype(bool),
            "truncations": arrays["truncated"].astype(bool),
            "success": arrays["success"].astype(bool) if "success" in arrays else None,
            "env_states": arrays.get("env_states"),
            "seed": seed[0] if isinstance(seed, list) and seed else None if isinstance(seed, list) else seed,
            "source": source_name,
        }
    )


def _load(node: Any, depth: int = 0, *, images: bool = False) -> Any:
    """Returns the arrays of a node, in nested dicts. With `images`, arrays of images stay in the file."""
    if not isinstance(node, h5py.Group):
        dataset = require_local(node)
        frames = hdf5_frames(dataset) if images else None
        return dataset[()] if frames is None else frames
    if depth > _MAX_DEPTH:  # a group may be a member of itself
        raise RuntimeError(f"{node.name[:100]} is nested deeper than {_MAX_DEPTH} groups")
    return {name: _load(child, depth + 1, images=images) for name, child in members(node)}


def observation(recorded_obs: Any) -> Any:
    """Converts recorded observations for policies: flattens the nested groups of a file like ManiSkill's wrappers.

    `agent` and `extra` become "state" `[T+1, D]`. The cameras' images become "rgb" and "depth", concatenated along the last
    axis. Observations with only a state become an array. Flat groups keep their names; an empty group becomes None.
    """
    if isinstance(recorded_obs, Frames):
        return recorded_obs
    if not isinstance(recorded_obs, dict):
        return recorded_obs.astype(np.float32) if recorded_obs.dtype == np.float64 else recorded_obs
    if not any(isinstance(child, dict) for child in recorded_obs.values()):
        return {name: observation(child) for name, child in recorded_obs.items()} or None
    obs_arrays: dict[str, Any] = {}
    number_arrays = [
        leaf for name, child in recorded_obs.items() if name not in _SENSORS for leaf in _iter_leaves(child)
    ]
    if number_arrays:
        obs_arrays["state"] = np.concatenate(
            [leaf.reshape(len(leaf), -1).astype(np.float32) for leaf in number_arrays], -1
        )
    cameras = recorded_obs.get("sensor_data", {}).values()
    for name in _IMAGES[:2]:
        if pictures := [camera[name] for camera in cameras if name in camera]:
            lazy = [image for image in pictures if isinstance(image, Frames)]
            obs_arrays[name] = concatenate(lazy) if len(lazy) == len(pictures) else np.concatenate(pictures, -1)
    return obs_arrays["state"] if list(obs_arrays) == ["state"] else obs_arrays or None


def _iter_leaves(data: Any) -> Iterator[np.ndarray]:
    if isinstance(data, dict):
        for child in data.values():
            yield from _iter_leaves(child)
    elif isinstance(data, Frames):  # poses and other matrices are numbers
        pool = FramePool()
        yield load_frames(data, pool)
        pool.close()
    else:
        yield data


class TrajectoryWriter(EpisodeWriter):
    """Writer of episodes in the format of ManiSkill's `RecordEpisode`, so that ManiSkill's loaders and replay can read them.

    The two files get their final names when `close` is called, so that no reader sees an unfinished file.

    Args:
        path: Path of the HDF5 file, with suffix `.h5`. The JSON file has the same name with suffix `.json`.
        env_id: Id of the environment.
        env_kwargs: Arguments of `gym.make`.
        max_episode_steps: Step limit of an episode.
        source_type: Type of the source: "rl", "motionplanning", "scripted", "human", …
        source_desc: Description of the source, such as the checkpoint or the expert.
        extra_facts: Additional entries of the JSON file.
        facts: Result of `DatasetFacts.to_json`, which conversions retain.

    Raises:
        ConfigError: The path does not end in .h5.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        source_type: str = "rl",
        source_desc: str = "",
        extra_facts: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix != ".h5":
            raise ConfigError(f"trajectories are written to {str(path)!r}, which does not end in .h5")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial_path = self.path.with_name(f".{self.path.stem}.partial.h5")
        self._file = h5py.File(self._partial_path, "w")
        kwargs = dict(env_kwargs or {})
        env_info: dict[str, Any] = {"env_id": env_id, "env_kwargs": kwargs, "max_episode_steps": max_episode_steps}
        if facts:
            env_info["dataset"] = dict(facts)
        self._control_mode = kwargs.get("control_mode")
        self._metadata: dict[str, Any] = {
            "env_info": env_info,
            "commit_info": None,
            "source_type": source_type,
            "source_desc": source_desc,
            **(extra_facts or {}),
            "episodes": [],
        }

    def __len__(self) -> int:
        return len(self._metadata["episodes"])

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode, with the fields of `rlhpc.embodied.data.trajectory`; `source` is not written.

        Raises:
            ConfigError: A field has a value that is not finite.
        """
        index, T = len(self), len(trajectory["actions"])
        fields = {"rewards": None, "success": None, "env_states": None, "seed": None, **trajectory}
        fields["source"] = f"{self.path}, traj_{index}"
        check(
            {
                name: np.asarray(field) if name in _PER_STEP and field is not None else field
                for name, field in fields.items()
            }
        )
        if problem := describe_nonfinite({**fields, "actions": np.asarray(fields["actions"])}, ("obs", "actions")):
            raise ConfigError(problem)
        name = f"traj_{index}"
        try:
            self._metadata["episodes"].append(self._write_group(name, index, T, fields))
            self._file.flush()  # a full disk is found here, not at the end
        except OSError:
            del self._metadata["episodes"][index:], self._file[name]
            raise

    def _write_group(self, name: str, index: int, num_steps: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the group of an episode; returns its entry of the JSON file."""
        group = self._file.create_group(name, track_order=True)
        if fields["obs"] is not None:
            _write(group, "obs", fields["obs"])
        actions = np.asarray(fields["actions"])
        # ManiSkill's actions are float32; discrete actions stay integers.
        group.create_dataset("actions", data=actions, dtype=actions.dtype if actions.dtype.kind in "iu" else np.float32)
        group.create_dataset("terminated", data=fields["terminations"], dtype=bool)
        group.create_dataset("truncated", data=fields["truncations"], dtype=bool)
        seed = fields["seed"]
        episode: dict[str, Any] = {
            "episode_id": index,
            "episode_seed": seed,
            "control_mode": self._control_mode,
            "elapsed_steps": num_steps,
            "reset_kwargs": {"options": None, **({} if seed is None else {"seed": seed})},
        }
        if fields["success"] is not None:
            group.create_dataset("success", data=fields["success"], dtype=bool)
            episode["success"] = bool(num_steps and fields["success"][-1])
        if fields["env_states"] is not None:
            _write(group, "env_states", fields["env_states"])
        if fields["rewards"] is not None:
            group.create_dataset("rewards", data=fields["rewards"], dtype=np.float32)
        return episode

    def close(self) -> None:
        """Finishes both files and renames them to their final names."""
        self._file.close()
        metadata_text = json.dumps(self._metadata, indent=2, default=_to_json_value) + "\n"
        replace_durably(self.path.with_suffix(".json"), metadata_text.encode())
        rename(self._partial_path, self.path)
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._file.close()
        self._partial_path.unlink(missing_ok=True)


_PER_STEP = ("actions", "rewards", "terminations", "truncations", "success")


def _write(group: Any, name: str, data: Any) -> None:
    if isinstance(data, Mapping):
        subgroup = group.create_group(name, track_order=True)
        for child_name, child in data.items():
            _write(subgroup, child_name, child)
    else:
        array = np.asarray(data)
        compression: dict[str, Any] = {}
        if name in _IMAGES and array.size:
            # a chunk is one image, so that reading an image decompresses no other
            compression = {"compression": "gzip", "compression_opts": 5, "chunks": (1, *array.shape[1:])}
        group.create_dataset(name, data=array, **compression)


def _to_json_value(array_value: Any) -> Any:
    return array_value.tolist() if isinstance(array_value, np.generic | np.ndarray) else str(array_value)
