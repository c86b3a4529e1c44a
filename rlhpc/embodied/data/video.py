"""Videos: a writer of small mp4 files with several evaluation episodes side by side, and a reader of video datasets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_folder, rename
from rlhpc.runtime.plugins import require_package

#: Maximum pixels of a tile's longer side. The file of a short episode is smaller than about 100 kB.
TILE = 256
_BORDER = 4
_GREEN, _GREY = (60, 170, 90), (140, 140, 140)


def tile(frames: np.ndarray) -> np.ndarray:
    """Tiles pictures `[n, H, W, 3]` into one picture, in rows of about √n. Empty tiles are black."""
    num_frames, height, width, _ = frames.shape
    columns = math.ceil(math.sqrt(num_frames))
    rows = math.ceil(num_frames / columns)
    grid = np.zeros((rows * height, columns * width, 3), np.uint8)
    for index, frame in enumerate(frames):
        y_offset, x_offset = index // columns * height, index % columns * width
        grid[y_offset : y_offset + height, x_offset : x_offset + width] = frame
    return grid


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrinks pictures `[n, H, W, 3]` by an integer factor so that they fit a tile. Each pixel is the mean of a block."""
    num_frames, height, width, _ = frames.shape
    shrink_factor = math.ceil(max(height, width) / TILE)
    if shrink_factor == 1:
        return frames
    cropped_frames = frames[:, : height // shrink_factor * shrink_factor, : width // shrink_factor * shrink_factor]
    blocks = cropped_frames.reshape(
        num_frames, height // shrink_factor, shrink_factor, width // shrink_factor, shrink_factor, 3
    )
    return blocks.mean((2, 4)).astype(np.uint8)


def add_border(frame: np.ndarray, success: bool) -> np.ndarray:
    """Returns an episode's last image with a border: green for success, grey for all others."""
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
    return require_package("av", "videos need PyAV", "embodied")


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    """Writes pictures `[H, W, 3]` as H.264, which every browser plays. The file gets its final name when it is complete.

    Raises:
        ConfigError: PyAV is not installed, or the file cannot be written.
    """
    av = pyav()
    height, width = (side_length // 2 * 2 for side_length in frames[0].shape[:2])  # the format needs even sizes
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
        rename(partial_path, path)
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


#: Maximum relative difference of a video's mean frame rate from that of the dataset.
_RATE_TOLERANCE = 0.01


def _rate_error(path: Path, video_rate: float, rate: float) -> ConfigError:
    return ConfigError(
        f"{path} has {video_rate:.4g} frames a second on average, and meta/info.json says fps: {rate:g}; correct fps, or "
        "encode the video anew with one frame a step"
    )


def count_frames(path: Path, rate: float) -> int:
    """Returns the number of frames of a video according to its container; 0 if it does not say.

    Raises:
        ConfigError: The file cannot be read as a video, or has another mean frame rate than `rate`.
    """
    av = pyav()
    try:
        with av.open(str(path), options=_CONTAINERS) as video:
            stream = video.streams.video[0]
            num_frames, video_rate = int(stream.frames), float(stream.average_rate or rate)
    except (OSError, ValueError, IndexError, av.error.FFmpegError) as error:
        raise ConfigError(f"{path} cannot be read as a video: {error}") from None
    if abs(video_rate / rate - 1) > _RATE_TOLERANCE:
        raise _rate_error(path, video_rate, rate)
    return num_frames


#: Number of frames that a reader decodes to reach a frame rather than seek, if the file has no index of its key frames.
_MAX_SKIPPED = 64


class VideoReader:
    """Reader of a video file that decodes on request, and seeks to the key frame before a frame. In one call, and in
    consecutive calls with increasing numbers, each frame is decoded at most once. Only the images of one call are in memory.

    Frame number i is the one shown at i / rate seconds, as in LeRobot's datasets.

    Args:
        path: Path of the file.
        size: Required height and width of the images; None if unknown.
        rate: Frames per second; None takes the file's.

    Attributes:
        num_decoded: Number of frames decoded so far.

    Raises:
        ConfigError: The file cannot be read as a video, its images have a different size, or it has more frames a second.
    """

    _stream: Any

    def __init__(self, path: Path, size: tuple[int, int] | None = None, rate: float | None = None) -> None:
        self.path = path
        self.num_decoded = 0
        self._size = size
        self._packed_bytes = 0
        self._av = pyav()
        self._video: Any = None
        self._frames: Iterator[Any] = iter(())
        #: Number of the frame that was decoded last.
        self._position = -1
        self._open()
        video_rate = float(self._stream.average_rate or 0.0)
        self._rate = rate or video_rate
        # Frames between two steps would be taken for a step's; those that are missing are found when they are read.
        if video_rate > self._rate * (1 + _RATE_TOLERANCE):
            self.close()
            raise _rate_error(path, video_rate, self._rate)

    def _open(self) -> None:
        self.close()
        try:
            self._video = self._av.open(str(self.path), options=_CONTAINERS)
            self._stream = self._video.streams.video[0]
            context = self._stream.codec_context
            height, width = self._size or (0, 0)
            max_pixels = (height + _PADDING) * (width + _PADDING) if self._size else _MAX_PIXELS
            context.options = {**context.options, "max_pixels": str(max_pixels)}
            self._require_size(context.height, context.width)
            self._frames = self._decode()
        except (OSError, ValueError, IndexError, self._av.error.FFmpegError) as error:
            raise self._read_error(error) from None
        self._position, self._packed_bytes = -1, 0

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

    # -- position -------------------------------------------------------------------------------------------------

    def _to_timestamp(self, frame_number: int) -> int:
        """Returns the time of a frame in units of the stream's time base."""
        return round(frame_number / self._rate / self._stream.time_base) + (self._stream.start_time or 0)

    def _next(self) -> Any:
        """Decodes the next frame and updates the position; returns None at the end of the file."""
        frame = next(self._frames, None)
        if frame is None:
            return None
        self.num_decoded += 1
        if frame.pts is None or not self._rate:
            self._position += 1
        else:
            offset = (frame.pts - (self._stream.start_time or 0)) * self._stream.time_base
            self._position = round(float(offset) * self._rate)
        return frame

    def _move_to(self, frame_number: int) -> Any:
        """Returns a decoded frame at or before frame `frame_number` if the decoder had to move there; None if the next
        frames of the decoder lead to it.
        """
        if frame_number > self._position and not self._seek_skips_frames(frame_number):
            return None
        if self._rate and frame_number > 0:
            self._video.seek(self._to_timestamp(frame_number), stream=self._stream, backward=True)
            self._frames = self._decode()
            frame = self._next()
            if frame is not None and self._position <= frame_number:
                return frame
        self._open()  # some containers cannot seek, or seek to a later frame
        return self._next()

    def _seek_skips_frames(self, frame_number: int) -> bool:
        """Returns whether a key frame lies between the decoder's position and frame `frame_number`, so that seeking
        skips frames.
        """
        if not self._rate or frame_number - self._position < 2:
            return False
        index_entries, target = self._stream.index_entries, self._to_timestamp(frame_number)
        index = index_entries.search_timestamp(target) if len(index_entries) else -1
        if index < 0:
            return frame_number - self._position > _MAX_SKIPPED
        return bool(index_entries[index].timestamp > self._to_timestamp(self._position))

    # -- frames ---------------------------------------------------------------------------------------------------

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the numbers and images, uint8 `[H, W, 3]`, of increasing frame numbers. Stops at the end of the file.

        Raises:
            ConfigError: The file is damaged, or a frame before its end is missing.
        """
        num_frames = 0
        try:
            for frame_number in numbers:
                frame = self._move_to(frame_number)
                while frame is None or self._position < frame_number:
                    frame = self._next()
                    if frame is None:
                        return
                if self._position > frame_number:
                    raise ConfigError(
                        f"{self.path} has no frame {frame_number} ({frame_number / self._rate:.3f} s at "
                        f"{self._rate:g} frames a second); "
                        f"the next is frame {self._position}: encode the video anew with one frame a step"
                    )
                self._require_size(frame.height, frame.width)
                pixels = frame.to_ndarray(format="rgb24")
                if not num_frames:
                    self._check_size(len(numbers) * pixels.size, self.path.stat().st_size)
                # the size of the file also includes other data
                self._check_size((num_frames + 1) * pixels.size, self._packed_bytes)
                num_frames += 1
                yield frame_number, pixels
        except (OSError, ValueError, self._av.error.FFmpegError) as error:
            raise self._read_error(error) from None

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns `count` images starting at number `start`, uint8 `[T, H, W, 3]`; fewer if the video ends earlier.

        Raises:
            ConfigError: The file is damaged, or a frame is missing.
        """
        images: np.ndarray | None = None
        num_frames = 0
        for _, pixels in self.frames(range(start, start + count)):
            if images is None:
                images = np.empty((count, *pixels.shape), np.uint8)
            images[num_frames] = pixels
            num_frames += 1
        return np.empty((0, 0, 0, 3), np.uint8) if images is None else images[:num_frames]

    def _check_size(self, size: int, stored_size: int) -> None:
        if size > _LARGE_BYTES and size > _MAX_COMPRESSION * stored_size:
            raise ConfigError(
                f"{self.path} has {stored_size} bytes, and pictures of {size / 1e9:.1f} GB are asked of it; "
                "encode the video anew if it is no attack"
            )

    def close(self) -> None:
        """Closes the file, and frees the decoder."""
        # the generator refers to this reader, which would keep the decoder until a garbage collection
        self._frames = iter(())
        self._stream = None
        if self._video is not None:
            self._video.close()
            self._video = None
