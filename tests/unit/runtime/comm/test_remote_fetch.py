"""Fetches of payloads from other hosts."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhpc.runtime.comm.payload import HostReader, Origin, Packed, fetch_once_per_host, unpack
from rlhpc.runtime.comm.remote_fetch import ReceiveBuffers
from rlhpc.runtime.comm.shared_memory import HEADER, Mappings
from rlhpc.runtime.comm.zmq_sockets import Peers
from rlhpc.runtime.scratch import Scratch
from tests.serving import Serving
from tests.unit.runtime.comm.bulk_pairs import SIZE, nothing, random_bytes


@pytest.mark.parametrize("lend", [False, True])
def test_what_arrives_is_what_was_packed(owner: Serving, scratch: Scratch, peers: Peers, lend: bool) -> None:
    item = {
        "a": random_bytes(SIZE),
        "empty": np.empty(0),
        "b": np.arange(777, dtype=np.float64),
        "c": random_bytes(1, 2),
    }
    packed = Packed(item, owner.pool, Origin("there", "", owner.server.endpoint), lender=owner.lender if lend else None)
    landing = ReceiveBuffers(1 << 30)

    def fetch(origin: Origin, path: str, size: int, reader: int, share: object) -> memoryview:
        memory = landing.take(HEADER + size)
        peers.fetch(origin.bulk, path, HEADER, memory[HEADER:])
        peers.release(origin.bulk, path, reader)
        return memory

    got = unpack(packed.frames(), "here", Mappings(), fetch)
    packed.finish_reads(True, nothing)
    for number in range(3):  # what comes next does not land where somebody still looks
        landing.take(SIZE + number)[:] = bytes(SIZE + number)
    assert all(np.array_equal(got[name], item[name]) and got[name].dtype == item[name].dtype for name in item)


def test_memory_is_used_again_when_nobody_looks_into_it() -> None:
    landing = ReceiveBuffers(2 * SIZE)
    first = np.frombuffer(landing.take(SIZE), np.uint8)[5:]
    place = first.__array_interface__["data"][0]
    second = np.frombuffer(landing.take(SIZE), np.uint8)
    assert abs(second.__array_interface__["data"][0] - place) >= SIZE
    del first
    assert np.frombuffer(landing.take(SIZE), np.uint8).__array_interface__["data"][0] == place - 5
    held = [landing.take(SIZE) for _ in range(8)]
    held.clear()
    assert landing._idle_bytes <= 2 * SIZE


# -- once a host ------------------------------------------------------------------------------------------------------


def test_one_of_a_host_fetches_for_all(scratch: Scratch) -> None:
    fetched: list[int] = []

    def take(number: int) -> str:
        def fetch() -> str:
            fetched.append(number)
            return "/the/segment"

        return fetch_once_per_host(scratch.shm, HostReader("m", number, 4), fetch, nothing)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(take, (3, 1, 0, 2))) == {"/the/segment"}
    assert len(fetched) == 1 and not list(scratch.shm.iterdir())


def _fetches_and_dies(scratch: Scratch) -> None:
    fetch_once_per_host(scratch.shm, HostReader("m", 0, 2), lambda: os.kill(os.getpid(), 9) or "", nothing)


def test_when_the_one_that_fetches_dies_the_next_does(scratch: Scratch) -> None:
    process = multiprocessing.get_context("fork").Process(target=_fetches_and_dies, args=[scratch])
    process.start()
    process.join()
    assert fetch_once_per_host(scratch.shm, HostReader("m", 1, 2), lambda: "/the/segment", nothing) == "/the/segment"
