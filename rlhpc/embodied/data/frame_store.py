"""Images of a replay buffer, each stored once: the next observation of a transition is the observation of the following one,
and a stacked observation shares all images but the newest with the one before.

Images have consecutive numbers. A transition holds the numbers of its images, and an image is kept until the last transition
that holds its number is overwritten. Which images are shared is decided by their content alone, so that episodes may end,
slots may change and transitions may be left out at any time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.envs.observations import boxes_of, is_channel_last
from rlhpc.runtime.errors import ConfigError

#: Number of blocks into which the expected number of images is divided; the file grows by one block.
_BLOCKS = 64


def is_image(dtype: np.dtype[Any], shape: Sequence[int]) -> bool:
    """Returns whether a column's rows are images: unsigned bytes `[H, W, C]` or `[C, H, W]`."""
    return dtype == np.uint8 and len(shape) == 3


@dataclass(frozen=True)
class ImageLayout:
    """Layout of an observation's image, which may stack the newest images of an episode.

    Attributes:
        shape: Shape of the observation, `[H, W, C]` or `[C, H, W]`.
        stack: Number of images in its channels, oldest first.
    """

    shape: tuple[int, ...]
    stack: int = 1

    def __post_init__(self) -> None:
        if self._channels % self.stack:
            raise ConfigError(
                f"algorithm.replay_buffer.frame_stack is {self.stack}, which does not divide the {self._channels} channels of "
                f"images {list(self.shape)}"
            )

    @property
    def _channels(self) -> int:
        return self.shape[2] if is_channel_last(self.shape) else self.shape[0]

    @property
    def frame_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.shape)) // self.stack

    def split(self, observations: np.ndarray) -> np.ndarray:
        """Returns the images `[n, stack, bytes]` of observations `[n, *shape]`."""
        n = len(observations)
        if self.stack > 1 and is_channel_last(self.shape):
            height, width, channels = self.shape
            stacked_parts = observations.reshape(n, height, width, self.stack, channels // self.stack)
            observations = np.moveaxis(stacked_parts, 3, 1)
        return np.ascontiguousarray(observations).reshape(n, self.stack, self.frame_bytes)

    def join(self, frames: np.ndarray) -> np.ndarray:
        """Returns observations `[n, *shape]` of images `[n, stack, bytes]`."""
        if self.stack > 1 and is_channel_last(self.shape):
            height, width, channels = self.shape
            stacked_parts = frames.reshape(len(frames), self.stack, height, width, channels // self.stack)
            frames = np.moveaxis(stacked_parts, 1, 3)
        return frames.reshape(len(frames), *self.shape)


def image_layouts(observation_space: Any, stack: int) -> dict[str, ImageLayout]:
    """Returns the layouts of the images in observations of a slot, by key; other observations have no layout.

    Raises:
        ConfigError: Images do not have channels for `stack` images.
    """
    boxes = boxes_of(observation_space)
    return {
        key: ImageLayout(box.shape, stack) for key, box in boxes.items() if is_image(np.dtype(box.dtype), box.shape)
    }


class FrameRing:
    """Images with the numbers `first` to `stop` (excluded), in a memory-mapped file that grows by blocks. A block whose images
    are all dropped is used again.

    Args:
        frame_bytes: Bytes of an image.
        num_expected: Number of images for which there must be room at once.
        folder: Folder of the file, which is unlinked at once.

    Raises:
        OSError: There is no room for the images.
    """

    def __init__(self, frame_bytes: int, num_expected: int, folder: Path) -> None:
        self.first = self.stop = 0
        self._frame_bytes = frame_bytes
        self._block = max(1, -(-num_expected // _BLOCKS))
        self._first_block = 0
        self._places: list[int] = []  # place in the file of each block, from `_first_block` on
        self._free_places: list[int] = []
        self._num_places = 0
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"frames-{secrets.token_hex(4)}"
        self._file = path.open("w+b")
        path.unlink()
        self._table = np.empty((0, frame_bytes), np.uint8)
        self._grow_table(-(-num_expected // self._block))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._num_places * self._block * self._frame_bytes

    def _grow_table(self, num_blocks: int) -> None:
        block_bytes = self._block * self._frame_bytes
        # fails on a full disk, which would cause a SIGBUS later
        os.posix_fallocate(self._file.fileno(), self.nbytes, num_blocks * block_bytes)
        self._free_places += range(self._num_places, self._num_places + num_blocks)
        self._num_places += num_blocks
        shape = (self._num_places * self._block, self._frame_bytes)
        self._table = np.memmap(self._file, np.uint8, "r+", shape=shape)

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows of the file's images with these numbers."""
        block, offset = np.divmod(numbers, self._block)
        return np.asarray(self._places, np.int64)[block - self._first_block] * self._block + offset

    def append(self, frames: np.ndarray) -> np.ndarray:
        """Adds images `[n, bytes]`; returns their numbers `[n]`."""
        frame_numbers = np.arange(self.stop, self.stop + len(frames))
        self.stop += len(frames)
        while (self._first_block + len(self._places)) * self._block < self.stop:
            if not self._free_places:
                self._grow_table(1)
            self._places.append(self._free_places.pop(0))
        self._table[self._rows(frame_numbers)] = frames
        return frame_numbers

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the images `[..., bytes]` with these numbers `[...]`."""
        rows = self._rows(numbers.reshape(-1))
        frames: np.ndarray = np.take(self._table, rows, axis=0, mode="clip")
        return frames.reshape(*numbers.shape, self._frame_bytes)

    def drop_before(self, first_kept: int) -> None:
        """Drops the images whose number is lower than `first_kept`."""
        self.first = max(self.first, first_kept)
        while self._places and (self._first_block + 1) * self._block <= self.first:
            self._free_places.append(self._places.pop(0))
            self._first_block += 1

    def parts(self, first_frame: int, stop: int) -> list[np.ndarray]:
        """Returns the images `first_frame` to `stop` in order, as arrays of one block each."""
        block_starts = range(first_frame - first_frame % self._block, stop, self._block)
        arrays = []
        for block_start in block_starts:
            part_start, part_end = max(first_frame, block_start), min(stop, block_start + self._block)
            row = int(self._rows(np.array([part_start]))[0])
            arrays.append(self._table[row : row + part_end - part_start])
        return arrays

    def restore(self, first_frame: int, parts: Sequence[np.ndarray]) -> None:
        """Replaces the content by images `[n, bytes]` whose numbers begin at `first_frame`."""
        self._free_places, self._places = list(range(self._num_places)), []
        self.first = self.stop = first_frame
        self._first_block = first_frame // self._block
        for frames in parts:
            for block_start in range(0, len(frames), self._block):
                self.append(frames[block_start : block_start + self._block])


class FrameColumn:
    """Images of one camera, in the observations and next observations of a rank's slots.

    Args:
        layout: Layout of the observations.
        num_slots: Number of slots of the rank.
        num_decisions: Number of decisions that the buffer holds.
        folder: Folder of the images' file.

    Raises:
        OSError: There is no room for the images.
    """

    def __init__(self, layout: ImageLayout, num_slots: int, num_decisions: int, folder: Path) -> None:
        self.layout = layout
        # one image for each transition, and the images of the newest next observations
        self.ring = FrameRing(layout.frame_bytes, num_slots * (num_decisions + layout.stack + 1), folder)
        self._newest_numbers = np.zeros((num_slots, layout.stack), np.int64)
        self._newest_frames: np.ndarray | None = None

    def add(self, obs: np.ndarray, next_obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds a decision of all slots.

        Args:
            obs, next_obs: Images `[slots, *shape]` before and after the decision.

        Returns:
            Numbers `[slots, stack]` of the images of both.
        """
        frames = self.layout.split(obs)
        frame_numbers = self._newest_numbers.copy()
        is_known = np.zeros(len(frames), bool)
        if self._newest_frames is not None:
            is_known = (frames == self._newest_frames).all((1, 2))
        self._append(frames, frame_numbers, ~is_known)
        next_frames = self.layout.split(next_obs)
        is_shifted = (next_frames[:, :-1] == frames[:, 1:]).all((1, 2))
        next_numbers = np.concatenate((frame_numbers[:, 1:], np.zeros_like(frame_numbers[:, :1])), 1)
        next_numbers[is_shifted, -1] = self.ring.append(next_frames[is_shifted, -1])
        self._append(next_frames, next_numbers, ~is_shifted)
        self._newest_numbers, self._newest_frames = next_numbers, next_frames
        return frame_numbers, next_numbers

    def _append(self, frames: np.ndarray, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Adds all images of some rows, and sets their numbers; equal neighbours, as at an episode's start, are one image."""
        slots = np.flatnonzero(rows)
        if not len(slots):
            return
        for i in range(self.layout.stack):
            is_new = np.ones(len(slots), bool)
            if i:
                is_new = (frames[slots, i] != frames[slots, i - 1]).any(1)
                numbers[slots[~is_new], i] = numbers[slots[~is_new], i - 1]
            numbers[slots[is_new], i] = self.ring.append(frames[slots[is_new], i])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns images `[n, *shape]` of numbers `[n, stack]`."""
        return self.layout.join(self.ring.read(numbers))

    def clear(self) -> None:
        """Removes all images."""
        self.ring.restore(0, ())
        self._newest_frames = None

    def resume_after(self, newest_numbers: np.ndarray) -> None:
        """Continues after stored transitions whose newest next observations have the numbers `[slots, stack]`."""
        self._newest_numbers, self._newest_frames = newest_numbers.copy(), self.ring.read(newest_numbers)
