"""Minari datasets: a folder with `data/main_data.hdf5`, which has a group `episode_<i>` per episode, and `data/metadata.json`.

https://minari.farama.org/content/dataset_standards
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlhpc.checkpoint.hdf5 import checked, member, members, open_hdf5
from rlhpc.embodied.data.trajectory import Trajectory, check
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.shown import first_line

#: The file of a dataset's folder.
MAIN = Path("data", "main_data.hdf5")
_GROUP = "episode_"
_PARTS = ("observations", "actions", "rewards", "terminations", "truncations")


def numbers(names: Iterator[str] | Any) -> list[int]:
    """The numbers of the episodes among the names of a file's groups, in order; none if it is not Minari's."""
    return sorted(
        int(name[len(_GROUP) :]) for name in names if name.startswith(_GROUP) and name[len(_GROUP) :].isdigit()
    )


def read_minari(path: Path) -> Iterator[Trajectory]:
    """The episodes of a file, in order, with the fields of `rlhpc.embodied.data.trajectory`.

    Observations by name keep their names; `infos/success`, where every step has it, is `success`.

    Raises:
        ConfigError: The file is not what Minari writes, or has pictures that are packed as JPEG.
    """
    with open_hdf5(path) as file:
        for number in numbers(file):
            source = f"{path}, {_GROUP}{number}"
            group = member(file, f"{_GROUP}{number}")
            try:
                yield _episode(group, source)
            except (OSError, RuntimeError, MemoryError, KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{source} is not what Minari writes: {first_line(error)}") from None


def _episode(group: Any, source: str) -> Trajectory:
    names = set(group)
    if missing := [name for name in _PARTS if name not in names]:
        raise ConfigError(f"{source} lacks {', '.join(missing)}; it has: {', '.join(group) or 'nothing'}")
    obs, actions, rewards, terminations, truncations = (_load(member(group, name), source) for name in _PARTS)
    if isinstance(actions, dict):
        raise ConfigError(f"{source} has actions by name ({', '.join(actions)}); supported is one array")
    seed = group.attrs.get("seed")
    return check(
        {
            "obs": obs,
            "actions": actions.reshape(len(actions), -1),
            "rewards": rewards.astype(np.float32),
            "terminations": terminations.astype(bool),
            "truncations": truncations.astype(bool),
            "success": _success(group, len(actions)),
            "env_states": None,
            "seed": None if seed is None else int(seed),
            "source": source,
        }
    )


def _load(node: Any, source: str) -> Any:
    if isinstance(node, h5py.Group):
        return {name: _load(value, source) for name, value in members(node)}
    if checked(node).dtype.kind not in "biuf":
        raise ConfigError(
            f"{source}: {node.name} holds {node.dtype}, no numbers; write pictures as they are (Minari's jpeg_encoding=False)"
        )
    found = node[()]
    return found.astype(np.float32) if found.dtype == np.float64 else found


def _success(group: Any, length: int) -> np.ndarray | None:
    """Minari's infos begin with that of the reset."""
    try:
        found = np.asarray(checked(member(group, "infos/success"))[()], bool).reshape(-1)
    except KeyError:
        return None
    return found[1:] if len(found) == length + 1 else found if len(found) == length else None
