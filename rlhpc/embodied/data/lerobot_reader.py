"""Reader of LeRobot datasets, versions 2 and 3: Parquet tables of frames, and `meta/info.json` that describes their
columns.

Version 2 has one file per episode, version 3 files with many episodes. Images are stored in the table (`dtype: image`) or
in mp4 files (`dtype: video`). https://huggingface.co/docs/lerobot/lerobot-dataset-v3

A LeRobot episode has as many observations as actions. To retain all actions, the reader repeats the last observation as
the final one. The last step is a truncation unless `next.done` and `next.success` mark the task's end; a column
`next.truncated`, which rlhpc writes, marks truncations.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.embodied.data.frames import FrameFile, FrameKey, FramePart, Frames, concatenate
from rlhpc.embodied.data.lerobot_frames import TableFrames, VideoFrames, arrow_package, pillow
from rlhpc.embodied.data.trajectory import EpisodeSource, Trajectory, check, iter_episodes
from rlhpc.embodied.data.video import count_frames
from rlhpc.embodied.envs.observations import decode_text, encode_text, text_bytes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, read_json
from rlhpc.runtime.text import first_line

#: Maximum number of files in a folder, and maximum bytes of a file, as in lerobot.
CHUNK = 1000
MAX_FILE_BYTES = {"data": 100 << 20, "videos": 200 << 20}
PATTERN = "chunk-{chunk_index:03d}/file-{file_index:03d}"
#: Column that marks the steps of an intervention; lerobot stores a teleoperator's events there.
INTERVENTION = "complementary_info.is_intervention"
_INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def columns_of(trajectory: Mapping[str, Any], cameras: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Returns the columns of an episode, `[T, ...]`, without index columns. `cameras` names the cameras in `rgb`."""
    obs = trajectory["obs"]
    columns: dict[str, np.ndarray] = {}
    for name, array in obs.items() if isinstance(obs, Mapping) else [("state", obs)]:
        column = np.asarray(array)[:-1]
        if is_instruction(name, column):
            continue
        if name in ("rgb", "image") or (column.ndim == 4 and column.dtype == np.uint8):
            columns |= _split_cameras(name, column, str(trajectory["source"]), cameras if name == "rgb" else ())
        else:
            columns[f"observation.{name}"] = column.reshape(len(column), -1).astype(np.float32)
    actions = np.asarray(trajectory["actions"])
    columns["action"] = actions.astype(np.int64 if actions.dtype.kind in "iu" else np.float32)
    terminations, truncations = (np.asarray(trajectory[name], bool) for name in ("terminations", "truncations"))
    if trajectory.get("rewards") is not None:
        columns["next.reward"] = np.asarray(trajectory["rewards"], np.float32)
    columns["next.done"], columns["next.truncated"] = terminations | truncations, truncations
    if trajectory.get("success") is not None:
        columns["next.success"] = np.asarray(trajectory["success"], bool)
    if trajectory.get("taken") is not None:
        columns[INTERVENTION] = np.asarray(trajectory["taken"], bool)
    return columns


def is_instruction(name: str, column: np.ndarray) -> bool:
    """Returns whether an observation is an instruction, which LeRobot stores as the frame's task."""
    return name == "instruction" and column.dtype == np.uint8 and column.ndim == 2


def tasks_of(trajectory: Mapping[str, Any], task: str) -> list[str]:
    """Returns the instruction of each step of an episode, and `task` for steps without an instruction."""
    obs, episode_length = trajectory["obs"], len(trajectory["actions"])
    instructions = obs.get("instruction") if isinstance(obs, Mapping) else None
    if instructions is None or not is_instruction("instruction", np.asarray(instructions)):
        return [task] * episode_length
    return [decode_text(row) or task for row in np.asarray(instructions)[:episode_length]]


def _split_cameras(
    name: str, pictures: np.ndarray, source_name: str, camera_names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Splits images along the last axis, and returns the images `[T, H, W, 3]` of each camera by column name."""
    num_cameras, remainder = divmod(pictures.shape[-1], 3)
    if pictures.dtype != np.uint8 or remainder or pictures.ndim != 4:
        raise ConfigError(
            f"{source_name}: {name} is {pictures.dtype}{list(pictures.shape[1:])}; pictures are uint8, 3 channels each"
        )
    key = f"observation.images.{name}"
    camera_frames = np.split(pictures, num_cameras, -1)
    if len(camera_names) == num_cameras:
        return dict(zip(camera_names, camera_frames, strict=True))
    return {key: pictures} if num_cameras == 1 else {f"{key}_{i}": frames for i, frames in enumerate(camera_frames)}


def features_of(columns: Mapping[str, np.ndarray], names_by_column: Mapping[str, Any], videos: bool) -> dict[str, Any]:
    """Returns `features` of `info.json`.

    Args:
        columns: Columns of an episode.
        names_by_column: Names of the components, by column.
        videos: Store images as videos, except those of odd height or width, which H.264 does not support.
    """
    features: dict[str, Any] = {}
    for name, column in columns.items():
        if name.startswith("observation.image"):
            height, width = column.shape[1:3]
            storage = "video" if videos and height % 2 == 0 and width % 2 == 0 else "image"
            features[name] = {"dtype": storage, "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        else:
            features[name] = {
                "dtype": str(column.dtype),
                "shape": list(column.shape[1:]) or [1],
                "names": names_by_column.get(name),
            }
    index_features = {
        name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
        for name in _INDEX_COLUMNS
    }
    return {**features, **index_features}


def image_columns(features: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns with images."""
    return [name for name, feature in features.items() if feature["dtype"] in ("image", "video")]


def table_of(columns: Mapping[str, np.ndarray], features: Mapping[str, Any], pyarrow: Any) -> Any:
    """Returns the Arrow table of an episode, without columns for videos."""
    arrays: dict[str, Any] = {}
    hf_features: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            png_cells = [{"bytes": _encode_png(frame), "path": None} for frame in columns[name]]
            arrays[name] = pyarrow.array(
                png_cells, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
            )
            hf_features[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            arrow_type = pyarrow.from_numpy_dtype(np.dtype(feature["dtype"]))
            arrow_values = pyarrow.array(columns[name].reshape(-1), arrow_type)
            value_type: dict[str, Any] = {"dtype": feature["dtype"], "_type": "Value"}
            row_size = feature["shape"][0]
            arrays[name] = (
                arrow_values if row_size == 1 else pyarrow.FixedSizeListArray.from_arrays(arrow_values, row_size)
            )
            hf_features[name] = (
                value_type if row_size == 1 else {"feature": value_type, "length": row_size, "_type": "List"}
            )
    schema = {"huggingface": json.dumps({"info": {"features": hf_features}})}
    return pyarrow.table(arrays).replace_schema_metadata(schema)


def _encode_png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    pillow().fromarray(picture).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def tasks_table(tasks: list[str], pyarrow: Any) -> Any:
    """Returns the Arrow table of `tasks.parquet`. Its pandas metadata declares the texts as the index."""
    column_kinds = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    pandas_metadata = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object",
                            "metadata": {"encoding": "UTF-8"}}],
        "columns": [{"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy, "metadata": None}
                    for name, pandas, numpy in column_kinds],
        "pandas_version": "2.0.0",
    }  # fmt: skip
    table = pyarrow.table({"task_index": pyarrow.array(range(len(tasks)), pyarrow.int64()), "task": tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas_metadata)})


_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,9})d)?\}")
_MAX_DIGITS = 20
_OBS, _STATE, _IMAGE = "observation.", "observation.state", "observation.image"
_REQUIRED_COLUMNS = ("action", "episode_index", "frame_index")


def read_lerobot(folder: Path) -> Iterator[Trajectory]:
    """Yields the episodes of a dataset's folder, in order (`LeRobotEpisodes`).

    Raises:
        ConfigError: A file is missing or does not match `info.json`.
    """
    yield from iter_episodes(LeRobotEpisodes(folder))


def lerobot_facts(folder: Path) -> dict[str, Any]:
    """Returns the facts of a dataset that no column contains, for `rlhpc.embodied.data.datasets`.

    Raises:
        ConfigError: A file does not match `info.json`.
    """
    dataset_info = _read_info(folder)
    features = dataset_info["features"]
    cameras = camera_columns(features)
    names_by_feature = {
        name: feature_spec["names"]
        for name, feature_spec in features.items()
        if feature_spec.get("names") and name not in cameras
    }
    tasks = set(_read_tasks(folder).values())
    return {
        "fps": dataset_info.get("fps"),
        "robot_type": dataset_info.get("robot_type"),
        "names": names_by_feature,
        "cameras": cameras,
        "task": tasks.pop() if len(tasks) == 1 else None,
    }


def marks_interventions(folder: Path) -> bool:
    """Returns whether the folder is a LeRobot dataset that marks the frames of interventions."""
    return (folder / "meta" / "info.json").is_file() and INTERVENTION in _read_info(folder)["features"]


def camera_columns(features: dict[str, Any]) -> list[str]:
    """Returns the camera columns in the order of their channels in `rgb`: first images in the table, then videos."""
    cameras = [
        name
        for name, feature in features.items()
        if name.startswith(_IMAGE) or (name.startswith(_OBS) and feature.get("dtype") in ("image", "video"))
    ]
    return sorted(cameras, key=lambda name: features[name].get("dtype") == "video")


def _read_info(folder: Path) -> dict[str, Any]:
    path = require_inside(folder, folder / "meta" / "info.json")
    try:
        dataset_info = read_json(path.read_bytes())
        version, features = str(dataset_info["codebase_version"]), dataset_info["features"]
        missing_names = [name for name in _REQUIRED_COLUMNS if name not in features]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a LeRobot dataset's info.json: {error!r}") from None
    if not version.startswith(("v2", "v3")):
        raise ConfigError(f"{path}: codebase_version is {version!r}; supported are v2 and v3")
    if missing_names:
        raise ConfigError(f"{path}: no column {', '.join(missing_names)}; it has: {', '.join(features)}")
    return dict(dataset_info)


def _read_table(folder: Path, file: Path, columns: list[str] | None = None) -> Any:
    pyarrow = arrow_package()
    try:
        return pyarrow.parquet.read_table(require_inside(folder, file), partitioning=None, columns=columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None


def _read_tasks(folder: Path) -> dict[int, str]:
    """Returns the tasks by index; {} if the dataset has no table of tasks."""
    meta = folder / "meta"
    try:
        if (meta / "tasks.parquet").is_file():
            table = _read_table(folder, meta / "tasks.parquet")
            text_column = next((name for name in ("task", "__index_level_0__") if name in table.column_names), "")
            task_indices = table["task_index"].to_pylist() if text_column else []
            rows = list(zip(task_indices, table[text_column].to_pylist(), strict=True)) if text_column else []
        elif (meta / "tasks.jsonl").is_file():
            lines = require_inside(folder, meta / "tasks.jsonl").read_text().splitlines()
            task_entries = [read_json(line) for line in lines if line.strip()]
            rows = [(row["task_index"], row["task"]) for row in task_entries]
        else:
            return {}
        return {int(task_index): str(task) for task_index, task in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{meta}/tasks.* cannot be read: {first_line(error)}") from None


#: Maximum number of videos whose lengths are checked when a dataset is opened. In a dataset with more, a video that is too
#: short is found when it is read.
_MAX_CHECKED = 1000


@dataclass(frozen=True)
class _EpisodeRows:
    """Rows of an episode in a file, in the order of its frames."""

    number: int
    file: Path
    rows: range | np.ndarray


class LeRobotEpisodes(EpisodeSource):
    """Episodes of a dataset's folder, in order.

    `observation.state` becomes "state". The cameras become "rgb", channels last, concatenated along the last axis. Other
    `observation.…` columns lose the prefix. A frame's task becomes "instruction", unless all tasks are
    empty or the robot's name. If there is only a state and at most one task, the observations are an array, not a dict.

    Args:
        folder: Folder of the dataset.

    Raises:
        ConfigError: A file is missing or does not match `info.json`, or an episode or a frame is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._info = folder, _read_info(folder)
        self._features = self._info["features"]
        self._cameras = camera_columns(self._features)
        self._is_video = {name: self._features[name].get("dtype") == "video" for name in self._cameras}
        tasks = _read_tasks(folder)
        self._tasks = {} if set(tasks.values()) <= {"", str(self._info.get("robot_type"))} else tasks
        files = sorted((folder / "data").glob("chunk-*/*.parquet"))
        if not files:
            raise ConfigError(f"{folder}/data has no file chunk-*/*.parquet")
        self._episodes = [episode for file in files for episode in self._index(file)]
        self._video_locations: dict[int, dict[str, Any]] = {}
        listed_numbers = {episode.number for episode in self._episodes}
        if str(self._info["codebase_version"]).startswith("v3"):
            for file in sorted((folder / "meta" / "episodes").glob("chunk-*/*.parquet")):
                for row in self._read_locations(file):
                    self._video_locations[int(row["episode_index"])] = row
            listed_numbers |= self._video_locations.keys()
        self._check_complete(listed_numbers)
        self._check_videos()
        self._sizes: dict[str, tuple[int, int, int]] = {}
        #: File and first row of the table that was read last, and its columns.
        self._last_read: tuple[Path, int, int, Any] | None = None

    def _index(self, file: Path) -> list[_EpisodeRows]:
        """Returns the episodes of a file, from its columns of indices."""
        pyarrow = arrow_package()
        try:
            column_names = pyarrow.parquet.read_schema(require_inside(self._folder, file)).names
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None
        images = [name for name in self._cameras if not self._is_video[name]]
        if missing_names := [name for name in (*_REQUIRED_COLUMNS, *images) if name not in column_names]:
            raise ConfigError(f"{file} has no column {', '.join(missing_names)}; it has: {', '.join(column_names)}")
        table = _read_table(self._folder, file, ["episode_index", "frame_index"])
        indices, frames = (np.asarray(table[name], np.int64) for name in ("episode_index", "frame_index"))
        row_order = np.lexsort((frames, indices))
        episode_numbers, row_starts = np.unique(indices[row_order], return_index=True)
        episodes = []
        for episode_number, rows in zip(episode_numbers.tolist(), np.split(row_order, row_starts[1:]), strict=True):
            if (holes := np.flatnonzero(frames[rows] != np.arange(len(rows)))).size:
                raise ConfigError(
                    f"{file}: frame {holes[0]} of episode {episode_number} is missing or there twice; its {len(rows)} "
                    f"rows have "
                    f"frame_index {frames[rows[0]]} to {frames[rows[-1]]}. Copy the file anew, or delete the episode"
                )
            is_consecutive = bool((np.diff(rows) == 1).all())
            episodes.append(
                _EpisodeRows(episode_number, file, range(int(rows[0]), int(rows[-1]) + 1) if is_consecutive else rows)
            )
        return episodes

    def _read_locations(self, file: Path) -> list[dict[str, Any]]:
        """Returns the locations of the episodes' videos from a table of `meta/episodes`, without its statistics."""
        pyarrow = arrow_package()
        try:
            column_names = pyarrow.parquet.read_schema(require_inside(self._folder, file)).names
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None
        columns = [name for name in column_names if name == "episode_index" or name.startswith("videos/")]
        rows: list[dict[str, Any]] = _read_table(self._folder, file, columns).to_pylist()
        return rows

    def _check_complete(self, listed_numbers: set[int]) -> None:
        """Checks that the tables have all episodes that the dataset's description lists."""
        present_numbers = {episode.number for episode in self._episodes}
        total_episodes = self._info.get("total_episodes")
        if missing_numbers := sorted(listed_numbers - present_numbers):
            raise ConfigError(
                f"{self._folder}/data has no frame of episode {missing_numbers[0]}, which meta/episodes lists; copy "
                f"the missing files"
            )
        if isinstance(total_episodes, int) and is_count(total_episodes) and len(present_numbers) < total_episodes:
            first_missing = next(
                episode_number for episode_number in range(total_episodes + 1) if episode_number not in present_numbers
            )
            raise ConfigError(
                f"{self._folder}/data has {len(present_numbers)} episodes, and meta/info.json says total_episodes: "
                f"{total_episodes}; the first "
                f"missing one is episode {first_missing}: copy the missing files, or correct total_episodes"
            )

    def _check_videos(self) -> None:
        """Checks that each camera's videos exist and, unless they are many, that they are long enough. Folders are listed,
        because a look at each file is slow on shared file systems.
        """
        cameras_by_path: dict[Path, set[str]] = {}
        last_frames: dict[Path, tuple[int, int]] = {}
        for camera in (name for name in self._cameras if self._is_video[name]):
            for episode in self._episodes:
                path, location = self._video(camera, episode.number)
                if path.parent not in cameras_by_path:
                    cameras_by_path[path.parent] = {file.name for file in path.parent.glob("*")}
                if path.name not in cameras_by_path[path.parent]:
                    raise ConfigError(
                        f"{path} is missing, which has the pictures of camera {camera} in episode {episode.number}; copy the "
                        f"videos, or remove {camera} from features in meta/info.json"
                    )
                end_frame = self._start(camera, location) + len(episode.rows)
                last_frames[path] = max(last_frames.get(path, (0, 0)), (end_frame, episode.number))
        fps = float(self._info["fps"])
        for path, (end_frame, number) in last_frames.items() if len(last_frames) <= _MAX_CHECKED else ():
            if 0 < (num_frames := count_frames(require_inside(self._folder, path), fps)) < end_frame:
                raise ConfigError(
                    f"{path} ends {end_frame - num_frames} frames before episode {number} does; copy the videos anew"
                )

    def __len__(self) -> int:
        return len(self._episodes)

    def episode(self, number: int) -> Trajectory:
        """Returns an episode (`EpisodeSource.episode`).

        Raises:
            ConfigError: The images of several cameras have different sizes.
        """
        episode = self._episodes[number]
        episode_length = len(episode.rows)
        cameras = [self._frames(camera, episode, episode_length) for camera in self._cameras]
        source_name = f"{self._folder}, episode {episode.number}"
        try:
            frames = concatenate(cameras) if cameras else None
        except ValueError as error:
            for camera in cameras:  # an error about a file that differs from info.json says more
                camera.parts[0].file.open().close()
            raise ConfigError(f"{source_name} has {error}; the cameras of rgb have one size") from None
        return _build_trajectory(self._columns(episode), frames, source_name, self._features, self._tasks)

    def _columns(self, episode: _EpisodeRows) -> dict[str, Any]:
        """Returns the columns of an episode without images, as arrays if possible."""
        rows = episode.rows
        first_row, last_row = (
            (rows.start, rows.stop) if isinstance(rows, range) else (int(rows.min()), int(rows.max()) + 1)
        )
        if (
            self._last_read is None
            or self._last_read[0] != episode.file
            or not self._last_read[1] <= first_row <= last_row <= self._last_read[2]
        ):
            self._last_read = (episode.file, *self._read_groups(episode.file, first_row, last_row))
        _, table_start, _, table = self._last_read
        if isinstance(rows, range):
            selected_rows = table.slice(first_row - table_start, len(rows))
        else:
            selected_rows = table.take(rows - table_start)
        return {name: _column_to_rows(selected_rows[name]) for name in selected_rows.column_names}

    def _read_groups(self, file: Path, first_row: int, end_row: int) -> tuple[int, int, Any]:
        """Reads the row groups that contain the rows `first_row` to `end_row`, without images.

        Returns:
            First row and end of the groups, and their table.
        """
        pyarrow = arrow_package()
        try:
            with pyarrow.parquet.ParquetFile(require_inside(self._folder, file)) as parquet:
                groups = range(parquet.metadata.num_row_groups)
                row_counts = [parquet.metadata.row_group(group).num_rows for group in groups]
                group_starts = np.cumsum([0, *row_counts]).tolist()
                needed_groups = [
                    group for group in groups if group_starts[group] < end_row and group_starts[group + 1] > first_row
                ]
                columns = [name for name in parquet.schema_arrow.names if name not in self._cameras]
                table = parquet.read_row_groups(needed_groups, columns)
            return group_starts[needed_groups[0]], group_starts[needed_groups[-1] + 1], table
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None

    # -- images ---------------------------------------------------------------------------------------------------

    def _frames(self, camera: str, episode: _EpisodeRows, num_frames: int) -> Frames:
        """Returns a camera's images `[T + 1, H, W, C]` of an episode; the last one is there twice."""
        if self._is_video[camera]:
            path, location = self._video(camera, episode.number)
            rate = float(self._info["fps"])
            start_frame = self._start(camera, location)
            picture_size = _parse_picture_size(self._features[camera])
            file: FrameFile = VideoFrames(require_inside(self._folder, path), picture_size, rate)
            name, rows = "", range(start_frame, start_frame + num_frames)
        else:
            file, name, rows = TableFrames(require_inside(self._folder, episode.file)), camera, episode.rows  # type: ignore[assignment]
        if camera not in self._sizes:
            self._sizes[camera] = self._find_image_shape(camera, file, (name, int(rows[0])))
        shape = self._sizes[camera]
        return Frames((num_frames + 1, *shape), np.dtype(np.uint8), (FramePart(file, name, rows, shape[-1]),))

    def _start(self, camera: str, location: Mapping[str, Any]) -> int:
        """Returns the number of an episode's first frame in its video."""
        return round(float(location.get(f"videos/{camera}/from_timestamp", 0.0)) * float(self._info["fps"]))

    def _find_image_shape(self, camera: str, file: FrameFile, key: FrameKey) -> tuple[int, int, int]:
        """Returns the shape of a camera's images, from its feature or, if that has none, from an image."""
        if (picture_size := _parse_picture_size(self._features[camera])) is not None:
            return (*picture_size, 3)
        reader = file.open()
        try:
            height, width, channels = next(reader.read([key]))[1].shape
        finally:
            reader.close()
        return height, width, channels

    def _video(self, camera: str, episode: int) -> tuple[Path, dict[str, Any]]:
        """Returns the path of a camera's video, and the episode's location in it."""
        location, pattern = self._video_locations.get(episode, {}), self._info.get("video_path")
        if not pattern:
            raise ConfigError(f"{self._folder}/meta/info.json has videos but no video_path")
        chunk = episode // max(1, int(self._info.get("chunks_size", 1000)))
        name = video_name(
            str(pattern),
            f"{self._folder}/meta/info.json",
            video_key=camera,
            episode_chunk=chunk,
            episode_index=episode,
            chunk_index=location.get(f"videos/{camera}/chunk_index", 0),
            file_index=location.get(f"videos/{camera}/file_index", 0),
        )
        return self._folder / name, location


def _column_to_rows(column: Any) -> Any:
    """Returns the rows of an Arrow column as an array, or as a list if they are ragged, have nulls, or are not numbers."""
    arrays = [array for chunk in column.chunks if (array := _to_regular_array(chunk)) is not None]
    if not arrays or len(arrays) < column.num_chunks or len({array.shape[1:] for array in arrays}) > 1:
        return column.to_pylist()
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _to_regular_array(arrow_values: Any) -> np.ndarray | None:
    """Returns an Arrow array of numbers, or of lists of one length, as an array; None if it is not one."""
    if arrow_values.null_count:
        return None
    type_name = str(arrow_values.type)
    if type_name.startswith(("list", "fixed_size_list", "large_list")):
        list_lengths = np.asarray(arrow_values.value_lengths()) if len(arrow_values) else np.zeros(0, np.int64)
        if not len(list_lengths) or (list_lengths != list_lengths[0]).any():
            return None
        inner_array = _to_regular_array(arrow_values.flatten())
        return (
            None
            if inner_array is None
            else inner_array.reshape(len(arrow_values), int(list_lengths[0]), *inner_array.shape[1:])
        )
    if type_name not in ("bool", "float", "double", "halffloat") and not type_name.startswith(("int", "uint")):
        return None
    array: np.ndarray = arrow_values.to_numpy(zero_copy_only=False)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def _parse_picture_size(feature: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the height and width of a camera's images from its feature in `info.json`, channels first or last; None if
    the shape is invalid.
    """
    shape, names = feature.get("shape"), feature.get("names")
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or not all(is_count(axis_size) and axis_size for axis_size in shape)
    ):
        return None
    axis_names = [str(name).rstrip("s") for name in names] if isinstance(names, list) else []
    if set(axis_names) == {"height", "width", "channel"}:
        return shape[axis_names.index("height")], shape[axis_names.index("width")]
    return (shape[1], shape[2]) if shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4) else (shape[0], shape[1])


def require_inside(folder: Path, file: Path) -> Path:
    """Returns `file` unchanged after checking that it lies in the dataset's folder.

    Raises:
        ConfigError: The file is a link to a file outside the dataset. Links to `blobs` of the Hugging Face Hub's cache are
            allowed.
    """
    root = folder.resolve()
    is_in_cache = root.parent.name == "snapshots" and file.resolve().is_relative_to(root.parent.parent / "blobs")
    if not file.resolve().is_relative_to(root) and not is_in_cache:
        raise ConfigError(
            f"{file} is a link to {file.resolve()}; a dataset holds all its files itself: copy the file there"
        )
    return file


def video_name(pattern: str, origin: str, **fields: Any) -> str:
    """Returns the path of a video, relative to the dataset's folder.

    Args:
        pattern: `video_path` of `info.json`, such as `videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4`.
        origin: File that contains the pattern, for messages.
        fields: Values of the fields: `video_key`, a string, and numbers.

    Raises:
        ConfigError: The pattern has another field, or the path is outside the folder.
    """
    prefix = f"{origin}: video_path is {pattern[:200]!r}"

    def fill_field(field: re.Match[str]) -> str:
        name, width = field[1], int(field[2] or 0)
        if name not in fields or width > _MAX_DIGITS or (name == "video_key" and field[2]):
            raise ConfigError(
                f"{prefix}; {field[0]} is not one of {', '.join(fields)}, each at most {_MAX_DIGITS} digits wide"
            )
        return str(fields[name]) if name == "video_key" else f"{int(fields[name]):0{width}d}"

    name = _FIELD.sub(fill_field, pattern)
    if "{" in _FIELD.sub("", pattern) or "}" in _FIELD.sub("", pattern) or not is_plain_name(name):
        raise ConfigError(f"{prefix}, which is not the name of a file below the data set's folder")
    return name


def _build_trajectory(
    columns: dict[str, Any], frames: Frames | None, source_name: str, features: dict[str, Any], tasks: dict[int, str]
) -> Trajectory:
    T = len(columns["action"])
    obs: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if name.startswith("observation.") and name in features:
            obs["state" if name == _STATE else name.removeprefix("observation.")] = _to_column_array(column, np.float32)
    if tasks and "task_index" in columns and (set(obs) != {"state"} or frames is not None or len(tasks) > 1):
        instructions = [tasks.get(int(task_index), "") for task_index in columns["task_index"]]
        num_text_bytes = text_bytes(tasks.values())
        obs["instruction"] = np.stack([encode_text(instruction, num_text_bytes) for instruction in instructions])
    final_obs: dict[str, Any] = {name: np.concatenate([column, column[-1:]]) for name, column in obs.items()}
    if frames is not None:  # after the numbers, before the instruction
        instruction = final_obs.pop("instruction", None)
        final_obs |= {"rgb": frames} | ({} if instruction is None else {"instruction": instruction})
    done_column, success = columns.get("next.done"), columns.get("next.success")
    terminations, truncations = np.zeros(T, bool), np.zeros(T, bool)
    is_end = np.asarray(done_column, bool).reshape(T) if done_column is not None else terminations
    success_flags = np.asarray(success, bool).reshape(T) if success is not None else None
    # `next.done` marks any end of an episode; without `next.success` it counts as a termination.
    if (truncated_column := columns.get("next.truncated")) is not None:
        truncations |= np.asarray(truncated_column, bool).reshape(T)
        terminations |= is_end & ~truncations
    else:
        terminations |= is_end if success_flags is None else is_end & success_flags
        truncations[-1] = not terminations[-1]
    actions = _to_column_array(columns["action"], None)
    reward = columns.get("next.reward")
    intervention = columns.get(INTERVENTION)
    return check(
        {
            "obs": final_obs["state"] if list(final_obs) == ["state"] else final_obs or None,
            "actions": actions if actions.dtype.kind in "iu" else actions.astype(np.float32),
            "rewards": np.asarray(reward, np.float32).reshape(T) if reward is not None else None,
            "terminations": terminations,
            "truncations": truncations,
            "success": success_flags,
            "env_states": None,
            "seed": None,
            "source": source_name,
            **({} if intervention is None else {"taken": np.asarray(intervention, bool).reshape(T)}),
        }
    )


def _to_column_array(rows: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(rows, dtype)
    return array.reshape(len(array), -1) if array.ndim < 2 else array
