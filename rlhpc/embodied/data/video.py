"""Videos: a writer of small mp4 files with several evaluation episodes side by side, and a reader of video datasets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_folder
from rlhpc.runtime.plugins import required

#: Maximum pixels of a tile's longer side. The file of a short episode is smaller than about 100 kB.
TILE = 256
_BORDER = 4
_GREEN, _GREY = (60, 170, 90), (140, 140, 140)


def tile(frames: np.ndarray) -> np.ndarray:
    """Tiles pictures `[n, H, W, 3]` into one picture, in rows of about √n. Empty tiles are black."""
    count, height, width, _ = frames.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = np.zeros((rows * height, columns * width, 3), np.uint8)
    for index, frame in enumerate(frames):
        y_offset, x_offset = index // columns * height, index % columns * width
        grid[y_offset : y_offset + height, x_offset : x_offset + width] = frame
    return grid


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrinks pictures `[n, H, W, 3]` by an integer factor so that they fit a tile. Each pixel is the mean of a block."""
    count, height, width, _ = frames.shape
    factor = math.ceil(max(height, width) / TILE)
    if factor == 1:
        return frames
    cropped = frames[:, : height // factor * factor, : width // factor * factor]
    blocks = cropped.reshape(count, height // factor, factor, width // factor, factor, 3)
    return blocks.mean((2, 4)).astype(np.uint8)


def add_border(frame: np.ndarray, success: bool) -> np.ndarray:
    """Returns an episode's last picture with a border: green for success, otherwise grey."""
    framed_picture = frame.copy()
    color = _GREEN if success else _GREY
    for border in (np.s_[:_BORDER], np.s_[-_BORDER:], np.s_[:, :_BORDER], np.s_[:, -_BORDER:]):
        framed_picture[border] = color
    return framed_picture


def pyav() -> Any:
    """Returns PyAV, the package that reads and writes videos.

    Raises:
        ConfigError: PyAV is not installed.
    """
    return required("av", "videos need PyAV", "embodied")


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    """Writes pictures `[H, W, 3]` as H.264, which every browser plays. The file gets its final name when it is complete.

    Raises:
        ConfigError: PyAV is not installed, or the file cannot be written.
    """
    av = pyav()
    height, width = (size // 2 * 2 for size in frames[0].shape[:2])  # the format needs even sizes
    partial_path = path.with_name(f".{path.stem}.partial.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(partial_path), "w", options={"movflags": "+faststart"}) as video:
            stream = video.add_stream("libx264", rate=fps, options={"crf": "28", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame in frames:
                picture = np.ascontiguousarray(frame[:height, :width])
                video.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            video.mux(stream.encode())
        partial_path.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        partial_path.unlink(missing_ok=True)


#: Decoder options that allow only container files, because a playlist can name other files.
_CONTAINERS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi", "protocol_whitelist": "file"}
_LARGE_BYTES, _MAX_COMPRESSION = 1 << 30, 2000
"""Size of decoded pictures above which the compression is checked, and the maximum ratio of decoded to stored bytes. Videos of
robots have a ratio of 50 to 500."""
_MAX_PIXELS = 8192 * 8192
"""Maximum pixels of a picture if its size is unknown."""
_PADDING = 128
"""Rows and columns that a decoder may add to a picture, because it rounds sizes up to multiples of a block."""


class VideoReader:
    """Reader of a video file that decodes on request. Consecutive reads decode each frame once. Only the pictures of one call
    are in memory.

    Args:
        path: Path of the file.
        size: Required height and width of the pictures; None if unknown.

    Attributes:
        decoded: Number of frames decoded so far.

    Raises:
        ConfigError: The file cannot be read as a video, or its pictures have another size.
    """

    def __init__(self, path: Path, size: tuple[int, int] | None = None) -> None:
        self.path = path
        self.decoded = 0
        self._size = size
        self._packed_bytes = 0
        self._av = pyav()
        self._video: Any = None
        self._frames: Iterator[Any] = iter(())
        self._position = 0
        self._open()

    def _open(self) -> None:
        self.close()
        try:
            self._video = self._av.open(str(self.path), options=_CONTAINERS)
            context = self._video.streams.video[0].codec_context
            height, width = self._size or (0, 0)
            max_pixels = (height + _PADDING) * (width + _PADDING) if self._size else _MAX_PIXELS
            context.options = {**context.options, "max_pixels": str(max_pixels)}
            self._require_size(context.height, context.width)
            self._frames = self._decode()
        except (OSError, ValueError, IndexError, self._av.error.FFmpegError) as error:
            raise self._read_error(error) from None
        self._position = self._packed_bytes = 0

    def _decode(self) -> Iterator[Any]:
        for packet in self._video.demux(video=0):
            self._packed_bytes += packet.size
            yield from packet.decode()

    def _require_size(self, height: int, width: int) -> None:
        if self._size and (height, width) != self._size:
            raise ConfigError(
                f"{self.path} has pictures of {height}x{width}, and info.json says {self._size[0]}x{self._size[1]}"
            )

    def _read_error(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path} cannot be read as a video: {error}")

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns `count` pictures starting at number `start`, uint8 `[T, H, W, 3]`; fewer if the video ends earlier.

        Raises:
            ConfigError: The file is damaged.
        """
        if start < self._position:
            self._open()
        frames_read: np.ndarray | None = None
        length = 0
        try:
            while self._position < start + count:
                frame = next(self._frames, None)
                if frame is None:
                    break
                self._position, self.decoded = self._position + 1, self.decoded + 1
                if self._position > start:
                    self._require_size(frame.height, frame.width)
                    pixels = frame.to_ndarray(format="rgb24")
                    if frames_read is None:
                        self._check_size(count * pixels.size, self.path.stat().st_size)
                        frames_read = np.empty((count, *pixels.shape), np.uint8)
                    # the size of the file also includes other data
                    self._check_size((length + 1) * pixels.size, self._packed_bytes)
                    frames_read[length] = pixels
                    length += 1
        except (OSError, ValueError, self._av.error.FFmpegError) as error:
            raise self._read_error(error) from None
        return np.empty((0, 0, 0, 3), np.uint8) if frames_read is None else frames_read[:length]

    def _check_size(self, size: int, stored: int) -> None:
        if size > _LARGE_BYTES and size > _MAX_COMPRESSION * stored:
            raise ConfigError(
                f"{self.path} has {stored} bytes, and pictures of {size / 1e9:.1f} GB are asked of it; "
                "encode the video anew if it is no attack"
            )

    def close(self) -> None:
        """Closes the file."""
        if self._video is not None:
            self._video.close()
            self._video = None
