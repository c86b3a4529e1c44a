"""What a receiver fetches while it loads: a bounded number of parts ahead, in order, and nothing is left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.weights.sender import Announcement
from rlhpc.weights.transport import Prefetcher, WeightReceiver
from tests.eventually import wait_until


def test_the_next_is_made_while_one_is_used_and_no_more() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    seen = []
    for number in Prefetcher(depth=1)(numbers()):
        expected = min(number + 2, 6)
        wait_until(lambda expected=expected: len(made) == expected, timeout=10)
        seen.append(number)
    assert seen == made == list(range(6))


def test_it_holds_nothing_back_and_nothing_of_what_was_used() -> None:
    """The maker may wait until the one before the last has been dropped."""
    alive: set[int] = set()

    class Held:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    most = 0
    for held in Prefetcher(depth=1)(Held(number) for number in range(50)):
        most = max(most, len(alive))
        del held
    assert most <= 2
    wait_until(lambda: not alive, timeout=10)


def test_what_is_raised_comes_where_the_item_would() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise OSError("the other host is gone")

    ahead = Prefetcher()(numbers())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the other host is gone"):
        next(ahead)


def test_who_stops_leaves_nobody_waiting() -> None:
    ahead, announced = Prefetcher(), threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        while not announced.wait(0.01):  # a part that may never be announced
            ahead.check()
        yield 2

    before = threading.active_count()
    items = ahead(numbers())
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    announced.set()
    assert list(ahead(numbers())) == [1, 2]


def test_memory_that_another_thread_received_stays_until_this_threads_stream_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine computes on a stream of its own, and the prefetching thread allocates on the first one."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of thread {threading.get_ident()}")
    streams: list[Any] = []
    on_device: Any = SimpleNamespace(is_cpu=False, device="an accelerator", record_stream=streams.append)
    announcement: Any = object.__new__(Announcement)

    def chunks() -> Iterator[Any]:
        yield announcement, [on_device, torch.zeros(2)]
        yield announcement, memoryview(b"on the host")
        yield announcement, None

    receiver: Any = object.__new__(WeightReceiver)
    receiver._origin, receiver._prefetcher = SimpleNamespace(host="another"), Prefetcher()
    context = SimpleNamespace(service=SimpleNamespace(endpoint={"host": "this"}))
    monkeypatch.setattr("rlhpc.weights.transport.current", lambda: context)
    assert len([*receiver._prefetch_chunks(chunks())]) == 3
    assert streams == [f"stream of thread {threading.get_ident()}"]
