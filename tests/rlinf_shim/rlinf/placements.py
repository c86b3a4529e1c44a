"""RLinf's placement strategies and its descriptions of nodes, on rlhpc's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import rlhpc
from rlhpc.runtime.cluster import NodeGroup
from rlhpc.runtime.placement.components import ComponentPlacementStrategy
from rlhpc.runtime.placement.strategies import PlacementStrategy, with_all_devices
from rlinf.workers import as_assertion


@dataclass
class HardwareInfo:
    """One device of a node."""

    type: str
    model: str


@dataclass
class HardwareResource:
    """Devices of one kind of a node."""

    type: str
    infos: list[HardwareInfo]


class Accelerator:
    """Kind of device that is an accelerator."""

    HW_TYPE = "Accelerator"


@dataclass
class NodeInfo:
    """A node, as RLinf's tests describe it."""

    node_labels: list[str]
    node_rank: int
    ray_id: str
    node_ip: str
    num_cpus: int
    python_interpreter_path: str
    default_env_vars: dict[str, str]
    env_vars: dict[str, str]
    hardware_resources: list[HardwareResource]

    @property
    def num_accelerators(self) -> int:
        return sum(len(each.infos) for each in self.hardware_resources if each.type == Accelerator.HW_TYPE)


@dataclass
class NodeGroupEnvConfig:
    """Environment of nodes of a group."""

    node_ranks: list[int]
    env_vars: Any = None
    python_interpreter_path: str | None = None


@dataclass
class NodeGroupInfo:
    """A node group, as RLinf's tests describe it."""

    DEFAULT_GROUP_LABEL = "cluster"
    NODE_PLACEMENT_GROUP_LABEL = "node"

    label: str
    nodes: list[NodeInfo]
    hardware_type: str | None = None
    env_configs: list[NodeGroupEnvConfig] = field(default_factory=list)

    def as_node_group(self) -> NodeGroup:
        """Returns the group as rlhpc has it: one environment and one Python for all of its nodes."""
        pairs = [pair for each in self.env_configs for pair in each.env_vars or ()]
        variables = {name: value for pair in pairs for name, value in pair.items()}
        pythons = [each.python_interpreter_path for each in self.env_configs if each.python_interpreter_path]
        return NodeGroup(self.label, tuple(node.node_rank for node in self.nodes), variables, next(iter(pythons), None))

    def get_node_env_vars(self, node_rank: int) -> dict[str, str]:
        assert node_rank in self.as_node_group().node_ranks
        return dict(self.as_node_group().env_vars)

    def get_node_python_interpreter_path(self, node_rank: int) -> str | None:
        assert node_rank in self.as_node_group().node_ranks
        return self.as_node_group().python_interpreter


def as_cluster(cluster: Any) -> rlhpc.Cluster:
    """Returns a description of nodes as rlhpc's cluster of virtual nodes."""
    if isinstance(cluster, rlhpc.Cluster):
        return cluster
    for group in cluster._node_groups.values():
        if group.hardware_type not in (None, Accelerator.HW_TYPE):
            raise NotImplementedError("rlhpc has no cluster.node_groups.hardware: robots are not resources of nodes")
    virtual = rlhpc.Cluster.local(cluster.num_nodes)
    for node in cluster._nodes:
        indices = range(node.num_accelerators)
        virtual.nodes[node.node_rank] = replace(
            virtual.nodes[node.node_rank], accelerators=tuple(indices), visible_devices=tuple(map(str, indices))
        )
    virtual.node_groups = {
        label: group.as_node_group()
        for label, group in cluster._node_groups.items()
        if label not in (NodeGroupInfo.DEFAULT_GROUP_LABEL, NodeGroupInfo.NODE_PLACEMENT_GROUP_LABEL)
    }
    return virtual


@dataclass
class Placed:
    """RLinf's names of a placement of a rank."""

    rank: int
    cluster_node_rank: int
    local_rank: int
    local_world_size: int
    local_accelerator_rank: int
    visible_accelerators: list[str]
    node_group_label: str
    isolate_accelerator: bool


class Strategy:
    """RLinf's interface of a placement strategy; rlhpc's is `place`."""

    def __init__(self, strategy: PlacementStrategy) -> None:
        self.strategy = strategy

    def place(self, cluster: rlhpc.Cluster) -> list[rlhpc.Placement]:
        return self.strategy.place(cluster)

    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placed]:
        nodes = as_cluster(cluster)
        with as_assertion():
            placements = self.place(nodes)
        if not isolate_accelerator:  # `launch(isolate_gpu=False)`
            placements = with_all_devices(placements, nodes)
        return [
            Placed(
                each.rank, each.node_rank, each.local_rank, each.local_world_size,
                each.accelerators[0] if each.accelerators else -1,
                [str(index) for index in each.visible or each.accelerators],
                each.node_group, isolate_accelerator,
            )
            for each in placements
        ]  # fmt: skip


class PackedPlacementStrategy(Strategy):
    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: Any = None,
    ) -> None:
        with as_assertion():
            super().__init__(
                rlhpc.PackedPlacementStrategy(
                    start_hardware_rank, end_hardware_rank, num_hardware_per_process, stride, node_group
                )
            )


class FlexiblePlacementStrategy(Strategy):
    def __init__(self, hardware_ranks_list: list[list[int]], node_group_label: Any = None) -> None:
        self.arguments = [sorted(ranks) for ranks in hardware_ranks_list], node_group_label
        with as_assertion():  # rlhpc checks duplicates here, RLinf when it places
            unique = [sorted(set(ranks)) for ranks in hardware_ranks_list]
            super().__init__(rlhpc.FlexiblePlacementStrategy(unique, self.arguments[1]))

    def place(self, cluster: rlhpc.Cluster) -> list[rlhpc.Placement]:
        return rlhpc.FlexiblePlacementStrategy(*self.arguments).place(cluster)


class NodePlacementStrategy(Strategy):
    def __init__(self, node_ranks: list[int], node_group_label: Any = None) -> None:
        with as_assertion():
            super().__init__(rlhpc.NodePlacementStrategy(node_ranks, node_group_label))


class HybridComponentPlacement:
    """rlhpc's placement of components with RLinf's names."""

    PLACEMENT: type[rlhpc.HybridComponentPlacement] = rlhpc.HybridComponentPlacement

    def __init__(self, config: Any, cluster: Any) -> None:
        with as_assertion():
            self.placement = self.PLACEMENT(config, as_cluster(cluster))
        # components of one placement have one strategy
        self._strategies: dict[tuple[Any, ...], Strategy] = {}

    def get_strategy(self, component: str) -> Strategy:
        placed = self.placement.get_strategy(component)
        return self._strategies.setdefault((placed.processes, placed.node_group), self.as_strategy(placed))

    def as_strategy(self, placed: ComponentPlacementStrategy) -> Strategy:
        """Returns a component's placement as the strategy that RLinf takes for it."""
        if placed.by_node:
            return NodePlacementStrategy([ranks[0] for ranks in placed.processes], placed.node_group)
        return FlexiblePlacementStrategy([list(ranks) for ranks in placed.processes], placed.node_group)

    def get_hardware_ranks(self, component: str) -> Sequence[int]:
        return sorted({rank for ranks in self.placement.get_strategy(component).processes for rank in ranks})


class ModelParallelComponentPlacement(HybridComponentPlacement):
    """rlhpc's placement of model-parallel components with RLinf's names."""

    PLACEMENT = rlhpc.ModelParallelComponentPlacement
    placement: rlhpc.ModelParallelComponentPlacement

    def as_strategy(self, placed: ComponentPlacementStrategy) -> Strategy:
        resources = [rank for ranks in placed.processes for rank in ranks]
        if placed.by_node or resources != list(range(resources[0], resources[-1] + 1)):
            return super().as_strategy(placed)
        return PackedPlacementStrategy(
            resources[0], resources[-1], len(placed.processes[0]), node_group=placed.node_group
        )

    @property
    def actor_world_size(self) -> int:
        return self.placement.get_world_size("actor")

    @property
    def rollout_world_size(self) -> int:
        return self.placement.get_world_size("rollout")

    @property
    def is_collocated(self) -> bool:
        return self.placement.is_collocated

    @property
    def is_disaggregated(self) -> bool:
        return self.placement.is_disaggregated

    @property
    def has_dedicated_inference(self) -> bool:
        return self.placement.has_component("inference")
