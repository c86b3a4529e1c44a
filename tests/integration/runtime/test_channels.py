"""Channels, send/recv and collectives between real processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from rlhpc import Channel, ChannelError, DeadlineExceeded, QueueEmpty, QueueFull, Session, WorkerFailed
from rlhpc.runtime.comm import unix_sockets
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.registry import CurveKeys


def test_order_and_content_survive_between_workers(launch):
    producer, consumer = launch(1, "producer"), launch(1, "consumer")
    channel = Channel.create("numbers", maxsize=4)
    produced, consumed = producer.produce(channel, 20), consumer.consume(channel, 20)
    assert produced.wait() == [20]
    assert consumed.wait()[0] == [(i, float(i)) for i in range(20)]


@pytest.mark.parametrize("size", [10, 20_000, 3_000_000])
@pytest.mark.parametrize("home", [None, "consumer"])
def test_every_size_and_home(launch, size, home):
    producer, consumer = launch(1, "producer"), launch(1, "consumer")
    channel = Channel.create("sized", maxsize=2, home=home)
    produced, consumed = producer.produce(channel, 5, size), consumer.consume(channel, 5)
    produced.wait()
    assert consumed.wait()[0] == [(i, float(i)) for i in range(5)]
    session = Session.running()
    assert session is not None and bytes_in_use(session.scratch.shm) == 0, "a segment was left"


def test_put_blocks_when_full_and_nowait_says_so():
    channel = Channel.create("bounded", maxsize=2)
    channel.put_nowait(1)
    channel.put_nowait(2)
    assert channel.full() and channel.qsize() == 2
    with pytest.raises(QueueFull):
        channel.put_nowait(3)
    third = threading.Thread(target=channel.put, args=(3,))
    third.start()
    time.sleep(0.1)
    assert third.is_alive() and channel.qsize() == 2
    assert [channel.get() for _ in range(3)] == [1, 2, 3]
    third.join(5)
    assert channel.empty()
    with pytest.raises(QueueEmpty):
        channel.get_nowait()


@pytest.mark.parametrize("how", ["put", "entrust", "send", "notify", "post"])
def test_no_wait_for_a_process_that_does_not_read_is_unbounded(launch, how):
    """Whatever a stopped process is sent, its deadline holds; nothing that it had taken is lost when it goes on."""
    home, sender = launch(1, "home"), launch(1, "sender")
    channel, pid = Channel.create("stopped", home="home"), home.identity().wait()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    rescue = threading.Timer(60, os.kill, (pid, signal.SIGCONT))
    rescue.start()
    try:
        error, sent = sender.flood(channel, how, 3.0).wait(120)[0]
        with open(f"/proc/{pid}/stat") as stat:
            assert stat.read().rpartition(")")[2].split()[0] == "T", "it came back only because the other one went on"
    finally:
        rescue.cancel()
        os.kill(pid, signal.SIGCONT)
    names = {"put": "'stopped'", "entrust": "'stopped'", "post": channel._homes[0]["ipc"]}
    assert error.startswith("DeadlineExceeded") and names.get(how, "home-0") in error
    if how in ("put", "entrust"):
        assert sender.flood(channel, how, 30.0, 3).wait(60) == [("", 3)]
        numbers = [channel.get(timeout=30)["number"] for _ in range(sent + 3)]
        while not channel.empty():  # the one that was given up may have come all the same
            numbers.append(channel.get(timeout=30)["number"])
        assert numbers[:sent] == list(range(sent)) and numbers[-3:] == [0, 1, 2]


def test_a_listener_whose_queue_is_full_keeps_nobody_waiting(tmp_path):
    """Its process is stopped: more connections come than the kernel takes for it."""
    path, keys = str(tmp_path / "s"), CurveKeys.fresh()
    listener = unix_sockets.Listener(path)
    listener.sock.listen(0)
    opened = []
    with pytest.raises(BlockingIOError):
        for _ in range(10):
            opened.append(unix_sockets.connect(path, keys, timeout=0.1))
    assert opened


def test_back_pressure_counts_bytes():
    channel = Channel.create("bytes", max_bytes=1_000_000)
    channel.put(np.zeros(900_000, np.uint8))
    with pytest.raises(QueueFull):
        channel.put_nowait(np.zeros(200_000, np.uint8))
    channel.put_nowait(b"small")
    channel.get()
    channel.put_nowait(np.zeros(200_000, np.uint8))


def test_keys_are_separate_queues():
    channel = Channel.create("keyed", maxsize=1)
    channel.put("a", key="x")
    channel.put("b", key="y")
    assert channel.get(key="y") == "b" and channel.qsize("y") == 0 and channel.qsize("x") == 1


def test_get_batch_is_fifo_and_stops_at_the_weight():
    channel = Channel.create("weighted")
    for weight in (1, 2, 3):
        channel.put(weight, weight=weight)
    assert channel.get_batch(target_weight=3) == [1, 2] and channel.qsize() == 1
    channel.put(4, weight=4)
    assert channel.get_batch(5) == [3], "the next item would pass the target"
    assert channel.get_batch(1) == [4], "a single item heavier than the target is still delivered"
    late = threading.Timer(0.2, lambda: channel.put("b", weight=2))
    channel.put("a", weight=1)
    late.start()
    assert channel.get_batch(3) == ["a", "b"], "it waits until the weight is there"


def test_async_operations_keep_their_order():
    channel = Channel.create("async", maxsize=2)
    puts = [channel.put(i, async_op=True) for i in range(6)]
    assert [channel.get(async_op=True).wait(5) for _ in range(6)] == list(range(6))
    assert all(p.wait(5) is None for p in puts)


def test_async_put_takes_the_item_as_it_is_now():
    channel = Channel.create("snapshot", maxsize=1)
    array = np.zeros(10)
    channel.put(0)
    work = channel.put(array, async_op=True)
    array[:] = 7
    channel.get()
    work.wait(5)
    assert (channel.get() == 0).all()


def test_waits_have_deadlines_that_say_for_what(launch):
    channel = Channel.create("dry")
    with pytest.raises(DeadlineExceeded, match="item in channel 'dry'"):
        channel.get(timeout=0.1)
    worker = launch(1, "thirsty")
    text = worker.get_with_deadline(channel, 0.3).wait()[0]
    assert text.startswith("DeadlineExceeded") and "dry" in text
    channel.put("still here")
    assert channel.get() == "still here", "the waiter that gave up did not swallow it"


#: A group that may fail and be restarted.
FRAGILE = SessionPolicies({"fragile": GroupPolicy(restartable=True)}, max_recoveries=1)


@pytest.mark.parametrize("how", ["get_nowait", "empty"])
@pytest.mark.parametrize("home", [None, "poller"])
def test_who_asks_again_and_again_is_freed_as_well(launch, how, home):
    """A rank that polls never blocks; it has to notice by what it asks that the others wait for it to give up."""
    poller, fragile = launch(1, "poller"), launch(1, "fragile")
    session = Session.running()
    with session.training(FRAGILE):
        channel = Channel.create(f"polled-{how}-{home}", home=home)
        handle = poller.poll(channel, how)
        fragile.leave(9)
        with pytest.raises(WorkerFailed):
            handle.wait(20)
        assert session.recover(5.0) == {"fragile": [0]}
        fragile.relaunch().wait_ready()
        assert poller.add(1).wait() == [1] and fragile.add(2).wait() == [2]


def test_the_request_to_give_up_may_come_late(launch, monkeypatch):
    """It goes to another socket and thread of the rank than its calls: behind the end of the recovery it asks for nothing."""
    steady, fragile = launch(1, "steady"), launch(1, "fragile")
    session = Session.running()
    with session.training(FRAGILE):
        held = []
        post = session.service.peers.post
        monkeypatch.setattr(
            session.service.peers, "post", lambda *what: held.append(what) if what[1] == b"ABORT" else post(*what)
        )
        with pytest.raises(WorkerFailed):
            fragile.leave(9).wait(20)
        session.recover(5.0)
        assert steady.add(1).wait() == [1]
        for what in held:
            post(*what)
        # By the same road: once it is answered, they have arrived.
        told = session.service.peers.request(held[0][0], b"DOING", [], 5.0, "steady")
        assert told and steady.add(2).wait() == [2]


def test_connect_waits_for_create_and_gives_up():
    with pytest.raises(ChannelError, match="never appeared"):
        Channel.connect("nobody", timeout=0.1)


def test_an_unacknowledged_item_of_a_dead_consumer_goes_back(launch):
    channel = Channel.create("durable")
    for i in range(3):
        channel.put(i)
    thief = launch(1, "thief")
    with pytest.raises(WorkerFailed, match="signal 9"):
        thief.take_and_hold(channel).wait()
    assert [channel.get(timeout=5) for _ in range(3)] == [0, 1, 2]


def test_distributed_channel_spreads_its_keys(launch):
    producer, consumer = launch(2, "producer"), launch(2, "consumer")
    channel = Channel.create("spread", distributed=True)
    assert len(channel._homes) == 4
    jobs = [producer.execute_on(r).produce(channel, 3, 100, str(r)) for r in range(2)]
    for job in jobs:
        job.wait()
    for r in range(2):
        assert consumer.execute_on(r).consume(channel, 3, str(r)).wait()[0] == [(i, float(i)) for i in range(3)]


def test_objects_keep_type_dtype_and_device(launch):
    a, b = launch(1, "a"), launch(1, "b")
    items = [
        torch.arange(6).reshape(2, 3),
        {"k": torch.ones(4, dtype=torch.bfloat16), "n": np.arange(3, dtype=np.int16)},
        [torch.tensor(1.5, dtype=torch.float64), torch.empty(0, 3), torch.ones(2, 2, dtype=torch.bool)],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.nn.Parameter(torch.ones(2)),
        torch.view_as_complex(torch.ones(3, 2)),
        "text", None, b"raw" * 100_000, {"nested": [1, (2, {3})]},
    ]  # fmt: skip
    sent, got = a.send_all(items, "b"), b.recv_all("a", len(items))
    sent.wait()
    for out, item in zip(got.wait()[0], items, strict=True):
        if isinstance(item, torch.Tensor):
            assert torch.equal(out, item) and out.dtype == item.dtype and type(out) is type(item)
        elif isinstance(item, list):
            assert all(
                torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape for x, y in zip(out, item, strict=True)
            )
        elif isinstance(item, dict) and "k" in item:
            assert torch.equal(out["k"], item["k"]) and (out["n"] == item["n"]).all() and out["n"].dtype == np.int16
        else:
            assert out == item


def test_send_tensor_in_place_and_its_refusals(launch):
    a, b = launch(1, "a"), launch(1, "b")
    a.send_in_place("b").wait()
    assert torch.equal(b.recv_in_place("a", (3, 4)).wait()[0], torch.arange(12.0).reshape(3, 4))
    a.send_in_place("b").wait()
    with pytest.raises(WorkerFailed, match=r"was given \(4, 3\).*\(3, 4\).*was sent"):
        b.recv_in_place("a", (4, 3)).wait()


def test_async_send_and_recv(launch):
    a, b = launch(1, "a"), launch(1, "b")
    first, second = a.exchange_async("b"), b.exchange_async("a")
    assert first.wait() == [[0, 1, 2, 3, 4]] and second.wait() == [[0, 1, 2, 3, 4]]


def test_broadcast_reaches_all_groups_and_frees_its_memory(launch):
    a, b = launch(2, "a"), launch(2, "b")
    groups, src = [("a", [0, 1]), ("b", [0, 1])], ("a", 0)
    first, second = a.broadcast_from(src, groups), b.broadcast_from(src, groups)
    expected = float(torch.arange(100_000.0).sum() - 1)
    assert all(abs(x - expected) < 1e4 for x in first.wait() + second.wait())
    session = Session.running()
    deadline = time.monotonic() + 5
    while bytes_in_use(session.scratch.shm) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert bytes_in_use(session.scratch.shm) == 0


def test_collectives_inside_a_group(launch):
    group = launch(3, "reducers")
    for tensor, gathered in group.reduce().wait():
        assert torch.equal(tensor, torch.full((3,), 3.0)) and gathered == [{"rank": r} for r in range(3)]


def test_collectives_in_subgroups(launch):
    assert launch(4, "pairs").reduce_in_pairs().wait() == [1.0, 1.0, 5.0, 5.0]


def test_two_hosts_exchange_over_tcp_with_keys(launch):
    """Workers that take themselves for another host exchange through the authenticated TCP sockets."""
    Session.start(tcp_address="127.0.0.1")
    try:
        near, far = launch(1, "near"), launch(1, "far", env_vars={"RLHPC_HOST_ID": "elsewhere"})
        assert far.add(1).wait() == [1]
        channel = Channel.create("between", maxsize=2)
        for size in (10, 1_000_000):
            produced, consumed = far.produce(channel, 5, size), near.consume(channel, 5)
            produced.wait()
            assert consumed.wait()[0] == [(i, float(i)) for i in range(5)]
            produced, consumed = near.produce(channel, 5, size), far.consume(channel, 5)
            produced.wait()
            assert consumed.wait()[0] == [(i, float(i)) for i in range(5)]
        first, second = (
            near.broadcast_from(("near", 0), [("far", [0])]),
            far.broadcast_from(("near", 0), [("far", [0])]),
        )
        assert abs(first.wait()[0] - second.wait()[0]) < 1e4
        big = torch.randn(500_000)
        assert torch.equal(far.echo(big).wait()[0], big)
    finally:
        near.shutdown()
        far.shutdown()
        Session.running().stop()
