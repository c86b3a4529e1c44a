"""What a run would start: job components with their sbatch directives, one step per worker group, the placement grid.

Pure: a configuration (and the cluster it is meant for) in, data and text out. Nothing is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.runtime.cluster import Cluster, visible_accelerators
from rlhpc.runtime.placement import HybridComponentPlacement, Placement

_DIRECTIVES = ("partition", "account", "qos", "constraint", "gres", "mem", "time")


@dataclass(frozen=True)
class Component:
    """One component of the (heterogeneous) job: the nodes of one node group."""

    index: int
    label: str
    nodes: tuple[int, ...]
    directives: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One worker group: its ranks, and the command that starts them in a Slurm job."""

    group: str
    ranks: int
    component: int
    srun: str


@dataclass(frozen=True)
class Plan:
    """Everything `rlhpc plan` prints."""

    name: str
    components: tuple[Component, ...]
    steps: tuple[Step, ...]
    placements: dict[str, list[Placement]]
    node_names: tuple[str, ...]
    accelerators: tuple[int, ...]
    cpus: tuple[int, ...]
    warnings: tuple[str, ...] = field(default=())


def planned_cluster(cfg: Any) -> Cluster:
    """The nodes a configuration asks for, as virtual nodes of this machine."""
    per_node = cfg.cluster.accelerators_per_node
    count = len(visible_accelerators(os.environ)) if per_node is None else int(per_node)
    return Cluster.local(int(cfg.cluster.num_nodes), count, cfg.cluster.node_groups)


def build_plan(cfg: Any, cluster: Cluster | None = None) -> Plan:
    """Plans a run.

    Args:
        cfg: Configuration, as `load_config` gives it.
        cluster: The allocation; by default the nodes that the configuration asks for.

    Raises:
        PlacementError: The placement breaks a rule.
    """
    cluster = cluster or planned_cluster(cfg)
    placement = HybridComponentPlacement(cfg, cluster)
    placements = placement.placements()
    components = _components(cfg, cluster)
    owner = {node: c.index for c in components for node in c.nodes}
    steps = tuple(
        step for group, ranks in placements.items() for step in _steps(group, ranks, owner, len(components), cluster)
    )
    return Plan(
        str(cfg.runner.name), components, steps, placements, tuple(f"node{n.rank}" for n in cluster.nodes),
        tuple(len(n.accelerators) for n in cluster.nodes), tuple(n.cpus for n in cluster.nodes),
        tuple(_oversubscribed(cluster, placements)),
    )  # fmt: skip


def _components(cfg: Any, cluster: Cluster) -> tuple[Component, ...]:
    """One component a node group that asks for resources of its own; the other nodes form the first one."""
    grouped: set[int] = set()
    found: list[tuple[str, tuple[int, ...], Any]] = []
    for raw in cfg.cluster.node_groups:
        nodes = tuple(n for n in cluster.node_group(str(raw.label)).node_ranks if n not in grouped)
        if nodes and (raw.het_component is not None or any(getattr(raw, key) for key in _DIRECTIVES)):
            found.append((str(raw.label), nodes, raw))
            grouped |= set(nodes)
    rest = tuple(n.rank for n in cluster.nodes if n.rank not in grouped)
    if rest:
        found.insert(0, ("cluster", rest, None))
    components = []
    for index, (label, nodes, raw) in enumerate(found):
        lines = [f"--nodes={len(nodes)}", "--ntasks-per-node=1"]
        cpus = getattr(raw, "cpus_per_node", None)
        if cpus:
            lines.append(f"--cpus-per-task={cpus}")
        lines += [f"--{key}={getattr(raw, key)}" for key in _DIRECTIVES if raw is not None and getattr(raw, key)]
        gpus = max(len(cluster.nodes[n].accelerators) for n in nodes)
        if gpus and not (raw is not None and raw.gres):
            lines.append(f"--gres=gpu:{gpus}")
        components.append(Component(index, label, nodes, tuple(lines)))
    return tuple(components)


def _steps(
    group: str, ranks: Sequence[Placement], owner: dict[int, int], components: int, cluster: Cluster
) -> list[Step]:
    """A group's steps: one, or one a component where its ranks span several."""
    steps = []
    for component in sorted({owner[p.node_rank] for p in ranks}):
        mine = [p for p in ranks if owner[p.node_rank] == component]
        nodes = sorted({p.node_rank for p in mine})
        busiest = max(sum(p.node_rank == n for p in mine) for n in nodes)
        cpus = max(1, min(cluster.nodes[n].cpus for n in nodes) // busiest)
        het = f" --het-group={component}" if components > 1 else ""
        steps.append(
            Step(group, len(mine), component,
                 f"srun --overlap{het} --nodes={len(nodes)} --ntasks={len(mine)} --cpus-per-task={cpus} "
                 f"--distribution=arbitrary --kill-on-bad-exit=1 python -m rlhpc.runtime.process")
        )  # fmt: skip
    return steps


def _oversubscribed(cluster: Cluster, placements: dict[str, list[Placement]]) -> list[str]:
    warnings = []
    for node in cluster.nodes:
        here = [p for ranks in placements.values() for p in ranks if p.node_rank == node.rank]
        if len(here) > node.cpus:
            warnings.append(f"node{node.rank}: {len(here)} processes share {node.cpus} cores")
        for index in node.accelerators:
            sharing = [
                g
                for g, ranks in placements.items()
                for p in ranks
                if p.node_rank == node.rank and index in p.accelerators
            ]
            if len(sharing) > 1:
                warnings.append(f"node{node.rank}, accelerator {index}: shared by {', '.join(sharing)}")
    return warnings


def render_plan(plan: Plan) -> str:
    """The plan as text."""
    lines = [f"run {plan.name}: {len(plan.node_names)} node(s), {len(plan.components)} job component(s)", ""]
    for component in plan.components:
        if component.index:
            lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {directive}" for directive in component.directives]
    lines += ["", "steps"]
    width = max(len(step.group) for step in plan.steps)
    lines += [f"  {step.group:{width}}  {step.ranks} rank(s)  {step.srun}" for step in plan.steps]
    lines += ["", "placement"]
    for node, name in enumerate(plan.node_names):
        lines.append(f"  {name} ({plan.cpus[node]} cores, {plan.accelerators[node]} accelerators)")
        slots = (
            [("", None)]
            if not plan.accelerators[node]
            else [(f"accelerator {i}: ", i) for i in range(plan.accelerators[node])]
        )
        for text, index in slots:
            here = [
                f"{group}-{p.rank}" for group, ranks in plan.placements.items() for p in ranks
                if p.node_rank == node and (index is None or index in p.accelerators)
            ]  # fmt: skip
            lines.append(f"    {text}{' '.join(here) or '-'}")
        if plan.accelerators[node]:
            bare = [
                f"{g}-{p.rank}"
                for g, ranks in plan.placements.items()
                for p in ranks
                if p.node_rank == node and not p.accelerators
            ]
            if bare:
                lines.append(f"    no accelerator: {' '.join(bare)}")
    lines += ["", *(f"warning: {w}" for w in plan.warnings)] if plan.warnings else []
    return "\n".join(lines)
