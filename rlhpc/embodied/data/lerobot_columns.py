"""The columns of a LeRobot dataset: which ones an episode has, how `info.json` describes them, and their table."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhpc.embodied.envs.observations import decode_text
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import required

#: Files of a folder, and bytes of a file, as lerobot has them.
CHUNK = 1000
MOST_BYTES = {"data": 100 << 20, "videos": 200 << 20}
PATTERN = "chunk-{chunk_index:03d}/file-{file_index:03d}"
#: In which steps somebody had taken over from the policy; lerobot's own recordings put what a teleoperator says there.
TAKEN = "complementary_info.is_intervention"
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def arrow_package() -> Any:
    """pyarrow, which reads and writes the tables.

    Raises:
        ConfigError: It is not installed.
    """
    required("pyarrow.parquet", "LeRobot datasets need pyarrow", "embodied")
    import pyarrow

    return pyarrow


def pillow() -> Any:
    """The module of Pillow that reads and writes pictures.

    Raises:
        ConfigError: It is not installed.
    """
    return required("PIL.Image", "pictures in LeRobot datasets need Pillow", "embodied")


def columns_of(trajectory: Mapping[str, Any], cameras: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The columns `[T, ...]` of an episode, but for those that say where a frame is; `cameras` names those of `rgb`."""
    obs = trajectory["obs"]
    columns: dict[str, np.ndarray] = {}
    for name, value in obs.items() if isinstance(obs, Mapping) else [("state", obs)]:
        column = np.asarray(value)[:-1]
        if is_instruction(name, column):
            continue
        if name in ("rgb", "image") or (column.ndim == 4 and column.dtype == np.uint8):
            columns |= _cameras(name, column, str(trajectory["source"]), cameras if name == "rgb" else ())
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
        columns[TAKEN] = np.asarray(trajectory["taken"], bool)
    return columns


def is_instruction(name: str, column: np.ndarray) -> bool:
    """Whether an observation is a text, which LeRobot has as a frame's task."""
    return name == "instruction" and column.dtype == np.uint8 and column.ndim == 2


def tasks_of(trajectory: Mapping[str, Any], task: str) -> list[str]:
    """What is to be done, in words, in each step of an episode; `task` where its observations do not say."""
    obs, length = trajectory["obs"], len(trajectory["actions"])
    texts = obs.get("instruction") if isinstance(obs, Mapping) else None
    if texts is None or not is_instruction("instruction", np.asarray(texts)):
        return [task] * length
    return [decode_text(row) or task for row in np.asarray(texts)[:length]]


def _cameras(name: str, pictures: np.ndarray, source: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Pictures `[T, H, W, 3]` by camera, of those that stand side by side in the last axis."""
    count, rest = divmod(pictures.shape[-1], 3)
    if pictures.dtype != np.uint8 or rest or pictures.ndim != 4:
        raise ConfigError(
            f"{source}: {name} is {pictures.dtype}{list(pictures.shape[1:])}; pictures are uint8, 3 channels each"
        )
    key = f"observation.images.{name}"
    parts = np.split(pictures, count, -1)
    if len(names) == count:
        return dict(zip(names, parts, strict=True))
    return {key: pictures} if count == 1 else {f"{key}_{i}": part for i, part in enumerate(parts)}


def features_of(columns: Mapping[str, np.ndarray], names: Mapping[str, Any], videos: bool) -> dict[str, Any]:
    """`features` of `info.json`, with the names of components. Pictures of odd sizes stay in the table: H.264 has none."""
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if name.startswith("observation.image"):
            height, width = column.shape[1:3]
            kind = "video" if videos and height % 2 == 0 and width % 2 == 0 else "image"
            found[name] = {"dtype": kind, "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        else:
            found[name] = {"dtype": str(column.dtype), "shape": list(column.shape[1:]) or [1], "names": names.get(name)}
    own = {name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None} for name in _OWN}
    return {**found, **own}


def images(features: Mapping[str, Any]) -> list[str]:
    """The columns with pictures."""
    return [name for name, each in features.items() if each["dtype"] in ("image", "video")]


def table_of(columns: Mapping[str, np.ndarray], features: Mapping[str, Any], arrow: Any) -> Any:
    """The rows of an episode; videos have no column."""
    arrays: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for name, each in features.items():
        if each["dtype"] == "image":
            rows = [{"bytes": _png(picture), "path": None} for picture in columns[name]]
            arrays[name] = arrow.array(rows, arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
            described[name] = {"_type": "Image"}
        elif each["dtype"] != "video":
            kind = arrow.from_numpy_dtype(np.dtype(each["dtype"]))
            flat = arrow.array(columns[name].reshape(-1), kind)
            value: dict[str, Any] = {"dtype": each["dtype"], "_type": "Value"}
            size = each["shape"][0]
            arrays[name] = flat if size == 1 else arrow.FixedSizeListArray.from_arrays(flat, size)
            described[name] = value if size == 1 else {"feature": value, "length": size, "_type": "List"}
    schema = {"huggingface": json.dumps({"info": {"features": described}})}
    return arrow.table(arrays).replace_schema_metadata(schema)


def _png(picture: np.ndarray) -> bytes:
    out = io.BytesIO()
    pillow().fromarray(picture).save(out, "PNG", compress_level=6)
    return out.getvalue()


def tasks_table(tasks: list[str], arrow: Any) -> Any:
    """`tasks.parquet`: the texts are pandas' index."""
    kinds = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    described = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object",
                            "metadata": {"encoding": "UTF-8"}}],
        "columns": [{"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy, "metadata": None}
                    for name, pandas, numpy in kinds],
        "pandas_version": "2.0.0",
    }  # fmt: skip
    table = arrow.table({"task_index": arrow.array(range(len(tasks)), arrow.int64()), "task": tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(described)})
