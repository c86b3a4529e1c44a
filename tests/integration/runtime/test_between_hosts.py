"""Ranks that take themselves for two hosts: what they exchange goes over TCP, whole, once a host, and is freed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from rlhpc import Channel, Session
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.errors import ChannelError, RlhpcError
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies

ELSEWHERE = {"RLHPC_HOST_ID": "elsewhere"}


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session.start(tcp_address="127.0.0.1")
    yield made
    made.stop()


def soon(condition: Callable[[], Any], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(met)


def test_a_sender_may_go_on_whether_or_not_somebody_waits(session: Session, launch: Callable[..., Any]) -> None:
    near, far = launch(1, "near"), launch(1, "far", env_vars=ELSEWHERE)
    channels = {home: Channel.create(f"at-{home}", home=home) for home in ("near", "far")}
    for size in (20_000, 3_000_000):
        for channel in (None, *channels.values()):
            for sender, receiver in ((0.0, 0.2), (0.2, 0.0), (0.0, 0.0)):
                given = near.give_and_change(size, sender, "far", channel)
                taken = far.take_twice(size, receiver, "near", channel)
                given.wait()
                assert taken.wait() == [[True, True]], (size, channel, sender, receiver)
    assert soon(lambda: not bytes_in_use(session.scratch.shm))


def test_a_broadcast_crosses_once_and_is_shared_by_a_host(session: Session, launch: Callable[..., Any]) -> None:
    near, far = launch(2, "near"), launch(3, "far", env_vars=ELSEWHERE)
    groups = [("near", [0, 1]), ("far", [0, 1, 2])]
    total = float(torch.arange(1 << 20).sum())
    for _ in range(3):
        handles = [group.broadcast_and_hold(("near", 0), groups) for group in (far, near)]
        there, here = (handle.wait() for handle in handles)
        assert {*there, *here} == {total}
        assert sum(far.segments_in_use().wait()) == 1  # one of the three has fetched it, and all look into it
    # none of them sees what another writes, unless it promised not to write
    handles = [group.broadcast_from(("near", 0), groups) for group in (far, near)]
    assert len({value for handle in handles for value in handle.wait()}) == 1
    assert not list(session.scratch.shm.glob("share-*"))


def test_back_pressure_holds_between_hosts(session: Session, launch: Callable[..., Any]) -> None:
    far = launch(1, "far", env_vars=ELSEWHERE)
    channel = Channel.create("narrow", maxsize=1)
    produced = far.produce(channel, 4, 1_000_000)
    assert soon(lambda: channel.qsize() == 1)
    time.sleep(0.3)
    assert channel.qsize() == 1 and not produced.done()
    assert [int(channel.get()["t"][-1]) for _ in range(4)] == [0, 1, 2, 3]
    assert produced.wait() == [4]


def test_a_consumer_beside_the_producer_gets_what_was_meant_for_another_host(
    session: Session, launch: Callable[..., Any]
) -> None:
    near, far = launch(2, "near"), launch(1, "far", env_vars=ELSEWHERE)
    channel = Channel.create("anyone", home="far")
    for group, rank in ((far, 0), (near, 1), (far, 0)):  # the producer remembers where the last consumer was
        taken = group.execute_on(rank).consume(channel, 2, "0")
        given = near.execute_on(0).produce(channel, 2, 1_000_000, "0")
        given.wait()
        assert taken.wait() == [[(0, 0.0), (1, 1.0)]]


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["near", "far"])
def test_a_death_in_the_middle_is_named_and_leaves_nothing(
    session: Session, launch: Callable[..., Any], victim: str
) -> None:
    near, far = launch(1, "near"), launch(1, "far", env_vars=ELSEWHERE)
    receiver = psutil.Process(session.processes["far-0"].pid)
    for size in (1_000, 100_000_000):
        given, taken = near.give_and_change(size, 0.0, "far", None), far.take_twice(size, 0.0, "near", None)
        if size == 1_000:
            given.wait(), taken.wait()
            at_rest = receiver.memory_info().rss
    assert soon(lambda: receiver.memory_info().rss > at_rest + (30 << 20))  # of 400 MB
    os.kill(session.processes[f"{victim}-0"].pid, signal.SIGKILL)
    with pytest.raises(RlhpcError, match=victim):
        given.wait()
        taken.wait()
    assert not bytes_in_use(session.scratch.shm)


def test_a_home_that_has_gone_is_not_waited_for(session: Session, launch: Callable[..., Any]) -> None:
    """Its end closes no connection; the driver knows of it all the same, and others keep the channel."""
    far = launch(2, "far", env_vars=ELSEWHERE)
    with session.training(SessionPolicies({"far": GroupPolicy(min_ranks=1)})):
        os.kill(session.processes["far-1"].pid, signal.SIGKILL)
        assert soon(lambda: far.present == [0])
    with pytest.raises(ChannelError, match="died while this one waited for the home of channel 'kept'"):
        Channel.create("kept", home="far")
    channel = Channel.create("kept", home="far", ranks=[0])
    channel.put("there", key="1")
    assert channel.get(key="1") == "there"
