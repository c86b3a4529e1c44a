"""Episodes whose images stay in their files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from rlhpc.embodied.data.frames import Frames
from rlhpc.embodied.data.trajectories import TrajectoryWriter, open_sources, read_trajectories
from rlhpc.embodied.data.trajectory import check, describe_nonfinite, iter_episodes, shapes
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.lerobot_files import episode


def with_depth(path: Path) -> Path:
    made = episode(4)
    made["obs"]["depth"] = np.ones((5, 16, 16, 1), np.float32)
    with TrajectoryWriter(path, env_id="test") as writer:
        writer.add(made)
    return path


def test_images_come_with_episodes_that_are_read_in_order(tmp_path: Path) -> None:
    (source,) = open_sources(with_depth(tmp_path / "a.h5"), "test")
    light, (loaded,) = source.episode(0), list(iter_episodes(source))
    assert shapes(light) == shapes(loaded) and check(light) is light
    assert {name for name, value in light["obs"].items() if isinstance(value, Frames)} == {"rgb", "depth"}
    np.testing.assert_array_equal(loaded["obs"]["rgb"], episode(4)["obs"]["rgb"])


def test_depth_that_is_not_finite_is_found_in_the_file(tmp_path: Path) -> None:
    path = with_depth(tmp_path / "a.h5")
    (source,) = open_sources(path, "test")
    assert describe_nonfinite(source.episode(0), ("obs", "actions")) == ""
    with h5py.File(path, "r+") as file:
        file["traj_0/obs/depth"][3, 2, 2] = np.inf
    assert "obs.depth of step 3 is not finite" in describe_nonfinite(source.episode(0), ("obs", "actions"))
    with pytest.raises(ConfigError, match=r"depth of step 3 is not finite"):
        list(read_trajectories(path))


def test_lengths_of_images_are_checked(tmp_path: Path) -> None:
    (source,) = open_sources(with_depth(tmp_path / "a.h5"), "test")
    light = source.episode(0)
    frames = light["obs"]["rgb"]
    light["obs"]["rgb"] = Frames((4, *frames.shape[1:]), frames.dtype, frames.parts)
    with pytest.raises(ConfigError, match=r"4 actions, but 4 observations rgb"):
        check(light)
