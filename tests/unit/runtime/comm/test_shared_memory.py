"""Shared-memory segments: what a reader holds stays as it is, and what nobody holds is used again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhpc.runtime.comm.payload import Packed, unpack
from rlhpc.runtime.comm.shared_memory import (
    HEADER,
    Mappings,
    SegmentGone,
    SegmentPool,
    bytes_in_use,
    capacity_of,
    discard,
    remove_idle_of_the_dead,
)
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.shared_pairs import ORIGIN, SIZE, files, nowhere


def test_a_segment_is_used_again_once_its_reader_is_done(scratch: Scratch) -> None:
    pool, mappings = SegmentPool(scratch), Mappings()
    for number in range(20):
        packed = Packed(np.full(SIZE + 1 + 1000 * number, number % 251, np.uint8), pool, ORIGIN)
        assert bytes_in_use(scratch.shm) > SIZE
        array = unpack(packed.frames(), "here", mappings, nowhere)
        array += 1  # it is the reader's
        assert array.min() == array.max() == number % 251 + 1
        del array
    assert len(files(scratch)) == 1, "like sizes share a segment"
    assert bytes_in_use(scratch.shm) == 0


def test_idle_memory_is_bounded(scratch: Scratch) -> None:
    pool, mappings = SegmentPool(scratch, max_idle=3 * SIZE), Mappings()
    held = [
        unpack(Packed(np.zeros(SIZE, np.uint8), pool, ORIGIN).frames(), "here", mappings, nowhere) for _ in range(8)
    ]
    assert len(files(scratch)) == 8
    held.clear()
    for _ in range(3):
        unpack(Packed(np.zeros(2 * SIZE, np.uint8), pool, ORIGIN).frames(), "here", mappings, nowhere)
    assert len(files(scratch)) <= 4


def test_a_full_memory_spills_to_disk_and_says_so(
    scratch: Scratch, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tmpfs of a few megabytes, as a container may have it, mounted for this test; without the right to, a quota."""
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small tmpfs takes root")
    try:
        monkeypatch.setattr(type(scratch), "shm", property(lambda self: small))
        pool, mappings = SegmentPool(scratch), Mappings()
        held = []
        for number in range(6):
            packed = Packed(np.full(SIZE, number, np.uint8), pool, ORIGIN)
            held.append(unpack(packed.frames(), "here", mappings, nowhere))
        assert [int(array[-1]) for array in held] == list(range(6))
        assert len(caplog.messages) == 1 and "slower" in caplog.text
        spilled = list(scratch.spill.iterdir())
        assert spilled
        held.clear()
        for _ in range(12):
            unpack(Packed(np.zeros(SIZE, np.uint8), pool, ORIGIN).frames(), "here", mappings, nowhere)
        assert not list(scratch.spill.iterdir()), "and what was spilled does not stay"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_what_is_discarded_is_free(scratch: Scratch) -> None:
    pool = SegmentPool(scratch)
    packed = Packed(np.zeros(SIZE, np.uint8), pool, ORIGIN)
    assert packed.segment is not None
    discard(packed.segment)
    assert bytes_in_use(scratch.shm) == 0
    assert Packed(np.ones(SIZE, np.uint8), pool, ORIGIN).segment == packed.segment
    discard(str(scratch.shm / "1-1"))  # gone: nothing to do


def test_a_segment_that_is_gone(scratch: Scratch) -> None:
    packed = Packed(np.zeros(SIZE, np.uint8), SegmentPool(scratch), ORIGIN)
    assert packed.segment is not None
    os.unlink(packed.segment)
    with pytest.raises(SegmentGone):
        unpack(packed.frames(), "here", Mappings(), nowhere)


def test_what_a_killed_process_left_idle_goes_and_what_is_needed_stays(scratch: Scratch) -> None:
    code = (
        "import os, numpy as np\n"
        "from rlhpc.runtime.comm.payload import Packed\n"
        "from rlhpc.runtime.comm.shared_memory import SegmentPool\n"
        "from rlhpc.runtime.comm.shared_memory import discard\n"
        "from rlhpc.runtime.scratch import Scratch\n"
        f"pool = SegmentPool(Scratch({scratch.token!r}))\n"
        "made = [Packed(np.zeros(1 << 20, np.uint8), pool, ('here', '')).segment for _ in range(2)]\n"
        "discard(made[0])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(files(scratch)) == 2
    remove_idle_of_the_dead(scratch.shm)
    assert len(files(scratch)) == 1


@pytest.mark.parametrize("size", [1, 4096, 40_000, 1_000_000, (64 << 20) + 1, 500_000_000])
def test_capacity_wastes_an_eighth_at_most(size: int) -> None:
    capacity = capacity_of(size)
    assert size <= capacity <= max(size * 9 / 8, size + 4096)
    assert capacity % 4096 == 0 and HEADER % 4096 == 0


def test_links_and_segments_of_others_are_not_mapped(scratch: Scratch, tmp_path) -> None:
    pool, mappings = SegmentPool(scratch), Mappings()
    path, _ = pool.write([b"mine" * 1024])
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        mappings.lease(str(link), 0)
    before = Path(path).read_bytes()
    discard(str(link))
    assert Path(path).read_bytes() == before, "its reader has not come"
    if os.getuid() == 0:
        os.chown(path, 23001, 23001)
        with pytest.raises(PermissionError, match="another user"):
            mappings.lease(path, 0)
