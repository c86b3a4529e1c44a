"""Messages over UNIX sockets: framing, the secret, and processes that do not read."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.runtime.comm import unix_sockets
from rlhpc.runtime.comm.unix_sockets import (
    Client,
    Decoder,
    Listener,
    UnixConnection,
    connect,
    encode,
    send_all,
    token_of,
)
from rlhpc.runtime.registry import CurveKeys

MESSAGES = [[b"a", b""], [], [b"x" * 20000, b"y"], [b"z"]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Returns a short path of a socket."""
    folder = os.open(tmp_path, os.O_RDONLY)
    yield f"/proc/self/fd/{folder}/s"
    os.close(folder)


def accepted(listener: Listener, token: bytes) -> UnixConnection:
    """Returns the next connection, and waits for it."""
    deadline = time.monotonic() + 60
    while (connection := listener.accept(token)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return connection


def received(connection: UnixConnection, count: int) -> list[list[bytes]]:
    """Returns this many messages, or fewer if the connection is closed."""
    messages: list[list[bytes]] = []
    deadline = time.monotonic() + 60
    while len(messages) < count and not connection.closed:
        messages += connection.receive()
        connection.flush()
        assert time.monotonic() < deadline
    return messages


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_read_from_whatever_pieces_arrive(seed: int) -> None:
    draw = random.Random(seed)
    data = b"".join(bytes(buffer) for message in MESSAGES for buffer in encode(message))
    decoder, messages = Decoder(), []
    while data:
        size = draw.randint(1, 9000)
        messages += decoder.feed(data[:size])
        data = data[size:]
    assert messages == MESSAGES


def test_small_messages_are_one_buffer_and_large_ones_are_not_copied() -> None:
    large = bytes(20000)
    assert len(encode([b"a", b"b"])) == 1
    assert encode([large, b""])[1] is large and len(encode([large, b""])) == 2


def test_too_many_frames_are_no_message() -> None:
    with pytest.raises(ConnectionError, match="frames is not one of ours"):
        Decoder().feed(b"\xff\xff\xff\x00")


def test_many_buffers_are_sent_in_full() -> None:
    ours, theirs = socket.socketpair()
    send_all(ours, [bytes([n % 256]) * 3 for n in range(1000)])
    ours.close()
    data = b""
    while part := theirs.recv(1 << 16):
        data += part
    assert data == b"".join(bytes([n % 256]) * 3 for n in range(1000))
    theirs.close()


def test_both_sides_exchange_messages_once_the_secret_is_shown(path: str) -> None:
    keys = CurveKeys.fresh()
    listener = Listener(path)
    client = Client(path, keys)
    server = accepted(listener, token_of(keys))
    for message in MESSAGES:
        client.send(message, lambda: None)
    assert received(server, len(MESSAGES)) == MESSAGES and client.in_step
    assert client.receive(0.0) is None
    server.send([b"answer", b"1"])
    server.send([b"answer", b"2"])
    assert client.receive(60) == [b"answer", b"1"] and client.receive(60) == [b"answer", b"2"]
    server.sock.close()
    with pytest.raises(ConnectionError, match="the other process is gone"):
        while True:
            client.receive(60)
    client.close()
    listener.sock.close()


def test_who_does_not_know_the_secret_is_not_heard(path: str) -> None:
    listener = Listener(path)
    stranger = Client(path, CurveKeys.fresh())
    stranger.send([b"order"], lambda: None)
    server = accepted(listener, token_of(CurveKeys.fresh()))
    assert received(server, 1) == [] and server.closed and not server.accepts_messages
    stranger.close()
    listener.sock.close()


def test_nobody_listens(path: str) -> None:
    with pytest.raises(OSError, match="No such file"):
        connect(path, CurveKeys.fresh())
    listener = Listener(path)
    assert listener.accept(b"") is None
    listener.sock.close()


def test_a_peer_that_does_not_read_blocks_nobody(path: str) -> None:
    keys = CurveKeys.fresh()
    listener = Listener(path)
    ours = connect(path, keys)
    theirs = accepted(listener, token_of(keys))
    large = [bytes([n]) * (1 << 20) for n in range(4)]
    assert ours.send(large) and ours.send([b"after"])  # something is left
    assert ours.flush()
    messages: deque[list[bytes]] = deque()
    deadline = time.monotonic() + 60
    while len(messages) < 2 and time.monotonic() < deadline:
        messages.extend(theirs.receive())
        ours.flush()
    assert list(messages) == [large, [b"after"]] and not ours.flush()
    theirs.sock.close()
    ours.send(large)
    assert ours.closed or not ours.flush()
    ours.sock.close()
    listener.sock.close()


class GivenUp(Exception):
    """Raised by a sender's check."""


def test_a_sender_gives_up_on_a_process_that_does_not_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "_CHECK_MS", 1)
    keys = CurveKeys.fresh()
    listener = Listener(path)
    client = Client(path, keys)

    def give_up() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        client.send([bytes(1 << 24)], give_up)
    assert not client.in_step  # a part of the message is under way
    client.close()
    listener.sock.close()
