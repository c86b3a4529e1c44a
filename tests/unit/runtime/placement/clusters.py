"""Small clusters and configurations of components."""

from __future__ import annotations

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.placement import Placement

GROUPS = [{"label": "gpu", "node_ranks": "0-1"}, {"label": "cpu", "node_ranks": "2-5", "accelerator_kind": "cpu"}]


def mixed() -> Cluster:
    """Two nodes with four accelerators, four without."""
    return Cluster.local(6, 4, GROUPS)


def spots(placements: list[Placement]) -> list[tuple[int, tuple[int, ...]]]:
    return [(p.node_rank, p.accelerators) for p in placements]
