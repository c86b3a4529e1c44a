"""Process group of weights between real ranks: transfers, and ranks that abort, end or never come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhpc import Cluster, NodePlacementStrategy, Session, WorkerGroup
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.weights.process_group import group_ranks
from tests.unit.weights.group_ranks import GroupRank


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    session = Session.start()
    strategy = NodePlacementStrategy([0] * 3)
    yield GroupRank.create_group().launch(Cluster.local(1, 0), strategy, "ranks")
    session.stop()


def open_group(ranks: WorkerGroup, name: str) -> None:
    ranks.open(name).wait(120)


def test_ranks_are_listed_by_group() -> None:
    addresses = [("trainer", 0), ("near", 1), ("far", 0), ("near", 0)]
    assert group_ranks(addresses) == [("trainer", [0]), ("near", [1, 0]), ("far", [0])]


def test_every_bucket_reaches_every_rank(ranks: WorkerGroup) -> None:
    open_group(ranks, "broadcast")
    sizes = [3, 1, 200]
    expected = [[(index + number) % 256 for index in range(size)] for number, size in enumerate(sizes)]
    assert ranks.broadcast(sizes).wait(120) == [expected] * 3
    assert ranks.broadcast([5]).wait(120) == [[list(range(5))]] * 3, "the same group is used again"


def test_ranks_exchange_with_all_others_at_once(ranks: WorkerGroup) -> None:
    open_group(ranks, "exchange")
    expected = [{peer: [peer, rank] for peer in range(3) if peer != rank} for rank in range(3)]
    assert ranks.exchange().wait(120) == expected


def test_a_rank_that_aborts_ends_the_group_for_all(ranks: WorkerGroup) -> None:
    open_group(ranks, "abort")
    ranks.exchange().wait(120)
    waiting = ranks.execute_on(0, 1).error_of_broadcast()
    ranks.execute_on(2).abort().wait(120)
    for rank, error in enumerate(waiting.wait(120)):
        assert error.startswith(f"GroupLost: ranks-{rank} lost "), error
    assert ranks.state().wait(120) == [{"group": None, "buffers": [], "work": None}] * 3
    open_group(ranks, "after the abort")
    assert ranks.broadcast([2]).wait(120) == [[[0, 1]]] * 3


def test_a_rank_that_does_not_come_is_named(ranks: WorkerGroup) -> None:
    open_group(ranks, "late")
    expected = "DeadlineExceeded: ranks-0 waited 1 s for ranks-1, ranks-2 in an update of weights by gloo"
    assert ranks.execute_on(0).error_of_broadcast(1.0).wait(120) == [expected]


def test_a_rank_that_dies_ends_the_group_for_the_others(ranks: WorkerGroup) -> None:
    """The last test of these ranks."""
    session = Session.running()
    assert session is not None
    open_group(ranks, "death")
    ranks.exchange().wait(120)
    with session.training(SessionPolicies({"ranks": GroupPolicy(min_ranks=1)})):
        waiting = ranks.execute_on(0, 1).error_of_broadcast()
        ranks.execute_on(2).die()
        for rank, error in enumerate(waiting.wait(120)):
            assert error.startswith(f"GroupLost: ranks-{rank} lost "), error
