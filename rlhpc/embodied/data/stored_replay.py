"""Replay buffers on disk: their index, their files, and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.embodied.data.frame_store import ImageLayout
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_json

FOLDER = "replay"
#: Formats of the index: 2 has images.
_FORMAT, _IMAGE_FORMAT = 1, 2


@dataclass(frozen=True)
class ReplayFile:
    """File of a stored replay buffer.

    Attributes:
        file: Name of the file.
        first, stop: Range of its decisions, or of its images' numbers (`stop` excluded), counted from the start of the run.
    """

    file: str
    first: int
    stop: int


@dataclass
class ImageIndex:
    """Index of one column of images of one rank's part of a stored replay buffer.

    Attributes:
        layout: Layout of the images.
        first, stop: Range of the images' numbers (`stop` excluded).
        segments: Files, oldest first. The first file may begin before `first`.
    """

    layout: ImageLayout
    first: int
    stop: int
    segments: list[ReplayFile]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ImageIndex:
        """Builds the index from its JSON content."""
        layout = ImageLayout(tuple(content["layout"]["shape"]), content["layout"]["stack"])
        return cls(layout, content["first"], content["stop"], _parse_segments(content["segments"]))


def _parse_segments(segments_json: list[dict[str, Any]]) -> list[ReplayFile]:
    """Builds the files' entries from their JSON content.

    Raises:
        ValueError: An entry is not the name of a file next to the index.
    """
    segments = [ReplayFile(**segment) for segment in segments_json]
    for segment in segments:
        if not is_plain_name(segment.file) or "/" in segment.file or not segment.file.endswith(".npy"):
            raise ValueError(f"file {segment.file!r} is not the name of a .npy file beside it")
    return segments


@dataclass
class ReplayIndex:
    """Index of one rank's part of a stored replay buffer.

    Attributes:
        slots: Range of the rank's slots: first, and last plus one.
        num_envs: Number of slots of the run.
        decisions: Number of decisions since the run began.
        held: Number of decisions in the buffer, which are the newest decisions.
        segments: Files, oldest first. The first file may begin before the oldest decision in the buffer.
        images: Indices of the columns of images, by the column of the observation.
    """

    slots: tuple[int, int]
    num_envs: int
    decisions: int
    held: int
    segments: list[ReplayFile] = field(default_factory=list)
    images: dict[str, ImageIndex] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Returns the index as JSON."""
        index_content: dict[str, Any] = {"format": _IMAGE_FORMAT if self.images else _FORMAT, **asdict(self)}
        if not self.images:
            del index_content["images"]
        return json.dumps(index_content, indent=1).encode() + b"\n"

    @classmethod
    def load(cls, path: Path) -> ReplayIndex:
        """Reads an index file written by `dump`.

        Raises:
            CheckpointError: The file is not a valid index; the message names it.
        """
        try:
            index_content = read_json(path.read_bytes())
            if index_content.pop("format") not in (_FORMAT, _IMAGE_FORMAT):
                raise ValueError(f"format is neither {_FORMAT} nor {_IMAGE_FORMAT}")
            segments = _parse_segments(index_content.pop("segments"))
            images = {name: ImageIndex.from_json(index) for name, index in index_content.pop("images", {}).items()}
            return cls(**{**index_content, "slots": tuple(index_content["slots"])}, segments=segments, images=images)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(f"{path}: cannot be read as the index of a replay buffer ({error})") from error


def write_segment(path: Path, row_parts: Sequence[np.ndarray]) -> None:
    """Writes arrays of one dtype, concatenated along the first axis, to a `.npy` file."""
    shape = (sum(len(rows) for rows in row_parts), *row_parts[0].shape[1:])
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(row_parts[0].dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for rows in row_parts:
            rows.tofile(file)


class StoredReplay:
    """Replay buffer on disk, read through memory maps.

    Args:
        folder: A checkpoint, or a folder with `index-*.json`.

    Raises:
        ConfigError: The folder contains no replay buffer.
        CheckpointError: The buffer is damaged.
    """

    def __init__(self, folder: Path) -> None:
        folder = expand_home(folder)
        self.folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        files = sorted(self.folder.glob("index-*.json"))
        if not files:
            raise ConfigError(
                f"{folder} holds no replay buffer; name a checkpoint of an off-policy run (runs/NAME/checkpoints/"
                "global_step_N), its folder 'replay', or what `rlhpc replay merge` wrote"
            )
        self.ranks = sorted((ReplayIndex.load(path) for path in files), key=lambda index: index.slots)
        first_index = self.ranks[0]
        slot_ends = [0, *(index.slots[1] for index in self.ranks)]
        is_complete = [index.slots[0] for index in self.ranks] == slot_ends[:-1] and slot_ends[
            -1
        ] == first_index.num_envs
        is_uniform = len({(index.num_envs, index.decisions, index.held) for index in self.ranks}) == 1
        if not is_complete or not is_uniform:
            raise CheckpointError(
                f"{self.folder}: the ranks' parts do not fit together; a file of some rank is missing"
            )
        self.num_envs = first_index.num_envs
        self.decisions = first_index.decisions
        self.held = first_index.held
        self._parts = [self._open(index) for index in self.ranks]
        self._images = [self._open_images(index) for index in self.ranks]
        dtypes = {segment_rows.dtype for rank_parts in self._parts for segment_rows in rank_parts}
        layouts = [{name: column.layout for name, column in index.images.items()} for index in self.ranks]
        if len(dtypes) > 1 or any(layout != layouts[0] for layout in layouts):
            raise CheckpointError(f"{self.folder}: the files' columns differ")
        self.layouts = layouts[0]
        #: Columns of the transitions, with the images.
        self.dtype: np.dtype[Any] | None = _with_images(dtypes.pop(), self.layouts) if dtypes else None

    def __len__(self) -> int:
        return self.held * self.num_envs

    def _open(self, index: ReplayIndex) -> list[np.ndarray]:
        """Returns a rank's files as memory-mapped arrays `[decisions, slots]`, without decisions older than the buffer."""
        slots = (index.slots[1] - index.slots[0],)
        return self._open_segments(index.segments, index.decisions - index.held, index.decisions, slots, "decisions")

    def _open_images(self, index: ReplayIndex) -> dict[str, list[np.ndarray]]:
        """Returns a rank's images as memory-mapped arrays `[n, bytes]`, by column."""
        return {
            name: self._open_segments(
                image.segments, image.first, image.stop, (image.layout.frame_bytes,), f"images of {name}"
            )
            for name, image in index.images.items()
        }

    def _open_segments(
        self, segments: Sequence[ReplayFile], oldest_row: int, stop_row: int, row_shape: tuple[int, ...], item_name: str
    ) -> list[np.ndarray]:
        next_row, row_parts = oldest_row, []
        for segment in segments:
            path = self.folder / segment.file
            try:
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from error
            expected_shape = (segment.stop - segment.first, *row_shape)
            if rows.shape != expected_shape or segment.first > next_row:
                raise CheckpointError(f"{path}: holds {rows.shape}, its index says {expected_shape}")
            row_parts.append(rows[max(0, oldest_row - segment.first) :])
            next_row = segment.stop
        if next_row != stop_row:
            raise CheckpointError(f"{self.folder}: the replay buffer lacks {item_name} {next_row} to {stop_row}")
        return row_parts

    def pieces(self, share: range) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yields the stored rows of the slots `share` as (offset, slots, rows): `rows` is a memory-mapped array
        `[decisions, slots]`, with the numbers of images; `offset` is the number of stored decisions before it, and `slots` the
        range of its slots within `share`.
        """
        for index, row_parts in zip(self.ranks, self._parts, strict=True):
            start_slot, stop_slot = max(share.start, index.slots[0]), min(share.stop, index.slots[1])
            offset = 0
            for segment_rows in row_parts if start_slot < stop_slot else ():
                columns = slice(start_slot - index.slots[0], stop_slot - index.slots[0])
                yield offset, slice(start_slot - share.start, stop_slot - share.start), segment_rows[:, columns]
                offset += len(segment_rows)

    def images(self, rank: int) -> dict[str, list[np.ndarray]]:
        """Returns the stored images of the rank at this position as memory-mapped arrays `[n, bytes]`, by column."""
        return self._images[rank]

    def take(self, first_transition: int, end_transition: int) -> np.ndarray:
        """Returns the transitions `first_transition` to `end_transition - 1`, ordered by decision, then by slot."""
        assert self.dtype is not None
        transitions = np.zeros(end_transition - first_transition, self.dtype)  # also the bytes between columns
        decisions = range(first_transition // self.num_envs, -(-end_transition // self.num_envs))
        for index, row_parts, images in zip(self.ranks, self._parts, self._images, strict=True):
            offset = 0
            for rows in row_parts:
                begin_decision, end_decision = max(decisions.start, offset), min(decisions.stop, offset + len(rows))
                if begin_decision < end_decision:
                    slots = np.arange(*index.slots)
                    row_positions = (
                        np.arange(begin_decision, end_decision)[:, None] * self.num_envs + slots - first_transition
                    ).reshape(-1)
                    is_inside = (row_positions >= 0) & (row_positions < end_transition - first_transition)
                    stored_rows = rows[begin_decision - offset : end_decision - offset].reshape(-1)[is_inside]
                    for name in self.dtype.names or ():
                        column = index.images.get(name.removeprefix("next_"))
                        transitions[name][row_positions[is_inside]] = (
                            stored_rows[name]
                            if column is None
                            else _read_images(column, images[name.removeprefix("next_")], stored_rows[name])
                        )
                offset += len(rows)
        return transitions

    def transitions(self) -> np.ndarray:
        """Returns all transitions, `[len(self)]`, ordered by decision (oldest first), then by slot."""
        return self.take(0, len(self))

    def column(self, name: str) -> np.ndarray:
        """Returns a column of all transitions, `[len(self), ...]`, in no particular order; not one of images."""
        columns = [rows[name].reshape(-1, *rows[name].shape[2:]) for _, _, rows in self.pieces(range(self.num_envs))]
        return np.concatenate(columns)


def _read_images(index: ImageIndex, image_parts: Sequence[np.ndarray], frame_numbers: np.ndarray) -> np.ndarray:
    """Returns the stored images `[n, *shape]` with numbers `[n, stack]`."""
    frames = np.empty((*frame_numbers.shape, index.layout.frame_bytes), np.uint8)
    part_begin = index.first
    for image_part in image_parts:
        is_inside = (frame_numbers >= part_begin) & (frame_numbers < part_begin + len(image_part))
        frames[is_inside] = image_part[frame_numbers[is_inside] - part_begin]
        part_begin += len(image_part)
    return index.layout.join(frames)


def _with_images(stored_type: np.dtype[Any], layouts: dict[str, ImageLayout]) -> np.dtype[Any]:
    """Returns the dtype of transitions with images, from the dtype of stored rows with numbers of images."""
    if not layouts:
        return stored_type
    fields: Any = stored_type.fields
    columns = {
        name: np.empty((0, *field_type.shape), field_type.base) if name.removeprefix("next_") not in layouts
        else np.empty((0, *layouts[name.removeprefix("next_")].shape), np.uint8)
        for name, (field_type, *_) in fields.items()
    }  # fmt: skip
    return row_type(columns, 1)


def row_type(columns: dict[str, np.ndarray], lead: int) -> np.dtype[Any]:
    """Returns the structured dtype of a transition, with a field per column.

    Args:
        columns: Arrays of transitions, by column name.
        lead: Number of leading axes that index transitions.
    """
    widest_first = sorted(columns, key=lambda name: (-columns[name].dtype.itemsize, name))
    return np.dtype([(name, columns[name].dtype, columns[name].shape[lead:]) for name in widest_first], align=True)


def describe_difference(dtype: np.dtype[Any], other_dtype: np.dtype[Any]) -> tuple[str, str]:
    """Returns the columns in which two buffers differ as texts, those of each."""
    fields: Any = dtype.fields or {}
    other_fields: Any = other_dtype.fields or {}

    def describe_differing(columns: Any, other_columns: Any) -> str:
        differing = [
            name for name in columns if name not in other_columns or other_columns[name][0] != columns[name][0]
        ]
        return describe(np.dtype([(name, columns[name][0]) for name in differing]))

    return describe_differing(fields, other_fields), describe_differing(other_fields, fields)


def describe(dtype: np.dtype[Any] | None) -> str:
    """Returns the columns of a buffer as text: names, dtypes and shapes."""
    if dtype is None or dtype.fields is None:
        return "none"
    return ", ".join(
        f"{name} {column_dtype.base.name}{list(column_dtype.shape) if column_dtype.shape else ''}"
        for name, (column_dtype, *_) in dtype.fields.items()
    )
