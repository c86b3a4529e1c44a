"""Index of demonstrations, and which steps form windows and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.demonstrations import check_fit, chunk_steps, first_demo, fitted_obs, index_demos
from rlhpc.embodied.data.frames import Frames
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.test_demo_stream import ACTION, BASE, SPACE, STACKED, index, write


def test_chunks_of_episodes_of_several_lengths() -> None:
    steps, is_pad = chunk_steps(np.array([0, 4, 1]), np.array([2, 5, 9]), range(-1, 2))
    assert steps.tolist() == [[0, 0, 1], [3, 4, 4], [0, 1, 2]]
    assert is_pad.tolist() == [[True, False, False], [False, False, True], [False, False, False]]


def test_images_are_held_against_the_environment_without_being_read(tmp_path: Path) -> None:
    trajectory = index(write(tmp_path / "a.h5", [4]))[0].read()
    assert isinstance(trajectory["obs"]["rgb"], Frames)
    for space in (SPACE, STACKED):
        check_fit(trajectory, space, ACTION)
    small = spaces.Dict({"state": SPACE["state"], "rgb": spaces.Box(0, 255, (8, 8, 6), np.uint8)})
    more = spaces.Dict({**SPACE.spaces, "wrist": SPACE["rgb"]})
    for space in (small, more):
        with pytest.raises(ConfigError, match=r"rgb \[32, 32, 6\] and actions \[2\] .*env\.train has observations"):
            check_fit(trajectory, space, ACTION)
    assert list(fitted_obs(trajectory["obs"], spaces.Dict({"rgb": SPACE["rgb"]}))) == ["rgb"]


def test_the_index_is_the_same_by_any_number_of_ranks(tmp_path: Path) -> None:
    """Each rank looks at a part of the episodes; all raise the same error."""
    path = write(tmp_path / "a.h5", [4, 9, 5, 7, 3])
    cfg = typed(BcConfig, load_config(BASE, [
        "runner.name=bc", "runner.max_steps=1", "env.train.env_id=Pendulum-v1", f"demos.path={path}",
        "demos.only_success=true",
    ]))  # fmt: skip
    looks: list[Any] = []
    for rank in range(3):  # what each rank contributes
        with pytest.raises(StopIteration):
            index_demos(cfg, rank=rank, world_size=3, gather=lambda local: (looks.append(local), next(iter(())))[1])
    assert [len(look) for look in looks] == [1, 2, 2]
    alone = [(demo.number, demo.length) for demo in index_demos(cfg)]
    assert alone == [(0, 4), (1, 9), (2, 5), (3, 7)], "the last one is too short to succeed"
    for rank in range(3):
        shared = index_demos(cfg, rank=rank, world_size=3, gather=lambda local: looks)
        assert [(demo.number, demo.length) for demo in shared] == alone
        with pytest.raises(ConfigError, match=r"a\.h5, traj_0 has observations state \[3\]"):
            index_demos(cfg, spaces=(SPACE["state"], ACTION), rank=rank, world_size=1, gather=lambda local: looks)
    assert isinstance(first_demo(cfg)["obs"]["rgb"], Frames), "checked without its images"


def test_demonstrations_that_change_while_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", [4, 9])
    demos = index(path)
    write(path, [4, 8])
    with pytest.raises(ConfigError, match=r"a\.h5, traj_1 has 8 steps, and had 9 when the run began"):
        demos[1].read()
