"""Trajectories in ManiSkill's format, and the reader of all formats (`read_trajectories`).

A ManiSkill dataset is an HDF5 file with a group `traj_<i>` per episode, and a JSON file.

https://maniskill.readthedocs.io/en/latest/user_guide/datasets/demos.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlhpc.checkpoint.hdf5 import has, member, members, open_hdf5, require_local
from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.minari import MAIN, numbers, read_minari
from rlhpc.embodied.data.trajectory import EpisodeWriter, Trajectory, check, describe_nonfinite, shapes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files, fsync_folder, read_json, replace_durably
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

    Raises:
        ConfigError: No file matches, a file is damaged, a required field is missing, or (without `left_out`) a number is not
            finite. The message names file and episode. Errors of the paths are raised at once, others at the episode.
    """
    paths = [path] if isinstance(path, str | Path) else path
    sources = [_open(str(source_path), key) for source_path in paths]
    if not sources:
        raise ConfigError(f"{key} is empty; it names files of trajectories ({', '.join(SUFFIXES)}) or LeRobot datasets")
    return _iter_checked(
        (trajectory for trajectories in sources for trajectory in trajectories),
        only_success,
        limit,
        tuple(require),
        key,
        left_out,
    )


def _open(path: str, key: str) -> Iterator[Trajectory]:
    folder = expand_home(path)
    if (folder / "meta" / "info.json").is_file():
        return read_lerobot(folder)
    files = [folder / MAIN] if (folder / MAIN).is_file() else find_files(path, SUFFIXES, key.removesuffix(".path"))
    return (trajectory for file in files for trajectory in _read(file))


def _read(file: Path) -> Iterator[Trajectory]:
    with open_hdf5(file) as hdf5_file:
        is_minari = bool(numbers(hdf5_file))
    return read_minari(file) if is_minari else read_maniskill(file)


def _iter_checked(
    trajectories: Iterator[Trajectory],
    only_success: bool,
    limit: int | None,
    require: tuple[str, ...],
    key: str,
    left_out: list[str] | None,
) -> Iterator[Trajectory]:
    first_trajectory: Trajectory | None = None
    num_read = count = 0
    for trajectory in trajectories:
        if limit is not None and count >= limit:
            return
        num_read += 1
        for field in (*require, "success") if only_success else require:
            if trajectory[field] is None:
                raise ConfigError(f"{trajectory['source']} has no {field}{_HINTS.get(field, '')}")
        if only_success and not np.any(trajectory["success"]):
            continue
        if problem := describe_nonfinite(trajectory, require):
            if left_out is None:
                raise ConfigError(problem)
            left_out.append(problem)
            continue
        if first_trajectory is None:
            first_trajectory = trajectory
        _check_same_shapes(first_trajectory, trajectory)
        count += 1
        yield trajectory
    if limit != 0 and count == 0:
        reason = f" among its {num_read} episodes none succeeded" if num_read else " it holds no episode"
        raise ConfigError(f"{key}:{reason}")


_REPLAY = "; replay it with ManiSkill: python -m mani_skill.trajectory.replay_trajectory --traj-path FILE --save-traj "
_HINTS = {
    "obs": f"{_REPLAY}-o state",
    "rewards": f"{_REPLAY}--record-rewards --reward-mode normalized_dense",
}


def _check_same_shapes(first: Trajectory, other: Trajectory) -> None:
    first_shapes, other_shapes = shapes(first), shapes(other)
    if first_shapes != other_shapes:
        raise ConfigError(
            f"{other['source']} has {other_shapes}, {first['source']} has {first_shapes}; one data set has one shape"
        )


# -- ManiSkill ----------------------------------------------------------------------------------------------------------


def read_maniskill(path: Path) -> Iterator[Trajectory]:
    """Yields the episodes of one file, in the order of its JSON file or, without a JSON file, by number."""
    file_metadata = metadata(path)
    with open_hdf5(path) as file:
        episodes = file_metadata.get("episodes")
        if episodes is None:
            episode_ids = sorted(int(name[5:]) for name in file if name.startswith("traj_") and name[5:].isdigit())
            if not episode_ids:
                raise ConfigError(f"{path} has no group traj_0, traj_1, …; it has: {', '.join(file) or 'nothing'}")
            episodes = [{"episode_id": episode_id} for episode_id in episode_ids]
        for episode in episodes:
            name = f"traj_{episode['episode_id']}"
            if not has(file, name):
                raise ConfigError(f"{path} has no group {name!r}, which {path.with_suffix('.json').name} names")
            group = member(file, name)
            if not isinstance(group, h5py.Group):
                raise ConfigError(f"{path}, {name} is no group")
            try:
                trajectory = _read_group(group, f"{path}, {name}", episode)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                raise ConfigError(f"{path}, {name} is not what ManiSkill writes: {error}") from None
            yield trajectory


def metadata(path: Path) -> dict[str, Any]:
    """Reads the JSON file of an HDF5 file: `env_info` (`env_id`, `env_kwargs`, `max_episode_steps`) and `episodes`. Returns
    {} if the JSON file does not exist.
    """
    json_file = path.with_suffix(".json")
    if not json_file.is_file():
        return {}
    try:
        content = read_json(json_file.read_bytes())
        ids = [episode["episode_id"] for episode in content.get("episodes", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{json_file} is not what ManiSkill writes beside a .h5 file: {error!r}") from None
    del ids
    return dict(content)


def _read_group(group: Any, source: str, episode: Mapping[str, Any]) -> Trajectory:
    try:
        names = set(group)  # `in group` would follow a link
        missing_names = [name for name in ("actions", "terminated", "truncated") if name not in names]
        if missing_names:
            raise ConfigError(f"{source} lacks {', '.join(missing_names)}; it has: {', '.join(group) or 'nothing'}")
        actions = member(group, "actions")
        if isinstance(actions, h5py.Group):
            raise ConfigError(f"{source} has actions of several robots ({', '.join(actions)}); supported is one")
        arrays = {name: _load(node) for name, node in members(group)}
    except (OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source} is damaged: {first_line(error)}") from None
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
            "source": source,
        }
    )


def _load(node: Any, depth: int = 0) -> Any:
    if not isinstance(node, h5py.Group):
        return require_local(node)[()]
    if depth > _MAX_DEPTH:  # a group may be a member of itself
        raise RuntimeError(f"{node.name[:100]} is nested deeper than {_MAX_DEPTH} groups")
    return {name: _load(child, depth + 1) for name, child in members(node)}


def observation(recorded: Any) -> Any:
    """Converts recorded observations for policies: flattens the nested groups of a file like ManiSkill's wrappers.

    `agent` and `extra` become "state" `[T+1, D]`. The cameras' images become "rgb" and "depth", concatenated along the last
    axis. Observations with only a state become an array. Flat groups keep their names; an empty group becomes None.
    """
    if not isinstance(recorded, dict):
        return recorded.astype(np.float32) if recorded.dtype == np.float64 else recorded
    if not any(isinstance(child, dict) for child in recorded.values()):
        return {name: observation(child) for name, child in recorded.items()} or None
    obs_arrays: dict[str, np.ndarray] = {}
    number_arrays = [leaf for name, child in recorded.items() if name not in _SENSORS for leaf in _leaves(child)]
    if number_arrays:
        obs_arrays["state"] = np.concatenate(
            [leaf.reshape(len(leaf), -1).astype(np.float32) for leaf in number_arrays], -1
        )
    cameras = recorded.get("sensor_data", {}).values()
    for name in _IMAGES[:2]:
        if pictures := [camera[name] for camera in cameras if name in camera]:
            obs_arrays[name] = np.concatenate(pictures, -1)
    return obs_arrays["state"] if list(obs_arrays) == ["state"] else obs_arrays or None


def _leaves(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    else:
        yield value


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
        extra: Additional entries of the JSON file.
        facts: Result of `DatasetFacts.to_json`, which conversions retain.
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
        extra: Mapping[str, Any] | None = None,
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
            **(extra or {}),
            "episodes": [],
        }

    def __len__(self) -> int:
        return len(self._metadata["episodes"])

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode, with the fields of `rlhpc.embodied.data.trajectory`; `source` is not written."""
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
        group = self._file.create_group(f"traj_{index}", track_order=True)
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
            "elapsed_steps": T,
            "reset_kwargs": {"options": None, **({} if seed is None else {"seed": seed})},
        }
        if fields["success"] is not None:
            group.create_dataset("success", data=fields["success"], dtype=bool)
            episode["success"] = bool(T and fields["success"][-1])
        if fields["env_states"] is not None:
            _write(group, "env_states", fields["env_states"])
        if fields["rewards"] is not None:
            group.create_dataset("rewards", data=fields["rewards"], dtype=np.float32)
        self._metadata["episodes"].append(episode)

    def close(self) -> None:
        """Finishes both files and renames them to their final names."""
        self._file.close()
        metadata_text = json.dumps(self._metadata, indent=2, default=_to_json_value) + "\n"
        replace_durably(self.path.with_suffix(".json"), metadata_text.encode())
        self._partial_path.replace(self.path)
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._file.close()
        self._partial_path.unlink(missing_ok=True)


_PER_STEP = ("actions", "rewards", "terminations", "truncations", "success")


def _write(group: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        subgroup = group.create_group(name, track_order=True)
        for child_name, child in value.items():
            _write(subgroup, child_name, child)
    else:
        compression = {"compression": "gzip", "compression_opts": 5} if name in _IMAGES else {}
        group.create_dataset(name, data=np.asarray(value), **compression)


def _to_json_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
