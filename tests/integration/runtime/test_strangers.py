"""What another user of the machine can do by connecting: to torch's process groups, and to the ports between hosts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from pathlib import Path

import pytest
from stranger_roles import Meeting, Stranger

from rlhpc import Cluster, NodePlacementStrategy, Session
from rlhpc.runtime.comm.zmq_sockets import PIECE
from rlhpc.runtime.errors import StrangerConnected, WorkerFailed
from rlhpc.runtime.rpc import CallSender

as_another = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def meet():
    groups = []

    def start(ranks, name, **options):
        strategy = NodePlacementStrategy([0] * ranks)
        cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)
        groups.append(Meeting.create_group().launch(cluster, placement_strategy=strategy, name=name, **options))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


def test_no_port_of_a_process_group_stays_open(meet):
    group = meet(4, "closed")
    assert group.form().wait() == [[6.0, 1.0], [6.0, 1.0], [6.0, 5.0], [6.0, 5.0]]
    assert group.doors().wait() == [[]] * 4
    assert max(group.idle_cpu().wait()) < 0.5, "gloo's thread must not spin over what took its socket's place"
    group.leave_group().wait()


def test_a_group_of_one_rank_leaves_no_port_open_either(meet):
    """In an interpreter of its own, which imports torch only after it has begun to be a rank."""
    group = meet(1, "alone", fork=False)
    assert group.alone().wait() == [3.0]
    assert group.doors().wait() == [[]]
    group.leave_group().wait()


def test_a_rank_may_open_as_many_files_as_its_user_may(meet):
    (soft, hard), *_ = meet(1, "limits").limits().wait()
    assert soft == min(hard, 65_536)


@as_another
def test_a_stranger_who_takes_a_ranks_place_ends_the_start_and_gets_nothing(meet, tmp_path):
    """The ranks are held between listening and connecting, so the stranger is first for certain."""
    go = tmp_path / "go"
    group = meet(2, "joined")
    with Stranger(1.0, 8, *(struct.pack("<q", number) for number in (0, 1))) as stranger:
        forming = group.form_late(str(go), 3.0)
        stranger.look(said_in(Path(f"{go}-0"), Path(f"{go}-1")))
        assert stranger.count() >= 2
        go.touch()
        with pytest.raises(WorkerFailed, match=r"did not prove to be of this run.*stranger.*start again") as raised:
            forming.wait()
    assert isinstance(raised.value.__cause__, StrangerConnected)
    assert re.search(r"joined-[01] on ", str(raised.value))
    assert "Traceback" not in str(raised.value)


@as_another
def test_strangers_who_say_nothing_or_nonsense_do_not_stop_a_start(meet, tmp_path):
    go = tmp_path / "go"
    group = meet(2, "crowded")
    with Stranger(10.0, 200, b"", struct.pack("<q", 99)) as stranger:
        forming = group.form_late(str(go), 20.0)
        stranger.look(said_in(Path(f"{go}-0"), Path(f"{go}-1")))
        assert stranger.count() >= 100
        go.touch()
        assert forming.wait() == [1.0, 1.0]


def said_in(*paths):
    """The words of files, once they are there."""
    deadline = time.monotonic() + 30
    while missing := [path for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, f"waited 30 s for {missing}"
        time.sleep(0.01)
    return [word for path in paths for word in path.read_text().split()]


@pytest.fixture
def reachable(meet):
    """A rank that listens for other hosts, and the driver's session."""
    session = Session.start(tcp_address="127.0.0.1")
    meet(1, "reachable")
    yield session, session.members["reachable-0"].record
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
    lines.send(far, [b"1", b"same", *service.pack(((text, []), {})).frames()])
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
