"""Placement of the components of a configuration: parser of `cluster.component_placement`, and the placements hybrid (no
constraints) and model-parallel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.runtime.cluster import Cluster, read_key
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement.strategies import Placement, extent, group_nodes, on_accelerators, on_nodes


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
        replica: Number of neighbouring ranks that form one engine; 1 for components that are not engines.
    """

    component: str
    processes: tuple[tuple[int, ...], ...]
    node_group: str
    by_node: bool
    replica: int = 1

    def place(self, cluster: Cluster) -> list[Placement]:
        """Returns the placement of each process of the component on a cluster, in rank order."""
        key = f"cluster.component_placement.{self.component}"
        if self.by_node:
            return on_nodes([ranks[0] for ranks in self.processes], cluster, (self.node_group,), key)
        return on_accelerators(self.processes, cluster, (self.node_group,), key)


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
        for component_names, component_placement in dict(placements).items():
            for name in str(component_names).split(","):
                self._add(name.strip(), component_placement)

    def _add(self, name: str, value: Any) -> None:
        key = f"cluster.component_placement.{name}"
        if not name:
            raise PlacementError("cluster.component_placement: an empty component name")
        if name in self._strategies:
            raise PlacementError(f"{key}: the component is placed twice")
        label, layout = "cluster", value
        if hasattr(value, "keys"):
            unknown_keys = sorted(set(map(str, value.keys())) - {"node_group", "placement"})
            if unknown_keys or "placement" not in value:
                problem = f"unknown key {unknown_keys[0]!r}" if unknown_keys else "placement is missing"
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
        num_resources, resource = (len(nodes), "node") if by_node else (len(accelerators), "accelerator")
        processes = parse_placement(name, str(layout), num_resources, resource, label)
        replica = 1
        if name in self._parallel:
            processes, replica = self._split_into_engine_ranks(name, f"{key}: {str(layout)!r}", resource, processes)
        if by_node and (shared_ranks := next((ranks for ranks in processes if len(ranks) > 1), None)):
            raise PlacementError(
                f"{key}: {str(layout)!r}: one process on nodes {shared_ranks}; rule: without accelerators each "
                f"process has one node"
            )
        strategy = ComponentPlacementStrategy(name, tuple(map(tuple, processes)), label, by_node, replica)
        try:
            strategy.place(self.cluster)  # checks all rules before any process starts
        except PlacementError as error:
            raise PlacementError(f"{key}: {str(layout)!r}: {str(error).removeprefix(f'{key}: ')}") from None
        self._strategies[name] = strategy

    def _split_into_engine_ranks(
        self, name: str, engine_position: str, unit_name: str, processes: list[list[int]]
    ) -> tuple[list[list[int]], int]:
        """Splits the processes into ranks with one resource each; returns the ranks' resources and the ranks per engine.

        Raises:
            PlacementError: The engines differ in size, or their size differs from the size in the configuration.
        """
        key, tp_size = f"{name}.parallel.tensor", _read_path(self._parallel[name], "tensor")
        widths = sorted({len(ranks) for ranks in processes})
        if len(widths) > 1:
            raise PlacementError(
                f"{engine_position}: processes have {widths} {unit_name}s; rule: all engines are of one size"
            )
        engine_size = widths[0] if tp_size is None or widths[0] > 1 else int(tp_size)
        if tp_size is not None and engine_size != tp_size:
            raise PlacementError(
                f"{engine_position}: each process has {engine_size} {unit_name}s, and {key} is {tp_size}; rule: each "
                f"{unit_name} of a process is a rank "
                f"of its engine, so write {key}={engine_size}, or leave it out"
            )
        ranks = [[resource] for process in processes for resource in process]
        if engine_size < 1 or len(ranks) % engine_size:
            raise PlacementError(
                f"{engine_position}: {len(ranks)} ranks are no whole number of engines of {engine_size} ({key})"
            )
        for first_rank in range(0, len(ranks), engine_size):
            placed_on = [rank[0] for rank in ranks[first_rank : first_rank + engine_size]]
            if unit_name == "accelerator" and len({*placed_on}) < engine_size:
                raise PlacementError(
                    f"{engine_position}: the {engine_size} ranks of an engine ({key}) are on accelerators {placed_on}; "
                    "rule: each has one of its own"
                )
        return ranks, engine_size

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
        for component in ("actor", "rollout"):
            self.get_strategy(component)
        claims = {name: self._resources(name) for name in self.COMPONENTS if name in self._strategies}
        for name, resources in claims.items():
            indices = sorted(resources)
            if indices != list(range(indices[0], indices[-1] + 1)):
                raise PlacementError(
                    f"cluster.component_placement.{name}: {_format_indices(resources)}; rule: the accelerators of a "
                    f"model-parallel component follow one another without gaps"
                )
        self.is_collocated = claims["actor"] == claims["rollout"]
        self.is_disaggregated = not self.is_collocated
        if self.is_collocated:
            self._check_collocated(claims)
        else:
            self._check_disaggregated(claims)

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

    def _check_collocated(self, claims: Mapping[str, frozenset[int]]) -> None:
        for name in ("inference", "actor_inference", "critic_inference"):
            if name in claims:
                raise PlacementError(
                    f"cluster.component_placement.{name}: actor and rollout are collocated on "
                    f"{_format_indices(claims['actor'])}; "
                    f"rule: there the actor computes log-probabilities itself, so {name} has no place"
                )
        actor, rollout = self.get_world_size("actor"), self.get_world_size("rollout")
        if actor % rollout and rollout % actor:
            raise PlacementError(
                f"cluster.component_placement: actor has {actor} processes and rollout {rollout} on the same "
                f"accelerators; rule: one count divides the other, so that each engine gets its weights from whole ranks"
            )

    def _check_disaggregated(self, claims: Mapping[str, frozenset[int]]) -> None:
        component_names = list(claims)
        for i, component in enumerate(component_names):
            for other_component in component_names[i + 1 :]:
                shared_resources = claims[component] & claims[other_component]
                if shared_resources:
                    raise PlacementError(
                        f"cluster.component_placement: {component} on {_format_indices(claims[component])} and "
                        f"{other_component} on "
                        f"{_format_indices(claims[other_component])} share {_format_indices(shared_resources)}; rule: "
                        f"actor and rollout "
                        f"use either the same "
                        f"accelerators (collocated), or each component its own (disaggregated)"
                    )


def _read_path(config_source: Any, *path: str) -> Any:
    """Returns the value at a path in a mapping, a DictConfig or a dataclass; None if the path does not exist."""
    for key in path:
        if config_source is None:
            return None
        if hasattr(config_source, "keys"):
            config_source = config_source[key] if key in config_source else None  # noqa: SIM401  (get() of a strict DictConfig raises)
        else:
            config_source = getattr(config_source, key, None)
    return config_source


def _format_indices(ranks: frozenset[int]) -> str:
    indices = sorted(ranks)
    if len(indices) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))


Fail = Callable[[str, str], PlacementError]


@dataclass(frozen=True)
class _Segment:
    """Segment of a placement: resources, and the processes that share them."""

    text: str
    resources: tuple[int, ...]
    processes: tuple[int, ...]


def _parse_ranks(ranks_text: str, num_resources: int | None, fail: Fail) -> list[int]:
    """Parses a rank, a range, or (if `num_resources` is given) `all`."""
    ranks_text = ranks_text.strip()
    if ranks_text.lower() == "all":
        if num_resources is None:
            raise fail(ranks_text, "'all' stands for resources only; write process ranks as 0-3")
        return list(range(num_resources))
    ranks_match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", ranks_text)
    if not ranks_match or len(ranks_text) > 24:
        raise fail(ranks_text, "not a rank (3), a range (0-3) or 'all'")
    first_number, last_number = int(ranks_match[1]), int(ranks_match[2] or ranks_match[1])
    if last_number < first_number:
        raise fail(ranks_text, "a range runs upwards")
    if num_resources is not None and last_number >= num_resources:
        raise fail(ranks_text, f"resource {last_number} does not exist")
    if last_number - first_number >= 10**6:
        raise fail(ranks_text, "more than a million processes")
    return list(range(first_number, last_number + 1))


def _split_segments(placement_text: str, num_resources: int, fail: Fail) -> list[_Segment]:
    """Splits a placement into segments.

    Parts without `:` before a part with `:` have two possible meanings. They are separate segments with one process per
    resource, or they are resources of the segment that ends with the part with `:`. The first process rank after the `:`
    decides: in the first case, it counts on after the processes of these parts.
    """
    segments: list[_Segment] = []
    open_segments: list[tuple[str, list[int]]] = []
    num_placed = 0

    def add_segment(segment_text: str, ranks: list[int]) -> None:
        nonlocal num_placed
        segments.append(_Segment(segment_text, tuple(ranks), tuple(range(num_placed, num_placed + len(ranks)))))
        num_placed += len(ranks)

    for part_text in (p.strip() for p in placement_text.split(",")):
        resource_text, colon, process_text = part_text.partition(":")
        if not resource_text.strip() or (colon and not process_text.strip()):
            raise fail(part_text, "ranks are missing; write resource ranks, or resource ranks:process ranks")
        if ":" in process_text:
            raise fail(part_text, "more than one ':'; separate segments with commas")
        ranks = _parse_ranks(resource_text, num_resources, fail)
        if not colon:
            open_segments.append((part_text, ranks))
            continue
        process_ranks = _parse_ranks(process_text, None, fail)
        if open_segments and process_ranks[0] != num_placed:
            for segment in open_segments:
                add_segment(*segment)
            open_segments = []
        segment_text = ",".join([*(p for p, _ in open_segments), part_text])
        if process_ranks[0] != num_placed:
            raise fail(
                segment_text,
                f"process ranks start at {process_ranks[0]} instead of {num_placed}: they count up from 0 without gaps",
            )
        resource_ranks = [r for _, rs in open_segments for r in rs] + ranks
        segments.append(_Segment(segment_text, tuple(resource_ranks), tuple(process_ranks)))
        num_placed, open_segments = num_placed + len(process_ranks), []
    for segment in open_segments:
        add_segment(*segment)
    return segments


def parse_placement(
    component: str, text: str, resources: int, unit: str = "resource", label: str = "cluster"
) -> list[list[int]]:
    """Parses one placement string.

    Args:
        component: Name of the component, for messages.
        text: `resource ranks[:process ranks]`, comma-separated.
        resources: Number of resources.
        unit: Type of the resources (accelerator or node), for messages.
        label: Node group of the resources, for messages.

    Returns:
        Resource ranks of each process, in rank order.

    Raises:
        PlacementError: The text breaks a rule; the message has the component, the wrong part of the text and the rule.
    """

    def make_error(part: str, rule: str) -> PlacementError:
        context = "" if part.strip() == text.strip() else f" in {text!r}"
        return PlacementError(
            f"cluster.component_placement.{component}: {part!r}{context}: {rule} ({extent(label, unit, resources)})"
        )

    processes: list[list[int]] = []
    previous_rank = -1
    for segment in _split_segments(text, resources, make_error):
        for rank in segment.resources:
            if rank <= previous_rank:
                raise make_error(
                    segment.text, f"{unit} {rank} follows {previous_rank}; resource ranks are unique and ascending, and each "
                    f"comma after a ':' begins the next segment"
                )  # fmt: skip
            previous_rank = rank
        num_resources, num_processes = len(segment.resources), len(segment.processes)
        if num_resources == 0:
            raise make_error(segment.text, f"there is no {unit}")
        if num_resources % num_processes and num_processes % num_resources:
            raise make_error(
                segment.text, f"{num_resources} {unit}s and {num_processes} processes: one count must divide the other"
            )
        if num_resources >= num_processes:
            per_process = num_resources // num_processes
            processes += [
                list(segment.resources[i * per_process : (i + 1) * per_process]) for i in range(num_processes)
            ]
        else:
            processes += [[rank] for rank in segment.resources for _ in range(num_processes // num_resources)]
    return processes
