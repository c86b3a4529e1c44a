"""A sender and those who take in what it writes, in threads over real segments: a few parts are in shared memory at a time."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from rlhpc.runtime.comm.shared_memory import Mappings, SegmentGone, SegmentPool
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.weights import sender
from rlhpc.weights.receiver import Subscriber
from rlhpc.weights.sender import MAX_UNREAD_CHUNKS, Announcement, ChunkWindow, DeviceChunkWriter, Publisher
from tests.eventually import wait_until
from tests.late_copies import LateCopies
from tests.serving import temporary_scratch

TENSORS, ELEMENTS = 40, 4096
#: A tensor a part; the segment also has a page for its header and one for the table.
PART = ELEMENTS * 4
NAMES = ["rollout-0", "rollout-1"]


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with temporary_scratch() as scratch:
        yield SegmentPool(scratch, max_idle=0)


class Loader:
    """A receiver that loads one tensor after the other, when it is let."""

    def __init__(self, number: int) -> None:
        self.number, self.inbox = number, queue.SimpleQueue[Announcement]()
        self.mappings, self.subscriber = Mappings(), Subscriber()
        self.let, self.begun = threading.Semaphore(0), threading.Event()
        self.taken = 0

    def load(self) -> None:
        def read(part, late):  # type: ignore[no-untyped-def]
            memory = self.mappings.lease(part.path, self.number)
            self.begun.set()
            return memory

        update = self.subscriber.receive(self.inbox.get, read)
        with contextlib.suppress(SegmentGone):  # of a test that has ended
            for name, tensor in update.tensors:
                assert torch.equal(tensor, torch.full((ELEMENTS,), float(name)))
                del tensor
                self.let.acquire()
                self.taken += 1


class Sending:
    """A version under way from a thread; `after` all have begun with it, once there are as many parts as may be."""

    def __init__(
        self, pool: SegmentPool, window: ChunkWindow, loaders: list[Loader], after: bool = True, carried: bool = False
    ) -> None:
        self.written: int = 0
        self.error: Exception | None = None
        carrier = DeviceChunkWriter(pool, LateCopies()) if carried else None
        publisher = Publisher(pool, len(NAMES), "off", PART, carrier)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for i in range(TENSORS):
                if after and i == MAX_UNREAD_CHUNKS + carried:
                    assert all(loader.begun.wait(20) for loader in loaders)
                yield str(i), torch.full((ELEMENTS,), float(i))

        def run() -> None:
            try:
                for announcement in publisher.publish(1, tensors(), window=window):
                    self.written += 1
                    for loader in loaders:
                        loader.inbox.put(announcement)
            except DeadlineExceeded as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def in_memory(pool: SegmentPool) -> int:
    """Returns the number of parts in memory; the sender may remove one while they are counted."""
    count = 0
    for path in pool._scratch.shm.iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += path.stat().st_size > PART
    return count


def started(loader: Loader) -> threading.Thread:
    thread = threading.Thread(target=loader.load, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("carried", [False, True])
def test_a_few_parts_are_there_at_a_time(pool: SegmentPool, carried: bool) -> None:
    """Both have begun, one is slower: the sender follows it."""
    loaders = [Loader(0), Loader(1)]
    threads = [started(loader) for loader in loaders]
    sending = Sending(pool, ChunkWindow(pool.list_pending_readers, NAMES), loaders, carried=carried)
    loaders[0].let.release(TENSORS)
    wait_until(lambda: sending.written >= MAX_UNREAD_CHUNKS, timeout=10)
    # Those that nobody has come for, one in use, and one that is written; a sender that ran ahead would leave more there.
    most = MAX_UNREAD_CHUNKS + 3
    assert most < TENSORS / 4
    for count in range(TENSORS):
        loaders[1].let.release()
        wait_until(lambda count=count: loaders[1].taken == count + 1 and in_memory(pool) <= most, timeout=10)
    for thread in (sending.thread, *threads):
        thread.join(20)
    assert sending.written == TENSORS and [loader.taken for loader in loaders] == [TENSORS] * 2


def test_who_has_not_begun_is_not_waited_for(pool: SegmentPool) -> None:
    """As where trainer and engine have an accelerator in turn: the version is there before anybody takes it."""
    loaders = [Loader(0), Loader(1)]
    sending = Sending(pool, ChunkWindow(pool.list_pending_readers, NAMES), loaders, after=False)
    sending.thread.join(20)
    assert sending.written == TENSORS == in_memory(pool)
    for loader in loaders:
        loader.let.release(TENSORS)
        loader.load()


@pytest.mark.parametrize("anew", [True, False])
def test_who_is_gone_is_named_or_if_it_was_started_again_left_alone(pool: SegmentPool, anew: bool) -> None:
    """A receiver begins, and dies."""
    loaders, there = [Loader(0), Loader(1)], {0: True, 1: True}
    threads = [started(loader) for loader in loaders]
    window = ChunkWindow(
        pool.list_pending_readers, NAMES, is_present=lambda reader: there[reader], deadline=0.5 if not anew else 20.0
    )
    sending = Sending(pool, window, loaders)
    loaders[0].let.release(TENSORS)
    wait_until(lambda: sending.written >= MAX_UNREAD_CHUNKS, timeout=10)
    if anew:
        wait_until(lambda: 1 in window._started_readers, timeout=10)
        there[1] = False
    sending.thread.join(20)
    if anew:
        threads[0].join(20)
        assert sending.written == TENSORS and loaders[0].taken == TENSORS
    else:
        assert "waited 0 s for rollout-1 to take in" in str(sending.error)
    loaders[1].let.release(TENSORS)


@pytest.mark.parametrize(("interval_s", "is_checked"), [(3600.0, False), (0.0, True)])
def test_waiting_for_readers_seldom_reads_their_records(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, is_checked: bool
) -> None:
    """A check reads files of every late reader, of which there may be thousands."""
    monkeypatch.setattr(sender, "_PRESENCE_S", interval_s)
    checked: list[int] = []
    num_looks = itertools.count()

    def awaited(path: str) -> list[bool]:
        return [next(num_looks) < 20, False]

    window = ChunkWindow(awaited, NAMES, is_present=lambda reader: checked.append(reader) is None)
    window.start_all()
    for number in range(MAX_UNREAD_CHUNKS):
        window.record(str(number))
    window.wait()
    assert bool(checked) == is_checked


def test_a_sender_may_wait_for_readers_that_have_not_begun() -> None:
    """Where these read each version while it is sent, it is never in memory as a whole."""
    unread: dict[str, list[bool]] = {}
    windows = [ChunkWindow(lambda path: unread[path], NAMES, deadline=0.05) for _ in range(2)]
    windows[1].start_all()
    for number in range(MAX_UNREAD_CHUNKS):
        unread[str(number)] = [True, True]
        for window in windows:
            window.record(str(number))
    windows[0].wait()  # they may be asleep until the whole version is written
    with pytest.raises(DeadlineExceeded, match="for rollout-0, rollout-1 to take in a part of the weights"):
        windows[1].wait()
    unread["0"] = [False, True]
    with pytest.raises(DeadlineExceeded, match="for rollout-1 to take in"):
        windows[1].wait()
    unread["0"] = [False, False]
    windows[1].wait()
