"""Videos of a dataset: decoding, order and limits."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from fractions import Fraction
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlhpc.embodied.data import video
from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.video import VideoReader, write_video
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.embodied.data.lerobot_files import Clocked, Shown, dataset

need_extra("embodied")


gymnasium.register("test/Clocked-v0", entry_point=Clocked, max_episode_steps=4)
gymnasium.register("test/Shown-v0", entry_point=Shown, max_episode_steps=4)


def test_each_frame_of_two_cameras_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dataset(tmp_path / "set", 7, length=5, videos=True)
    readers: list[VideoReader] = []
    begin = VideoReader.__init__
    monkeypatch.setattr(VideoReader, "__init__", lambda self, *args: (readers.append(self), begin(self, *args))[1])
    assert len(list(read_lerobot(folder))) == 7
    assert sorted(reader.num_decoded for reader in readers) == [35, 35]


def test_pictures_in_any_order_of_episodes(tmp_path: Path) -> None:
    frames = [np.full((16, 16, 3), 10 * t, np.uint8) for t in range(20)]
    write_video(tmp_path / "a.mp4", frames, 10)
    reader = VideoReader(tmp_path / "a.mp4")
    whole = reader.read(0, 20)
    for start, count in itertools.product((12, 3, 3, 0, 15), (1, 5)):
        np.testing.assert_array_equal(reader.read(start, count), whole[start : start + count])
    assert len(reader.read(18, 5)) == 2 and len(reader.read(40, 5)) == 0
    reader.close()
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(ConfigError, match=r"b\.mp4 cannot be read as a video"):
        VideoReader(tmp_path / "b.mp4")


def test_a_closed_reader_frees_its_decoder(tmp_path: Path) -> None:
    """At once: decoders of many files would otherwise wait for a garbage collection."""
    write_video(tmp_path / "a.mp4", [np.zeros((16, 16, 3), np.uint8)] * 8, 10)
    gc.disable()
    try:
        reader = VideoReader(tmp_path / "a.mp4")
        assert len(list(reader.frames([1, 5]))) == 2
        reference = weakref.ref(reader)
        reader.close()
        del reader
        assert reference() is None
    finally:
        gc.enable()


def test_a_small_video_of_many_large_pictures_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [np.zeros((1024, 1024, 3), np.uint8)] * 2, 10)
    reader = VideoReader(tmp_path / "a.mp4")
    with pytest.raises(ConfigError, match=r"a\.mp4 has \d+ bytes, and pictures of 6\.3 GB are asked of it"):
        reader.read(0, 2000)
    assert len(reader.read(0, 2000 // 1000)) == 2
    reader.close()


@pytest.mark.parametrize("padding", [b"", bytes(16), bytes(4 << 20)])
def test_what_a_file_holds_beside_its_pictures_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: bytes
) -> None:
    """A small video that is made to look large asks for no more memory than the small one."""
    write_video(tmp_path / "a.mp4", [np.zeros((512, 512, 3), np.uint8)] * 60, 10)
    with (tmp_path / "a.mp4").open("ab") as file:
        file.write(len(padding).to_bytes(4, "big") + b"free" + padding)
    monkeypatch.setattr(video, "_LARGE_BYTES", 8 << 20)
    reader = VideoReader(tmp_path / "a.mp4")
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"a\.mp4 has \d+ bytes, and pictures of"):
        reader.read(0, 60)
    tracemalloc.stop()
    assert reader.num_decoded < 30
    reader.close()


def test_a_video_whose_pictures_grow(tmp_path: Path) -> None:
    """What its header says does not bind its frames."""
    av = video.pyav()
    parts = b""
    for size in (32, 1024):
        with av.open(str(tmp_path / "part.h264"), "w", format="h264") as part:
            stream = part.add_stream("libx264", rate=10)
            stream.width = stream.height = size
            stream.pix_fmt = "yuv420p"
            for _ in range(4):
                part.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((size, size, 3), np.uint8), format="rgb24")))
            part.mux(stream.encode())
        parts += (tmp_path / "part.h264").read_bytes()
    (tmp_path / "both.h264").write_bytes(parts)
    with av.open(str(tmp_path / "both.h264"), format="h264") as source, av.open(str(tmp_path / "a.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size:
                packet.stream, packet.pts, packet.dts, packet.time_base = (
                    stream,
                    100 * number,
                    100 * number,
                    Fraction(1, 1000),
                )
                target.mux(packet)
    for size in ((32, 32), None):
        reader = VideoReader(tmp_path / "a.mkv", size)
        with pytest.raises(ConfigError, match=r"a\.mkv"):
            reader.read(0, 8)
        reader.close()


@pytest.mark.parametrize("text", ["ffconcat version 1.0\nfile a.mp4\n", "#EXTM3U\n#EXTINF:1,\na.mp4\n#EXT-X-ENDLIST\n"])
def test_a_list_of_other_files_is_no_video(tmp_path: Path, text: str) -> None:
    write_video(tmp_path / "a.mp4", [np.zeros((16, 16, 3), np.uint8)] * 2, 10)
    (tmp_path / "list.mp4").write_text(text)
    with pytest.raises(ConfigError, match=r"list\.mp4 cannot be read as a video"):
        VideoReader(tmp_path / "list.mp4")
