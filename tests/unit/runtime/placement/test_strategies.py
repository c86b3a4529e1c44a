"""Placement strategies: packed, flexible and by node."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy
from rlhpc.runtime.placement.strategies import Placement, with_all_devices, with_shared_devices
from tests.unit.runtime.placement.clusters import mixed, spots


class TestStrategies:
    def test_packed(self) -> None:
        cluster = Cluster.local(2, 4)
        places = PackedPlacementStrategy(0, 7, num_accelerators_per_process=2).place(cluster)
        assert spots(places) == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))]
        assert [(p.rank, p.local_rank, p.local_world_size) for p in places] == [
            (0, 0, 2),
            (1, 1, 2),
            (2, 0, 2),
            (3, 1, 2),
        ]

    def test_packed_with_a_stride(self) -> None:
        places = PackedPlacementStrategy(0, 7, 2, stride=2).place(Cluster.local(2, 4))
        assert spots(places) == [(0, (0, 2)), (0, (1, 3)), (1, (0, 2)), (1, (1, 3))]

    def test_packed_in_a_group(self) -> None:
        cluster = Cluster.local(3, 2, [{"label": "b", "node_ranks": "1-2"}])
        places = PackedPlacementStrategy(1, 2, node_group="b").place(cluster)
        assert spots(places) == [(1, (1,)), (2, (0,))] and places[0].node_group == "b"

    def test_packed_without_accelerators_counts_nodes(self) -> None:
        assert spots(PackedPlacementStrategy(1, 2).place(Cluster.local(3, 0))) == [(1, ()), (2, ())]
        with pytest.raises(PlacementError, match="without accelerators each process has one node"):
            PackedPlacementStrategy(0, 1, 2).place(Cluster.local(3, 0))
        assert spots(PackedPlacementStrategy(0, 1, node_group="node").place(Cluster.local(2, 4))) == [(0, ()), (1, ())]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [((1, 0), "start must not be after end"), ((-1, 0), "negative"), ((0, 2, 2), "do not divide"),
         ((0, 3, 2, 4), "num_accelerators_per_process(2) * stride(4)"), ((0, 3, 0), "do not divide")],
    )  # fmt: skip
    def test_packed_violations(self, arguments: tuple[int, ...], says: str) -> None:
        with pytest.raises(PlacementError, match=re.escape(says)):
            PackedPlacementStrategy(*arguments)

    def test_flexible(self) -> None:
        places = FlexiblePlacementStrategy([[0, 2], [5], [1]]).place(Cluster.local(2, 4))
        assert spots(places) == [(0, (0, 2)), (1, (1,)), (0, (1,))]
        assert [(p.local_rank, p.local_world_size) for p in places] == [(0, 2), (0, 1), (1, 2)]

    @pytest.mark.parametrize(
        ("ranks", "says"),
        [([], "every process needs"), ([[]], "every process needs"), ([[1, 0]], "ascending and unique"),
         ([[0, 0]], "ascending and unique"), ([[3, 4]], "share one node"), ([[8]], "accelerator 8 does not exist")],
    )  # fmt: skip
    def test_flexible_violations(self, ranks: list[list[int]], says: str) -> None:
        with pytest.raises(PlacementError, match=says):
            FlexiblePlacementStrategy(ranks).place(Cluster.local(2, 4))

    def test_by_node(self) -> None:
        places = NodePlacementStrategy([0, 0, 1]).place(Cluster.local(2, 4))
        assert spots(places) == [(0, ()), (0, ()), (1, ())]
        assert [(p.rank, p.local_rank, p.local_world_size) for p in places] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
        assert spots(NodePlacementStrategy([1], node_group="cpu").place(mixed())) == [(3, ())]

    @pytest.mark.parametrize("ranks", [[], [2], [-1]])
    def test_by_node_violations(self, ranks: list[int]) -> None:
        with pytest.raises(PlacementError, match=r"NodePlacementStrategy\("):
            NodePlacementStrategy(ranks).place(Cluster.local(2, 4))

    @pytest.mark.parametrize(
        "strategy",
        [PackedPlacementStrategy(0, 0, node_group="x"), FlexiblePlacementStrategy([[0]], "x"),
         NodePlacementStrategy([0], "x")],
    )  # fmt: skip
    def test_group_that_does_not_exist(self, strategy: Any) -> None:
        with pytest.raises(PlacementError, match="no node group 'x'"):
            strategy.place(Cluster.local(1, 1))

    @given(
        nodes=st.integers(1, 4), per_node=st.integers(1, 8), each=st.integers(1, 4), stride=st.integers(1, 4),
        start=st.integers(0, 8), count=st.integers(1, 16),
    )  # fmt: skip
    def test_packed_uses_each_accelerator_once(
        self, nodes: int, per_node: int, each: int, stride: int, start: int, count: int
    ) -> None:
        cluster = Cluster.local(nodes, per_node)
        try:
            places = PackedPlacementStrategy(start, start + count - 1, each, stride).place(cluster)
        except PlacementError:
            return
        used = [cluster.accelerator_rank(p.node_rank, i) for p in places for i in p.accelerators]
        assert sorted(used) == list(range(start, start + count))
        assert [p.rank for p in places] == list(range(len(places))) and {len(p.accelerators) for p in places} == {each}
        for node in range(nodes):
            here = [p for p in places if p.node_rank == node]
            assert [p.local_rank for p in here] == list(range(len(here)))
            assert all(p.local_world_size == len(here) for p in here)


def test_ranks_that_work_together_see_each_others_accelerators() -> None:
    """In one order, and those of their own node alone; a rank by itself sees its own."""
    placed = [
        Placement(0, 0, 0, 3, (2,)), Placement(1, 0, 1, 3, (0,)), Placement(2, 0, 2, 3, (1,)), Placement(3, 1, 0, 2, (5,)),
        Placement(4, 1, 1, 2, (4,)),
    ]  # fmt: skip
    assert [rank.visible for rank in with_shared_devices(placed, 2)] == [(2, 0), (2, 0), (), (), ()]
    assert [rank.visible for rank in with_shared_devices(placed, 4)] == [(2, 0, 1)] * 3 + [()] * 2
    assert [rank.accelerators for rank in with_shared_devices(placed, 4)] == [rank.accelerators for rank in placed]
    on_cpu = [Placement(rank, 0, rank, 2) for rank in range(2)]
    assert with_shared_devices(on_cpu, 2) == on_cpu


def test_ranks_count_on_over_several_node_groups() -> None:
    """Accelerators, or nodes, of the second group follow those of the first; each rank has the label of its own."""
    groups = [{"label": "a", "node_ranks": "0"}, {"label": "b", "node_ranks": "1"}, {"label": "c", "node_ranks": "2"}]
    cluster = Cluster.local(3, 2, groups)
    labels = ["c", "a"]
    for placed in (
        FlexiblePlacementStrategy([[0, 1], [2], [3]], labels).place(cluster),
        PackedPlacementStrategy(1, 3, node_group=labels).place(cluster),
        NodePlacementStrategy([0, 1, 1], labels).place(cluster),
    ):
        assert [(rank.node_group, rank.node_rank) for rank in placed] == [("c", 2), ("a", 0), ("a", 0)]
        assert [(rank.local_rank, rank.local_world_size) for rank in placed] == [(0, 1), (0, 2), (1, 2)]
    with pytest.raises(
        PlacementError, match=r"accelerators \[1, 2\] are of node groups \['c', 'a'\]; rule: a process is in one"
    ):
        FlexiblePlacementStrategy([[1, 2]], labels).place(cluster)
    with pytest.raises(
        PlacementError, match="accelerator 4 does not exist; node groups 'c', 'a' together have 4 accelerators"
    ):
        FlexiblePlacementStrategy([[4]], labels).place(cluster)
    with pytest.raises(PlacementError, match="no node group 'x'"):
        NodePlacementStrategy([0], ["a", "x"]).place(cluster)


def test_ranks_that_are_not_isolated_see_all_accelerators_of_their_node() -> None:
    cluster = Cluster.local(1, 3)
    placed = with_all_devices(FlexiblePlacementStrategy([[1], [2]]).place(cluster), cluster)
    assert [(rank.accelerators, rank.visible) for rank in placed] == [((1,), (0, 1, 2)), ((2,), (0, 1, 2))]
    assert with_all_devices(NodePlacementStrategy([0]).place(cluster), cluster)[0].visible == (0, 1, 2)
