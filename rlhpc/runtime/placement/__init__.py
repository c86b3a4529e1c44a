"""Placement: nodes and accelerators of each rank. Pure functions without I/O.

The grammar of `cluster.component_placement` is `resource ranks[:process ranks]`, comma-separated:

    actor,rollout: 0-7                      # two components, each with one process per accelerator
    rollout: 0-1:0-3                        # two accelerators hold four processes
    reward: 0,2,4-5:0-1                     # two processes with two accelerators each
    env: {node_group: cpu, placement: "0-1:0-3,3-5:4-6"}

A resource is an accelerator, or a node if the cluster (or the node group) has no accelerators. If a process is an engine over
several resources, each resource is a rank of the engine: `rollout: 0-7:0-3` has four engines of two accelerators, which are
eight ranks.
"""

from rlhpc.runtime.placement.components import (
    ComponentPlacementStrategy,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    parse_placement,
)
from rlhpc.runtime.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
)

__all__ = [
    "ComponentPlacementStrategy",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementStrategy",
    "parse_placement",
]
