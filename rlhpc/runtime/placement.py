"""Placement: which rank of which component runs on which node and accelerators. Pure functions, no I/O.

The grammar of `cluster.component_placement` is `resource ranks[:process ranks]`, comma-separated:

    actor,rollout: 0-7                      # two components, one process an accelerator each
    rollout: 0-1:0-3                        # two accelerators hold four processes
    env: {node_group: cpu, placement: "0-1:0-3,3-5:4-6"}

A resource is an accelerator, or a node where the cluster (or the node group) has no accelerators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, PlacementError


@dataclass(frozen=True)
class Placement:
    """Where one process runs.

    Attributes:
        rank: Rank in its group.
        node_rank: Node.
        local_rank, local_world_size: Position among the group's processes of that node.
        accelerators: Indices on that node.
        node_group: Label of the node group.
    """

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    accelerators: tuple[int, ...] = ()
    node_group: str = "cluster"


class PlacementStrategy(Protocol):
    """Anything that can say where the ranks of a group go."""

    def place(self, cluster: Cluster) -> list[Placement]: ...


def _finish(where: Sequence[tuple[int, tuple[int, ...]]], node_group: str) -> list[Placement]:
    """Adds ranks and local ranks to (node, accelerators) pairs in rank order."""
    totals: dict[int, int] = {}
    for node, _ in where:
        totals[node] = totals.get(node, 0) + 1
    seen: dict[int, int] = {}
    placements = []
    for rank, (node, accelerators) in enumerate(where):
        local = seen.get(node, 0)
        seen[node] = local + 1
        placements.append(Placement(rank, node, local, totals[node], accelerators, node_group))
    return placements


def _one_node(cluster: Cluster, label: str, ranks: Sequence[int], who: str) -> tuple[int, tuple[int, ...]]:
    """Global accelerator ranks of one process → its node and local indices."""
    available = cluster.accelerators_of(label)
    wrong = [r for r in ranks if not 0 <= r < len(available)]
    if wrong:
        raise PlacementError(
            f"{who}: accelerator {wrong[0]} does not exist; {label} has {len(available)} (0 to {len(available) - 1})"
        )
    chosen = [available[r] for r in ranks]
    nodes = {node for node, _ in chosen}
    if len(nodes) > 1:
        raise PlacementError(
            f"{who}: accelerators {list(ranks)} lie on nodes {sorted(nodes)}; rule: a process's accelerators share one node"
        )
    kinds = {
        group.accelerator_kind for group in cluster.node_groups.values() if nodes & set(group.node_ranks)
    }  # fmt: skip
    if label == "cluster" and len(kinds) > 1 and len(ranks) > 1:
        raise PlacementError(
            f"{who}: accelerators of kinds {sorted(map(str, kinds))} in one process; rule: one kind a process"
        )
    return chosen[0][0], tuple(index for _, index in chosen)


class PackedPlacementStrategy:
    """Consecutive resources from `start` to `end` (inclusive), `num_accelerators_per_process` to each process.

    Args:
        start, end: Global accelerator ranks; node ranks where there are no accelerators.
        num_accelerators_per_process: How many each process gets.
        stride: Distance between the accelerators of one process.
        node_group: Count within this group only.
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
        """See `PlacementStrategy`."""
        block = self.per_process * self.stride
        groups = [
            [first + offset + i * self.stride for i in range(self.per_process)]
            for first in range(self.start, self.end + 1, block)
            for offset in range(self.stride)
        ]
        if cluster.accelerators_of(self.node_group):
            return FlexiblePlacementStrategy(groups, self.node_group).place(cluster)
        nodes = cluster.node_group(self.node_group).node_ranks
        return NodePlacementStrategy([n for g in groups for n in g], self.node_group)._check(nodes)


class FlexiblePlacementStrategy:
    """An explicit list of accelerator ranks for every process, such as `[[0, 1], [2]]`."""

    def __init__(self, accelerators: Sequence[Sequence[int]], node_group: str | None = None) -> None:
        if not accelerators or not all(len(a) for a in accelerators):
            raise PlacementError(f"FlexiblePlacementStrategy({accelerators!r}): every process needs an accelerator")
        for ranks in accelerators:
            if list(ranks) != sorted(set(ranks)):
                raise PlacementError(f"FlexiblePlacementStrategy: {list(ranks)}; rule: ascending and unique")
        self.accelerators, self.node_group = [list(a) for a in accelerators], node_group or "cluster"

    def place(self, cluster: Cluster) -> list[Placement]:
        """See `PlacementStrategy`."""
        where = [
            _one_node(cluster, self.node_group, ranks, f"process {p}") for p, ranks in enumerate(self.accelerators)
        ]
        return _finish(where, self.node_group)


class NodePlacementStrategy:
    """One process a listed node, without accelerators: `[0, 0, 1]` puts two on node 0 and one on node 1."""

    def __init__(self, node_ranks: Sequence[int], node_group: str | None = None) -> None:
        if not node_ranks:
            raise PlacementError("NodePlacementStrategy([]): at least one process is needed")
        self.node_ranks, self.node_group = list(node_ranks), node_group or "cluster"

    def place(self, cluster: Cluster) -> list[Placement]:
        """See `PlacementStrategy`."""
        return self._check(cluster.node_group(self.node_group).node_ranks)

    def _check(self, nodes: Sequence[int]) -> list[Placement]:
        for rank in self.node_ranks:
            if not 0 <= rank < len(nodes):
                raise PlacementError(
                    f"node {rank} does not exist; {self.node_group} has {len(nodes)} (0 to {len(nodes) - 1})"
                )
        ordered = [nodes[r] for r in self.node_ranks]
        return _finish([(n, ()) for n in ordered], self.node_group)


# -- the grammar ------------------------------------------------------------------------------------------------------


def _numbers(text: str, total: int | None, fail: Any) -> list[int]:
    text = text.strip()
    if text == "all":
        if total is None:
            raise fail("'all' stands for resources only, not for process ranks")
        return list(range(total))
    match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text)
    if not match:
        raise fail(f"{text!r} is not a rank (3), a range (0-3) or 'all'")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise fail(f"range {text!r} runs backwards; ranks ascend")
    return list(range(first, last + 1))


def parse_placement(component: str, text: str, resources: int) -> list[list[int]]:
    """Parses one placement string.

    Args:
        component: Name, for messages.
        text: `resource ranks[:process ranks]`, comma-separated.
        resources: How many there are.

    Returns:
        The resource ranks of each process, in rank order.

    Raises:
        PlacementError: Names component, the text at fault and the rule.
    """

    def fail(rule: str) -> PlacementError:
        return PlacementError(f"cluster.component_placement.{component}: {text!r}: {rule}")

    segments: list[tuple[list[int], list[int] | None]] = []
    pending: list[int] = []
    for part in str(text).split(","):
        if not part.strip():
            raise fail("an empty part between commas")
        left, colon, right = part.partition(":")
        pending += _numbers(left, resources, fail)
        if colon:
            segments.append((pending, _numbers(right, None, fail)))
            pending = []
    if pending:
        segments.append((pending, None))
    used = [r for ranks, _ in segments for r in ranks]
    if used != sorted(set(used)):
        raise fail("resource ranks must be unique and ascending")
    if used and used[-1] >= resources:
        raise fail(f"resource {used[-1]} does not exist; there are {resources} (0 to {resources - 1})")
    processes: list[list[int]] = []
    for ranks, names in segments:
        names = list(range(len(processes), len(processes) + len(ranks))) if names is None else names
        expected = list(range(len(processes), len(processes) + len(names)))
        if names != expected:
            raise fail(
                f"process ranks {names[0]}-{names[-1]} should be {expected[0]}-{expected[-1]}: process ranks are contiguous, "
                f"ascending and start at 0"
            )
        n, p = len(ranks), len(names)
        if n % p and p % n:
            raise fail(f"{n} resources and {p} processes: one count must divide the other")
        if n >= p:
            each = n // p
            processes += [ranks[i * each : (i + 1) * each] for i in range(p)]
        else:
            processes += [[rank] for rank in ranks for _ in range(p // n)]
    return processes


@dataclass(frozen=True)
class ComponentPlacementStrategy:
    """A component's place as the configuration says it."""

    component: str
    processes: tuple[tuple[int, ...], ...]
    node_group: str
    by_node: bool

    def place(self, cluster: Cluster) -> list[Placement]:
        """See `PlacementStrategy`."""
        who = f"cluster.component_placement.{self.component}: process"
        if not self.by_node:
            where = [_one_node(cluster, self.node_group, ranks, f"{who} {p}") for p, ranks in enumerate(self.processes)]
            return _finish(where, self.node_group)
        nodes = cluster.node_group(self.node_group).node_ranks
        return _finish([(nodes[ranks[0]], ()) for ranks in self.processes], self.node_group)


class HybridComponentPlacement:
    """The placement of every component of a configuration, without constraints between components.

    Args:
        cfg: A configuration with `cluster.component_placement`.
        cluster: Where to place.

    Raises:
        PlacementError: A rule is broken; says which, in which component, and where.
    """

    def __init__(self, cfg: Any, cluster: Cluster) -> None:
        self.cluster = cluster
        raw = cfg["cluster"]["component_placement"] if isinstance(cfg, Mapping) else cfg.cluster.component_placement
        if not raw:
            raise PlacementError(
                "cluster.component_placement is empty: give every component a place, such as 'actor: 0'"
            )
        self._strategies: dict[str, ComponentPlacementStrategy] = {}
        for names, value in dict(raw).items():
            for name in str(names).split(","):
                self._add(name.strip(), value)

    def _add(self, name: str, value: Any) -> None:
        if not name:
            raise PlacementError("cluster.component_placement: an empty component name")
        if name in self._strategies:
            raise PlacementError(f"cluster.component_placement.{name}: the component is placed twice")
        label, text = "cluster", value
        if hasattr(value, "keys"):
            unknown = set(value.keys()) - {"node_group", "placement"}
            if unknown or "placement" not in value:
                raise PlacementError(
                    f"cluster.component_placement.{name}: keys {sorted(value.keys())}; allowed: node_group, placement"
                )
            label, text = str(value.get("node_group") or "cluster"), value["placement"]
        if text is None or isinstance(text, (list, bool, float)):
            raise PlacementError(
                f"cluster.component_placement.{name}: {text!r}: write ranks as text, such as '0-3' or '0-1:0-3'"
            )
        try:
            group = self.cluster.node_group(label)
        except ConfigError as error:
            raise PlacementError(f"cluster.component_placement.{name}: {error}") from None
        accelerators = self.cluster.accelerators_of(label)
        by_node = label == "node" or not accelerators
        total = len(group.node_ranks) if by_node else len(accelerators)
        processes = parse_placement(name, str(text), total)
        if by_node and any(len(ranks) > 1 for ranks in processes):
            raise PlacementError(
                f"cluster.component_placement.{name}: {str(text)!r}: one process over several nodes; rule: without "
                f"accelerators each process has one node"
            )
        strategy = ComponentPlacementStrategy(name, tuple(map(tuple, processes)), label, by_node)
        strategy.place(self.cluster)  # every rule is checked here, before anything starts
        self._strategies[name] = strategy

    @property
    def components(self) -> list[str]:
        return list(self._strategies)

    def get_strategy(self, component: str) -> ComponentPlacementStrategy:
        """The component's strategy.

        Raises:
            PlacementError: It has no place.
        """
        if component not in self._strategies:
            raise PlacementError(
                f"cluster.component_placement has no component {component!r}; it has: {', '.join(self._strategies)}"
            )
        return self._strategies[component]

    def get_world_size(self, component: str) -> int:
        return len(self.get_strategy(component).processes)

    def placements(self) -> dict[str, list[Placement]]:
        """All components' placements."""
        return {name: strategy.place(self.cluster) for name, strategy in self._strategies.items()}


class ModelParallelComponentPlacement(HybridComponentPlacement):
    """Placement of actor and rollout (and others) that is either collocated or disaggregated, nothing in between.

    Collocated: all components use the same resources. Disaggregated: no two share one.

    Raises:
        PlacementError: The components overlap in part.
    """

    def __init__(self, cfg: Any, cluster: Cluster) -> None:
        super().__init__(cfg, cluster)
        used = {
            name: {(p.node_rank, a) for p in places for a in (p.accelerators or (-1,))}
            for name, places in self.placements().items()
        }
        for needed in ("actor", "rollout"):
            self.get_strategy(needed)
        sets = list(used.values())
        self.is_collocated = all(s == sets[0] for s in sets)
        self.is_disaggregated = not self.is_collocated and sum(map(len, sets)) == len(set().union(*sets))
        if not (self.is_collocated or self.is_disaggregated):
            table = "; ".join(f"{name} on {sorted(places)}" for name, places in used.items())
            raise PlacementError(
                f"cluster.component_placement overlaps in part ({table}): use the same resources for all components "
                f"(collocated) or separate ones for each (disaggregated)"
            )
