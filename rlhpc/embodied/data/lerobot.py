"""LeRobot datasets, versions 2 and 3: Parquet tables of frames, and `meta/info.json` that describes their columns.

Version 2 has one file per episode, version 3 files with many episodes. Pictures lie in the table (`dtype: image`) or in
mp4 files (`dtype: video`). https://huggingface.co/docs/lerobot/lerobot-dataset-v3

A LeRobot episode has as many observations as actions. So that none of its actions is lost, the last observation is
repeated as the final one; the last step is a truncation unless `next.done` and `next.success` say that it was the task's end,
or a column `next.truncated`, which rlhpc writes, says which ends are none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.embodied.data.lerobot_columns import arrow_package, pillow
from rlhpc.embodied.data.trajectory import check
from rlhpc.embodied.envs.observations import TEXT_BYTES, encode_text
from rlhpc.embodied.video import pyav
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plain import read_json
from rlhpc.runtime.shown import first_line

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,9})d)?\}")
_WIDEST = 20
_STATE, _IMAGE = "observation.state", "observation.image"
_NEEDED = ("action", "episode_index", "frame_index")


def read_lerobot(folder: Path) -> Iterator[dict[str, Any]]:
    """The episodes of a dataset's folder, in order, with the fields of `rlhpc.embodied.data.trajectory`.

    `observation.state` is "state"; the cameras are "rgb", side by side in the last axis, channels last; further
    `observation.…` columns keep their names. A frame's task is its "instruction", unless it is only the robot's name. A
    dataset with only a state, and one task, gives arrays.

    Raises:
        ConfigError: A file is missing or not what `info.json` says.
    """
    info = _info(folder)
    features = info["features"]
    videos = [name for name, feature in features.items() if feature.get("dtype") == "video"]
    table = _Frames(folder, info)
    tasks = table.tasks()
    for number, columns in table.episodes():
        pictures = {name: table.frames(name, number, len(columns["action"])) for name in videos}
        yield _trajectory({**columns, **pictures}, f"{folder}, episode {number}", features, tasks)


def _info(folder: Path) -> dict[str, Any]:
    path = folder / "meta" / "info.json"
    try:
        info = read_json(path.read_bytes())
        version, features = str(info["codebase_version"]), info["features"]
        missing = [name for name in _NEEDED if name not in features]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a LeRobot dataset's info.json: {error!r}") from None
    if not version.startswith(("v2", "v3")):
        raise ConfigError(f"{path}: codebase_version is {version!r}; supported are v2 and v3")
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; it has: {', '.join(features)}")
    return dict(info)


class _Frames:
    """The rows of a dataset, one episode at a time, and where its pictures are."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        arrow = arrow_package()
        self._parquet, self._errors = arrow.parquet, (OSError, arrow.ArrowException)
        self._folder, self._info = folder, info
        self._files = sorted((folder / "data").glob("chunk-*/*.parquet"))
        if not self._files:
            raise ConfigError(f"{folder}/data has no file chunk-*/*.parquet")
        self._places: dict[int, dict[str, Any]] = {}
        if str(info["codebase_version"]).startswith("v3"):
            for file in sorted((folder / "meta" / "episodes").glob("chunk-*/*.parquet")):
                for row in self._read(file).to_pylist():
                    self._places[int(row["episode_index"])] = row
        self._decoded: tuple[Path, np.ndarray] | None = None

    def _read(self, file: Path) -> Any:
        try:
            return self._parquet.read_table(file, partitioning=None)
        except self._errors as error:
            raise ConfigError(f"{file} cannot be read as Parquet: {first_line(error)}") from None

    def tasks(self) -> dict[int, str]:
        """Tasks by their numbers; {} where they are not in words."""
        meta = self._folder / "meta"
        try:
            if (meta / "tasks.parquet").is_file():
                table = self._read(meta / "tasks.parquet")
                words = next((name for name in ("task", "__index_level_0__") if name in table.column_names), "")
                numbers = table["task_index"].to_pylist() if words else []
                rows = list(zip(numbers, table[words].to_pylist(), strict=True)) if words else []
            elif (meta / "tasks.jsonl").is_file():
                lines = (meta / "tasks.jsonl").read_text().splitlines()
                said = [read_json(line) for line in lines if line.strip()]
                rows = [(row["task_index"], row["task"]) for row in said]
            else:
                return {}
            found = {int(number): str(task) for number, task in rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{meta}/tasks.* cannot be read: {first_line(error)}") from None
        return {} if set(found.values()) <= {"", str(self._info.get("robot_type"))} else found

    def episodes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for file in self._files:
            table = self._read(file)
            missing = [name for name in _NEEDED if name not in table.column_names]
            if missing:
                raise ConfigError(f"{file} has no column {', '.join(missing)}; it has: {', '.join(table.column_names)}")
            indices = np.asarray(table["episode_index"])
            order = np.lexsort((np.asarray(table["frame_index"]), indices))
            for number in np.unique(indices).tolist():
                rows = table.take(order[indices[order] == number])
                yield number, {name: rows[name].to_pylist() for name in rows.column_names}

    def frames(self, camera: str, episode: int, length: int) -> np.ndarray:
        """Pictures `[T, H, W, C]` of one episode out of its mp4 file."""
        place, pattern = self._places.get(episode, {}), self._info.get("video_path")
        if not pattern:
            raise ConfigError(f"{self._folder}/meta/info.json has videos but no video_path")
        chunk = episode // max(1, int(self._info.get("chunks_size", 1000)))
        path = self._folder / video_name(
            str(pattern), f"{self._folder}/meta/info.json", video_key=camera, episode_chunk=chunk, episode_index=episode,
            chunk_index=place.get(f"videos/{camera}/chunk_index", 0), file_index=place.get(f"videos/{camera}/file_index", 0),
        )  # fmt: skip
        if self._decoded is None or self._decoded[0] != path:
            self._decoded = (path, decode(path))
        start = round(float(place.get(f"videos/{camera}/from_timestamp", 0.0)) * float(self._info["fps"]))
        found = self._decoded[1][start : start + length]
        if len(found) < length:
            raise ConfigError(f"{path} ends {length - len(found)} frames before episode {episode} does")
        return found


def video_name(pattern: str, origin: str, **fields: Any) -> str:
    """The name of a video below the data set's folder.

    Args:
        pattern: `video_path` of `info.json`, such as `videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4`.
        origin: Where it is from, for messages.
        fields: What may stand in it: `video_key`, which is a text, and numbers.

    Raises:
        ConfigError: It asks for something else, or leads out of the folder.
    """
    said = f"{origin}: video_path is {pattern[:200]!r}"

    def put(field: re.Match[str]) -> str:
        name, width = field[1], int(field[2] or 0)
        if name not in fields or width > _WIDEST or (name == "video_key" and field[2]):
            raise ConfigError(
                f"{said}; {field[0]} is not one of {', '.join(fields)}, each at most {_WIDEST} digits wide"
            )
        return str(fields[name]) if name == "video_key" else f"{int(fields[name]):0{width}d}"

    name = _FIELD.sub(put, pattern)
    if "{" in _FIELD.sub("", pattern) or "}" in _FIELD.sub("", pattern) or not is_plain_name(name):
        raise ConfigError(f"{said}, which is not the name of a file below the data set's folder")
    return name


def decode(path: Path) -> np.ndarray:
    """All pictures of a video, `[T, H, W, 3]` uint8."""
    av = pyav()
    try:
        with av.open(str(path)) as video:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    except (OSError, ValueError, av.error.FFmpegError) as error:
        raise ConfigError(f"{path} cannot be read as a video: {error}") from None


def _trajectory(
    columns: dict[str, Any], source: str, features: dict[str, Any], tasks: dict[int, str]
) -> dict[str, Any]:
    T = len(columns["action"])
    seen = {name: value for name, value in columns.items() if name.startswith("observation.") and name in features}
    obs: dict[str, np.ndarray] = {}
    pictures = []
    for name, value in seen.items():
        if name.startswith(_IMAGE):
            pictures.append(_pictures(value, source))
        else:
            obs["state" if name == _STATE else name.removeprefix("observation.")] = _array(value, np.float32)
    if pictures:
        obs["rgb"] = np.concatenate(pictures, -1)
    if tasks and "task_index" in columns and (set(obs) != {"state"} or len(tasks) > 1):
        words = [tasks.get(int(number), "") for number in columns["task_index"]]
        obs["instruction"] = np.stack([encode_text(text, TEXT_BYTES) for text in words])
    final = {name: np.concatenate([value, value[-1:]]) for name, value in obs.items()}
    done, success = columns.get("next.done"), columns.get("next.success")
    terminations, truncations = np.zeros(T, bool), np.zeros(T, bool)
    ended = np.asarray(done, bool).reshape(T) if done is not None else terminations
    reached = np.asarray(success, bool).reshape(T) if success is not None else None
    # `next.done` marks any end; if nothing is said about success, it is taken for the task's.
    if (cut := columns.get("next.truncated")) is not None:
        truncations |= np.asarray(cut, bool).reshape(T)
        terminations |= ended & ~truncations
    else:
        terminations |= ended if reached is None else ended & reached
        truncations[-1] = not terminations[-1]
    actions = _array(columns["action"], None)
    reward = columns.get("next.reward")
    return check(
        {
            "obs": final["state"] if list(final) == ["state"] else final or None,
            "actions": actions if actions.dtype.kind in "iu" else actions.astype(np.float32),
            "rewards": np.asarray(reward, np.float32).reshape(T) if reward is not None else None,
            "terminations": terminations, "truncations": truncations, "success": reached,
            "env_states": None, "seed": None, "source": source,
        }
    )  # fmt: skip


def _array(rows: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(rows, dtype)
    return array.reshape(len(array), -1) if array.ndim < 2 else array


def _pictures(rows: Any, source: str) -> np.ndarray:
    """`[T, H, W, C]` uint8 of decoded frames, or of the encoded ones that a table holds."""
    if isinstance(rows, np.ndarray):
        return rows
    image = pillow()
    try:
        return np.stack([np.asarray(image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in rows])
    except (OSError, TypeError, KeyError) as error:
        raise ConfigError(f"{source} has a picture that cannot be read: {error!r}") from None
