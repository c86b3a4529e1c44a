"""Images of LeRobot datasets by index, and datasets with holes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.embodied.data import lerobot_reader
from rlhpc.embodied.data.frames import FramePool
from rlhpc.embodied.data.lerobot_reader import LeRobotEpisodes, read_lerobot
from rlhpc.embodied.data.video import VideoReader
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.embodied.data.lerobot_files import CAMERAS, dataset
from tests.unit.embodied.data.test_trajectories import lerobot

need_extra("embodied")

FILE = "data/chunk-000/file-000.parquet"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("storage", ["image", "video"])
def test_frames_in_random_order(tmp_path: Path, version: str, storage: str) -> None:
    rng = np.random.default_rng(0)
    episodes = [
        {
            "obs": {
                "state": rng.normal(size=(length + 1, 3)).astype(np.float32),
                "rgb": rng.integers(0, 256, (length + 1, 32, 32, 3), np.uint8),
            },
            "actions": rng.normal(size=(length, 2)).astype(np.float32), "rewards": np.zeros(length, np.float32),
            "terminations": np.zeros(length, bool),
        }
        for length in (5, 70, 9)
    ]  # fmt: skip
    source, pool = LeRobotEpisodes(lerobot(tmp_path / "set", version, episodes, camera=storage)), FramePool(max_open=2)
    frames = [source.episode(number)["obs"]["rgb"] for number in range(3)]
    rows = [(number, step) for number in range(3) for step in range(len(frames[number]))]
    for batch in np.array_split(rng.permutation(rows), 4):
        out = np.empty((len(batch), 32, 32, 3), np.uint8)
        pool.read([(frames[number], [step], out[i : i + 1]) for i, (number, step) in enumerate(batch)])
        for image, (number, step) in zip(out, batch, strict=True):
            last = len(episodes[number]["actions"]) - 1
            np.testing.assert_array_equal(image, episodes[number]["obs"]["rgb"][min(step, last)])
    pool.close()


def rewrite(folder: Path, change: Callable[[dict[str, list[object]]], None]) -> None:
    """Changes the columns of the table of frames."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder / FILE)
    columns = table.to_pydict()
    change(columns)
    pq.write_table(pa.table(columns, table.schema), folder / FILE)


def without(rows: range) -> Callable[[dict[str, list[object]]], None]:
    def change(columns: dict[str, list[object]]) -> None:
        for column in columns.values():
            del column[rows.start : rows.stop]

    return change


def test_a_dataset_with_holes(tmp_path: Path) -> None:
    """One message names the first thing that is missing, before anything is trained."""
    whole = dataset(tmp_path / "whole", 3, length=5, videos=True)

    def refused(name: str, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            LeRobotEpisodes(tmp_path / name)

    rewrite(Path(shutil.copytree(whole, tmp_path / "frame")), without(range(7, 8)))
    refused("frame", r"frame 2 of episode 1 is missing or there twice; its 4 rows have frame_index 0 to 4")
    rewrite(Path(shutil.copytree(whole, tmp_path / "episode")), without(range(5, 10)))
    refused("episode", r"has no frame of episode 1, which meta/episodes lists")
    shutil.copytree(whole, tmp_path / "camera")
    shutil.rmtree(tmp_path / "camera" / "videos" / CAMERAS[0])
    refused("camera", rf"file-000\.mp4 is missing, which has the pictures of camera {CAMERAS[0]} in episode 0")
    info = Path(shutil.copytree(whole, tmp_path / "total")) / "meta" / "info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "total_episodes": 4}))
    refused("total", r"has 3 episodes, and meta/info\.json says total_episodes: 4; the first missing one is episode 3")
    images = dataset(tmp_path / "images", 2)
    info = images / "meta" / "info.json"
    content = json.loads(info.read_text())
    content["features"]["observation.images.top"] = content["features"][CAMERAS[0]]
    info.write_text(json.dumps(content))
    refused("images", r"file-000\.parquet has no column observation\.images\.top")
    assert len(list(read_lerobot(whole))) == 3


def test_a_video_with_a_hole(tmp_path: Path) -> None:
    """A recording that dropped a frame is not read with all frames after it shifted."""
    from rlhpc.embodied.data.video import pyav

    av = pyav()
    with av.open(str(tmp_path / "a.mp4"), "w") as video:
        stream = video.add_stream("libx264", rate=10, options={"g": "2"})
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number in (*range(6), *range(7, 12)):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 20 * number, np.uint8), format="rgb24")
            frame.pts = number
            video.mux(stream.encode(frame))
        video.mux(stream.encode())
    reader = VideoReader(tmp_path / "a.mp4", None, 10)
    assert [number for number, _ in reader.frames([0, 3, 5, 7, 11])] == [0, 3, 5, 7, 11]
    found = dict(reader.frames([8, 10]))
    assert {number: round(float(image.mean()) / 20) for number, image in found.items()} == {8: 8, 10: 10}
    with pytest.raises(ConfigError, match=r"a\.mp4 has no frame 6 \(0\.600 s at 10 frames a second\)"):
        list(reader.frames([5, 6]))
    reader.close()


def test_a_video_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found at once, or in a dataset of very many videos when it is read."""
    folder = dataset(tmp_path / "set", 2, length=6, videos=True)
    short = dataset(tmp_path / "short", 1, length=6, videos=True)
    for camera in CAMERAS:
        name = f"videos/{camera}/chunk-000/file-000.mp4"
        shutil.copy(short / name, folder / name)
    with pytest.raises(ConfigError, match=r"file-000\.mp4 ends 6 frames before episode 1 does"):
        LeRobotEpisodes(folder)
    monkeypatch.setattr(lerobot_reader, "_MAX_CHECKED", 1)
    source = LeRobotEpisodes(folder)
    pool, out = FramePool(), np.empty((1, 16, 16, 6), np.uint8)
    pool.read([(source.episode(0)["obs"]["rgb"], [5], out)])
    with pytest.raises(ConfigError, match=r"file-000\.mp4 ends before frame 8"):
        pool.read([(source.episode(1)["obs"]["rgb"], [2], out)])


@pytest.mark.parametrize("fps", [20, 80])
def test_videos_of_another_rate_than_the_dataset_s(tmp_path: Path, fps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames would be taken from other times, or found missing in the middle of a run."""
    folder = dataset(tmp_path / "set", 2, length=6, videos=True)
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "fps": fps}))
    message = rf"file-000\.mp4 has {info['fps']:g} frames a second on average, and meta/info.json says fps: {fps}; correct fps"
    with pytest.raises(ConfigError, match=message):
        LeRobotEpisodes(folder)
    monkeypatch.setattr(lerobot_reader, "_MAX_CHECKED", 0)
    with pytest.raises(ConfigError, match=message if fps < info["fps"] else "has no frame 1 "):
        list(read_lerobot(folder))
