"""Cluster shapes: pools of resources, and placements of groups on the resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config.sections import RunConfig
from rlhpc.runs.tuning.costs import word_of
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.placement import HybridComponentPlacement


@dataclass(frozen=True)
class Pool:
    """Pool of resources for placements: the accelerators of a node group, or the nodes of a group without accelerators.

    Attributes:
        label: Label of the node group.
        resources: Pairs (node, index of the accelerator on the node); the index is -1 if the resource is the node.
    """

    label: str
    resources: tuple[tuple[int, int], ...]

    @property
    def by_node(self) -> bool:
        """True if the resources are nodes."""
        return all(index < 0 for _, index in self.resources)


@dataclass(frozen=True)
class GroupPlacement:
    """Placement of the ranks of a group.

    Attributes:
        label: Label of the node group.
        text: Placement as written in a configuration.
        processes: Resources of each rank, as indices into the pool.
    """

    label: str
    text: str
    processes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_range(cls, label: str, first_resource: int, count: int, ranks_per_resource: int = 1) -> GroupPlacement:
        """Returns the placement on `count` consecutive resources from `first_resource` on.

        Each resource gets `ranks_per_resource` ranks.
        """
        last_resource = first_resource + count - 1
        resources = str(first_resource) if count == 1 else f"{first_resource}-{last_resource}"
        ranks = count * ranks_per_resource
        placement_text = resources if ranks_per_resource == 1 else f"{resources}:0-{ranks - 1}"
        return cls(
            label, placement_text, tuple((first_resource + rank // ranks_per_resource,) for rank in range(ranks))
        )

    @property
    def resources(self) -> frozenset[int]:
        return frozenset(resource for ranks in self.processes for resource in ranks)


@dataclass(frozen=True)
class ClusterShape:
    """Machines of a run.

    Attributes:
        pools: Label of a node group → pool of its resources.
        cores: Number of cores of each node.
        accelerators: Total number of accelerators.
        memory: Bytes of host memory of a node; 0 if unknown.
        device_memory: Bytes of memory of an accelerator; 0 if unknown.
    """

    pools: Mapping[str, Pool]
    cores: tuple[int, ...]
    accelerators: int = 0
    memory: int = 0
    device_memory: int = 0

    @classmethod
    def from_config(
        cls, cfg: RunConfig, labels: Iterable[str], memory: int = 0, device_memory: int = 0
    ) -> ClusterShape:
        """Returns the machines that a configuration requests, with pools for these node groups."""
        cluster = Cluster.planned(cfg.cluster)
        pools = {}
        for label in labels:
            accelerators = [] if label == "node" else cluster.accelerators_of(label)
            pools[label] = Pool(
                label, tuple(accelerators or ((node, -1) for node in cluster.node_group(label).node_ranks))
            )
        cores = tuple(max(1, node.cpus) for node in cluster.nodes)
        return cls(pools, cores, cluster.num_accelerators, memory, device_memory)

    def resources_of(self, placement: GroupPlacement) -> list[list[tuple[int, int]]]:
        """Returns the resources of each rank, as pairs (node, index of the accelerator on the node)."""
        pool = self.pools[placement.label]
        return [[pool.resources[index] for index in indices] for indices in placement.processes]

    def nodes_of(self, placement: GroupPlacement) -> list[int]:
        """Returns the node of each rank."""
        return [resources[0][0] for resources in self.resources_of(placement)]


@dataclass(frozen=True)
class Candidate:
    """Candidate of the search: the placement of each group, and the value of each variable key."""

    placements: Mapping[str, GroupPlacement]
    settings: Mapping[str, Any]

    def ranks(self, group: str) -> int:
        """Returns the number of the group's ranks."""
        return len(self.placements[group].processes)

    @property
    def mode(self) -> str:
        """Placement mode. `collocated`: all groups share all resources; `disaggregated`: no groups share;
        otherwise `hybrid`.
        """
        used_resources = [{(placement.label, r) for r in placement.resources} for placement in self.placements.values()]
        if all(group_resources == used_resources[0] for group_resources in used_resources):
            return "collocated"
        return "disaggregated" if sum(map(len, used_resources)) == len(set().union(*used_resources)) else "hybrid"

    def placement(self) -> dict[str, Any]:
        """Returns the value of `cluster.component_placement`."""
        return {
            group: placement.text
            if placement.label == "cluster"
            else {"node_group": placement.label, "placement": placement.text}
            for group, placement in self.placements.items()
        }

    def overrides(self) -> list[str]:
        """Returns the candidate as `key=value` overrides."""
        override_words = [word_of(key, setting_value) for key, setting_value in self.settings.items()]
        return [word_of("cluster.component_placement", self.placement()), *override_words]


def configured_placements(cfg: RunConfig) -> dict[str, GroupPlacement]:
    """Returns the placement of a configuration's groups.

    Raises:
        PlacementError: The configuration breaks a placement rule.
    """
    placement = HybridComponentPlacement(cfg, Cluster.planned(cfg.cluster))
    placements = {}
    for name in placement.components:
        strategy = placement.get_strategy(name)
        raw_placement = next(
            ranks_text
            for group_names, ranks_text in cfg.cluster.component_placement.items()
            if name in map(str.strip, str(group_names).split(","))
        )
        placement_text = raw_placement["placement"] if hasattr(raw_placement, "keys") else raw_placement
        placements[name] = GroupPlacement(strategy.node_group, str(placement_text), strategy.processes)
    return placements
