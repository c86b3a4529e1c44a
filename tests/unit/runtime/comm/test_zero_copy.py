"""What a host passes on: to as many as it is offered to; and where it does not, the owner is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from rlhpc.runtime.comm import bulk_transfer as bulk
from rlhpc.runtime.comm import remote_fetch as fetching
from rlhpc.runtime.comm import zero_copy as offers
from rlhpc.runtime.comm.bulk_transfer import BulkServer
from rlhpc.runtime.comm.payload import ForwardingProcess, Origin
from rlhpc.runtime.comm.remote_fetch import Fetching
from rlhpc.runtime.comm.shared_memory import HEADER, Mappings, SegmentPool
from rlhpc.runtime.comm.zero_copy import ForwardedData, Withdrawn
from rlhpc.runtime.comm.zmq_sockets import Peers
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
from tests.eventually import wait_until
from tests.serving import Serving

SIZE = 100_000
NAME = "stream-3"


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


Fetch = Callable[[], np.ndarray]


@pytest.fixture
def between(scratch: Scratch, data: np.ndarray) -> Iterator[tuple[Serving, Serving, ForwardingProcess, Fetch]]:
    """The owner of a segment, a host that may pass it on, and what a third fetches."""
    keys = CurveKeys.fresh()
    owner, above = Serving(scratch, keys, "owner-0"), Serving(scratch, keys, "above-0")
    path, _ = owner.pool.write([data])
    peers = Peers(zmq.Context.instance(), keys, lambda: None)
    third = Fetching(scratch, SegmentPool(scratch), Mappings(), peers, lambda: None)
    origin, asked = Origin("elsewhere", "", owner.server.endpoint), ForwardingProcess(above.server.endpoint)

    def fetch() -> np.ndarray:
        memory = third.fetch(origin, path, SIZE, 0, None, in_place=True, releases=[], forwarder=(asked, NAME))
        return np.frombuffer(memory, np.uint8)[HEADER:]

    yield owner, above, asked, fetch
    peers.close()
    owner.close()
    above.close()


def withdrawn(offers: ForwardedData) -> bool:
    try:
        offers.find(NAME, 0.0)
    except Withdrawn:
        return True
    return False


def test_it_is_taken_from_who_passes_it_on(
    between: tuple[Serving, Serving, ForwardingProcess, Fetch], data: np.ndarray
) -> None:
    owner, above, asked, fetch = between
    threading.Timer(0.2, lambda: above.forwarded_data.put(NAME, memoryview(data), 2)).start()  # it has it only later
    for _ in range(2):
        assert np.array_equal(fetch(), data)
    assert (owner.server.sent, above.server.sent, asked.is_lost) == (0, 2 * SIZE, False)
    wait_until(lambda: withdrawn(above.forwarded_data), 10.0)  # all have it


def test_who_comes_late_gets_one_part_from_the_owner_and_asks_again(
    between: tuple[Serving, Serving, ForwardingProcess, Fetch], data: np.ndarray
) -> None:
    owner, above, asked, fetch = between
    above.forwarded_data.put(NAME, memoryview(data), 2)
    for number in range(offers._MAX_OFFERS):
        above.forwarded_data.put(str(number), memoryview(data), 2)
    assert np.array_equal(fetch(), data)
    assert owner.server.sent == SIZE and not asked.is_lost


def test_who_is_dead_is_not_asked_again(
    between: tuple[Serving, Serving, ForwardingProcess, Fetch], data: np.ndarray
) -> None:
    owner, above, asked, fetch = between
    above.close()
    started = time.monotonic()
    for _ in range(3):
        assert np.array_equal(fetch(), data)
    assert (
        asked.is_lost and owner.server.sent == 3 * SIZE and time.monotonic() - started < fetching._FORWARDER_TIMEOUT_S
    )


def test_who_dies_while_it_sends_is_replaced(
    between: tuple[Serving, Serving, ForwardingProcess, Fetch], data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, asked, fetch = between

    def half(self: BulkServer, link: bulk.BulkConnection, name: str, start: int, count: int) -> None:
        link.send(bulk._OK)
        link.sock.sendall(b"\1" * (count // 2))
        link.sock.close()

    monkeypatch.setattr(BulkServer, "_send_offer", half)
    assert np.array_equal(fetch(), data) and asked.is_lost


def test_who_never_gets_it_is_given_up(
    between: tuple[Serving, Serving, ForwardingProcess, Fetch], data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_FORWARDER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(bulk, "_OFFER_S", 0.05)
    owner, _, asked, fetch = between
    assert np.array_equal(fetch(), data)
    assert asked.is_lost and owner.server.sent == SIZE


def test_few_offers_are_held(data: np.ndarray) -> None:
    held = ForwardedData()
    for number in range(20):
        held.put(str(number), memoryview(data), 2)
    assert held.find("19", 0.0) is not None and held.find(str(20 - offers._MAX_OFFERS), 0.0) is not None
    with pytest.raises(Withdrawn):
        held.find(str(19 - offers._MAX_OFFERS), 0.0)
    assert held.find("20", 0.0) is None
