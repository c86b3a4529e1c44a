"""Ranks of elastic groups that end: what was meant for them is freed or put back, and whoever takes their place is reached."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhpc import Channel, ChannelError, Cluster, NodePlacementStrategy, Session, WorkerFailed, WorkerGroup
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies

sys.path.insert(0, str(Path(__file__).parent))

from loss_roles import Loser

MIB = 1 << 20


@pytest.fixture(params=["one host", "two hosts"])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """A rank that stays, and two of which one may be lost; these take themselves for another host's in half of the tests."""
    far = request.param == "two hosts"
    session = Session.start(tcp_address="127.0.0.1" if far else None, wait_deadline=60.0)
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)
    env = {"RLHPC_HOST_ID": "elsewhere"} if far else {}
    stays = Loser.create_group().launch(cluster, NodePlacementStrategy([0]), "stays")
    lossy = Loser.create_group().launch(cluster, NodePlacementStrategy([0, 0]), "lossy", env_vars=env)
    with session.training(SessionPolicies({"lossy": GroupPolicy(min_ranks=1)})):
        yield stays, lossy
    session.stop()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def lose(group: WorkerGroup, rank: int = 1) -> None:
    os.kill(group.execute_on(rank).pid().wait()[0], signal.SIGKILL)
    until(lambda: rank not in group.present)


def restart(group: WorkerGroup, rank: int = 1) -> None:
    until(lambda: rank in group.restart())  # once its earlier process is gone
    until(lambda: rank in group.admit())


@pytest.mark.parametrize("how", ["send", "put", "call", "broadcast", "hold"])
def test_shared_memory_does_not_grow_with_losses(groups: tuple[WorkerGroup, WorkerGroup], how: str) -> None:
    """Neither by what a lost rank had not read, nor by what it was reading."""
    stays, lossy = groups
    session = Session.current()
    used = []
    for _ in range(5):
        channel = Channel.create("kept", home="lossy", ranks=[1]) if how == "put" else None
        if how == "call":
            busy = lossy.execute_on(1).nap(600)
            calls = [lossy.execute_on(1).take(np.ones(4 * MIB, np.uint8)) for _ in range(3)]
        elif how == "hold":
            holding = lossy.execute_on(1).hold(3)
            stays.give("send", 3, 4 * MIB, None).wait()
            holding.wait()
        else:
            stays.give(how, 3, 4 * MIB, channel).wait()
        if how == "call":
            os.kill(lossy._records[1]["pid"], signal.SIGKILL)
            assert busy.wait() == [] and [call.wait() for call in calls] == [[], [], []]
        else:
            lose(lossy)
        if how == "broadcast":
            assert lossy.execute_on(0).receive_broadcasts(3).wait() == [3 * 4 * MIB]
        restart(lossy)
        until(lambda: not bytes_in_use(session.scratch.shm))
        stays.settle(4 * MIB).wait()
        used.append(session.scratch.used_bytes())
    # What is under way at a time: three messages, three copies on the other host, one to itself. A leak would be of 15.
    assert max(used) < 8 * 4.2 * MIB, [size // MIB for size in used]


def test_a_getter_that_has_ended_takes_no_item(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """At a channel that a rank keeps, whatever host the getter was on."""
    stays, lossy = groups
    channel = Channel.create("kept", home="stays")
    lossy.execute_on(1).get(channel)
    until(lambda: stays.getters("kept").wait() == [1])
    os.kill(lossy._records[1]["pid"], signal.SIGKILL)
    until(lambda: lossy.present == [0])
    until(lambda: stays.getters("kept").wait() == [0])
    channel.put("an item")
    assert lossy.execute_on(0).get(channel).wait() == ["an item"]


def test_a_rank_that_was_started_again_misses_no_broadcast(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """Even where the filesystem answers questions about a file from a cache, as NFS does, and only an open asks anew."""
    stays, lossy = groups
    stays.cache_attributes().wait()
    for _ in range(3):
        given = stays.give("broadcast", 1, 1000, None)
        received = lossy.receive_broadcasts(1)
        given.wait()
        assert received.wait() == [1000, 1000]
        lose(lossy)
        restart(lossy)
    given = stays.give("send", 2, 100_000, None)
    assert lossy.execute_on(1).receive(2).wait() == [200_000]
    given.wait()


@pytest.mark.parametrize("far", [False, True])
def test_a_home_that_refuses_is_heard_of(groups: tuple[WorkerGroup, WorkerGroup], far: bool) -> None:
    """By the next request at the latest, or by the end of the call, although nobody waits for each small item's answer."""
    _, lossy = groups
    channel = Channel.create("kept", home="lossy" if far else "stays", ranks=[0])
    lone = Channel("no such channel", channel._homes, 0)
    until(lambda: lossy.execute_on(1).put_small(channel, 3).wait() == [3])
    with pytest.raises(WorkerFailed, match="is not the home of a channel named 'no such channel'"):
        lossy.execute_on(1).put_small(lone, 3).wait()


def test_a_home_that_refuses_is_heard_of_by_the_driver(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    channel = Channel.create("kept", home="lossy", ranks=[0])
    lone = Channel("no such channel", channel._homes, 0)
    lone.put("lost")
    with pytest.raises(ChannelError, match=r"an item put before was refused: .*'no such channel'"):
        channel.qsize()
    channel.put("there")
    assert channel.qsize() == 1
