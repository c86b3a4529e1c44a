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


def with_shared_devices(placements: Sequence[Placement], engine_size: int) -> list[Placement]:
    """Makes each `engine_size` consecutive ranks see the accelerators of all of them on the same node, in the same order.

    Libraries that copy between the accelerators of several processes need this: they name a peer's accelerator by its index.
    """
    shared_placements = []
    for placement in placements:
        first_rank = placement.rank - placement.rank % engine_size
        engine_placements = [
            other_placement
            for other_placement in placements[first_rank : first_rank + engine_size]
            if other_placement.node_rank == placement.node_rank
        ]
        indices = tuple(
            dict.fromkeys(index for other_placement in engine_placements for index in other_placement.accelerators)
        )
        shared_placements.append(replace(placement, visible=indices if indices != placement.accelerators else ()))
    return shared_placements


def with_all_devices(placements: Sequence[Placement], cluster: Cluster) -> list[Placement]:
    """Makes each rank see all accelerators of its node; those of its placement remain its own."""
    return [replace(placement, visible=cluster.nodes[placement.node_rank].accelerators) for placement in placements]


class PlacementStrategy(Protocol):
    """Interface of placement strategies: `place(cluster)` returns the placements of a group's ranks, in rank order."""

    def place(self, cluster: Cluster) -> list[Placement]: ...


def _make_placements(locations: Sequence[tuple[str, int, tuple[int, ...]]]) -> list[Placement]:
    """Returns placements for (node group, node, accelerators) in rank order, with ranks and local ranks."""
    ranks_by_node: dict[int, int] = {}
    for _, node, _ in locations:
        ranks_by_node[node] = ranks_by_node.get(node, 0) + 1
    num_on_node: dict[int, int] = {}
    placements = []
    for rank, (node_group, node, accelerators) in enumerate(locations):
        local_rank = num_on_node.get(node, 0)
        num_on_node[node] = local_rank + 1
        placements.append(Placement(rank, node, local_rank, ranks_by_node[node], accelerators, node_group))
    return placements


def group_nodes(cluster: Cluster, label: str, label_text: str) -> tuple[int, ...]:
    """Returns the node ranks of a node group; for a reserved label, those of all nodes.

    Raises:
        PlacementError: A node group does not exist.
    """
    try:
        return cluster.node_group(label).node_ranks
    except ConfigError as error:
        raise PlacementError(f"{label_text}: {error}") from None


def _labels(node_group: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the labels of a strategy's node groups; by default that of the cluster."""
    if not node_group:
        return ("cluster",)
    return (node_group,) if isinstance(node_group, str) else tuple(node_group)


def extent(labels: Sequence[str] | str, resource: str, num_resources: int) -> str:
    """Returns a text with the number of available resources, for messages."""
    labels = _labels(labels)
    if labels in (("cluster",), ("node",)):
        scope = "the cluster"
    elif len(labels) == 1:
        scope = f"node group {labels[0]!r}"
    else:
        scope = f"node groups {', '.join(map(repr, labels))} together"
    indices = {0: "", 1: " (0)"}.get(num_resources, f" (0 to {num_resources - 1})")
    count_text = f"{num_resources} {resource}{'' if num_resources == 1 else 's'}"
    return f"{scope} {'has' if len(labels) == 1 else 'have'} {count_text}{indices}"


def _locate(
    available_resources: Sequence[tuple[str, int, int]], labels: Sequence[str], ranks: Sequence[int], origin: str
) -> tuple[str, int, tuple[int, ...]]:
    """Returns the node group and node of a process and the indices of its accelerators on the node, from accelerator ranks.

    Raises:
        PlacementError: An accelerator does not exist, or the accelerators are on several nodes or of several node groups.
    """
    for rank in ranks:
        if not 0 <= rank < len(available_resources):
            raise PlacementError(
                f"{origin}: accelerator {rank} does not exist; {extent(labels, 'accelerator', len(available_resources))}"
            )
    selected_resources = [available_resources[r] for r in ranks]
    groups = list(dict.fromkeys(label for label, _, _ in selected_resources))
    if len(groups) > 1:
        raise PlacementError(
            f"{origin}: accelerators {list(ranks)} are of node groups {groups}; rule: a process is in one node group"
        )
    nodes = sorted({node for _, node, _ in selected_resources})
    if len(nodes) > 1:
        raise PlacementError(
            f"{origin}: accelerators {list(ranks)} lie on nodes {nodes}; rule: a process's accelerators share one node"
        )
    return groups[0], nodes[0], tuple(index for _, _, index in selected_resources)


class PackedPlacementStrategy:
    """Placement on consecutive resources from `start` to `end` (inclusive).

    Args:
        start, end: Global accelerator ranks; node ranks if the nodes have no accelerators.
        num_accelerators_per_process: Number of accelerators of each process.
        stride: Distance between the accelerators of one process.
        node_group: Node group in which the ranks count; by default the cluster. In a list of node groups they count on from
            one group to the next.

    Raises:
        PlacementError: The numbers are out of range, or the accelerators do not divide evenly over the processes.
    """

    def __init__(
        self,
        start: int,
        end: int,
        num_accelerators_per_process: int = 1,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
    ) -> None:
        num_accelerators = end - start + 1
        if start < 0 or num_accelerators < 1:
            raise PlacementError(f"PackedPlacementStrategy({start}, {end}): start must not be after end, nor negative")
        if num_accelerators_per_process < 1 or stride < 1 or num_accelerators % (num_accelerators_per_process * stride):
            raise PlacementError(
                f"PackedPlacementStrategy({start}, {end}): {num_accelerators} resources do not divide by "
                f"num_accelerators_per_process({num_accelerators_per_process}) * stride({stride})"
            )
        self.start, self.end, self.per_process = start, end, num_accelerators_per_process
        self.stride, self.node_groups = stride, _labels(node_group)

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`.

        Raises:
            PlacementError: A process would have several accelerators on nodes without accelerators.
        """
        origin = f"PackedPlacementStrategy({self.start}, {self.end})"
        if "node" in self.node_groups or not _accelerators(cluster, self.node_groups, origin):
            if self.per_process > 1:
                raise PlacementError(
                    f"{origin}: num_accelerators_per_process is {self.per_process}, but "
                    f"{extent(self.node_groups, 'accelerator', 0)}; rule: without accelerators each process has one node"
                )
            return on_nodes(range(self.start, self.end + 1), cluster, self.node_groups, origin)
        block = self.per_process * self.stride
        return on_accelerators(
            [
                [first_rank + offset + i * self.stride for i in range(self.per_process)]
                for first_rank in range(self.start, self.end + 1, block)
                for offset in range(self.stride)
            ],
            cluster,
            self.node_groups,
            origin,
        )


class FlexiblePlacementStrategy:
    """Placement by an explicit list of accelerator ranks for each process, such as `[[0, 1], [2]]`.

    With a list of node groups, ranks count on from one group to the next.

    Raises:
        PlacementError: A process has no accelerator, or the ranks are not ascending and unique.
    """

    def __init__(self, accelerators: Sequence[Sequence[int]], node_group: str | Sequence[str] | None = None) -> None:
        if not accelerators or not all(len(a) for a in accelerators):
            raise PlacementError(f"FlexiblePlacementStrategy({accelerators!r}): every process needs an accelerator")
        for ranks in accelerators:
            if list(ranks) != sorted(set(ranks)):
                raise PlacementError(f"FlexiblePlacementStrategy: {list(ranks)}; rule: ascending and unique")
        self.accelerators, self.node_groups = [list(a) for a in accelerators], _labels(node_group)

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`."""
        return on_accelerators(self.accelerators, cluster, self.node_groups, "FlexiblePlacementStrategy")


class NodePlacementStrategy:
    """Placement of one process for each listed node, without accelerators.

    For example, `[0, 0, 1]` places two processes on node 0 and one process on node 1. With a list of node groups, ranks count
    on from one group to the next.

    Raises:
        PlacementError: There is no process.
    """

    def __init__(self, node_ranks: Sequence[int], node_group: str | Sequence[str] | None = None) -> None:
        if not node_ranks:
            raise PlacementError("NodePlacementStrategy([]): at least one process is needed")
        self.node_ranks, self.node_groups = list(node_ranks), _labels(node_group)

    def place(self, cluster: Cluster) -> list[Placement]:
        """Implements `PlacementStrategy.place`."""
        origin = f"NodePlacementStrategy({self.node_ranks})"
        return on_nodes(self.node_ranks, cluster, self.node_groups, origin)


def _accelerators(cluster: Cluster, labels: Sequence[str], origin: str) -> list[tuple[str, int, int]]:
    """Returns (node group, node rank, index on the node) of each accelerator of the node groups, one group after another."""
    for label in labels:
        group_nodes(cluster, label, origin)
    return [(label, node, index) for label in labels for node, index in cluster.accelerators_of(label)]


def on_accelerators(
    processes: Sequence[Sequence[int]], cluster: Cluster, labels: Sequence[str], origin: str
) -> list[Placement]:
    """Returns placements of processes on accelerators of node groups, from the accelerator ranks of each process."""
    available_accelerators = _accelerators(cluster, labels, origin)
    locations = [
        _locate(available_accelerators, labels, ranks, f"{origin}: process {index}")
        for index, ranks in enumerate(processes)
    ]
    return _make_placements(locations)


def on_nodes(ranks: Sequence[int], cluster: Cluster, labels: Sequence[str], origin: str) -> list[Placement]:
    """Returns placements of one process on each node in `ranks`, which count the nodes of one group after another.

    Raises:
        PlacementError: A node does not exist.
    """
    nodes = [(label, node) for label in labels for node in group_nodes(cluster, label, origin)]
    for rank in ranks:
        if not 0 <= rank < len(nodes):
            raise PlacementError(f"{origin}: node {rank} does not exist; {extent(labels, 'node', len(nodes))}")
    return _make_placements([(*nodes[rank], ()) for rank in ranks])
