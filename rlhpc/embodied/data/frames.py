"""Frames of datasets, read by index: handles of an episode's images, and a pool that reads, decodes and caches them.

A handle says where the images of an episode are; it holds none. `FramePool.read` takes the requests of a batch, groups them by
file, and reads each file once, in increasing order. A frame that several windows of the batch contain is decoded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.hdf5 import member, require_local
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

#: Position of an image in a file: name of the column or data set ("" if the file has only one), and number of the image.
FrameKey = tuple[str, int]


class FrameReader(ABC):
    """Open file with images."""

    @abstractmethod
    def read(self, keys: Sequence[FrameKey]) -> Iterator[tuple[FrameKey, np.ndarray]]:
        """Yields the images of sorted, distinct keys, `[H, W, C]` (or another shape of a step), in their order.

        Raises:
            ConfigError: The file is damaged, or has no such image.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""


@dataclass(frozen=True)
class FrameFile(ABC):
    """File with images. Equal descriptions mean the same file.

    Attributes:
        path: Path of the file.
    """

    path: Path

    @abstractmethod
    def open(self) -> FrameReader:
        """Opens the file.

        Raises:
            ConfigError: The file cannot be opened.
        """


@dataclass(frozen=True, eq=False)
class FramePart:
    """Images of an episode from one camera.

    Attributes:
        file: File with the images.
        name: Name of the column or data set; "" if the file has only one.
        rows: Numbers of the episode's images in the file. Steps after the last image repeat it.
        num_channels: Number of channels on the last axis of an image.
    """

    file: FrameFile
    name: str
    rows: range | np.ndarray
    num_channels: int

    def key(self, step: int) -> FrameKey:
        """Returns the position of a step's image."""
        return self.name, int(self.rows[min(step, len(self.rows) - 1)])


@dataclass(frozen=True, eq=False)
class Frames:
    """Images of an episode that stay in their files; stands in a trajectory in place of an array.

    Attributes:
        shape: Shape of the array, `[T+1, H, W, C]`.
        dtype: Type of the array.
        parts: Cameras, which are concatenated along the last axis.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[FramePart, ...]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes, including the time axis."""
        return len(self.shape)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one step's image, all cameras together."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize


def concatenate(frames: Sequence[Frames]) -> Frames:
    """Returns the images of several cameras, concatenated along the last axis.

    Raises:
        ValueError: The cameras have images of different sizes or types.
    """
    first_camera = frames[0]
    if any(
        other_camera.shape[:-1] != first_camera.shape[:-1] or other_camera.dtype != first_camera.dtype
        for other_camera in frames
    ):
        raise ValueError(
            f"cameras with images {', '.join(str(list(other_camera.shape[1:])) for other_camera in frames)}"
        )
    width = sum(camera.shape[-1] for camera in frames)
    return Frames(
        (*first_camera.shape[:-1], width),
        first_camera.dtype,
        tuple(frame_part for camera in frames for frame_part in camera.parts),
    )


#: Request of a batch: images of an episode, numbers of the steps, and the array `[len(steps), H, W, C]` to write to.
FrameRequest = tuple[Frames, Sequence[int] | np.ndarray, np.ndarray]


class FramePool:
    """Reader of the frames of many files, with a cache of decoded frames.

    The cache keeps the frames that are read first, up to its budget, and replaces none. A pass in random order reads each
    frame once, so a frame that was read recently is no more likely to come next than another.

    Args:
        budget: Maximum bytes of the cache; 0 for no cache.
        max_open: Maximum number of open files.

    Attributes:
        cached_bytes: Bytes in the cache.
        num_read: Number of frames read from files so far.
        num_cached: Number of frames taken from the cache so far.
    """

    def __init__(self, budget: int = 0, max_open: int = 16) -> None:
        self.cached_bytes = self.num_read = self.num_cached = 0
        self._budget, self._max_open = budget, max_open
        self._cache: dict[tuple[FrameFile, FrameKey], np.ndarray] = {}
        self._readers = OrderedDict[FrameFile, FrameReader]()

    def read(self, requests: Iterable[FrameRequest]) -> None:
        """Writes the frames of all requests to their arrays; reads each file once.

        Raises:
            ConfigError: A file is missing, damaged, or has no such frame.
        """
        targets: dict[FrameFile, dict[FrameKey, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        for frames, steps, target_array in requests:
            channel = 0
            for frame_part in frames.parts:
                width = slice(channel, channel + frame_part.num_channels) if len(frames.parts) > 1 else slice(None)
                for row, step in enumerate(steps):
                    targets[frame_part.file][frame_part.key(int(step))].append(target_array[row][..., width])
                channel += frame_part.num_channels
        for file, file_targets in targets.items():
            missing_keys: list[FrameKey] = []
            for key, arrays in file_targets.items():
                frame = self._cache.get((file, key))
                if frame is None:
                    missing_keys.append(key)
                else:
                    self.num_cached += 1
                    _fill(arrays, frame)
            if missing_keys:
                for key, frame in self._open(file).read(sorted(missing_keys)):
                    self.num_read += 1
                    _fill(file_targets[key], frame)
                    self._keep(file, key, frame, file_targets[key][0].dtype)

    def _keep(self, file: FrameFile, key: FrameKey, frame: np.ndarray, dtype: np.dtype[Any]) -> None:
        num_bytes = frame.size * dtype.itemsize
        if self.cached_bytes + num_bytes <= self._budget:
            # A view would keep the array that it belongs to.
            self._cache[file, key] = frame if frame.base is None and frame.dtype == dtype else frame.astype(dtype)
            self.cached_bytes += num_bytes

    def _open(self, file: FrameFile) -> FrameReader:
        if file in self._readers:
            self._readers.move_to_end(file)
            return self._readers[file]
        while len(self._readers) >= self._max_open:
            self._readers.popitem(last=False)[1].close()
        reader = self._readers[file] = file.open()
        return reader

    def close(self) -> None:
        """Closes the open files; the cache stays."""
        while self._readers:
            self._readers.popitem()[1].close()


def _fill(arrays: Iterable[np.ndarray], frame: np.ndarray) -> None:
    for array in arrays:
        array[...] = frame


def load_frames(frames: Frames, pool: FramePool) -> np.ndarray:
    """Returns all images of an episode as an array."""
    array = np.empty(frames.shape, frames.dtype)
    pool.read([(frames, range(len(frames)), array)])
    return array


def load_obs(obs: Any, pool: FramePool) -> Any:
    """Returns an episode's observation with arrays in place of `Frames`."""
    if isinstance(obs, Mapping):
        return {name: load_obs(obs_value, pool) for name, obs_value in obs.items()}
    return load_frames(obs, pool) if isinstance(obs, Frames) else obs


# -- HDF5 ---------------------------------------------------------------------------------------------------------------


class _Hdf5Reader(FrameReader):
    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read as HDF5: {first_line(error)}") from None

    def read(self, keys: Sequence[FrameKey]) -> Iterator[tuple[FrameKey, np.ndarray]]:
        dataset: Any = None
        for name, row in keys:
            try:
                if dataset is None or dataset.name != name:
                    dataset = require_local(member(self._file, name))
                yield (name, row), dataset[row]
            except (OSError, RuntimeError, KeyError, ValueError, IndexError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{self._path}: image {row} of {name} cannot be read: {first_line(error)}") from None

    def close(self) -> None:
        self._file.close()


class Hdf5Frames(FrameFile):
    """HDF5 file whose data sets are arrays of images."""

    def open(self) -> FrameReader:
        """Opens the file (`FrameFile.open`)."""
        return _Hdf5Reader(self.path)


def hdf5_frames(dataset: Any) -> Frames | None:
    """Returns a handle of an HDF5 data set with images `[T, H, W, ...]`; None if it is empty or has no images."""
    if dataset.ndim < 3 or not len(dataset):
        return None
    dtype = np.dtype(np.float32) if dataset.dtype == np.float64 else dataset.dtype
    file = Hdf5Frames(Path(dataset.file.filename))
    frame_part = FramePart(file, dataset.name, range(len(dataset)), dataset.shape[-1])
    return Frames(tuple(dataset.shape), dtype, (frame_part,))
