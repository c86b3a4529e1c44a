"""What another user of the machine can do by connecting: to torch's process groups, and to the ports between hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from rlhpc import Session
from rlhpc.runtime.comm.zmq_sockets import PIECE
from rlhpc.runtime.rpc import CallSender
from tests.strangers import Stranger

as_another = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def reachable(meet):
    """A rank that listens for other hosts, and the driver's session."""
    session = Session.start(tcp_address="127.0.0.1")
    meet(1, "reachable")
    yield session, session.processes["reachable-0"].record
    session.stop()


@pytest.mark.parametrize("door", ["rpc", "data"])
def test_a_frame_of_a_stranger_is_refused_by_its_length(reachable, door):
    """ZeroMQ reads a frame into memory before it knows who sent it."""
    _, record = reachable
    address, _, port = record[door]["tcp"].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((address, int(port)), 5) as sock:
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32))
        sock.sendall(b"\x06" + (800 << 20).to_bytes(8, "big"))
        sock.settimeout(8)  # less than the time that a handshake may take
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass


def test_long_frames_reach_other_hosts_all_the_same(reachable):
    """Python objects go over ZeroMQ however long they are; only arrays and tensors have a way of their own."""
    session, record = reachable
    service, text = session.service, "naïve " * 1_000_000
    lines = CallSender(service)
    far = {**record["rpc"], "host": "elsewhere"}
    lines.send(far, [b"1", b"same 0", *service.pack(((text, []), {})).frames()])
    answers, deadline = [], time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        answers = lines.receive(200)
    lines.close()
    assert answers[0][1] == b"ok"
    assert service.unpack(answers[0][3:]) == (text, [])
    for value in (b"", b"x" * PIECE, os.urandom(5 * PIECE + 3)):
        service.peers.request(record["data"]["tcp"], b"STORE", [b"set", b"long", value], 30, "the store")
        assert service.peers.request(record["data"]["tcp"], b"STORE", [b"get", b"long"], 30, "the store") == [value]


@as_another
def test_strangers_leave_a_rank_the_descriptors_for_its_files(meet):
    session = Session.start(tcp_address="127.0.0.1")
    group = meet(1, "besieged")
    group.may_open(1024).wait()
    [doors] = group.doors().wait()
    there, deadline = 0, time.monotonic() + 60
    with Stranger(90.0, 10_000, b"") as stranger:
        stranger.look(doors)
        while there <= 1024 * 3 // 4:  # as many as it takes; one that says nothing is dropped after a while
            assert time.monotonic() < deadline, f"in 60 s strangers have taken no more than {there} of its descriptors"
            [there] = group.open_files(20).wait()
        for _ in range(30):  # he goes on, and would soon have the rest
            group.open_files(20).wait()
            assert group.same("it", "answers").wait() == [("it", "answers")]
            time.sleep(0.1)
    session.stop()
