"""Writer of LeRobot datasets, format v3.0: files of many episodes, as in lerobot's `LeRobotDataset.create`.

    meta/info.json, stats.json, tasks.parquet, episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet                       one row per frame, one row group per episode
    videos/<camera>/chunk-000/file-000.mp4                the frames of all episodes, concatenated

A LeRobot episode has as many observations as actions, so the observation after the last action is omitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.column_statistics import DatasetStatistics
from rlhpc.embodied.data.lerobot_frames import arrow_package
from rlhpc.embodied.data.lerobot_reader import (
    CHUNK,
    MAX_FILE_BYTES,
    PATTERN,
    columns_of,
    features_of,
    image_columns,
    table_of,
    tasks_of,
    tasks_table,
)
from rlhpc.embodied.data.trajectory import FolderWriter, describe_nonfinite
from rlhpc.embodied.data.video import pyav
from rlhpc.runtime.errors import ConfigError

#: Encoder options as in lerobot: key frames are close together, because readers access frames in any order.
_OPTIONS = {"crf": "23", "g": "2", "preset": "veryfast"}


class CameraFiles:
    """Writer of a camera's images `[T, H, W, 3]` to mp4 files; height and width must be even.

    Args:
        root: Folder of the dataset.
        camera: Name of the camera's column.
        fps: Frames per second.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, root: Path, camera: str, fps: float) -> None:
        self._av = pyav()
        self._root = root
        self._camera = camera
        self._fps = fps
        self._number = 0
        self._num_frames = 0
        self._size = (0, 0)
        self._file: Any = None

    @property
    def _path(self) -> Path:
        stem = PATTERN.format(chunk_index=self._number // CHUNK, file_index=self._number % CHUNK)
        return self._root / "videos" / self._camera / f"{stem}.mp4"

    def add(self, pictures: np.ndarray) -> dict[str, Any]:
        """Appends an episode's images, and returns their location as columns of the table of episodes."""
        # The file exists only after the encoder's first packet, which short episodes may not produce.
        if self._file is not None and self._path.exists() and self._path.stat().st_size >= MAX_FILE_BYTES["videos"]:
            self._finish()
            self._number, self._num_frames = self._number + 1, 0
        if self._file is None:
            self._open(pictures)
        for pixels in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            self._file.mux(self._stream.encode(frame))
        start_frame, self._num_frames = self._num_frames, self._num_frames + len(pictures)
        key = f"videos/{self._camera}"
        return {
            f"{key}/chunk_index": self._number // CHUNK,
            f"{key}/file_index": self._number % CHUNK,
            f"{key}/from_timestamp": start_frame / self._fps,
            f"{key}/to_timestamp": self._num_frames / self._fps,
        }

    def _open(self, pictures: np.ndarray) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._av.open(str(self._path), "w")
        self._stream = self._file.add_stream(
            "libx264", rate=Fraction(self._fps).limit_denominator(1000), options=_OPTIONS
        )
        self._size = pictures.shape[1:3]
        self._stream.height, self._stream.width = self._size
        self._stream.pix_fmt = "yuv420p"

    def _finish(self) -> None:
        self._file.mux(self._stream.encode())
        self._file.close()
        self._file = None

    def close(self) -> dict[str, Any]:
        """Finishes the last file, and returns the column's `info` for `info.json`."""
        self._finish()
        return {
            "video.height": self._size[0],
            "video.width": self._size[1],
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": 3,
            "has_audio": False,
        }

    def discard(self) -> None:
        """Closes the open file without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class NothingToWrite(ConfigError):
    """Error raised for a dataset without episodes."""


class LeRobotWriter(FolderWriter):
    """Writer of a LeRobot dataset. The folder gets its final name when `close` is called.

    Args:
        folder: Folder of the dataset.
        fps: Frames per second.
        task: Task of steps whose observations have no `instruction`.
        videos: Write images to mp4 files instead of the table.
        robot: `robot_type` of `info.json`.
        names: Names of components, by column (`DatasetFacts.names`).
        cameras: Column names for the images that are concatenated in `rgb`; ignored if their number differs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fps: float,
        task: str,
        videos: bool = False,
        robot: str | None = None,
        names: Mapping[str, Any] | None = None,
        cameras: Sequence[str] = (),
    ) -> None:
        self._arrow = arrow_package()
        super().__init__(folder)
        self._parquet = self._arrow.parquet
        self._fps = fps
        self._task = task
        self._videos = videos
        self._robot = robot
        self._names = dict(names or {})
        self._camera_names = tuple(cameras)
        self._features: dict[str, Any] = {}
        self._cameras: dict[str, CameraFiles] = {}
        self._rows: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._totals = DatasetStatistics()
        self._table: Any = None
        self._file = 0
        self._num_frames = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode, with the fields of `rlhpc.embodied.data.trajectory`.

        Raises:
            ConfigError: The episode has no observations, its columns differ from the first episode's, or a number is not
                finite.
        """
        if trajectory["obs"] is None:
            raise ConfigError(f"{trajectory['source']} has no obs, which a LeRobot dataset needs")
        if problem := describe_nonfinite(dict(trajectory), ("obs", "actions")):
            raise ConfigError(problem)
        columns = columns_of(trajectory, self._camera_names)
        features = features_of(columns, self._names, self._videos)
        if not self._features:
            self._features = features
            self._cameras = {
                name: CameraFiles(self.root, name, self._fps)
                for name in image_columns(features)
                if features[name]["dtype"] == "video"
            }
        elif features != self._features:
            raise ConfigError(
                f"{trajectory['source']} has {_format_features(features)}; the episodes before it have "
                f"{_format_features(self._features)}"
            )
        episode_index, episode_length = len(self._rows), len(columns["action"])
        tasks = tasks_of(trajectory, self._task)
        columns |= {
            "timestamp": np.arange(episode_length, dtype=np.float32) / np.float32(self._fps),
            "frame_index": np.arange(episode_length),
            "episode_index": np.full(episode_length, episode_index),
            "index": self._num_frames + np.arange(episode_length),
            "task_index": np.array([self._tasks.setdefault(task, len(self._tasks)) for task in tasks], np.int64),
        }
        statistics = {
            name: self._totals.add(name, column, name in image_columns(features)) for name, column in columns.items()
        }
        video_locations: dict[str, Any] = {}
        for name, camera in self._cameras.items():
            video_locations |= camera.add(columns[name])
        self._write(table_of(columns, self._features, self._arrow))
        self._rows.append(
            {
                "episode_index": episode_index,
                "tasks": list(dict.fromkeys(tasks)),
                "length": episode_length,
                "data/chunk_index": self._file // CHUNK,
                "data/file_index": self._file % CHUNK,
                "dataset_from_index": self._num_frames,
                "dataset_to_index": self._num_frames + episode_length,
                **video_locations,
                **{
                    f"stats/{name}/{key}": statistic.tolist()
                    for name, column_statistics in statistics.items()
                    for key, statistic in column_statistics.items()
                },
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self._num_frames += episode_length

    def _write(self, table: Any) -> None:
        path = (
            self.root / f"data/{PATTERN.format(chunk_index=self._file // CHUNK, file_index=self._file % CHUNK)}.parquet"
        )
        if self._table is not None and path.stat().st_size + table.nbytes >= MAX_FILE_BYTES["data"]:
            self._table.close()
            self._table, self._file = None, self._file + 1
            self._write(table)
            return
        if self._table is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._table = self._parquet.ParquetWriter(path, table.schema, compression="snappy")
        self._table.write_table(table)

    def close(self) -> None:
        """Finishes the files and renames the folder to its final name.

        Raises:
            ConfigError: The dataset has no episodes.
        """
        with self.commit:
            if not self._rows:
                raise NothingToWrite("there is no episode to write")
            self._table.close()
            for name, camera in self._cameras.items():
                self._features[name]["info"] = camera.close()
            meta = self.root / "meta"
            (meta / "episodes" / "chunk-000").mkdir(parents=True)
            episodes = self._arrow.Table.from_pylist(self._rows)
            self._parquet.write_table(episodes, meta / "episodes" / "chunk-000" / "file-000.parquet")
            self._parquet.write_table(tasks_table(list(self._tasks), self._arrow), meta / "tasks.parquet")
            (meta / "stats.json").write_text(json.dumps(self._totals.all(), indent=4) + "\n")
            (meta / "info.json").write_text(json.dumps(self._info(), indent=4) + "\n")

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0", "robot_type": self._robot, "total_episodes": len(self._rows),
            "total_frames": self._num_frames, "total_tasks": len(self._tasks), "chunks_size": CHUNK,
            "data_files_size_in_mb": MAX_FILE_BYTES["data"] >> 20, "video_files_size_in_mb": MAX_FILE_BYTES["videos"] >> 20,
            "fps": self._fps, "splits": {"train": f"0:{len(self._rows)}"}, "data_path": f"data/{PATTERN}.parquet",
            "video_path": f"videos/{{video_key}}/{PATTERN}.mp4" if self._cameras else None, "features": self._features,
        }  # fmt: skip

    def discard(self) -> None:
        """Removes the unfinished dataset (`EpisodeWriter.discard`)."""
        if self._table is not None:
            self._table.close()
        for camera in self._cameras.values():
            camera.discard()
        super().discard()


def _format_features(features: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {feature['dtype']}{list(feature['shape'])}" for name, feature in features.items())
