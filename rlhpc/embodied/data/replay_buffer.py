"""Replay buffer: the newest transitions of a rank's slots, in a memory-mapped ring buffer.

The buffer of a run is a table with a row per decision (one action in every slot) and a column per slot. Each actor rank
stores the columns of its slots. Indices of transitions count over the complete table, so that a sampled batch does not
depend on the number of ranks. A transition is stored as one row of bytes: sampling a batch is one gather, and the batch's
columns are views of the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.checkpoint.store import final_folder
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_json

FOLDER = "replay"
_FORMAT = 1


@dataclass(frozen=True)
class _ReplayFile:
    """File of a stored replay buffer.

    Attributes:
        file: Name of the file.
        first, stop: Range of its decisions (`stop` excluded), counted from the start of the run.
    """

    file: str
    first: int
    stop: int


@dataclass
class _Index:
    """Index of one rank's part of a stored replay buffer.

    Attributes:
        slots: Range of the rank's slots: first, and last plus one.
        num_envs: Number of slots of the run.
        decisions: Number of decisions since the run began.
        held: Number of decisions in the buffer, which are the newest decisions.
        segments: Files, oldest first. The first file may begin before the oldest decision in the buffer.
    """

    slots: tuple[int, int]
    num_envs: int
    decisions: int
    held: int
    segments: list[_ReplayFile] = field(default_factory=list)

    def dump(self) -> bytes:
        """Returns the index as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def load(cls, path: Path) -> _Index:
        """Reads an index file written by `dump`.

        Raises:
            CheckpointError: The file is not a valid index; the message names it.
        """
        try:
            content = read_json(path.read_bytes())
            if content.pop("format") != _FORMAT:
                raise ValueError(f"format is not {_FORMAT}")
            segments = [_ReplayFile(**segment) for segment in content.pop("segments")]
            for segment in segments:
                if not is_plain_name(segment.file) or "/" in segment.file or not segment.file.endswith(".npy"):
                    raise ValueError(f"file {segment.file!r} is not the name of a .npy file beside it")
            return cls(**{**content, "slots": tuple(content["slots"])}, segments=segments)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read as the index of a replay buffer ({error})") from error


def _write_segment(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Writes arrays of one dtype, concatenated along the first axis, to a `.npy` file."""
    shape = (sum(len(rows) for rows in parts), *parts[0].shape[1:])
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(parts[0].dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for rows in parts:
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
        self.ranks = sorted((_Index.load(path) for path in files), key=lambda index: index.slots)
        first_index = self.ranks[0]
        ends = [0, *(index.slots[1] for index in self.ranks)]
        is_complete = [index.slots[0] for index in self.ranks] == ends[:-1] and ends[-1] == first_index.num_envs
        is_uniform = len({(index.num_envs, index.decisions, index.held) for index in self.ranks}) == 1
        if not is_complete or not is_uniform:
            raise CheckpointError(
                f"{self.folder}: the ranks' parts do not fit together; a file of some rank is missing"
            )
        self.num_envs = first_index.num_envs
        self.decisions = first_index.decisions
        self.held = first_index.held
        self._parts = [self._open(index) for index in self.ranks]
        dtypes = {segment_rows.dtype for rank_parts in self._parts for segment_rows in rank_parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder}: the files' columns differ")
        self.dtype: np.dtype[Any] | None = dtypes.pop() if dtypes else None

    def __len__(self) -> int:
        return self.held * self.num_envs

    def _open(self, index: _Index) -> list[np.ndarray]:
        """Returns a rank's files as memory-mapped arrays `[decisions, slots]`, without decisions older than the buffer."""
        oldest, next_decision, parts = index.decisions - index.held, index.decisions - index.held, []
        for segment in index.segments:
            path = self.folder / segment.file
            try:
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from error
            expected_shape = (segment.stop - segment.first, index.slots[1] - index.slots[0])
            if rows.shape != expected_shape or segment.first > next_decision:
                raise CheckpointError(f"{path}: holds {rows.shape}, its index says {expected_shape}")
            parts.append(rows[max(0, oldest - segment.first) :])
            next_decision = segment.stop
        if next_decision != index.decisions:
            raise CheckpointError(f"{self.folder}: decisions {next_decision} to {index.decisions} are missing")
        return parts

    def pieces(self, share: range) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yields the transitions of the slots `share` as (offset, slots, rows): `rows` is a memory-mapped array
        `[decisions, slots]`, `offset` the number of stored decisions before it, and `slots` the range of its slots within
        `share`.
        """
        for index, parts in zip(self.ranks, self._parts, strict=True):
            start, stop = max(share.start, index.slots[0]), min(share.stop, index.slots[1])
            offset = 0
            for segment_rows in parts if start < stop else ():
                columns = slice(start - index.slots[0], stop - index.slots[0])
                yield offset, slice(start - share.start, stop - share.start), segment_rows[:, columns]
                offset += len(segment_rows)

    def of_slots(self, share: range) -> np.ndarray:
        """Returns the transitions of the slots `share`, `[held, len(share)]`, oldest first."""
        assert self.dtype is not None
        rows_by_slot = np.zeros((self.held, len(share)), self.dtype)  # also the bytes between columns
        for offset, slot_slice, rows in self.pieces(share):
            rows_by_slot[offset : offset + len(rows), slot_slice] = rows
        return rows_by_slot

    def transitions(self) -> np.ndarray:
        """Returns all transitions, `[len(self)]`, ordered by decision (oldest first), then by slot."""
        return self.of_slots(range(self.num_envs)).reshape(-1)


def _open_all(folders: Sequence[str | Path]) -> list[StoredReplay]:
    """Opens stored buffers, which must have the same columns.

    Raises:
        ConfigError: The columns of two buffers differ, or a buffer is empty.
    """
    replays = [StoredReplay(Path(folder)) for folder in folders]
    for replay in replays:
        if replay.dtype is None:
            raise ConfigError(f"{replay.folder} is empty")
        if replay.dtype != replays[0].dtype:
            raise ConfigError(
                f"{replay.folder} has the columns {describe(replay.dtype)}, {replays[0].folder} has "
                f"{describe(replays[0].dtype)}"
            )
    return replays


def describe(dtype: np.dtype[Any] | None) -> str:
    """Returns the columns of a buffer as text: names, dtypes and shapes."""
    if dtype is None or dtype.fields is None:
        return "none"
    return ", ".join(
        f"{name} {column_dtype.base.name}{list(column_dtype.shape) if column_dtype.shape else ''}"
        for name, (column_dtype, *_) in dtype.fields.items()
    )


def _write_replay(target: Path, transitions: np.ndarray) -> None:
    """Writes transitions as a stored buffer of one slot, atomically.

    Raises:
        ConfigError: The target exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    count = len(transitions)
    with filled_folder(target) as folder:
        segment = _ReplayFile(f"0-0-{count}.npy", 0, count)
        _write_segment(folder / segment.file, [transitions.reshape(-1, 1)])
        (folder / "index-0.json").write_bytes(_Index((0, 1), 1, count, count, [segment]).dump())


def inspect(folder: str | Path) -> dict[str, Any]:
    """Returns a summary of a stored buffer: numbers of transitions, ranks, files and bytes, its columns, reward statistics
    and the number of terminations."""
    replay = StoredReplay(Path(folder))
    files = [replay.folder / segment.file for index in replay.ranks for segment in index.segments]
    summary: dict[str, Any] = {
        "folder": str(replay.folder),
        "transitions": len(replay),
        "num_envs": replay.num_envs,
        "decisions_made": replay.decisions,
        "ranks": len(replay.ranks),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "columns": describe(replay.dtype),
    }
    if len(replay):
        rows = replay.transitions()
        rewards = rows["rewards"].astype(np.float64)
        summary |= {
            "reward_mean": float(rewards.mean()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "terminations": int(rows["terminations"].sum()),
        }
    return summary


def merge(folders: Sequence[str | Path], output: str | Path) -> int:
    """Concatenates stored buffers, in the given order, into a new buffer.

    Returns:
        Number of transitions of the new buffer.
    """
    tables = [replay.transitions() for replay in _open_all(folders)]
    _write_replay(Path(output), np.concatenate(tables))
    return sum(map(len, tables))


def split(folder: str | Path, output: str | Path, parts: int) -> list[int]:
    """Splits a stored buffer into `parts` buffers of nearly equal size, oldest first: `output/0`, `output/1`, …

    Returns:
        Number of transitions of each part.
    """
    (replay,) = _open_all([folder])
    if not 1 <= parts <= len(replay):
        raise ConfigError(f"--parts is {parts}; {replay.folder} has {len(replay)} transitions")
    target = Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    tables = np.array_split(replay.transitions(), parts)
    for index, table in enumerate(tables):
        _write_replay(target / str(index), table)
    return [len(table) for table in tables]


#: Maximum number of a rank's files in a checkpoint. Once it is reached, the next save writes all decisions to a single file.
MAX_SEGMENTS = 32


def row_type(columns: dict[str, np.ndarray], lead: int) -> np.dtype[Any]:
    """Returns the structured dtype of a transition, with a field per column.

    Args:
        columns: Arrays of transitions, by column name.
        lead: Number of leading axes that index transitions.
    """
    widest_first = sorted(columns, key=lambda name: (-columns[name].dtype.itemsize, name))
    return np.dtype([(name, columns[name].dtype, columns[name].shape[lead:]) for name in widest_first], align=True)


def gather(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies k rows of a byte table `[n, bytes]` to `out`, `[k, bytes]`."""
    np.take(table, rows, axis=0, out=out, mode="clip")


class ReplayBuffer:
    """One rank's part of the replay buffer.

    Args:
        capacity: Maximum number of transitions, over all ranks.
        share: Slots of this rank.
        num_envs: Number of slots of the run.
        rank: This rank, for file names.
        folder: Folder of the mapped file. The file is unlinked at once, so that a killed rank leaves no file behind.

    Attributes:
        decisions: Number of decisions since the run began.
        table: All rows, as bytes `[rows, bytes]`.
    """

    def __init__(self, capacity: int, share: range, num_envs: int, rank: int, folder: Path) -> None:
        self.capacity = max(1, capacity // num_envs)
        self.share = share
        self.num_envs = num_envs
        self.rank = rank
        self._folder = folder
        self.decisions = 0
        self._first = 0  # number of the first decision that this buffer ever contained
        self.dtype: np.dtype[Any] | None = None
        self.table = np.empty((0, 0), np.uint8)
        self._ring: Any = np.empty((0, len(share)))
        self._segments: list[_ReplayFile] = []
        self._saved: Path | None = None

    @property
    def held(self) -> int:
        """Number of decisions in the buffer."""
        return min(self.decisions - self._first, self.capacity)

    def __len__(self) -> int:
        """Returns the number of transitions in the buffers of all ranks."""
        return self.held * self.num_envs

    # -- writing --------------------------------------------------------------------------------------------------

    def _allocate(self, dtype: np.dtype[Any]) -> None:
        rows = self.capacity * len(self.share)
        size = rows * dtype.itemsize
        path = self._folder / f"replay-{self.rank}-{secrets.token_hex(4)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                path.unlink()
                os.posix_fallocate(file.fileno(), 0, size)  # fails on a full disk, which would cause a SIGBUS later
                self.table = np.memmap(file, np.uint8, "r+", shape=(rows, dtype.itemsize))
        except OSError as error:
            raise ConfigError(
                f"algorithm.replay_buffer.size: {self.capacity * len(self.share)} transitions of {dtype.itemsize} bytes "
                f"need {size / 2**30:.1f} GiB in {self._folder}: {error.strerror}; make it smaller, or set cluster.scratch"
            ) from error
        self._ring = self.table.view(dtype).reshape(self.capacity, len(self.share))
        self.dtype = dtype

    def add(self, columns: dict[str, np.ndarray]) -> None:
        """Adds T decisions of all the rank's slots; each column is `[slots, T, ...]`. Overwrites the oldest decisions if the
        buffer is full.

        Raises:
            ConfigError: The columns differ from the buffer's, or there is not enough disk space for the buffer.
        """
        dtype = row_type(columns, 2)
        if self.dtype is None:
            self._allocate(dtype)
        elif dtype != self.dtype:
            raise ConfigError(
                f"the replay buffer has {describe(self.dtype)}; this run's transitions have {describe(dtype)}"
            )
        steps = next(iter(columns.values())).shape[1]
        num_kept = min(steps, self.capacity)
        ring_rows = (self.decisions + np.arange(steps - num_kept, steps)) % self.capacity
        for name, column in columns.items():
            self._ring[name][ring_rows] = column[:, steps - num_kept :].swapaxes(0, 1)
        self.decisions += steps

    # -- reading --------------------------------------------------------------------------------------------------

    def local_rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the transitions that this rank stores.

        Args:
            places: Indices of transitions in the complete buffer, ordered by decision (oldest first), then by slot.

        Returns:
            Positions in `places` of the transitions on this rank, and their rows in `table`.
        """
        decision, slot = np.divmod(places, self.num_envs)
        decision += self.decisions - self.held
        decision %= self.capacity
        if len(self.share) == self.num_envs:
            return np.arange(len(places)), decision * self.num_envs + slot
        local_positions = np.flatnonzero((slot >= self.share.start) & (slot < self.share.stop))
        return local_positions, decision[local_positions] * len(self.share) + slot[local_positions] - self.share.start

    def _between(self, first: int, stop: int) -> list[np.ndarray]:
        """Returns decisions `first` to `stop` in order, as one array or, if the range wraps around the ring, as two."""
        ring_start, ring_stop = first % self.capacity, (stop - 1) % self.capacity + 1
        return (
            [self._ring[ring_start:ring_stop]]
            if ring_start < ring_stop
            else [self._ring[ring_start:], self._ring[:ring_stop]]
        )

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes the decisions since the last save to a checkpoint, and hard-links the files of earlier saves.

        Args:
            checkpoint: Staging folder of the checkpoint.
        """
        folder = checkpoint / FOLDER
        folder.mkdir(exist_ok=True)
        oldest = self.decisions - self.held
        segments = [segment for segment in self._segments if segment.stop > oldest]
        if len(segments) >= MAX_SEGMENTS or not self._link(segments, folder):
            segments = []
        segment_start = segments[-1].stop if segments else oldest
        if segment_start < self.decisions:
            segment = _ReplayFile(f"{self.rank}-{segment_start}-{self.decisions}.npy", segment_start, self.decisions)
            _write_segment(folder / segment.file, self._between(segment_start, self.decisions))
            segments.append(segment)
        index = _Index((self.share.start, self.share.stop), self.num_envs, self.decisions, self.held, segments)
        (folder / f"index-{self.rank}.json").write_bytes(index.dump())
        self._segments = segments
        self._saved = final_folder(checkpoint) / FOLDER

    def _link(self, segments: list[_ReplayFile], folder: Path) -> bool:
        """Hard-links files of the last checkpoint into `folder`. Returns False and removes the new links if a file is missing
        or the filesystem does not support hard links.
        """
        linked_files: list[Path] = []
        try:
            for segment in segments:
                assert self._saved is not None
                os.link(self._saved / segment.file, folder / segment.file)
                linked_files.append(folder / segment.file)
        except OSError:
            for path in linked_files:
                with contextlib.suppress(OSError):
                    path.unlink()
            return False
        return True

    def load(self, checkpoint: Path) -> None:
        """Restores this rank's slots from a checkpoint of any number of ranks.

        Raises:
            CheckpointError: The checkpoint has no replay buffer, or the buffer is damaged.
        """
        try:
            checkpoint_replay = StoredReplay(checkpoint)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        self.decisions = 0
        self._first = 0
        self._segments = []
        self._saved = None
        if checkpoint_replay.dtype is None:
            return
        if self.dtype != checkpoint_replay.dtype:
            self._allocate(checkpoint_replay.dtype)
        if checkpoint_replay.num_envs == self.num_envs:
            decisions, count, row_blocks = (
                checkpoint_replay.decisions,
                checkpoint_replay.held,
                checkpoint_replay.pieces(self.share),
            )
        else:
            # The number of environments differs: reshape the same transitions, in the same order, to rows of `num_envs`.
            decisions = count = len(checkpoint_replay) // self.num_envs
            newest_rows = checkpoint_replay.transitions()[len(checkpoint_replay) - count * self.num_envs :]
            rows = newest_rows.reshape(count, self.num_envs)[:, self.share.start : self.share.stop]
            row_blocks = iter([(0, slice(None), rows)])
        self.decisions = decisions
        self._first = decisions - min(count, self.capacity)
        for offset, slot_slice, rows in row_blocks:
            begin = decisions - count + offset
            num_expired = max(0, self._first - begin)
            self._ring[np.arange(begin + num_expired, begin + len(rows)) % self.capacity, slot_slice] = rows[
                num_expired:
            ]
        local_indices = [
            index for index in checkpoint_replay.ranks if index.slots == (self.share.start, self.share.stop)
        ]
        file = checkpoint_replay.folder / f"index-{self.rank}.json"
        if (
            local_indices
            and checkpoint_replay.num_envs == self.num_envs
            and file.is_file()
            and _Index.load(file) == local_indices[0]
        ):
            self._segments = local_indices[0].segments
            self._saved = checkpoint_replay.folder
