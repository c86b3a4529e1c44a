"""Sockets of a service: large messages, connections that end, and ports while descriptors are short."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.runtime.comm import zmq_sockets
from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.comm.unix_sockets import connect
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair

GET = pickle.dumps(("c", "key", None, True, ("", ""), "left"))


@pytest.fixture
def pair(tmp_path: Path, scratch: Scratch) -> Iterator[tuple[Context, Context]]:
    with rank_pair(tmp_path, scratch, "127.0.0.1") as contexts:
        contexts[1].service.open_channel("c", 0, 1 << 30)
        yield contexts


def put(pair: tuple[Context, Context], endpoint: str, body: bytes) -> None:
    header = pickle.dumps(("c", "key", len(body), 0, "", True))
    pair[0].service.peers.request(pair[1].service.endpoint[endpoint], b"PUT", [header, body], 20.0, "room")


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
def test_a_message_larger_than_a_socket_takes_at_once(pair: tuple[Context, Context], endpoint: str) -> None:
    body = bytes(8 << 20)
    put(pair, endpoint, body)
    reply = pair[0].service.peers.request(pair[1].service.endpoint[endpoint], b"GET", [GET], 20.0, "an item")
    assert reply[1] == body


def test_items_of_a_connection_that_ends_return(pair: tuple[Context, Context]) -> None:
    put(pair, "ipc", b"item")
    service = pair[1].service
    consumer = connect(service.endpoint["ipc"].removeprefix("ipc://"), service.keys)
    consumer.send([b"1", b"GET", GET])
    deadline = time.monotonic() + 10
    while service.channel("c").count("key") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.channel("c").count("key") == 0
    consumer.close()
    while not service.channel("c").count("key") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.channel("c").count("key") == 1


def test_ports_are_shut_while_descriptors_are_short(
    pair: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = pair[1].service.endpoint["tcp"].removeprefix("tcp://").split(":")
    socket.create_connection((host, int(port)), 10.0).close()
    monkeypatch.setattr(zmq_sockets, "is_short_of_descriptors", lambda: True)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the ports are checked at each tick
        try:
            socket.create_connection((host, int(port)), 0.2).close()
        except TimeoutError:
            break
    assert time.monotonic() < deadline
    monkeypatch.setattr(zmq_sockets, "is_short_of_descriptors", lambda: False)
    socket.create_connection((host, int(port)), 10.0).close()
