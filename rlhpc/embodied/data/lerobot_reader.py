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
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.embodied.data.trajectory import check
from rlhpc.embodied.data.video import VideoReader
from rlhpc.embodied.envs.observations import decode_text, encode_text, text_bytes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, read_json
from rlhpc.runtime.plugins import required
from rlhpc.runtime.text import first_line

#: Maximum number of files in a folder, and maximum bytes of a file, as in lerobot.
CHUNK = 1000
MAX_FILE_BYTES = {"data": 100 << 20, "videos": 200 << 20}
PATTERN = "chunk-{chunk_index:03d}/file-{file_index:03d}"
#: Column that marks the steps of an intervention; lerobot stores a teleoperator's events there.
INTERVENTION = "complementary_info.is_intervention"
_INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def arrow_package() -> Any:
    """Returns the pyarrow module, with `pyarrow.parquet` imported.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    required("pyarrow.parquet", "LeRobot datasets need pyarrow", "embodied")
    import pyarrow

    return pyarrow


def pillow() -> Any:
    """Returns Pillow's module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    return required("PIL.Image", "pictures in LeRobot datasets need Pillow", "embodied")


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
    obs, length = trajectory["obs"], len(trajectory["actions"])
    instructions = obs.get("instruction") if isinstance(obs, Mapping) else None
    if instructions is None or not is_instruction("instruction", np.asarray(instructions)):
        return [task] * length
    return [decode_text(row) or task for row in np.asarray(instructions)[:length]]


def _split_cameras(name: str, pictures: np.ndarray, source: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Splits images along the last axis, and returns the images `[T, H, W, 3]` of each camera by column name."""
    count, remainder = divmod(pictures.shape[-1], 3)
    if pictures.dtype != np.uint8 or remainder or pictures.ndim != 4:
        raise ConfigError(
            f"{source}: {name} is {pictures.dtype}{list(pictures.shape[1:])}; pictures are uint8, 3 channels each"
        )
    key = f"observation.images.{name}"
    camera_frames = np.split(pictures, count, -1)
    if len(names) == count:
        return dict(zip(names, camera_frames, strict=True))
    return {key: pictures} if count == 1 else {f"{key}_{i}": frames for i, frames in enumerate(camera_frames)}


def features_of(columns: Mapping[str, np.ndarray], names: Mapping[str, Any], videos: bool) -> dict[str, Any]:
    """Returns `features` of `info.json`.

    Args:
        columns: Columns of an episode.
        names: Names of the components, by column.
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
                "names": names.get(name),
            }
    index_features = {
        name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
        for name in _INDEX_COLUMNS
    }
    return {**features, **index_features}


def image_columns(features: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns with images."""
    return [name for name, feature in features.items() if feature["dtype"] in ("image", "video")]


def table_of(columns: Mapping[str, np.ndarray], features: Mapping[str, Any], arrow: Any) -> Any:
    """Returns the Arrow table of an episode, without columns for videos."""
    arrays: dict[str, Any] = {}
    hf_features: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            png_cells = [{"bytes": _png(frame), "path": None} for frame in columns[name]]
            arrays[name] = arrow.array(png_cells, arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
            hf_features[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            arrow_type = arrow.from_numpy_dtype(np.dtype(feature["dtype"]))
            values = arrow.array(columns[name].reshape(-1), arrow_type)
            value_type: dict[str, Any] = {"dtype": feature["dtype"], "_type": "Value"}
            size = feature["shape"][0]
            arrays[name] = values if size == 1 else arrow.FixedSizeListArray.from_arrays(values, size)
            hf_features[name] = value_type if size == 1 else {"feature": value_type, "length": size, "_type": "List"}
    schema = {"huggingface": json.dumps({"info": {"features": hf_features}})}
    return arrow.table(arrays).replace_schema_metadata(schema)


def _png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    pillow().fromarray(picture).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def tasks_table(tasks: list[str], arrow: Any) -> Any:
    """Returns the Arrow table of `tasks.parquet`. Its pandas metadata declares the texts as the index."""
    kinds = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    pandas_metadata = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object",
                            "metadata": {"encoding": "UTF-8"}}],
        "columns": [{"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy, "metadata": None}
                    for name, pandas, numpy in kinds],
        "pandas_version": "2.0.0",
    }  # fmt: skip
    table = arrow.table({"task_index": arrow.array(range(len(tasks)), arrow.int64()), "task": tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas_metadata)})


_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,9})d)?\}")
_MAX_DIGITS = 20
_STATE, _IMAGE = "observation.state", "observation.image"
_REQUIRED_COLUMNS = ("action", "episode_index", "frame_index")


def read_lerobot(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the episodes of a dataset's folder, in order, with the fields of `rlhpc.embodied.data.trajectory`.

    `observation.state` becomes "state". The cameras become "rgb", channels last, concatenated along the last axis. Other
    `observation.…` columns lose the prefix. A frame's task becomes "instruction", unless all tasks are
    empty or the robot's name. If there is only a state and at most one task, the observations are an array, not a dict.

    Raises:
        ConfigError: A file is missing or does not match `info.json`.
    """
    info = _read_info(folder)
    features = info["features"]
    videos = [name for name, feature in features.items() if feature.get("dtype") == "video"]
    frames_table = _Frames(folder, info)
    tasks = frames_table.instructions()
    try:
        for episode_index, columns in frames_table.episodes():
            pictures = {name: frames_table.frames(name, episode_index, len(columns["action"])) for name in videos}
            yield _trajectory({**columns, **pictures}, f"{folder}, episode {episode_index}", features, tasks)
    finally:
        frames_table.close()


def lerobot_facts(folder: Path) -> dict[str, Any]:
    """Returns the facts of a dataset that no column contains, for `rlhpc.embodied.data.lerobot_info`.

    Raises:
        ConfigError: A file does not match `info.json`.
    """
    info = _read_info(folder)
    features = info["features"]
    cameras = camera_columns(features)
    names = {name: spec["names"] for name, spec in features.items() if spec.get("names") and name not in cameras}
    tasks = set(_Frames(folder, info).tasks().values())
    return {
        "fps": info.get("fps"),
        "robot_type": info.get("robot_type"),
        "names": names,
        "cameras": cameras,
        "task": tasks.pop() if len(tasks) == 1 else None,
    }


def camera_columns(features: dict[str, Any]) -> list[str]:
    """Returns the camera columns in the order of their channels in `rgb`: first images in the table, then videos."""
    cameras = [name for name in features if name.startswith(_IMAGE)]
    return sorted(cameras, key=lambda name: features[name].get("dtype") == "video")


def _read_info(folder: Path) -> dict[str, Any]:
    path = _inside(folder, folder / "meta" / "info.json")
    try:
        info = read_json(path.read_bytes())
        version, features = str(info["codebase_version"]), info["features"]
        missing = [name for name in _REQUIRED_COLUMNS if name not in features]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a LeRobot dataset's info.json: {error!r}") from None
    if not version.startswith(("v2", "v3")):
        raise ConfigError(f"{path}: codebase_version is {version!r}; supported are v2 and v3")
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; it has: {', '.join(features)}")
    return dict(info)


class _Frames:
    """Frames of a dataset: table rows by episode, and images from video files."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        arrow = arrow_package()
        self._parquet = arrow.parquet
        self._errors = (OSError, arrow.ArrowException)
        self._folder = folder
        self._read_info = info
        self._files = sorted((folder / "data").glob("chunk-*/*.parquet"))
        if not self._files:
            raise ConfigError(f"{folder}/data has no file chunk-*/*.parquet")
        self._video_locations: dict[int, dict[str, Any]] = {}
        if str(info["codebase_version"]).startswith("v3"):
            for file in sorted((folder / "meta" / "episodes").glob("chunk-*/*.parquet")):
                for row in self._read(file).to_pylist():
                    video_location = {name: value for name, value in row.items() if name.startswith("videos/")}
                    self._video_locations[int(row["episode_index"])] = video_location
        self._readers: dict[str, VideoReader] = {}

    def _read(self, file: Path) -> Any:
        try:
            return self._parquet.read_table(_inside(self._folder, file), partitioning=None)
        except self._errors as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None

    def tasks(self) -> dict[int, str]:
        """Returns the tasks by index; {} if the dataset has no table of tasks."""
        meta = self._folder / "meta"
        try:
            if (meta / "tasks.parquet").is_file():
                table = self._read(meta / "tasks.parquet")
                text_column = next((name for name in ("task", "__index_level_0__") if name in table.column_names), "")
                task_indices = table["task_index"].to_pylist() if text_column else []
                rows = list(zip(task_indices, table[text_column].to_pylist(), strict=True)) if text_column else []
            elif (meta / "tasks.jsonl").is_file():
                lines = _inside(self._folder, meta / "tasks.jsonl").read_text().splitlines()
                entries = [read_json(line) for line in lines if line.strip()]
                rows = [(row["task_index"], row["task"]) for row in entries]
            else:
                return {}
            tasks = {int(task_index): str(task) for task_index, task in rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{meta}/tasks.* cannot be read: {first_line(error)}") from None
        return tasks

    def instructions(self) -> dict[int, str]:
        """Returns the tasks by index; {} if each task is empty or the robot's name."""
        tasks = self.tasks()
        return {} if set(tasks.values()) <= {"", str(self._read_info.get("robot_type"))} else tasks

    def episodes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for file in self._files:
            table = self._read(file)
            missing = [name for name in _REQUIRED_COLUMNS if name not in table.column_names]
            if missing:
                raise ConfigError(f"{file} has no column {', '.join(missing)}; it has: {', '.join(table.column_names)}")
            indices = np.asarray(table["episode_index"])
            order = np.lexsort((np.asarray(table["frame_index"]), indices))
            for episode_index in np.unique(indices).tolist():
                rows = table.take(order[indices[order] == episode_index])
                yield episode_index, {name: rows[name].to_pylist() for name in rows.column_names}

    def frames(self, camera: str, episode: int, length: int) -> np.ndarray:
        """Reads the `length` images `[T, H, W, C]` of one episode from its mp4 file.

        Raises:
            ConfigError: The file cannot be read, or ends too early.
        """
        video_location, pattern = self._video_locations.get(episode, {}), self._read_info.get("video_path")
        if not pattern:
            raise ConfigError(f"{self._folder}/meta/info.json has videos but no video_path")
        chunk = episode // max(1, int(self._read_info.get("chunks_size", 1000)))
        path = self._folder / video_name(
            str(pattern),
            f"{self._folder}/meta/info.json",
            video_key=camera,
            episode_chunk=chunk,
            episode_index=episode,
            chunk_index=video_location.get(f"videos/{camera}/chunk_index", 0),
            file_index=video_location.get(f"videos/{camera}/file_index", 0),
        )
        reader = self._readers.get(camera)
        if reader is None or reader.path != path:
            if reader is not None:
                reader.close()
            size = _picture_size(self._read_info["features"][camera])
            reader = self._readers[camera] = VideoReader(_inside(self._folder, path), size)
        start = round(float(video_location.get(f"videos/{camera}/from_timestamp", 0.0)) * float(self._read_info["fps"]))
        frames = reader.read(start, length)
        if len(frames) < length:
            raise ConfigError(f"{path} ends {length - len(frames)} frames before episode {episode} does")
        return frames

    def close(self) -> None:
        """Closes the open video files."""
        for reader in self._readers.values():
            reader.close()


def _picture_size(feature: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the height and width of a camera's images from its feature in `info.json`, channels first or last; None if
    the shape is invalid.
    """
    shape, names = feature.get("shape"), feature.get("names")
    if not isinstance(shape, list) or len(shape) != 3 or not all(is_count(size) and size for size in shape):
        return None
    axis_names = [str(name).rstrip("s") for name in names] if isinstance(names, list) else []
    if set(axis_names) == {"height", "width", "channel"}:
        return shape[axis_names.index("height")], shape[axis_names.index("width")]
    return (shape[1], shape[2]) if shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4) else (shape[0], shape[1])


def _inside(folder: Path, file: Path) -> Path:
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


def _trajectory(
    columns: dict[str, Any], source: str, features: dict[str, Any], tasks: dict[int, str]
) -> dict[str, Any]:
    T = len(columns["action"])
    obs_columns = {
        name: column for name, column in columns.items() if name.startswith("observation.") and name in features
    }
    obs: dict[str, np.ndarray] = {}
    camera_pictures = []
    for name, column in obs_columns.items():
        if name.startswith(_IMAGE):
            camera_pictures.append(_decode_pictures(column, source))
        else:
            obs["state" if name == _STATE else name.removeprefix("observation.")] = _array(column, np.float32)
    if camera_pictures:
        obs["rgb"] = np.concatenate(camera_pictures, -1)
    if tasks and "task_index" in columns and (set(obs) != {"state"} or len(tasks) > 1):
        instructions = [tasks.get(int(task_index), "") for task_index in columns["task_index"]]
        size = text_bytes(tasks.values())
        obs["instruction"] = np.stack([encode_text(text, size) for text in instructions])
    final_obs = {name: np.concatenate([column, column[-1:]]) for name, column in obs.items()}
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
    actions = _array(columns["action"], None)
    reward = columns.get("next.reward")
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
            "source": source,
        }
    )


def _array(rows: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(rows, dtype)
    return array.reshape(len(array), -1) if array.ndim < 2 else array


def _decode_pictures(rows: Any, source: str) -> np.ndarray:
    """Returns images as uint8 `[T, H, W, C]`: decoded frames unchanged, and encoded images of a table decoded."""
    if isinstance(rows, np.ndarray):
        return rows
    image = pillow()
    try:
        return np.stack([np.asarray(image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in rows])
    except (OSError, TypeError, KeyError) as error:
        raise ConfigError(f"{source} has a picture that cannot be read: {error!r}") from None
