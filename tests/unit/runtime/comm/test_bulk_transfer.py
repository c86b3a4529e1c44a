"""Data between hosts: whole, only for those who know the secret, and an error that names who died."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhpc.runtime.comm import bulk_transfer as bulk
from rlhpc.runtime.comm.bulk_transfer import MAGIC, MAX_TRANSFERS, BulkClient
from rlhpc.runtime.comm.shared_memory import HEADER, SegmentPool, bytes_in_use
from rlhpc.runtime.comm.zero_copy import LEND_LIMIT
from rlhpc.runtime.comm.zmq_sockets import Peers
from rlhpc.runtime.errors import ChannelError, RlhpcError
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
from tests.serving import Serving
from tests.unit.runtime.comm.bulk_pairs import SIZE, nothing, random_bytes


@pytest.mark.parametrize("start, count", [(HEADER, 100), (HEADER + 7, LEND_LIMIT + 64), (HEADER + LEND_LIMIT + 3, 60)])
def test_any_part_of_a_loan_is_what_a_segment_would_hold(
    owner: Serving, keys: CurveKeys, scratch: Scratch, start: int, count: int
) -> None:
    buffers = [random_bytes(LEND_LIMIT + 5).data, random_bytes(40, 1).data, random_bytes(3000, 2).data]
    path, spans = SegmentPool(scratch).write(buffers)
    loan = owner.lender.lend(buffers, 1)
    client, target = BulkClient(owner.server.endpoint, keys, nothing), bytearray(count)
    client.fetch(loan.name, start, memoryview(target))
    with open(path, "rb") as file:
        file.seek(start)
        assert bytes(target) == file.read(count) and loan.spans == spans
    client.close()


def test_a_loan_that_nobody_waits_for_becomes_a_segment(owner: Serving, keys: CurveKeys, scratch: Scratch) -> None:
    data = random_bytes(SIZE)
    loan = owner.lender.lend([data.data], 1)
    loan.finish_reads(False, owner.pool, nothing)
    expected, target = data.copy(), bytearray(SIZE)
    data[:] = 0  # the caller goes on
    client = BulkClient(owner.server.endpoint, keys, nothing)
    client.fetch(loan.name, HEADER, memoryview(target))
    assert np.array_equal(np.frombuffer(target, np.uint8), expected)
    client.release(loan.name, 0)
    assert wait_for(lambda: owner.lender.find(loan.name) is None and not bytes_in_use(scratch.shm))
    with pytest.raises(ChannelError, match=r"owner-3 .* is gone"):
        client.fetch(loan.name, HEADER, memoryview(target))
    client.close()


def test_a_loan_outlives_the_reader_that_dies(owner: Serving, keys: CurveKeys, scratch: Scratch) -> None:
    """A consumer that is killed while it reads: the item is there for the next one, although the sender has gone on."""
    data = random_bytes(64 << 20)
    loan, expected = owner.lender.lend([data.data], 1), data.copy()
    first = BulkClient(owner.server.endpoint, keys, nothing)
    first._link.send(b"F" + bulk._RANGE.pack(HEADER, data.nbytes) + loan.name.encode())
    assert first._link.receive(nothing) == b"+"
    first.close()
    loan.finish_reads(True, owner.pool, nothing)
    data[:] = 0
    target = bytearray(data.nbytes)
    BulkClient(owner.server.endpoint, keys, nothing).fetch(loan.name, HEADER, memoryview(target))
    assert np.array_equal(np.frombuffer(target, np.uint8), expected)


def wait_for(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    return any(condition() or pause.wait(0.02) for _ in range(250))


def test_more_transfers_than_are_served_at_a_time(owner: Serving, keys: CurveKeys) -> None:
    data = [random_bytes(4 << 20, seed) for seed in range(3)]
    paths = [owner.pool.write([each.data])[0] for each in data]

    def fetch(number: int) -> bool:
        client, target = BulkClient(owner.server.endpoint, keys, nothing), bytearray(4 << 20)
        for _ in range(2):
            client.fetch(paths[number % 3], HEADER, memoryview(target))
        client.close()
        return bytes(target) == data[number % 3].tobytes()

    with ThreadPoolExecutor(3 * MAX_TRANSFERS) as pool:
        assert all(pool.map(fetch, range(3 * MAX_TRANSFERS)))


# -- who may ask, and for what ----------------------------------------------------------------------------------------


def test_another_generations_key_is_refused_by_both_sides(owner: Serving, scratch: Scratch, keys: CurveKeys) -> None:
    with pytest.raises(ChannelError, match=r"owner-3 at 127.0.0.1:\d+ did not prove to be of this run"):
        BulkClient(owner.server.endpoint, CurveKeys.fresh(), nothing)
    assert wait_for(lambda: owner.server.num_refused == 1)
    stranger = Serving(scratch, CurveKeys.fresh(), "owner-3")
    try:
        with pytest.raises(ChannelError, match="did not prove"):
            BulkClient(stranger.server.endpoint, keys, nothing)
    finally:
        stranger.close()


def test_a_server_that_only_repeats_what_it_hears_is_refused(keys: CurveKeys) -> None:
    """Without the secret: the client's own proof as the server's."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def impostor() -> None:
            sock, _ = door.accept()
            sock.sendall(MAGIC + secrets.token_bytes(32))
            said = sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(said[32:] + b"\0\7owner-3")
            sock.recv(1)
            sock.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ChannelError, match="does not know the generation's secret"):
            BulkClient(f"owner-3@127.0.0.1:{door.getsockname()[1]}", keys, nothing)
        thread.join()


def test_a_forged_request_on_a_proven_connection_is_dropped(owner: Serving, keys: CurveKeys) -> None:
    path, _ = owner.pool.write([random_bytes(SIZE).data])
    client = BulkClient(owner.server.endpoint, keys, nothing)
    body = b"F" + bulk._RANGE.pack(HEADER, 10) + path.encode()
    client._link.sock.sendall(bulk.SIZE.pack(len(body)) + body + secrets.token_bytes(32))
    with pytest.raises(ConnectionError):
        client._link.receive(nothing)
    client.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "{shm}/../../etc/passwd", "{shm}/link", "{shm}/none", "loan:1-1", ""])
def test_nothing_but_segments_is_served(owner: Serving, keys: CurveKeys, scratch: Scratch, path: str) -> None:
    (scratch.shm / "link").symlink_to("/etc/passwd")
    client, target = BulkClient(owner.server.endpoint, keys, nothing), bytearray(10)
    with pytest.raises(ChannelError, match=r"owner-3 at .*(is gone|not a segment)"):
        client.fetch(path.format(shm=scratch.shm), 0, memoryview(target))
    real, _ = owner.pool.write([random_bytes(SIZE).data])
    with pytest.raises(ChannelError, match="has no 10 bytes"):
        client.fetch(real, 1 << 40, memoryview(target))
    client.fetch(real, HEADER, memoryview(target))  # a refusal is not the end of the connection
    assert bytes(target) == random_bytes(SIZE)[:10].tobytes()
    client.close()


def test_silent_strangers_keep_nobody_out(owner: Serving, keys: CurveKeys) -> None:
    with contextlib.ExitStack() as stack:
        address, _, port = owner.server.endpoint.rpartition("@")[2].rpartition(":")
        for _ in range(200):
            stack.enter_context(socket.create_connection((address, int(port))))
        path, _ = owner.pool.write([random_bytes(SIZE).data])
        target = bytearray(10)
        BulkClient(owner.server.endpoint, keys, nothing).fetch(path, HEADER, memoryview(target))


# -- deaths -----------------------------------------------------------------------------------------------------------


def _dies_half_way(scratch: Scratch, keys: CurveKeys, told: socket.socket) -> None:
    def send_half(sock: socket.socket, buffers: list[memoryview]) -> None:
        sock.sendall(buffers[0][: len(buffers[0]) // 2])
        os.kill(os.getpid(), 9)

    bulk.send_all = send_half
    owner = Serving(scratch, keys, "owner-3")
    loan = owner.lender.lend([random_bytes(SIZE).data], 1)
    told.sendall(f"{owner.server.endpoint} {loan.name}".encode())
    owner._thread.join()


def test_the_death_of_an_owner_is_an_error_that_names_it(scratch: Scratch, keys: CurveKeys, peers: Peers) -> None:
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_dies_half_way, args=[scratch, keys, theirs])
    process.start()
    endpoint, name = ours.recv(1000).decode().split()
    with pytest.raises(ChannelError, match=rf"owner-3 at 127.0.0.1:\d+ died .* receiving|received {SIZE} bytes"):
        peers.fetch(endpoint, name, HEADER, memoryview(bytearray(SIZE)))
    process.join()
    with pytest.raises(ChannelError, match=r"cannot reach owner-3 at 127.0.0.1"):
        peers.fetch(endpoint, name, HEADER, memoryview(bytearray(SIZE)))


def test_a_failed_run_ends_a_transfer(owner: Serving, keys: CurveKeys) -> None:
    """The owner hangs in the middle; what the driver says about the run is what the receiver raises."""
    hold, failed = threading.Event(), threading.Event()

    class Failed(RlhpcError): ...

    def check() -> None:
        if failed.is_set():
            raise Failed("rank 7 is dead")

    def stuck(sock: socket.socket, buffers: list[memoryview]) -> None:
        hold.wait(30)

    original, bulk.send_all = bulk.send_all, stuck
    try:
        loan = owner.lender.lend([random_bytes(SIZE).data], 1)
        client = BulkClient(owner.server.endpoint, keys, check)
        failed.set()
        with pytest.raises(Failed):
            client.fetch(loan.name, HEADER, memoryview(bytearray(SIZE)))
        assert not client.in_step
        client.close()
    finally:
        bulk.send_all = original
        hold.set()
