"""The replay buffer: the newest transitions of a rank's slots, in a memory-mapped ring.

The buffer of a run is a table of decisions (one action in every slot) by slots. Actor ranks hold the columns of their own
slots, and a transition is named by its place in the whole table, so that a batch drawn from it is the same whatever the
number of ranks. A transition is one row of bytes: a batch is one gather, and its columns are views of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.store import final_folder
from rlhpc.embodied.data.replay_files import FOLDER, Index, Segment, StoredReplay, describe, write_segment
from rlhpc.runtime.errors import CheckpointError, ConfigError

#: Files of a rank in a checkpoint. If there are more, the next save writes a single one that holds all.
MAX_SEGMENTS = 32


def row_type(columns: dict[str, np.ndarray], lead: int) -> np.dtype[Any]:
    """The dtype of a transition.

    Args:
        columns: Arrays of many transitions.
        lead: Leading axes that count transitions.
    """
    wide = sorted(columns, key=lambda name: (-columns[name].dtype.itemsize, name))
    return np.dtype([(name, columns[name].dtype, columns[name].shape[lead:]) for name in wide], align=True)


def gather(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of bytes `[k, bytes]` of a table `[n, bytes]`."""
    np.take(table, rows, axis=0, out=out, mode="clip")


class ReplayBuffer:
    """A rank's part of the buffer.

    Args:
        capacity: Transitions over all ranks.
        share: The rank's slots.
        num_envs: Slots of the run.
        rank: Its number, for file names.
        folder: Where the mapped file is made (and unlinked at once, so that a killed rank leaves nothing).

    Attributes:
        decisions: Decisions made since the run began.
    """

    def __init__(self, capacity: int, share: range, num_envs: int, rank: int, folder: Path) -> None:
        self.capacity = max(1, capacity // num_envs)
        self.share, self.num_envs, self.rank, self._folder = share, num_envs, rank, folder
        self.decisions = 0
        self._first = 0  # earlier decisions were never in this buffer
        self.dtype: np.dtype[Any] | None = None
        self._bytes = np.empty((0, 0), np.uint8)
        self._ring: Any = np.empty((0, len(share)))
        self._segments: list[Segment] = []
        self._saved: Path | None = None

    @property
    def held(self) -> int:
        """Number of decisions in the buffer."""
        return min(self.decisions - self._first, self.capacity)

    def __len__(self) -> int:
        """Transitions in the buffers of all ranks."""
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
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and not a SIGBUS later
                self._bytes = np.memmap(file, np.uint8, "r+", shape=(rows, dtype.itemsize))
        except OSError as error:
            raise ConfigError(
                f"algorithm.replay_buffer.size: {self.capacity * len(self.share)} transitions of {dtype.itemsize} bytes "
                f"need {size / 2**30:.1f} GiB in {self._folder}: {error.strerror}; make it smaller, or set cluster.scratch"
            ) from error
        self._ring = self._bytes.view(dtype).reshape(self.capacity, len(self.share))
        self.dtype = dtype

    def add(self, columns: dict[str, np.ndarray]) -> None:
        """Takes in decisions of all of the rank's slots, each column `[slots, T, ...]`.

        Raises:
            ConfigError: The columns are other than those already here.
        """
        dtype = row_type(columns, 2)
        if self.dtype is None:
            self._allocate(dtype)
        elif dtype != self.dtype:
            raise ConfigError(
                f"the replay buffer has {describe(self.dtype)}; this run's transitions have {describe(dtype)}"
            )
        steps = next(iter(columns.values())).shape[1]
        newest = min(steps, self.capacity)
        at = (self.decisions + np.arange(steps - newest, steps)) % self.capacity
        for name, column in columns.items():
            self._ring[name][at] = column[:, steps - newest :].swapaxes(0, 1)
        self.decisions += steps

    # -- reading --------------------------------------------------------------------------------------------------

    def mine(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some transitions are here.

        Args:
            places: Of transitions among all `len(self)`, oldest decision first and by slot.

        Returns:
            Their indices in `places`, and their rows.
        """
        decision, slot = np.divmod(places, self.num_envs)
        decision += self.decisions - self.held
        decision %= self.capacity
        if len(self.share) == self.num_envs:
            return np.arange(len(places)), decision * self.num_envs + slot
        inside = np.flatnonzero((slot >= self.share.start) & (slot < self.share.stop))
        return inside, decision[inside] * len(self.share) + slot[inside] - self.share.start

    @property
    def table(self) -> np.ndarray:
        """All rows, as bytes `[rows, bytes]`."""
        return self._bytes

    def _between(self, first: int, stop: int) -> list[np.ndarray]:
        """Decisions in order, in one piece or two."""
        a, b = first % self.capacity, (stop - 1) % self.capacity + 1
        return [self._ring[a:b]] if a < b else [self._ring[a:], self._ring[:b]]

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes what is new since the last save, and links what that one wrote.

        Args:
            checkpoint: The folder that is being filled.
        """
        folder = checkpoint / FOLDER
        folder.mkdir(exist_ok=True)
        oldest = self.decisions - self.held
        kept = [segment for segment in self._segments if segment.stop > oldest]
        if len(kept) >= MAX_SEGMENTS or not self._link(kept, folder):
            kept = []
        first = kept[-1].stop if kept else oldest
        if first < self.decisions:
            segment = Segment(f"{self.rank}-{first}-{self.decisions}.npy", first, self.decisions)
            write_segment(folder / segment.file, self._between(first, self.decisions))
            kept.append(segment)
        index = Index((self.share.start, self.share.stop), self.num_envs, self.decisions, self.held, kept)
        (folder / f"index-{self.rank}.json").write_bytes(index.dump())
        self._segments, self._saved = kept, final_folder(checkpoint) / FOLDER

    def _link(self, segments: list[Segment], folder: Path) -> bool:
        """Whether all files of the last checkpoint could be linked; if not (it is gone, or links are not supported),
        none is."""
        done: list[Path] = []
        try:
            for segment in segments:
                assert self._saved is not None
                os.link(self._saved / segment.file, folder / segment.file)
                done.append(folder / segment.file)
        except OSError:
            for path in done:
                with contextlib.suppress(OSError):
                    path.unlink()
            return False
        return True

    def load(self, checkpoint: Path) -> None:
        """Restores a checkpoint of any number of ranks.

        Raises:
            CheckpointError: It has no replay buffer, or a damaged one.
        """
        try:
            stored = StoredReplay(checkpoint)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        self.decisions, self._first, self._segments, self._saved = 0, 0, [], None
        if stored.dtype is None:
            return
        if self.dtype != stored.dtype:
            self._allocate(stored.dtype)
        if stored.num_envs == self.num_envs:
            made, count, pieces = stored.decisions, stored.held, stored.pieces(self.share)
        else:
            # Another number of environments: the same transitions in the same order, in rows of another length.
            made = count = len(stored) // self.num_envs
            flat = stored.transitions()[len(stored) - count * self.num_envs :]
            rows = flat.reshape(count, self.num_envs)[:, self.share.start : self.share.stop]
            pieces = iter([(0, slice(None), rows)])
        self.decisions, self._first = made, made - min(count, self.capacity)
        for at, place, rows in pieces:
            begin = made - count + at
            newer = max(0, self._first - begin)
            self._ring[np.arange(begin + newer, begin + len(rows)) % self.capacity, place] = rows[newer:]
        own = [index for index in stored.ranks if index.slots == (self.share.start, self.share.stop)]
        file = stored.folder / f"index-{self.rank}.json"
        if own and stored.num_envs == self.num_envs and file.is_file() and Index.load(file) == own[0]:
            self._segments, self._saved = own[0].segments, stored.folder
