"""Images of LeRobot datasets, read by index: videos, and encoded images in Parquet tables."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.frames import FrameFile, FrameKey, FrameReader
from rlhpc.embodied.data.video import VideoReader
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.text import first_line


def arrow_package() -> Any:
    """Returns the pyarrow module, with `pyarrow.parquet` imported.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    require_package("pyarrow.parquet", "LeRobot datasets need pyarrow", "embodied")
    import pyarrow

    return pyarrow


def pillow() -> Any:
    """Returns Pillow's module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    return require_package("PIL.Image", "pictures in LeRobot datasets need Pillow", "embodied")


class _VideoReader(FrameReader):
    def __init__(self, file: VideoFrames) -> None:
        self._reader = VideoReader(file.path, file.size, file.rate)

    def read(self, keys: Sequence[FrameKey]) -> Iterator[tuple[FrameKey, np.ndarray]]:
        num_read = 0
        for frame_number, image in self._reader.frames([frame_number for _, frame_number in keys]):
            num_read += 1
            yield ("", frame_number), image
        if num_read < len(keys):
            raise ConfigError(
                f"{self._reader.path} ends before frame {keys[num_read][1]}; copy or encode the video anew"
            )

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True)
class VideoFrames(FrameFile):
    """Video of a camera.

    Attributes:
        size: Height and width of the images; None if unknown.
        rate: Frames per second.
    """

    size: tuple[int, int] | None
    rate: float

    def open(self) -> FrameReader:
        """Opens the file (`FrameFile.open`)."""
        return _VideoReader(self)


#: Number of rows of a table that are in memory while images are read from it.
_ROWS = 64


class _TableReader(FrameReader):
    def __init__(self, path: Path) -> None:
        pyarrow = arrow_package()
        self._path, self._errors = path, (OSError, pyarrow.ArrowException)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._errors as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {first_line(error)}") from None
        metadata = self._file.metadata
        row_counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *row_counts])

    def read(self, keys: Sequence[FrameKey]) -> Iterator[tuple[FrameKey, np.ndarray]]:
        num_read = 0
        while num_read < len(keys):
            column, row = keys[num_read]
            group = int(np.searchsorted(self._starts, row, side="right")) - 1
            end_position = num_read
            while (
                end_position < len(keys)
                and keys[end_position][0] == column
                and keys[end_position][1] < self._starts[group + 1]
            ):
                end_position += 1
            yield from self._read_group(group, column, keys[num_read:end_position])
            num_read = end_position

    def _read_group(
        self, group_index: int, column: str, keys: Sequence[FrameKey]
    ) -> Iterator[tuple[FrameKey, np.ndarray]]:
        """Yields the images of one row group. Its encoded images are read in parts of `_ROWS` rows."""
        group_start, key_position = int(self._starts[group_index]), 0
        try:
            for batch in self._file.iter_batches(_ROWS, row_groups=[group_index], columns=[column]):
                cells = batch.column(0)
                while key_position < len(keys) and keys[key_position][1] < group_start + len(cells):
                    row = keys[key_position][1]
                    yield (
                        keys[key_position],
                        _decode_image(cells[row - group_start].as_py(), f"{self._path}, row {row}"),
                    )
                    key_position += 1
                if key_position == len(keys):
                    return
                group_start += len(cells)
        except self._errors as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._path} cannot be read as Parquet: {first_line(error)}") from None

    def close(self) -> None:
        self._file.close()


class TableFrames(FrameFile):
    """Parquet file with encoded images."""

    def open(self) -> FrameReader:
        """Opens the file (`FrameFile.open`)."""
        return _TableReader(self.path)


def _decode_image(cell: Any, source_name: str) -> np.ndarray:
    """Returns an encoded image of a table as uint8 `[H, W, 3]`."""
    try:
        return np.asarray(pillow().open(io.BytesIO(cell["bytes"])).convert("RGB"))
    except (OSError, TypeError, KeyError) as error:
        raise ConfigError(f"{source_name} has a picture that cannot be read: {error!r}") from None
