"""Minari datasets: a folder with `data/main_data.hdf5`, which has a group `episode_<i>` per episode, and `data/metadata.json`.

https://minari.farama.org/content/dataset_standards
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlhpc.checkpoint.hdf5 import member, members, open_hdf5, require_local
from rlhpc.embodied.data.frames import hdf5_frames
from rlhpc.embodied.data.trajectory import EpisodeSource, FolderWriter, Trajectory, check
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_json
from rlhpc.runtime.text import first_line

#: Path of the data file in a dataset's folder.
MAIN = Path("data", "main_data.hdf5")
_GROUP = "episode_"
_FIELDS = ("observations", "actions", "rewards", "terminations", "truncations")


def numbers(group_names: Iterator[str] | Any) -> list[int]:
    """Returns the sorted episode numbers of a file's groups; empty for a file that is not in Minari's format."""
    return sorted(
        int(name[len(_GROUP) :]) for name in group_names if name.startswith(_GROUP) and name[len(_GROUP) :].isdigit()
    )


class MinariEpisodes(EpisodeSource):
    """Episodes of a file, in order.

    Named observations keep their names. `infos/success` becomes `success` if it has a value for every step.

    Args:
        path: Path of the HDF5 file.

    Raises:
        ConfigError: The file is not in Minari's format, or contains images encoded as JPEG.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_hdf5(path) as file:
            self._numbers = numbers(file)

    def __len__(self) -> int:
        return len(self._numbers)

    def episode(self, number: int) -> Trajectory:
        """Returns an episode (`EpisodeSource.episode`).

        Raises:
            ConfigError: The file does not have Minari's format.
        """
        name = f"{_GROUP}{self._numbers[number]}"
        source_name = f"{self._path}, {name}"
        with open_hdf5(self._path) as file:
            try:
                return _read_episode(member(file, name), source_name)
            except (OSError, RuntimeError, MemoryError, KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{source_name} is not what Minari writes: {first_line(error)}") from None


def _read_episode(group: Any, source_name: str) -> Trajectory:
    group_names = set(group)
    if missing_names := [name for name in _FIELDS if name not in group_names]:
        raise ConfigError(f"{source_name} lacks {', '.join(missing_names)}; it has: {', '.join(group) or 'nothing'}")
    obs, actions, rewards, terminations, truncations = (
        _load(member(group, name), source_name, images=name == "observations") for name in _FIELDS
    )
    if isinstance(actions, dict):
        raise ConfigError(f"{source_name} has actions by name ({', '.join(actions)}); supported is one array")
    seed = group.attrs.get("seed")
    return check(
        {
            "obs": obs,
            "actions": actions.reshape(len(actions), -1),
            "rewards": rewards.astype(np.float32),
            "terminations": terminations.astype(bool),
            "truncations": truncations.astype(bool),
            "success": _read_success(group, len(actions)),
            "env_states": None,
            "seed": None if seed is None else int(seed),
            "source": source_name,
        }
    )


def _load(node: Any, source_name: str, *, images: bool) -> Any:
    if isinstance(node, h5py.Group):
        return {name: _load(child, source_name, images=images) for name, child in members(node)}
    if require_local(node).dtype.kind not in "biuf":
        raise ConfigError(
            f"{source_name}: {node.name} holds {node.dtype}, no numbers; write pictures as they are (Minari's "
            f"jpeg_encoding=False)"
        )
    if images and (frames := hdf5_frames(node)) is not None:
        return frames
    array = node[()]
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _read_success(group: Any, episode_length: int) -> np.ndarray | None:
    """Returns the success flag of each step; None if the file has none. Minari's infos begin with the reset, which is
    omitted.
    """
    try:
        success = np.asarray(require_local(member(group, "infos/success"))[()], bool).reshape(-1)
    except KeyError:
        return None
    return success[1:] if len(success) == episode_length + 1 else success if len(success) == episode_length else None


class MinariWriter(FolderWriter):
    """Writer of a Minari dataset. The folder gets its final name when `close` is called. Images are not encoded as JPEG.

    Args:
        folder: Folder of the dataset.
        env_id: Id of the environment.
        spaces: Result of `minari_spaces` for the sources. A space is written if the episodes fit it.
    """

    def __init__(self, folder: Path, *, env_id: str, spaces: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder)
        self._env_id = env_id
        self._spaces = dict[str, Any]()
        self._source_spaces = dict(spaces or {})
        (self.root / MAIN).parent.mkdir()
        self._file = h5py.File(self.root / MAIN, "w", track_order=True)
        self._num_steps = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode, with the fields of `rlhpc.embodied.data.trajectory`.

        Raises:
            ConfigError: The episode lacks observations or rewards, or its shape differs from the first episode's.
        """
        if missing_names := [name for name in ("obs", "rewards") if trajectory[name] is None]:
            raise ConfigError(f"{trajectory['source']} has no {missing_names[0]}, which a Minari dataset needs")
        actions = np.asarray(trajectory["actions"])
        actions = actions.reshape(-1) if actions.dtype.kind in "iu" and actions.shape[1] == 1 else actions
        spaces = {"observation_space": _describe_space(trajectory["obs"]), "action_space": _describe_space(actions)}
        for name, space in spaces.items():
            if (source_space := join_spaces(self._source_spaces.get(name), space)) is not None:
                space = source_space
            if name in self._spaces:
                common_space = join_spaces(self._spaces[name], space)
                if common_space is None:
                    space_label = "observations" if name == "observation_space" else "actions"
                    raise ConfigError(f"{trajectory['source']} has other {space_label} than the episodes before it")
                space = common_space
            spaces[name] = space
        self._spaces = spaces
        group = self._file.create_group(f"{_GROUP}{self._count}")
        group.attrs.update({"id": self._count, "total_steps": len(actions)})
        if trajectory["seed"] is not None:
            group.attrs["seed"] = trajectory["seed"]
        obs = trajectory["obs"]
        for name, array in obs.items() if isinstance(obs, dict) else [("", obs)]:
            group[f"observations/{name}".rstrip("/")] = array
        group["actions"] = actions
        for name in _FIELDS[2:]:
            group[name] = trajectory[name]
        if trajectory["success"] is not None:
            group["infos/success"] = np.concatenate([[False], trajectory["success"]])
        self._count, self._num_steps = self._count + 1, self._num_steps + len(actions)

    def close(self) -> None:
        """Finishes the files and renames the folder to its final name.

        Raises:
            ConfigError: The dataset has no episodes.
        """
        with self.commit:
            if not self._count:
                raise ConfigError("there is no episode to write")
            self._file.close()
            dataset_metadata = {
                "total_episodes": self._count,
                "total_steps": self._num_steps,
                "data_format": "hdf5",
                "jpeg_encoding": False,
                **{name: json.dumps(space) for name, space in self._spaces.items()},
                "dataset_id": f"{self._env_id.lower()}/rlhpc-v0",
                "minari_version": "0.5.4",
                "dataset_size": round((self.root / MAIN).stat().st_size / 1e6, 1),
            }
            (self.root / "data" / "metadata.json").write_text(json.dumps(dataset_metadata) + "\n")

    def discard(self) -> None:
        """Removes the unfinished dataset (`EpisodeWriter.discard`)."""
        self._file.close()
        super().discard()


def minari_spaces(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the observation and action spaces that all sources declare; {} unless all sources are Minari datasets."""
    spaces: list[dict[str, Any]] = []
    for path in paths:
        file = expand_home(path) / MAIN.parent / "metadata.json"
        try:
            spaces_content = read_json(file.read_bytes())
            spaces.append({name: read_json(spaces_content[name]) for name in ("observation_space", "action_space")})
        except (OSError, ValueError, KeyError, TypeError):
            return {}
    return {
        name: space
        for name, space in (spaces or [{}])[0].items()
        if all(file_spaces[name] == space for file_spaces in spaces)
    }


def join_spaces(first_space: Any, second_space: Any) -> dict[str, Any] | None:
    """Returns the union of two spaces in Minari's JSON; None if they differ in kind or shape. A box keeps the bounds of the
    first space; a discrete space covers the values of both.
    """
    if (
        not isinstance(first_space, dict)
        or not isinstance(second_space, dict)
        or first_space.get("type") != second_space.get("type")
    ):
        return None
    if first_space["type"] == "Discrete":
        joint_start = min(
            first_start := int(first_space.get("start", 0)), other_start := int(second_space.get("start", 0))
        )
        return {
            **first_space,
            "start": joint_start,
            "n": max(first_start + int(first_space["n"]), other_start + int(second_space["n"])) - joint_start,
        }
    if first_space["type"] == "Dict":
        subspaces = {
            name: join_spaces(subspace, second_space["subspaces"].get(name))
            for name, subspace in first_space["subspaces"].items()
        }
        is_compatible = set(subspaces) == set(second_space["subspaces"]) and None not in subspaces.values()
        return {**first_space, "subspaces": subspaces} if is_compatible else None
    return (
        dict(first_space)
        if all(first_space.get(name) == second_space.get(name) for name in ("dtype", "shape"))
        else None
    )


def _describe_space(obs_value: Any) -> dict[str, Any]:
    """Returns the space of one step's values in Minari's JSON. Floats get infinite bounds."""
    if isinstance(obs_value, dict):
        return {"type": "Dict", "subspaces": {name: _describe_space(subspace) for name, subspace in obs_value.items()}}
    if obs_value.dtype.kind in "iu" and obs_value.ndim == 1:
        start_value = min(0, int(obs_value.min(initial=0)))
        return {
            "type": "Discrete",
            "dtype": "int64",
            "start": start_value,
            "n": int(obs_value.max(initial=0)) + 1 - start_value,
        }
    shape, dtype = obs_value.shape[1:], obs_value.dtype
    limits_by_kind = {"b": lambda: (0, 1), "i": lambda: np.iinfo(dtype), "u": lambda: np.iinfo(dtype)}
    type_limits: Any = limits_by_kind.get(dtype.kind, lambda: (-np.inf, np.inf))()
    low_limit, high_limit = type_limits if isinstance(type_limits, tuple) else (type_limits.min, type_limits.max)
    bounds = {"low": np.full(shape, low_limit, dtype).tolist(), "high": np.full(shape, high_limit, dtype).tolist()}
    return {"type": "Box", "dtype": str(dtype), "shape": list(shape), **bounds}
