"""Placement of the components of a configuration: hybrid (no constraints) and model-parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.runtime.cluster import Cluster, read_key
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement.grammar import parse_placement
from rlhpc.runtime.placement.strategies import Placement, group_nodes, on_accelerators, on_nodes


class Clustered(Protocol):
    """Configuration with a section `cluster`."""

    @property
    def cluster(self) -> ClusterConfig:
        """Section with the machines and the placement of components."""


@dataclass(frozen=True)
class ComponentPlacementStrategy:
    """Placement of a component, from the configuration.

    Attributes:
        component: Name of the component.
        processes: Resource ranks of each process.
        node_group: Label of the node group; resource ranks count within this group.
        by_node: Whether the resources are nodes rather than accelerators.
        replica: Number of neighbouring ranks that form one engine; 1 for components that are no engines.
    """

    component: str
    processes: tuple[tuple[int, ...], ...]
    node_group: str
    by_node: bool
    replica: int = 1

    def place(self, cluster: Cluster) -> list[Placement]:
        """Returns the placement of each process of the component on a cluster, in rank order."""
        key = f"cluster.component_placement.{self.component}"
        nodes = group_nodes(cluster, self.node_group, key)
        if self.by_node:
            return on_nodes([ranks[0] for ranks in self.processes], nodes, self.node_group, key)
        return on_accelerators(self.processes, cluster, self.node_group, key)


class HybridComponentPlacement:
    """Placement of all components of a configuration, without constraints between components.

    If the section of a component in `ENGINES` has `parallel`, each process of the component is an engine. Each resource of the
    process is then a separate rank, and these neighbouring ranks form the engine.

    Args:
        cfg: Configuration with `cluster.component_placement`.
        cluster: Cluster on which to place the components.

    Raises:
        PlacementError: The placement breaks a rule; the message has the rule, the component and the text.
    """

    ENGINES = ("rollout",)

    def __init__(self, cfg: Clustered | Mapping[str, Any], cluster: Cluster) -> None:
        self.cluster = cluster
        parallel = {name: _read_path(cfg, name, "parallel") for name in self.ENGINES}
        self._parallel = {name: section for name, section in parallel.items() if section is not None}
        placements = read_key(read_key(cfg, "cluster"), "component_placement")
        if not placements:
            raise PlacementError(
                "cluster.component_placement is empty: give every component a place, such as 'actor: 0'"
            )
        if not hasattr(placements, "keys"):
            raise PlacementError(
                f"cluster.component_placement is {placements!r}; write component: ranks, such as 'actor: 0'"
            )
        self._strategies: dict[str, ComponentPlacementStrategy] = {}
        for names, component_placement in dict(placements).items():
            for name in str(names).split(","):
                self._add(name.strip(), component_placement)

    def _add(self, name: str, value: Any) -> None:
        key = f"cluster.component_placement.{name}"
        if not name:
            raise PlacementError("cluster.component_placement: an empty component name")
        if name in self._strategies:
            raise PlacementError(f"{key}: the component is placed twice")
        label, layout = "cluster", value
        if hasattr(value, "keys"):
            unknown = sorted(set(map(str, value.keys())) - {"node_group", "placement"})
            if unknown or "placement" not in value:
                problem = f"unknown key {unknown[0]!r}" if unknown else "placement is missing"
                raise PlacementError(f"{key}: {problem}; keys are node_group and placement")
            label, layout = (
                str(value["node_group"] if value.get("node_group") is not None else label),
                value["placement"],
            )
        if isinstance(layout, bool) or not isinstance(layout, (str, int)):
            raise PlacementError(f"{key}: {layout!r}: write ranks as text, such as '0-3' or '0-1:0-3'")
        nodes = group_nodes(self.cluster, label, f"{key}: node_group {label!r}")
        accelerators = self.cluster.accelerators_of(label)
        by_node = label == "node" or not accelerators
        total, resource = (len(nodes), "node") if by_node else (len(accelerators), "accelerator")
        processes = parse_placement(name, str(layout), total, resource, label)
        replica = 1
        if name in self._parallel:
            processes, replica = self._ranks_of_engines(name, f"{key}: {str(layout)!r}", resource, processes)
        if by_node and (shared := next((ranks for ranks in processes if len(ranks) > 1), None)):
            raise PlacementError(
                f"{key}: {str(layout)!r}: one process on nodes {shared}; rule: without accelerators each process has one node"
            )
        strategy = ComponentPlacementStrategy(name, tuple(map(tuple, processes)), label, by_node, replica)
        try:
            strategy.place(self.cluster)  # checks all rules before any process starts
        except PlacementError as error:
            raise PlacementError(f"{key}: {str(layout)!r}: {str(error).removeprefix(f'{key}: ')}") from None
        self._strategies[name] = strategy

    def _ranks_of_engines(
        self, name: str, at: str, unit: str, processes: list[list[int]]
    ) -> tuple[list[list[int]], int]:
        """Splits the processes into ranks with one resource each; returns the ranks' resources and the ranks per engine.

        Raises:
            PlacementError: The engines differ in size, or their size differs from the size in the configuration.
        """
        key, tp_size = f"{name}.parallel.tensor", _read_path(self._parallel[name], "tensor")
        widths = sorted({len(ranks) for ranks in processes})
        if len(widths) > 1:
            raise PlacementError(f"{at}: processes have {widths} {unit}s; rule: all engines are of one size")
        size = widths[0] if tp_size is None or widths[0] > 1 else int(tp_size)
        if tp_size is not None and size != tp_size:
            raise PlacementError(
                f"{at}: each process has {size} {unit}s, and {key} is {tp_size}; rule: each {unit} of a process is a rank "
                f"of its engine, so write {key}={size}, or leave it out"
            )
        ranks = [[resource] for process in processes for resource in process]
        if size < 1 or len(ranks) % size:
            raise PlacementError(f"{at}: {len(ranks)} ranks are no whole number of engines of {size} ({key})")
        for first_rank in range(0, len(ranks), size):
            placed_on = [rank[0] for rank in ranks[first_rank : first_rank + size]]
            if unit == "accelerator" and len({*placed_on}) < size:
                raise PlacementError(
                    f"{at}: the {size} ranks of an engine ({key}) are on accelerators {placed_on}; "
                    "rule: each has one of its own"
                )
        return ranks, size

    @property
    def components(self) -> list[str]:
        return list(self._strategies)

    def get_strategy(self, component: str) -> ComponentPlacementStrategy:
        """Returns the placement strategy of a component.

        Raises:
            PlacementError: The component has no placement.
        """
        if component not in self._strategies:
            raise PlacementError(
                f"cluster.component_placement has no component {component!r}; it has: {', '.join(self._strategies)}"
            )
        return self._strategies[component]

    def has_component(self, component: str) -> bool:
        return component in self._strategies

    def get_world_size(self, component: str) -> int:
        """Returns the number of processes of the component."""
        return len(self.get_strategy(component).processes)

    def placements(self) -> dict[str, list[Placement]]:
        """Returns the placements of all components, by name."""
        return {name: strategy.place(self.cluster) for name, strategy in self._strategies.items()}


class ModelParallelComponentPlacement(HybridComponentPlacement):
    """Placement of `actor`, `rollout` and the other model-parallel components (`COMPONENTS`) for large models.

    Collocated: actor and rollout alternate on the same accelerators. Disaggregated: each of these components has separate
    accelerators. Other components (env, reward, …) may use any resources.

    Raises:
        PlacementError: Actor or rollout has no placement, the accelerators of a component have gaps, components overlap in
            part, or a rule of the mode is broken.
    """

    COMPONENTS = ("actor", "rollout", "inference", "actor_inference", "critic", "critic_inference")

    def __init__(self, cfg: Clustered | Mapping[str, Any], cluster: Cluster) -> None:
        super().__init__(cfg, cluster)
        for needed in ("actor", "rollout"):
            self.get_strategy(needed)
        used = {name: self._resources(name) for name in self.COMPONENTS if name in self._strategies}
        for name, resources in used.items():
            indices = sorted(resources)
            if indices != list(range(indices[0], indices[-1] + 1)):
                raise PlacementError(
                    f"cluster.component_placement.{name}: {_text(resources)}; rule: the accelerators of a "
                    f"model-parallel component follow one another without gaps"
                )
        self.is_collocated = used["actor"] == used["rollout"]
        self.is_disaggregated = not self.is_collocated
        if self.is_collocated:
            self._check_collocated(used)
        else:
            self._check_disaggregated(used)

    def _resources(self, name: str) -> frozenset[int]:
        """Returns the global accelerator ranks of a component, or its node ranks if it is placed by node."""
        strategy = self._strategies[name]
        if strategy.by_node:
            return frozenset(p.node_rank for p in strategy.place(self.cluster))
        return frozenset(
            self.cluster.accelerator_rank(p.node_rank, index)
            for p in strategy.place(self.cluster)
            for index in p.accelerators
        )

    def _check_collocated(self, used: Mapping[str, frozenset[int]]) -> None:
        for name in ("inference", "actor_inference", "critic_inference"):
            if name in used:
                raise PlacementError(
                    f"cluster.component_placement.{name}: actor and rollout are collocated on {_text(used['actor'])}; "
                    f"rule: there the actor computes log-probabilities itself, so {name} has no place"
                )
        actor, rollout = self.get_world_size("actor"), self.get_world_size("rollout")
        if actor % rollout and rollout % actor:
            raise PlacementError(
                f"cluster.component_placement: actor has {actor} processes and rollout {rollout} on the same "
                f"accelerators; rule: one count divides the other, so that each engine gets its weights from whole ranks"
            )

    def _check_disaggregated(self, used: Mapping[str, frozenset[int]]) -> None:
        names = list(used)
        for i, component in enumerate(names):
            for other_component in names[i + 1 :]:
                shared = used[component] & used[other_component]
                if shared:
                    raise PlacementError(
                        f"cluster.component_placement: {component} on {_text(used[component])} and {other_component} on "
                        f"{_text(used[other_component])} share {_text(shared)}; rule: actor and rollout use either the same "
                        f"accelerators (collocated), or each component its own (disaggregated)"
                    )


def _read_path(source: Any, *path: str) -> Any:
    """Returns the value at a path in a mapping, a DictConfig or a dataclass; None if the path does not exist."""
    for key in path:
        if source is None:
            return None
        if hasattr(source, "keys"):
            source = source[key] if key in source else None  # noqa: SIM401  (get() of a strict DictConfig raises)
        else:
            source = getattr(source, key, None)
    return source


def _text(ranks: frozenset[int]) -> str:
    indices = sorted(ranks)
    if len(indices) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))
