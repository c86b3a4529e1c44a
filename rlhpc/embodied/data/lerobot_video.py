"""The video files of a camera of a LeRobot dataset: the frames of all episodes, one after the other."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.lerobot_columns import CHUNK, MOST_BYTES, PATTERN
from rlhpc.embodied.video import pyav

#: As lerobot: key frames close to one another, since frames are read in any order.
_OPTIONS = {"crf": "23", "g": "2", "preset": "veryfast"}


class CameraFiles:
    """Takes pictures `[T, H, W, 3]` of even sizes.

    Args:
        root: The dataset's folder.
        camera: Name of its column.
        fps: Frames a second.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, root: Path, camera: str, fps: float) -> None:
        self._av, self._root, self._camera, self._fps = pyav(), root, camera, fps
        self._number, self._frames, self._size = 0, 0, (0, 0)
        self._file: Any = None

    @property
    def _path(self) -> Path:
        place = PATTERN.format(chunk_index=self._number // CHUNK, file_index=self._number % CHUNK)
        return self._root / "videos" / self._camera / f"{place}.mp4"

    def add(self, pictures: np.ndarray) -> dict[str, Any]:
        """Appends an episode; returns where it is."""
        # The file comes with its first packet, which short episodes do not fill.
        if self._file is not None and self._path.exists() and self._path.stat().st_size >= MOST_BYTES["videos"]:
            self._finish()
            self._number, self._frames = self._number + 1, 0
        if self._file is None:
            self._open(pictures)
        for picture in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            self._file.mux(self._stream.encode(frame))
        first, self._frames = self._frames, self._frames + len(pictures)
        key = f"videos/{self._camera}"
        return {
            f"{key}/chunk_index": self._number // CHUNK, f"{key}/file_index": self._number % CHUNK,
            f"{key}/from_timestamp": first / self._fps, f"{key}/to_timestamp": self._frames / self._fps,
        }  # fmt: skip

    def _open(self, pictures: np.ndarray) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._av.open(str(self._path), "w")
        self._stream = self._file.add_stream(
            "libx264", rate=Fraction(self._fps).limit_denominator(1000), options=_OPTIONS
        )
        self._size = pictures.shape[1:3]
        self._stream.height, self._stream.width = self._size
        self._stream.pix_fmt = "yuv420p"

    def _finish(self) -> None:
        self._file.mux(self._stream.encode())
        self._file.close()
        self._file = None

    def close(self) -> dict[str, Any]:
        """Ends the last file; returns the column's `info`."""
        self._finish()
        return {
            "video.height": self._size[0], "video.width": self._size[1], "video.codec": "h264", "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False, "video.fps": self._fps, "video.channels": 3, "has_audio": False,
        }  # fmt: skip

    def discard(self) -> None:
        """Closes what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
