"""Messages between hosts: large frames in pieces, requests, strangers, and ports that are shut for a while."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.comm.zmq_sockets import PIECE, Peers, TcpPort, choose, divide_frames, join_pieces
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.bulk_pairs import nothing
from tests.unit.runtime.comm.rank_pairs import rank_pair


@pytest.fixture
def pair(tmp_path: Path, scratch: Scratch) -> Iterator[tuple[Context, Context]]:
    with rank_pair(tmp_path, scratch, "127.0.0.1") as contexts:
        yield contexts


def put(sender: Context, home: Context, key: str, body: bytes, name: str = "c") -> None:
    header = pickle.dumps((name, key, len(body), 0, "", True))
    sender.service.peers.post(home.service.endpoint["tcp"], b"PUT", [header, body])


@pytest.mark.parametrize("frames", [[], [b""], [b"a", b"b" * PIECE], [b"", b"a" * (2 * PIECE + 1), b"b"]])
def test_divided_frames_are_joined(frames: list[bytes]) -> None:
    pieces = [bytes(piece) for piece in divide_frames(frames)]
    assert max(map(len, pieces), default=0) <= PIECE
    assert join_pieces(pieces) == frames


def test_a_request_reaches_the_service_of_another_host(pair: tuple[Context, Context]) -> None:
    left, right = pair
    right.service.open_channel("c", 0, 1 << 30)
    put(left, right, "key", b"x" * (3 * PIECE))
    left.service.peers.confirm(10.0)
    endpoint, header = right.service.endpoint["tcp"], pickle.dumps(("c", "key", None, True, ("", ""), "left"))
    _, body = left.service.peers.request(endpoint, b"GET", [header], 10.0, "an item")
    assert body == b"x" * (3 * PIECE)


def test_a_put_without_confirmation_that_is_refused(pair: tuple[Context, Context]) -> None:
    put(*pair, "key", b"", name="no channel")
    with pytest.raises(ChannelError, match="an item put before was refused"):
        pair[0].service.peers.confirm(10.0)


def test_a_request_without_an_answer(pair: tuple[Context, Context]) -> None:
    left, right = pair
    right.service.open_channel("c", 0, 1 << 30)
    header = pickle.dumps(("c", "key", None, True, ("", ""), "left"))
    with pytest.raises(DeadlineExceeded, match="an item"):
        left.service.peers.request(right.service.endpoint["tcp"], b"GET", [header], 0.1, "an item")
    pending = left.service.peers.begin(right.service.endpoint["tcp"], b"GET", [header], "an item")
    with pytest.raises(ChannelError, match="died while this one waited for an item"):
        left.service.peers.reply_to(pending, 10.0, lambda: True)


def test_a_stranger_gets_no_answer(pair: tuple[Context, Context]) -> None:
    peers = Peers(zmq.Context.instance(), CurveKeys.fresh(), nothing)
    try:
        with pytest.raises(DeadlineExceeded):
            peers.request(pair[0].service.endpoint["tcp"], b"SYNC", [], 0.5, "an answer")
    finally:
        peers.close()


def test_a_shut_port_takes_no_connection() -> None:
    zmq_context = zmq.Context.instance()
    router = zmq_context.socket(zmq.ROUTER)
    port = TcpPort(router, "127.0.0.1")
    address = port.listener.getsockname()
    try:
        port.shut(True)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.2)
        port.shut(False)
        socket.create_connection(address, 10.0).close()
    finally:
        router.close()
        port.listener.close()


def test_a_process_that_is_out_of_reach() -> None:
    with pytest.raises(ChannelError, match="listens on no TCP port"):
        choose({"host": "another", "ipc": "ipc:///x", "tcp": ""})
    assert choose({"host": "another", "ipc": "ipc:///x", "tcp": "tcp://y:1"}) == "tcp://y:1"


def test_the_end_of_a_process_of_this_host_is_known(pair: tuple[Context, Context]) -> None:
    record = pair[0].rank_record("right", 0)
    assert not pair[0].service.peers.has_ended(record)
    pair[1].service.stop()
    assert pair[0].service.peers.has_ended(record)
    with pytest.raises(ChannelError, match="cannot reach the process"):
        pair[0].service.peers.request(record["data"]["ipc"], b"SYNC", [], 5.0, "an answer")
