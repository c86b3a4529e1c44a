"""Waiting in a process: whoever waits leads the event loop, and nobody sleeps while nobody leads."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch


class Home(Service):
    """A service that counts how often a wait had to look around because nothing came."""

    def __init__(self, keys: CurveKeys, scratch: Scratch, busy_s: float) -> None:
        self.looks = 0
        super().__init__(
            "home", keys, scratch, check=self._check_times, on_tick=lambda _: time.sleep(busy_s), tick_s=0.01
        )
        self.open_channel("c", 0, 1 << 20)

    def _check_times(self) -> None:
        self.looks += 1

    def take(self, key: str) -> bytes:
        """Waits for the next item of a key."""
        items = self.wait_local(lambda answer: self.channel("c").get(key, (), None, answer), 30.0, "an item")
        return bytes(items[0].frames[0])


@pytest.fixture
def keys() -> CurveKeys:
    return CurveKeys.fresh()


def put(sender: Service, home: Service, key: str, body: bytes) -> None:
    head = pickle.dumps(("c", key, len(body), 0, "", True))
    sender.peers.request(home.endpoint["ipc"], b"PUT", [head, body], 30.0, "room")


def test_a_busy_service_thread_keeps_nobody_waiting(keys, scratch):
    """It is slow to step aside; whoever waits goes on asking, instead of sleeping as if somebody led."""
    home, sender = Home(keys, scratch, busy_s=0.05), Service("sender", keys, scratch)
    try:
        for number in range(10):
            put(sender, home, "0", b"%d" % number)
            time.sleep(0.02)  # the service thread is at it again
            got: list[bytes] = []
            taker = threading.Thread(target=lambda into=got: into.append(home.take("1")))
            taker.start()
            put(sender, home, "1", b"%d" % number)
            taker.join()
            assert (home.take("0"), got) == (b"%d" % number, [b"%d" % number])
        assert home.looks == 0
    finally:
        sender.stop()
        home.stop()


def test_who_follows_is_called_when_the_leader_has_what_it_waited_for(keys, scratch):
    home, sender = Home(keys, scratch, busy_s=0.0), Service("sender", keys, scratch)
    got: dict[str, bytes] = {}
    try:
        for _ in range(10):
            takers = [threading.Thread(target=lambda key=key: got.update({key: home.take(key)})) for key in "abc"]
            for taker in takers:
                taker.start()
            time.sleep(0.05)  # one leads by now, the others follow
            looks = home.looks
            for key, taker in zip("abc", takers, strict=True):
                put(sender, home, key, key.encode())
                taker.join()
            assert home.looks == looks
        assert got == {key: key.encode() for key in "abc"}
    finally:
        sender.stop()
        home.stop()


def test_a_get_that_is_given_up_returns_only_its_own_items(keys, scratch):
    """Another item that the same connection has leased stays leased."""
    home, consumer = Home(keys, scratch, busy_s=0.0), Service("consumer", keys, scratch)
    endpoint = home.endpoint["ipc"]

    def get(key: str, timeout: float) -> None:
        head = pickle.dumps(("c", key, None, True, ("", ""), "consumer"))
        consumer.peers.request(endpoint, b"GET", [head], timeout, "an item")

    try:
        put(consumer, home, "leased", b"item")
        get("leased", 30.0)
        with pytest.raises(DeadlineExceeded):
            get("empty", 0.05)
        consumer.peers.request(endpoint, b"SYNC", [], 30.0, "the cancelled request")
        assert home.channel("c").count("leased") == 0
        consumer.peers.close()
        deadline = time.monotonic() + 10
        while not home.channel("c").count("leased") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert home.channel("c").count("leased") == 1, "the end of the connection returns it"
    finally:
        consumer.stop()
        home.stop()
