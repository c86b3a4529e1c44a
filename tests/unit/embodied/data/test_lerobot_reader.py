"""Reader of LeRobot's datasets."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import gymnasium
import pytest

from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.embodied.data.lerobot_files import CAMERAS, Clocked, Shown, dataset, episode

need_extra("embodied")


gymnasium.register("test/Clocked-v0", entry_point=Clocked, max_episode_steps=4)
gymnasium.register("test/Shown-v0", entry_point=Shown, max_episode_steps=4)


# -- videos -------------------------------------------------------------------------------------------------------


def test_memory_of_reading_videos_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = {}
    for episodes in (3, 30):
        folder = dataset(tmp_path / str(episodes), 1, videos=True)  # imports
        list(read_lerobot(folder))
        long = tmp_path / f"{episodes}_episodes"
        with LeRobotWriter(long, fps=10, task="t", videos=True) as writer:
            for seed in range(episodes):
                writer.add(episode(8, seed, size=96))
        assert len(list(long.rglob("*.mp4"))) == 2, "one file a camera"
        tracemalloc.start()
        for _ in read_lerobot(long):
            pass
        peaks[episodes] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = episode(8, size=96)["obs"]["rgb"].nbytes
    assert peaks[30] < 8 * size and peaks[30] - peaks[3] < 2 * size, "the file of 30 holds 27 episodes more"


@pytest.mark.parametrize(
    ("shape", "names"),
    [([64, 64, 3], None), ([3, 64, 64], None), ([64, 3, 64], ["height", "channels", "width"]), ([16, 8, 3], None)],
)
def test_pictures_of_another_size_than_is_said(tmp_path: Path, shape: list[int], names: list[str] | None) -> None:
    """They are refused before one is decoded."""
    folder = dataset(tmp_path / "set", 1, length=5, videos=True)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info["features"][CAMERAS[0]].update(shape=shape, names=names)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=rf"has pictures of 16x16, and info\.json says {64 if 64 in shape else 16}x"):
        list(read_lerobot(folder))


@pytest.mark.parametrize("name", ["*.mp4", "*.parquet", "info.json"])
def test_links_out_of_a_dataset(tmp_path: Path, name: str) -> None:
    """They are refused as those of HDF5 are, but for those of the hub's cache."""
    folder = dataset(tmp_path / "hub" / "snapshots" / "set", 2, length=5, videos=True)
    for way, leads_out in (("hub/blobs", False), ("elsewhere", True)):
        target = tmp_path / way / "file"
        target.parent.mkdir(parents=True)
        file = sorted(folder.rglob(name))[0]
        file.resolve().rename(target)
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        if not leads_out:
            assert len(list(read_lerobot(folder))) == 2
            continue
        with pytest.raises(ConfigError, match=r"is a link to .*; a dataset holds all its files itself"):
            list(read_lerobot(folder))
