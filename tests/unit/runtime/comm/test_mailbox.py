"""Mailboxes: order, forms that change, both ends in two processes, and waits that end."""

import os
import threading
import time

import numpy as np
import pytest

from rlhpc.runtime.comm.mailbox import Mailbox, available
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.trace_recorder import recorder

pytestmark = pytest.mark.skipif(not available(), reason="needs a machine with ordered stores")


def pair(path, capacity=4096, deadline=5.0):
    ends = [Mailbox(path, capacity, is_first=first, peer="peer-0", deadline=deadline) for first in (True, False)]
    return ends[0], ends[1]


def test_arrays_arrive_as_they_were_sent(tmp_path):
    a, b = pair(tmp_path / "m")
    for array in (np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.float32), np.arange(6).reshape(2, 3).T):
        a.put(array)
        got = b.get()
        assert got.dtype == array.dtype and got.shape == array.shape
        np.testing.assert_array_equal(got, array)
    b.put(np.ones(2, np.int64))
    assert a.get().tolist() == [1, 1]


def test_nothing_is_left_once_both_ends_have_met(tmp_path):
    a, b = pair(tmp_path / "m")
    assert list(tmp_path.iterdir())
    a.put(np.zeros(3))
    assert b.get().tolist() == [0, 0, 0] and not list(tmp_path.iterdir())
    b.put(np.ones(3))
    assert a.get().tolist() == [1, 1, 1]


def test_what_was_taken_is_a_copy(tmp_path):
    a, b = pair(tmp_path / "m")
    a.put(np.zeros(3))
    first = b.get()
    a.put(np.ones(3))
    assert first.tolist() == [0, 0, 0] and b.get().tolist() == [1, 1, 1]


def test_a_traced_array_is_one_message_with_both_times(tmp_path):
    a, b = pair(tmp_path / "m")
    a.put(np.zeros(3))
    recorder.start(str(tmp_path / "g-0.jsonl"), {"group": "g", "rank": 0, "host": "h", "host_id": "h", "pid": 1})
    try:
        b.get()  # it was sent before the recording began
        before = time.monotonic_ns()
        a.put(np.zeros(3))
        between = time.monotonic_ns()
        b.get()
        ((name, source, sent, arrived),) = recorder.messages
    finally:
        recorder.stop(flush=True)
        recorder.reset()
    assert (name, source) == ("array", "peer-0") and before <= sent == arrived <= between, "it lay ready from then on"


def test_a_traced_array_that_is_waited_for_arrives_at_the_end_of_the_wait(tmp_path):
    a, b = pair(tmp_path / "m")
    recorder.start(str(tmp_path / "g-0.jsonl"), {"group": "g", "rank": 0, "host": "h", "host_id": "h", "pid": 1})
    try:
        sender = threading.Timer(0.2, a.put, [np.zeros(3)])
        sender.start()
        b.get()
        sender.join()
        ((_, _, sent, arrived),) = recorder.messages
    finally:
        recorder.stop(flush=True)
        recorder.reset()
    assert sent < arrived <= time.monotonic_ns()


def test_two_processes_in_lockstep(tmp_path):
    path, count = tmp_path / "m", 3000
    child = os.fork()
    if child == 0:
        end = Mailbox(path, 4096, is_first=False, peer="parent", deadline=20)
        for _ in range(count):
            end.put(end.get() * 2)
        os._exit(0)
    end = Mailbox(path, 4096, is_first=True, peer="child", deadline=20)
    for i in range(count):
        end.put(np.full(16, i))
        assert end.get().tolist() == [2 * i] * 16
    assert os.waitpid(child, 0)[1] == 0


def test_a_slow_peer_is_waited_for(tmp_path):
    child = os.fork()
    if child == 0:
        end = Mailbox(tmp_path / "m", 64, is_first=False, peer="parent", deadline=20)
        time.sleep(0.2)
        end.put(np.ones(1))
        os._exit(0)
    end = Mailbox(tmp_path / "m", 64, is_first=True, peer="child", deadline=20)
    began = time.process_time()
    assert end.get().tolist() == [1]
    assert time.process_time() - began < 0.1  # naps instead of burning a core
    os.waitpid(child, 0)


def test_waits_end_and_say_for_whom(tmp_path):
    a, _ = pair(tmp_path / "m", deadline=0.05)
    with pytest.raises(DeadlineExceeded, match="for an array from peer-0"):
        a.get()
    a.put(np.zeros(1))
    with pytest.raises(DeadlineExceeded, match="to take an array from peer-0"):
        a.put(np.zeros(1))


def test_what_does_not_fit_is_refused(tmp_path):
    a, _ = pair(tmp_path / "m", capacity=8)
    with pytest.raises(ChannelError, match="does not fit into 8 bytes"):
        a.put(np.zeros(2))


def test_a_sleeper_is_woken_and_a_check_ends_a_wait(tmp_path):
    def stop():
        if time.monotonic() > end:
            raise InterruptedError

    child = os.fork()
    if child == 0:
        end = Mailbox(tmp_path / "m", 64, is_first=False, peer="parent", deadline=20)
        for _ in range(3):
            time.sleep(0.03)
            end.put(np.ones(1))  # the last two wait until the one before is taken
        os._exit(0)
    end = float("inf")
    box = Mailbox(tmp_path / "m", 64, is_first=True, peer="child", deadline=20, check=stop)
    for _ in range(3):
        assert box.get().tolist() == [1]
        time.sleep(0.1)
    assert os.waitpid(child, 0)[1] == 0
    end = time.monotonic()
    with pytest.raises(InterruptedError):
        box.get()
