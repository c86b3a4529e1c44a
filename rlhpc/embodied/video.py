"""Videos of evaluation episodes: small mp4 files, several episodes side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.runtime.durable import fsync_folder
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import required

#: Pixels of a tile's longer side, about; the file stays below some 100 kB for a short episode.
TILE = 256
_BORDER = 4
_GREEN, _GREY = (60, 170, 90), (140, 140, 140)


def tile(frames: np.ndarray) -> np.ndarray:
    """Pictures `[n, H, W, 3]` as one, in rows of about √n; black where there is none."""
    n, height, width, _ = frames.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grid = np.zeros((rows * height, columns * width, 3), np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * height, i % columns * width
        grid[top : top + height, left : left + width] = frame
    return grid


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrinks pictures `[n, H, W, 3]` by a whole factor so that they fit a tile; each pixel is the mean of those it
    replaces."""
    n, height, width, _ = frames.shape
    factor = math.ceil(max(height, width) / TILE)
    if factor == 1:
        return frames
    cut = frames[:, : height // factor * factor, : width // factor * factor]
    blocks = cut.reshape(n, height // factor, factor, width // factor, factor, 3)
    return blocks.mean((2, 4)).astype(np.uint8)


def framed(frame: np.ndarray, success: bool) -> np.ndarray:
    """The picture of an episode that has ended: framed in green if it succeeded, otherwise in grey."""
    marked = frame.copy()
    color = _GREEN if success else _GREY
    for edge in (np.s_[:_BORDER], np.s_[-_BORDER:], np.s_[:, :_BORDER], np.s_[:, -_BORDER:]):
        marked[edge] = color
    return marked


def pyav() -> Any:
    """The package that reads and writes videos.

    Raises:
        ConfigError: It is not installed.
    """
    return required("av", "videos need PyAV", "embodied")


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    """Pictures `[H, W, 3]` as H.264, which every browser plays; the file takes its name when it is whole.

    Raises:
        ConfigError: PyAV is not installed, or the file cannot be written.
    """
    av = pyav()
    height, width = (size // 2 * 2 for size in frames[0].shape[:2])  # the format wants even sizes
    partial = path.with_name(f".{path.stem}.partial.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(partial), "w", options={"movflags": "+faststart"}) as video:
            stream = video.add_stream("libx264", rate=fps, options={"crf": "28", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame in frames:
                picture = np.ascontiguousarray(frame[:height, :width])
                video.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            video.mux(stream.encode())
        partial.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
