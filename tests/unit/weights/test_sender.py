"""Parts that are written beside what is gathered next, as from an accelerator."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from rlhpc.runtime import devices as device
from rlhpc.runtime.comm.remote_fetch import ReceiveBuffers
from rlhpc.runtime.comm.shared_memory import Mappings, SegmentPool, bytes_in_use
from rlhpc.runtime.devices import host_memory, lock_pages
from rlhpc.runtime.scratch import Scratch
from rlhpc.weights.sender import DeviceChunkWriter, Publisher
from tests.late_copies import LateCopies
from tests.serving import temporary_scratch


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with temporary_scratch() as made:
        yield made


def named(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((str(i), torch.full((1000,), float(i))) for i in range(count))


def test_two_parts_are_under_way_at_most_and_none_is_announced_before_it_is_there(scratch: Scratch) -> None:
    pool, copies = SegmentPool(scratch), LateCopies()
    publisher = Publisher(pool, 1, "off", 4000, DeviceChunkWriter(pool, copies))
    gathered = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named(6):
            gathered.append(copies.under_way)
            yield name, tensor

    for number, announcement in enumerate(publisher.publish(0, gathering())):
        assert announcement.chunk is not None
        held = pool.memory(announcement.chunk.path)
        assert held is not None
        assert torch.frombuffer(held, dtype=torch.float32, count=1000, offset=mmap.PAGESIZE).eq(number).all()
    # The third and those after it are gathered while the part before is on its way.
    assert gathered == [0, 0, 1, 1, 1, 1] and copies.most == 2 and copies.under_way == 0


def test_a_version_that_breaks_off_leaves_nothing_behind(scratch: Scratch) -> None:
    pool, copies = SegmentPool(scratch), LateCopies()
    publisher = Publisher(pool, 2, "off", 4000, DeviceChunkWriter(pool, copies))

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named(2)
        raise OSError("another rank died")

    with pytest.raises(OSError, match="another rank died"):
        list(publisher.publish(0, breaking()))
    assert copies.under_way == 0 and bytes_in_use(scratch.shm) == 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the accelerator's driver would be told; the memory is read when its pages are released."""
    said: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        said.append(("lock", size))
        return 0

    def unregister(address: int) -> int:
        with open("/proc/self/maps") as maps:
            ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
        assert any(start <= address < end for start, end in ranges)
        said.append(("unlock", 0))
        return 0

    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    )
    return said


def test_pages_are_locked_once_and_released_before_they_are_unmapped(
    scratch: Scratch, calls: list[tuple[str, int]]
) -> None:
    pool = SegmentPool(scratch)
    publisher = Publisher(pool, 1, "off", 4000, DeviceChunkWriter(pool, LateCopies()))
    for version in range(4):
        for announcement in publisher.publish(version, named(1)):
            assert announcement.chunk is not None
            pool.release(announcement.chunk.path, 0)
    assert [what for what, _ in calls] == ["lock"]
    pool.close()
    publisher = None
    gc.collect()
    assert [what for what, _ in calls] == ["lock", "unlock"]


def test_a_receivers_pages_are_locked_once_for_all_versions(scratch: Scratch, calls: list[tuple[str, int]]) -> None:
    """As long as a segment of its host stays mapped; and those of memory in which data from other hosts lands."""
    pool, mappings = SegmentPool(scratch), Mappings()
    for _ in range(3):
        path, _spans = pool.write([b"x" * 5000], 1)
        view = mappings.lease(path, 0)
        mappings.lock(path)
        del view
    assert [what for what, _ in calls] == ["lock"]
    mappings.lock("no such segment")
    mappings = None  # type: ignore[assignment]
    gc.collect()
    assert [what for what, _ in calls] == ["lock", "unlock"]
    landing = ReceiveBuffers(1 << 20)
    for lock in (False, True, True):
        view = landing.take(5000, lock=lock)
        del view
    assert [what for what, _ in calls] == ["lock", "unlock", "lock"]
    landing = None  # type: ignore[assignment]
    gc.collect()
    assert [what for what, _ in calls] == ["lock", "unlock"] * 2
    pool.close()


def test_memory_of_the_host_is_as_large_as_asked_for(calls: list[tuple[str, int]]) -> None:
    size = (1 << 20) + 64
    memory = host_memory(size, "cuda")
    assert memory.nbytes == size and calls == [("lock", size)]
    del memory
    assert calls == [("lock", size), ("unlock", 0)]


def test_without_an_accelerator_nothing_is_locked() -> None:
    assert device.accelerator() or not lock_pages(torch.zeros(10))
