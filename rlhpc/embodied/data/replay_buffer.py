"""Replay buffer: the newest transitions of a rank's slots, in a memory-mapped ring buffer.

The buffer of a run is a table with a row per decision (one action in every slot) and a column per slot. Each actor rank
stores the columns of its slots. Indices of transitions count over the complete table, so that a sampled batch does not
depend on the number of ranks. A transition is stored as one row of bytes: sampling a batch is one gather, and the batch's
columns are views of the result. Images are stored apart, each once (`frame_store`), and the row has their numbers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.checkpoint.store import final_folder
from rlhpc.embodied.data.frame_store import FrameColumn, ImageLayout, is_image
from rlhpc.embodied.data.stored_replay import (
    FOLDER,
    ImageIndex,
    ReplayFile,
    ReplayIndex,
    StoredReplay,
    describe,
    row_type,
    write_segment,
)
from rlhpc.runtime.errors import CheckpointError, ConfigError

#: Maximum bytes of transitions that are rebuilt at a time from another layout.
_COPY_BYTES = 1 << 26

#: Maximum number of a rank's files in a checkpoint. Once it is reached, the next save writes all decisions to a single file.
MAX_SEGMENTS = 32


def gather(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies k rows of a byte table `[n, bytes]` to `out`, `[k, bytes]`."""
    np.take(table, rows, axis=0, out=out, mode="clip")


class TransitionRing:
    """Positions of transitions in a ring of decisions, of which each has one transition for each of a rank's slots. Rows count
    decisions of the ring first, then the rank's slots.

    Args:
        capacity: Maximum number of transitions, over all ranks.
        share: Slots of this rank.
        num_envs: Number of slots of the run.

    Attributes:
        capacity: Maximum number of decisions.
        decisions: Number of decisions since the run began.
        first: Number of the first decision that this buffer ever contained.
        dtype: Columns of a transition; None for a buffer that never had one.
    """

    def __init__(self, capacity: int, share: range, num_envs: int) -> None:
        self.capacity = max(1, capacity // num_envs)
        self.share = share
        self.num_envs = num_envs
        self.decisions = self.first = 0
        self.dtype: np.dtype[Any] | None = None

    @property
    def held(self) -> int:
        """Number of decisions in the buffer."""
        return min(self.decisions - self.first, self.capacity)

    def __len__(self) -> int:
        """Returns the number of transitions in the buffers of all ranks."""
        return self.held * self.num_envs

    def local_rows(self, replay_places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the transitions that this rank stores.

        Args:
            replay_places: Indices of transitions in the complete buffer, ordered by decision (oldest first), then by slot.

        Returns:
            Positions in `replay_places` of the transitions on this rank, and their rows.
        """
        decision, slot = np.divmod(replay_places, self.num_envs)
        decision += self.decisions - self.held
        decision %= self.capacity
        if len(self.share) == self.num_envs:
            return np.arange(len(replay_places)), decision * self.num_envs + slot
        local_positions = np.flatnonzero((slot >= self.share.start) & (slot < self.share.stop))
        return local_positions, decision[local_positions] * len(self.share) + slot[local_positions] - self.share.start

    def following(self, rows: Any, num_steps: int) -> tuple[Any, Any]:
        """Finds later transitions of the same slots.

        Args:
            rows: Rows of transitions, from `local_rows`: an array or a tensor.
            num_steps: Number of decisions between a transition and the later one.

        Returns:
            Rows of the later transitions, and whether they are in the buffer.
        """
        decision, slot = rows // len(self.share), rows % len(self.share)
        num_newer = (self.decisions - 1 - decision) % self.capacity  # number of newer decisions
        return (decision + num_steps) % self.capacity * len(self.share) + slot, num_newer >= num_steps


class ReplayBuffer(TransitionRing):
    """One rank's part of the replay buffer.

    Args:
        capacity: Maximum number of transitions, over all ranks.
        share: Slots of this rank.
        num_envs: Number of slots of the run.
        rank: This rank, for file names.
        folder: Folder of the mapped files. They are unlinked at once, so that a killed rank leaves no file behind.
        frame_stack: Number of images that an observation's image stacks.
        checkpoint_folder: Name of the buffer's folder in a checkpoint.
        key: Configuration key of the capacity, for messages.
    """

    def __init__(
        self,
        capacity: int,
        share: range,
        num_envs: int,
        rank: int,
        folder: Path,
        frame_stack: int = 1,
        *,
        checkpoint_folder: str = FOLDER,
        key: str = "algorithm.replay_buffer.size",
    ) -> None:
        super().__init__(capacity, share, num_envs)
        self.rank = rank
        self._folder = folder
        self._frame_stack = frame_stack
        self._checkpoint_folder = checkpoint_folder
        self._key = key
        self._table = np.empty((0, 0), np.uint8)
        self._ring: Any = np.empty((0, len(share)))
        self._images: dict[str, FrameColumn] = {}
        self._forget_files()

    def _forget_files(self) -> None:
        """Forgets the files of earlier saves, so that the next save writes everything."""
        self._segments: dict[str, list[ReplayFile]] = {}  # those of the rows have the key ""
        self._saved_folder: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the mapped files."""
        return self._table.nbytes + sum(column.ring.nbytes for column in self._images.values())

    # -- writing --------------------------------------------------------------------------------------------------

    def _allocate(self, dtype: np.dtype[Any]) -> None:
        """Allocates the files of transitions with these columns.

        Raises:
            ConfigError: There is no room.
        """
        fields: Any = dtype.fields
        shapes = {name: (field_type.base, field_type.shape) for name, (field_type, *_) in fields.items()}
        layouts = {
            name: ImageLayout(shapes[name][1], self._frame_stack)
            for name in shapes
            if is_image(*shapes[name]) and shapes.get(f"next_{name}") == shapes[name]
        }
        frame_numbers = np.empty((0, self._frame_stack), np.int64)
        columns = {
            name: frame_numbers if name.removeprefix("next_") in layouts else np.empty((0, *shape), base_dtype)
            for name, (base_dtype, shape) in shapes.items()
        }
        stored_type = row_type(columns, 1)
        rows = self.capacity * len(self.share)
        path = self._folder / f"replay-{self.rank}-{secrets.token_hex(4)}"
        self._images = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                path.unlink()
                # fails on a full disk, which would cause a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, rows * stored_type.itemsize)
                self._table = np.memmap(file, np.uint8, "r+", shape=(rows, stored_type.itemsize))
            for name, layout in layouts.items():
                self._images[name] = FrameColumn(layout, len(self.share), self.capacity, self._folder)
        except OSError as error:
            raise self._full(
                error, stored_type.itemsize + sum(layout.frame_bytes for layout in layouts.values())
            ) from error
        self._ring = self._table.view(stored_type).reshape(self.capacity, len(self.share))
        self.dtype = dtype

    def _full(self, error: OSError, row_bytes: int) -> ConfigError:
        rows = self.capacity * len(self.share)
        return ConfigError(
            f"{self._key}: {rows} transitions of {row_bytes} bytes need {rows * row_bytes / 2**30:.1f} GiB "
            f"in {self._folder}: {error.strerror}; make it smaller, or set cluster.scratch"
        )

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
        num_decisions = next(iter(columns.values())).shape[1]
        num_kept = min(num_decisions, self.capacity)
        ring_rows = (self.decisions + np.arange(num_decisions - num_kept, num_decisions)) % self.capacity
        for name, column in columns.items():
            if name.removeprefix("next_") not in self._images:
                self._ring[name][ring_rows] = column[:, num_decisions - num_kept :].swapaxes(0, 1)
        if not self._images:
            self.decisions += num_decisions
            return
        self.decisions += num_decisions - num_kept
        for step, row in zip(range(num_decisions - num_kept, num_decisions), ring_rows, strict=True):
            self._add_images(columns, step, row)

    def skip(self, count: int) -> None:
        """Counts decisions that are not stored. The caller must then add as many as the buffer holds.

        Args:
            count: Number of decisions.
        """
        self.decisions += count

    def _add_images(self, columns: dict[str, np.ndarray], step: int, row: int) -> None:
        """Adds the images of a decision, whose other columns are in a row of the ring, and counts the decision. Images that
        only overwritten decisions have are dropped.
        """
        for name, image in self._images.items():
            try:
                frame_numbers = image.add(columns[name][:, step], columns[f"next_{name}"][:, step])
            except OSError as error:
                raise self._full(error, image.layout.frame_bytes) from error
            self._ring[name][row], self._ring[f"next_{name}"][row] = frame_numbers
        self.decisions += 1
        oldest_slot = (self.decisions - self.held) % self.capacity
        for name, image in self._images.items():
            image.ring.drop_before(int(self._ring[name][oldest_slot].min()))

    # -- reading --------------------------------------------------------------------------------------------------

    def stored_column(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns a column without images of the transitions in some rows."""
        column: np.ndarray = self._ring[name].reshape(-1, *self._ring[name].shape[2:])[rows]
        return column

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copies the transitions of some rows to `out`, bytes `[k, dtype.itemsize]`."""
        if not self._images:
            gather(self._table, rows, out)
            return
        assert self.dtype is not None
        stored_rows = np.take(self._table, rows, axis=0, mode="clip").view(self._ring.dtype)[:, 0]
        transitions = out.view(self.dtype)[:, 0]
        for name in self.dtype.names or ():
            image = self._images.get(name.removeprefix("next_"))
            transitions[name] = stored_rows[name] if image is None else image.read(stored_rows[name])

    def _read_decisions(self, first_decision: int, stop_decision: int) -> list[np.ndarray]:
        """Returns decisions `first_decision` to `stop_decision` in order, as one array or, if the range wraps around
        the ring, as two.
        """
        ring_start, ring_stop = first_decision % self.capacity, (stop_decision - 1) % self.capacity + 1
        return (
            [self._ring[ring_start:ring_stop]]
            if ring_start < ring_stop
            else [self._ring[ring_start:], self._ring[:ring_stop]]
        )

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes the transitions since the last save to a checkpoint, and hard-links the files of earlier saves.

        Args:
            checkpoint: Staging folder of the checkpoint.
        """
        folder = checkpoint / self._checkpoint_folder
        folder.mkdir(exist_ok=True)
        self.write(folder)
        self._saved_folder = final_folder(checkpoint) / self._checkpoint_folder

    def write(self, folder: Path) -> None:
        """Writes the buffer to a folder (`save`)."""
        oldest_decision = self.decisions - self.held
        ranges = {"": (oldest_decision, self.decisions)}
        ranges |= {name: (image.ring.first, image.ring.stop) for name, image in self._images.items()}
        kept_segments = {
            name: [segment for segment in self._segments.get(name, ()) if segment.stop > first_decision]
            for name, (first_decision, _) in ranges.items()
        }
        is_long = any(len(segments) >= MAX_SEGMENTS for segments in kept_segments.values())
        if is_long or not self._link([segment for segments in kept_segments.values() for segment in segments], folder):
            kept_segments = {name: [] for name in ranges}
        for range_number, (name, (first_decision, stop_decision)) in enumerate(ranges.items()):
            segment_start = kept_segments[name][-1].stop if kept_segments[name] else first_decision
            if segment_start < stop_decision:
                prefix = f"images{range_number}-{self.rank}" if name else f"{self.rank}"
                segment = ReplayFile(f"{prefix}-{segment_start}-{stop_decision}.npy", segment_start, stop_decision)
                rows = (
                    self._images[name].ring.parts(segment_start, stop_decision)
                    if name
                    else self._read_decisions(segment_start, stop_decision)
                )
                write_segment(folder / segment.file, rows)
                kept_segments[name].append(segment)
        images = {
            name: ImageIndex(image.layout, *ranges[name], kept_segments[name]) for name, image in self._images.items()
        }
        index = ReplayIndex(
            (self.share.start, self.share.stop), self.num_envs, self.decisions, self.held, kept_segments[""], images
        )
        (folder / f"index-{self.rank}.json").write_bytes(index.dump())
        self._segments = kept_segments

    def _link(self, segments: list[ReplayFile], folder: Path) -> bool:
        """Hard-links files of the last checkpoint into `folder`. Returns False and removes the new links if a file is missing
        or the filesystem does not support hard links.
        """
        linked_files: list[Path] = []
        try:
            for segment in segments:
                assert self._saved_folder is not None
                os.link(self._saved_folder / segment.file, folder / segment.file)
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
            folder = checkpoint / self._checkpoint_folder
            checkpoint_replay = StoredReplay(folder if folder.is_dir() else checkpoint)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        self.decisions = 0
        self.first = 0
        self._forget_files()
        for image in self._images.values():
            image.clear()
        if checkpoint_replay.dtype is None:
            return
        if self.dtype != checkpoint_replay.dtype:
            self._allocate(checkpoint_replay.dtype)
        layouts = {name: image.layout for name, image in self._images.items()}
        rank_shares = [index.slots for index in checkpoint_replay.ranks]
        is_same_share = (
            checkpoint_replay.num_envs == self.num_envs and (self.share.start, self.share.stop) in rank_shares
        )
        if self._images and not (is_same_share and layouts == checkpoint_replay.layouts):
            self._load_transitions(checkpoint_replay)
            return
        if checkpoint_replay.num_envs == self.num_envs:
            decisions, num_decisions, row_blocks = (
                checkpoint_replay.decisions,
                checkpoint_replay.held,
                checkpoint_replay.pieces(self.share),
            )
        else:
            # The number of environments differs: reshape the same transitions, in the same order, to rows of `num_envs`.
            decisions = num_decisions = len(checkpoint_replay) // self.num_envs
            newest_rows = checkpoint_replay.transitions()[len(checkpoint_replay) - num_decisions * self.num_envs :]
            rows = newest_rows.reshape(num_decisions, self.num_envs)[:, self.share.start : self.share.stop]
            row_blocks = iter([(0, slice(None), rows)])
        self.decisions = decisions
        self.first = decisions - min(num_decisions, self.capacity)
        for offset, slot_slice, rows in row_blocks:
            begin_decision = decisions - num_decisions + offset
            num_expired = max(0, self.first - begin_decision)
            self._ring[
                np.arange(begin_decision + num_expired, begin_decision + len(rows)) % self.capacity, slot_slice
            ] = rows[num_expired:]
        if not is_same_share:
            return
        share_index = rank_shares.index((self.share.start, self.share.stop))
        index = checkpoint_replay.ranks[share_index]
        for name, image in self._images.items():
            image.ring.restore(index.images[name].first, checkpoint_replay.images(share_index)[name])
            if self.held:
                oldest_slot, newest_slot = ((self.decisions + offset) % self.capacity for offset in (-self.held, -1))
                image.ring.drop_before(int(self._ring[name][oldest_slot].min()))
                image.resume_after(self._ring[f"next_{name}"][newest_slot])
        file = checkpoint_replay.folder / f"index-{self.rank}.json"
        if file.is_file() and ReplayIndex.load(file) == index:
            self._segments = {"": index.segments, **{name: image.segments for name, image in index.images.items()}}
            self._saved_folder = checkpoint_replay.folder

    def _load_transitions(self, stored_replay: StoredReplay) -> None:
        """Loads transitions with images from a checkpoint with another layout; a part at a time."""
        assert self.dtype is not None
        num_decisions = len(stored_replay) // self.num_envs
        self.decisions = stored_replay.decisions if stored_replay.num_envs == self.num_envs else num_decisions
        self.decisions -= min(num_decisions, self.capacity)
        self.first = self.decisions
        begin_row = len(stored_replay) - min(num_decisions, self.capacity) * self.num_envs
        block = max(1, _COPY_BYTES // (self.dtype.itemsize * self.num_envs)) * self.num_envs
        for first_row in range(begin_row, len(stored_replay), block):
            rows = stored_replay.take(first_row, min(first_row + block, len(stored_replay))).reshape(-1, self.num_envs)
            local_rows = rows[:, self.share.start : self.share.stop].swapaxes(0, 1)
            self.add({name: local_rows[name] for name in self.dtype.names or ()})


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


def _write_replay(target: Path, transitions: np.ndarray) -> None:
    """Writes transitions as a stored buffer of one slot, atomically.

    Raises:
        ConfigError: The target exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    with filled_folder(target) as folder:
        buffer = ReplayBuffer(len(transitions), range(1), 1, 0, folder)
        buffer.add({name: transitions[name][None] for name in transitions.dtype.names or ()})
        buffer.write(folder)


def inspect(folder: str | Path) -> dict[str, Any]:
    """Returns a summary of a stored buffer: numbers of transitions, ranks, files and bytes, its columns, reward statistics
    and the number of terminations."""
    replay = StoredReplay(Path(folder))
    files = [
        replay.folder / segment.file
        for index in replay.ranks
        for segments in (index.segments, *(image.segments for image in index.images.values()))
        for segment in segments
    ]
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
        rewards = replay.column("rewards").astype(np.float64)
        summary |= {
            "reward_mean": float(rewards.mean()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "terminations": int(replay.column("terminations").sum()),
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


def split(folder: str | Path, output: str | Path, num_parts: int) -> list[int]:
    """Splits a stored buffer into `num_parts` buffers of nearly equal size, oldest first: `output/0`, `output/1`, …

    Returns:
        Number of transitions of each part.

    Raises:
        ConfigError: There are fewer transitions than parts, or the target exists.
    """
    (replay,) = _open_all([folder])
    if not 1 <= num_parts <= len(replay):
        raise ConfigError(f"--parts is {num_parts}; {replay.folder} has {len(replay)} transitions")
    target = Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    tables = np.array_split(replay.transitions(), num_parts)
    for index, table in enumerate(tables):
        _write_replay(target / str(index), table)
    return [len(table) for table in tables]
