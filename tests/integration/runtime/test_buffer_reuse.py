"""A call has copied its arguments when it returns, on every path and at every size; so has a rank its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, WorkerGroup

sys.path.insert(0, str(Path(__file__).parent))

from reuse_roles import MAX_BYTES, Reuser, digest, draw, overwrite

HOSTS = {"one host": {}, "two hosts": {"RLHPC_HOST_ID": "elsewhere"}}


@pytest.fixture(params=list(HOSTS))
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[..., WorkerGroup]]:
    """Launches groups; those that are `far` take themselves for another host's in half of the tests."""
    session = Session.start(tcp_address="127.0.0.1" if request.param == "two hosts" else None, wait_deadline=120.0)
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)

    def start(name: str, count: int = 1, far: bool = False) -> WorkerGroup:
        strategy = NodePlacementStrategy([0] * count)
        return Reuser.create_group().launch(cluster, strategy, name, env_vars=HOSTS[request.param] if far else {})

    yield start
    session.stop()


def test_arguments_of_calls(ranks: Callable[..., WorkerGroup]) -> None:
    group = ranks("busy", 2, far=True)
    for max_bytes, count in ((64 << 10, 80), (MAX_BYTES, 20)):
        nap, digests = group.nap(0.7), []  # the ranks' sockets fill up meanwhile
        calls = []
        for seed in range(count):
            obj = draw(seed, max_bytes)
            digests.append(digest(obj))
            calls.append(group.take(obj))
            overwrite(obj)
        nap.wait()
        for call in calls:
            call.wait()
        for received in group.take_digests().wait():
            assert [seed for seed in range(count) if received[seed] != digests[seed]] == []


def test_results_of_calls(ranks: Callable[..., WorkerGroup]) -> None:
    group = ranks("returns", far=True)
    for max_bytes, count in ((64 << 10, 80), (MAX_BYTES, 20)):
        calls = [group.give(seed, max_bytes) for seed in range(count)]
        group.nap(0.0)  # the driver reads nothing before `wait`, so the rank's answers wait in its own memory
        wrong = []
        for seed, call in enumerate(calls):
            (result,) = call.wait()
            if digest(result) != digest(draw(seed, max_bytes)):
                wrong.append(seed)
            overwrite(result)
        assert wrong == []


@pytest.mark.parametrize("how", ["send", "send, async", "notify", "broadcast"])
def test_messages(ranks: Callable[..., WorkerGroup], how: str) -> None:
    near, far = ranks("near"), ranks("far", 2 if how == "broadcast" else 1, far=True)
    for max_bytes, count, late in ((64 << 10, 60, 0.5), (MAX_BYTES, 12, 0.0)):
        sent = near.send_by(how, list(range(count)), max_bytes, "far", None)
        received = far.receive_by(how, count, "near", None, late)
        expected = sent.wait()[0]
        for digests in received.wait():
            assert [seed for seed in range(count) if digests[seed] != expected[seed]] == []


@pytest.mark.parametrize("home", ["driver", "near", "far"])
@pytest.mark.parametrize("how", ["put", "put, async", "put_nowait", "entrust"])
def test_channels(ranks: Callable[..., WorkerGroup], how: str, home: str) -> None:
    near, far = ranks("near"), ranks("far", far=True)
    channel = Channel.create("items", home=None if home == "driver" else home)
    for max_bytes, count, late in ((64 << 10, 60, 0.5), (MAX_BYTES, 12, 0.0)):
        sent = near.send_by(how, list(range(count)), max_bytes, "far", channel)
        received = far.receive_by(how, count, "near", channel, late)
        expected = sent.wait()[0]
        for digests in received.wait():
            assert [seed for seed in range(count) if digests[seed] != expected[seed]] == []
