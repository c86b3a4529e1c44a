"""Placement strategies, which assign the resources of a cluster to the processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, PlacementError


@dataclass(frozen=True)
class Placement:
    """Placement of one process.

    Attributes:
        rank: Rank of the process in its group.
        node_rank: Rank of the node.
        local_rank, local_world_size: Index among the group's processes on the node, and their number.
        accelerators: Indices of the process's accelerators on the node.
        node_group: Label of the node group.
        visible: Indices of the accelerators that the process sees, its own among them; empty for its own alone.
    """

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    accelerators: tuple[int, ...] = ()
    node_group: str = "cluster"
    visible: tuple[int, ...] = ()


def with_shared_devices(placements: Sequence[Placement], size: int) -> list[Placement]:
    """Makes each `size` consecutive ranks see the accelerators of all of them on the same node, in the same order.

    Libraries that copy between the accelerators of several processes need this: they name a peer's accelerator by its index.
    """
    shared = []
    for placement in placements:
        first = placement.rank - placement.rank % size
        unit = [other for other in placements[first : first + size] if other.node_rank == placement.node_rank]
        indices = tuple(dict.fromkeys(index for other in unit for index in other.accelerators))
        shared.append(replace(placement, visible=indices if indices != placement.accelerators else ()))
    return shared


class PlacementStrategy(Protocol):
    """Interface of placement strategies: `place(cluster)` returns the placements of a group's ranks, in rank order."""

    def place(self, cluster: Cluster) -> list[Placement]: ...


def _make_placements(locations: Sequence[tuple[int, tuple[int, ...]]], node_group: str) -> list[Placement]:
    """Returns placements for pairs (node, accelerators) in rank order, with ranks and local ranks."""
    totals: dict[int, int] = {}
    for node, _ in locations:
        totals[node] = totals.get(node, 0) + 1
    num_on_node: dict[int, int] = {}
    placements = []
    for rank, (node, accelerators) in enumerate(locations):
        local_rank = num_on_node.get(node, 0)
        num_on_node[node] = local_rank + 1
        placements.append(Placement(rank, node, local_rank, totals[node], accelerators, node_group))
    return placements


def group_nodes(cluster: Cluster, label: str, label_text: str) -> tuple[int, ...]:
    """Returns the node ranks of a node group; for a reserved label, those of all nodes."""
    try:
        return cluster.node_group(label).node_ranks
    except ConfigError as error:
        raise PlacementError(f"{label_text}: {error}") from None


def extent(label: str, resource: str, total: int) -> str:
    """Returns a text with the number of available resources, for messages."""
    scope = "the cluster" if label in ("cluster", "node") else f"node group {label!r}"
    indices = {0: "", 1: " (0)"}.get(total, f" (0 to {total - 1})")
    return f"{scope} has {total} {resource}{'' if total == 1 else 's'}{indices}"


def _locate(
    available: Sequence[tuple[int, int]], label: str, ranks: Sequence[int], origin: str
) -> tuple[int, tuple[int, ...]]:
    """Returns the node of a process and the indices of its accelerators on the node, from global accelerator ranks.

    Raises:
        PlacementError: An accelerator does not exist, or the accelerators are on several nodes.
    """
    for rank in ranks:
        if not 0 <= rank < len(available):
            raise PlacementError(
                f"{origin}: accelerator {rank} does not exist; {extent(label, 'accelerator', len(available))}"
            )
    chosen = [available[r] for r in ranks]
    nodes = sorted({node for node, _ in chosen})
    if len(nodes) > 1:
        raise PlacementError(
            f"{origin}: accelerators {list(ranks)} lie on nodes {nodes}; rule: a process's accelerators share one node"
        )
    return nodes[0], tuple(index for _, index in chosen)


class PackedPlacementStrategy:
    """Placement on consecutive resources from `start` to `end` (inclusive).

    Args:
        start, end: Global accelerator ranks; node ranks if the nodes have no accelerators.
        num_accelerators_per_process: Number of accelerators of each process.
        stride: Distance between the accelerators of one process.
        node_group: Node group in which the ranks count; by default the cluster.
    """

    def __init__(
        self,
        start: int,
        end: int,
        num_accelerators_per_process: int = 1,
        stride: int = 1,
        node_group: str | None = None,
    ) -> None:
        count = end - start + 1
        if start < 0 or count < 1:
            raise PlacementError(f"PackedPlacementStrategy({start}, {end}): start must not be after end, nor negative")
        if num_accelerators_per_process < 1 or stride < 1 or count % (num_accelerators_per_process * stride):
            raise PlacementError(
                f"PackedPlacementStrategy({start}, {end}): {count} resources do not divide by "
                f"num_accelerators_per_process({num_accelerators_per_process}) * stride({stride})"
            )
        self.start, self.end, self.per_process = start, end, num_accelerators_per_process
        self.stride, self.node_group = stride, node_group or "cluster"

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`."""
        origin = f"PackedPlacementStrategy({self.start}, {self.end})"
        nodes = group_nodes(cluster, self.node_group, origin)
        if self.node_group == "node" or not cluster.accelerators_of(self.node_group):
            if self.per_process > 1:
                raise PlacementError(
                    f"{origin}: num_accelerators_per_process is {self.per_process}, but "
                    f"{extent(self.node_group, 'accelerator', 0)}; rule: without accelerators each process has one node"
                )
            return on_nodes(list(range(self.start, self.end + 1)), nodes, self.node_group, origin)
        block = self.per_process * self.stride
        return on_accelerators(
            [
                [first_rank + offset + i * self.stride for i in range(self.per_process)]
                for first_rank in range(self.start, self.end + 1, block)
                for offset in range(self.stride)
            ],
            cluster,
            self.node_group,
            origin,
        )


class FlexiblePlacementStrategy:
    """Placement by an explicit list of accelerator ranks for each process, such as `[[0, 1], [2]]`."""

    def __init__(self, accelerators: Sequence[Sequence[int]], node_group: str | None = None) -> None:
        if not accelerators or not all(len(a) for a in accelerators):
            raise PlacementError(f"FlexiblePlacementStrategy({accelerators!r}): every process needs an accelerator")
        for ranks in accelerators:
            if list(ranks) != sorted(set(ranks)):
                raise PlacementError(f"FlexiblePlacementStrategy: {list(ranks)}; rule: ascending and unique")
        self.accelerators, self.node_group = [list(a) for a in accelerators], node_group or "cluster"

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`."""
        group_nodes(cluster, self.node_group, "FlexiblePlacementStrategy")
        return on_accelerators(self.accelerators, cluster, self.node_group, "FlexiblePlacementStrategy")


class NodePlacementStrategy:
    """Placement of one process for each listed node, without accelerators.

    For example, `[0, 0, 1]` places two processes on node 0 and one process on node 1.
    """

    def __init__(self, node_ranks: Sequence[int], node_group: str | None = None) -> None:
        if not node_ranks:
            raise PlacementError("NodePlacementStrategy([]): at least one process is needed")
        self.node_ranks, self.node_group = list(node_ranks), node_group or "cluster"

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`."""
        origin = f"NodePlacementStrategy({self.node_ranks})"
        return on_nodes(self.node_ranks, group_nodes(cluster, self.node_group, origin), self.node_group, origin)


def on_accelerators(processes: Sequence[Sequence[int]], cluster: Cluster, label: str, origin: str) -> list[Placement]:
    """Returns placements of processes on accelerators of a node group, from the accelerator ranks of each process."""
    available = cluster.accelerators_of(label)
    locations = [
        _locate(available, label, ranks, f"{origin}: process {index}") for index, ranks in enumerate(processes)
    ]
    return _make_placements(locations, label)


def on_nodes(ranks: Sequence[int], nodes: Sequence[int], label: str, origin: str) -> list[Placement]:
    """Returns placements of one process on each node in `ranks`, which are indices in the list `nodes` of node ranks."""
    for rank in ranks:
        if not 0 <= rank < len(nodes):
            raise PlacementError(f"{origin}: node {rank} does not exist; {extent(label, 'node', len(nodes))}")
    return _make_placements([(nodes[rank], ()) for rank in ranks], label)
