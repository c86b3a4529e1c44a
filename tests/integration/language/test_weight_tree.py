"""Weights to many hosts: the sender's goes to two of them, and each passes it on to two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tree_ranks import BYTES, Follower, Source

from rlhpc import Cluster, NodePlacementStrategy, Session, WorkerGroup

#: Ranks of each host but the sender's.
HOSTS = (1, 2, 1, 1, 2, 1)


@pytest.fixture(scope="module")
def groups() -> Iterator[list[WorkerGroup]]:
    """The sender, one receiver on its host, and those of the other hosts."""
    session = Session.start(tcp_address="127.0.0.1")
    cluster = Cluster.local(1, 0)
    made = [
        Source.create_group().launch(cluster, NodePlacementStrategy([0]), "source"),
        Follower.create_group().launch(cluster, NodePlacementStrategy([0]), "near"),
    ]
    for number, ranks in enumerate(HOSTS):
        elsewhere = {"RLHPC_HOST_ID": f"host{number}"}
        strategy = NodePlacementStrategy([0] * ranks)
        made.append(Follower.create_group().launch(cluster, strategy, f"host{number}", env_vars=elsewhere))
    yield made
    session.stop()


def opened(groups: list[WorkerGroup], far: int, delta: str = "off") -> list[WorkerGroup]:
    """The sender and its receivers, on so many other hosts."""
    source, *receivers = groups[: 2 + far]
    to = [(group.name, list(range(group.world_size))) for group in receivers]
    for handle in [group.open(to, delta) for group in (source, *receivers)]:
        handle.wait()
    return [source, *receivers]


@pytest.mark.parametrize("far", [2, 6])
def test_every_host_gets_every_version_and_the_sender_sends_it_twice(groups: list[WorkerGroup], far: int) -> None:
    source, *receivers = opened(groups, far)
    everybody = [source, *receivers]
    before = sent_by(everybody)
    for version in range(4):
        handles = [source.send(version), *(group.take() for group in receivers)]
        (digest,), *taken = [handle.wait() for handle in handles]
        assert {found for group in taken for found in group} == {digest}
    times = [round((after - first) / BYTES / 4, 1) for after, first in zip(sent_by(everybody), before, strict=True)]
    # The sender, the rank beside it, and the other hosts.
    assert times == ([2, 0, 0, 0] if far == 2 else [2, 0, 2, 2, 0, 0, 0, 0])


def test_so_do_weights_that_are_not_trained(groups: list[WorkerGroup]) -> None:
    """They are kept for who comes later, and sent once."""
    source, *receivers = opened(groups, 6, "frozen")
    everybody, times = [source, *receivers], []
    for version in range(2):
        before = sent_by(everybody)
        handles = [source.send(version), *(group.take() for group in receivers)]
        (digest,), *taken = [handle.wait() for handle in handles]
        assert {found for group in taken for found in group} == {digest}
        times.append([round((now - then) / BYTES, 1) for now, then in zip(sent_by(everybody), before, strict=True)])
    assert times == [[2, 0, 2, 2, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 0]]


def test_so_do_changes(groups: list[WorkerGroup]) -> None:
    """The first version is sent whole, and kept; later ones hold a few elements, which each host makes in what it got."""
    source, *receivers = opened(groups, 6, "elements")
    everybody, times = [source, *receivers], []
    for version in range(3):
        before = sent_by(everybody)
        handles = [source.send(version), *(group.take() for group in receivers)]
        (digest,), *taken = [handle.wait() for handle in handles]
        assert {found for group in taken for found in group} == {digest}
        times.append([(now - then) / BYTES for now, then in zip(sent_by(everybody), before, strict=True)])
    assert [round(whole, 1) for whole in times[0]] == [2, 0, 2, 2, 0, 0, 0, 0]
    for changed in times[1:]:
        assert [round(part / (changed[0] / 2), 1) for part in changed] == [2, 0, 2, 2, 0, 0, 0, 0]
        assert changed[0] < 0.02


def test_a_host_that_is_behind_gets_what_a_version_was_and_not_what_has_become_of_it(groups: list[WorkerGroup]) -> None:
    source, *receivers = opened(groups, 6, "elements")
    *others, last = receivers
    digests = []
    for version in range(2):
        handles = [source.send(version, together=False), *(group.take() for group in others)]
        (digest,), *_ = [handle.wait() for handle in handles]
        digests.append(digest)
    assert [last.take().wait()[0] for _ in range(2)] == digests


def sent_by(groups: list[WorkerGroup]) -> list[int]:
    """Bytes that the groups have sent to other hosts."""
    return [sum(group.passed_on().wait()) for group in groups]


def test_slow_hosts_hold_the_sender_back_and_get_the_same(groups: list[WorkerGroup]) -> None:
    source, *receivers = opened(groups, 6)
    before = sent_by([source])[0]
    pauses = [0.0, 0.002, 0.0, 0.004, 0.0, 0.001, 0.003]
    handles = [source.send(9), *(group.take(pause) for group, pause in zip(receivers, pauses, strict=True))]
    (digest,), *taken = [handle.wait() for handle in handles]
    assert {found for group in taken for found in group} == {digest}
    assert sent_by([source])[0] - before < 2.1 * BYTES
