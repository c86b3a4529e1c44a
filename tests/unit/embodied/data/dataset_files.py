"""Datasets in several formats."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np

from rlhpc.cli import main


def data(*words: object) -> None:
    assert main(["data", *map(str, words)]) == 0


def discrete(folder: Path, *lengths: int, declared: int | None = None) -> Path:
    """A Minari dataset as FrozenLake's: places and moves are numbers."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        for i, n in enumerate(lengths):
            group = file.create_group(f"episode_{i}")
            group["observations"], group["actions"] = np.arange(n + 1), np.arange(n) % 2
            group["rewards"] = np.zeros(n)
            group["terminations"], group["truncations"] = np.arange(n) == n - 1, np.zeros(n, bool)
    if declared is not None:
        space = {"type": "Discrete", "dtype": "int64", "start": 0, "n": declared}
        names = ("observation_space", "action_space")
        (folder / "data/metadata.json").write_text(json.dumps(dict.fromkeys(names, json.dumps(space))))
    return folder
