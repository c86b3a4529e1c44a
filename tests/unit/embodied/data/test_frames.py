"""Frames of datasets by index: each file is read once per batch, within a budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhpc.embodied.data.frames import FramePool, Frames, concatenate, load_obs
from rlhpc.embodied.data.trajectories import TrajectoryWriter, open_sources, read_trajectories
from rlhpc.embodied.data.video import VideoReader
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.embodied.data.lerobot_files import dataset, episode


def pictures(path: Path, episodes: int = 3) -> Path:
    """An HDF5 file with two cameras in each image."""
    with TrajectoryWriter(path, env_id="test") as writer:
        for seed in range(episodes):
            writer.add(episode(6, seed))
    return path


def test_images_by_index_are_those_of_the_episodes(tmp_path: Path) -> None:
    path, pool = pictures(tmp_path / "a.h5"), FramePool()
    expected = [trajectory["obs"]["rgb"] for trajectory in read_trajectories(path)]
    (source,) = open_sources(path, "test")
    frames = [source.episode(number)["obs"]["rgb"] for number in range(3)]
    assert isinstance(frames[0], Frames) and len(frames[0]) == 7 and frames[0].frame_bytes == 16 * 16 * 6
    steps = [(2, [5, 0, 5]), (0, [6]), (1, [3, 1])]
    out = [np.empty((len(numbers), 16, 16, 6), np.uint8) for _, numbers in steps]
    pool.read([(frames[number], numbers, array) for (number, numbers), array in zip(steps, out, strict=True)])
    for (number, numbers), array in zip(steps, out, strict=True):
        np.testing.assert_array_equal(array, expected[number][numbers])
    assert pool.num_read == 5, "step 5 is in the batch twice"
    pool.close()


def test_the_cache_stays_within_its_budget(tmp_path: Path) -> None:
    (source,) = open_sources(pictures(tmp_path / "a.h5"), "test")
    size = 16 * 16 * 6
    pool = FramePool(4 * size + 10)
    first, second = (load_obs(source.episode(0)["obs"], pool)["rgb"] for _ in range(2))
    assert pool.cached_bytes == 4 * size
    assert (pool.num_read, pool.num_cached) == (7 + 3, 4)
    np.testing.assert_array_equal(first, second)
    pool.close()


def test_a_video_that_serves_several_windows_of_a_batch_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_extra("embodied")
    (source,) = open_sources(dataset(tmp_path / "set", 7, length=5, videos=True), "test")
    readers: list[VideoReader] = []
    begin = VideoReader.__init__
    monkeypatch.setattr(VideoReader, "__init__", lambda self, *args: (readers.append(self), begin(self, *args))[1])
    frames, pool = [source.episode(number)["obs"]["rgb"] for number in range(7)], FramePool()
    windows = [(number, [max(0, t - 1), t, t + 1]) for number in (6, 0, 3) for t in (4, 0, 2, 3)]
    out = [np.empty((3, 16, 16, 6), np.uint8) for _ in windows]
    pool.read([(frames[number], steps, array) for (number, steps), array in zip(windows, out, strict=True)])
    assert len(readers) == 2, "a file of each camera, although twelve windows are in three episodes"
    assert pool.num_read == 2 * 3 * 5
    # Key frames are two frames apart, so that a seek decodes at most one frame that was not asked for.
    assert all(3 * 5 <= reader.num_decoded <= 3 * 5 + 3 for reader in readers)
    whole = [trajectory["obs"]["rgb"] for trajectory in read_trajectories(tmp_path / "set")]
    for (number, steps), array in zip(windows, out, strict=True):
        np.testing.assert_array_equal(array, whole[number][steps])
    pool.close()


def test_cameras_of_other_sizes_are_not_concatenated(tmp_path: Path) -> None:
    (source,) = open_sources(pictures(tmp_path / "a.h5"), "test")
    frames = source.episode(0)["obs"]["rgb"]
    both = concatenate([frames, frames])
    assert both.shape == (7, 16, 16, 12)
    out = np.empty((1, 16, 16, 12), np.uint8)
    FramePool().read([(both, [3], out)])
    np.testing.assert_array_equal(out[..., :6], out[..., 6:])
    with pytest.raises(ValueError, match=r"\[16, 16, 6\], \[8, 16, 6\]"):
        concatenate([frames, Frames((7, 8, 16, 6), frames.dtype, frames.parts)])


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = pictures(tmp_path / "a.h5")
    (source,) = open_sources(path, "test")
    frames = source.episode(0)["obs"]["rgb"]
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.h5 cannot be read as HDF5"):
        FramePool().read([(frames, [0], np.empty((1, 16, 16, 6), np.uint8))])
