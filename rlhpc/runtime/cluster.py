"""Cluster: the nodes a run may use, from Slurm's variables inside a job and from this machine outside of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhpc.runtime.allocation import (
    Node,
    expand_hostlist,
    expand_range,
    gpus_in,
    granted_cpus,
    in_slurm_job,
    slurm_nodes,
    visible_accelerators,
)
from rlhpc.runtime.cluster_config import Key, SectionSource
from rlhpc.runtime.devices import VIRTUAL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name

__all__ = ["Cluster", "Node", "NodeGroup", "expand_hostlist", "granted_cpus", "read_key", "visible_accelerators"]

#: Labels that always exist: all nodes counted by accelerator, and all nodes counted by node.
RESERVED_LABELS = ("cluster", "node")
#: Keys of a node group that request nodes with other Slurm options than the rest of the job.
JOB_REQUEST_KEYS: tuple[Key, ...] = ("accelerators_per_node", "het_component", "partition", "constraint", "gres")
#: Accelerator kinds which declare that the run does not use the nodes' accelerators.
NO_ACCELERATOR_KINDS = ("cpu", "none")


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with a label, which share the kind of accelerator, the environment variables and the interpreter."""

    label: str
    node_ranks: tuple[int, ...]
    env_vars: Mapping[str, str] = field(default_factory=dict)
    python_interpreter: str | None = None
    accelerator_kind: str | None = None
    het_component: int | None = None


def read_key(config_source: Any, key: Key, default: Any = None) -> Any:
    """Returns the value of a key of a mapping, a DictConfig or a dataclass.

    Returns the default if the key is absent, null, or required but not set (`???`).
    """
    if config_source is None:
        return default
    if isinstance(config_source, Mapping) or hasattr(config_source, "keys"):
        read_value = config_source[key] if key in config_source else default  # noqa: SIM401  (get() of a strict DictConfig raises)
    else:
        read_value = getattr(config_source, key, default)
    return default if read_value is None or (isinstance(read_value, str) and read_value == "???") else read_value


class Cluster:
    """Nodes and node groups of a run.

    Accelerators are numbered from 0 in node order, both in the cluster and in each node group.

    Args:
        config: The `cluster:` section of a configuration (mapping, DictConfig or dataclass), or a number of nodes.
        num_nodes: Number of nodes to use, starting with the first node.
        environ: Environment with Slurm's variables.

    Raises:
        ConfigError: There are fewer nodes or accelerators than requested, or a node group is wrong.

    Attributes:
        nodes: Nodes in rank order.
        node_groups: Node groups by label, without the reserved labels.
        source: Origin of the nodes: `slurm` (an allocation), `machine` (this machine) or `virtual`.
        granted: (Node rank, index) of each accelerator that the job or the machine has, used or not, also on
            nodes of the job that the run does not use.
        interface: Network interface for connections between nodes; None means the interface on the route between the nodes.
        container: Arguments before every command of a job step.
        container_python: Python of the ranks in the container; None is the driver's.
        srun: Further options of srun for every job step.
        bind_cores: Whether ranks are bound to the cores near their accelerators.
    """

    def __init__(
        self,
        config: SectionSource | int = None,
        *,
        num_nodes: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        env = os.environ if environ is None else environ
        if isinstance(config, int):
            config, num_nodes = None, config
        requested_nodes = read_key(config, "num_nodes") if num_nodes is None else num_nodes
        if requested_nodes is not None:
            _count(requested_nodes, "cluster.num_nodes", 1)
        slurm = in_slurm_job(env)
        if slurm:
            nodes, origin = slurm_nodes(env, asks_slurm=environ is None), f"the Slurm job {env['SLURM_JOB_ID']}"
        else:
            visible_devices = visible_accelerators(env)
            nodes = [Node(0, node_name(), granted_cpus(), tuple(range(len(visible_devices))), visible_devices)]
            origin = "this machine (outside a Slurm job)"
        if requested_nodes is not None and requested_nodes > len(nodes):
            raise ConfigError(
                f"cluster.num_nodes is {requested_nodes}, but {origin} has {len(nodes)} "
                f"({', '.join(n.name for n in nodes)}); set cluster.num_nodes={len(nodes)} or ask for more nodes"
            )
        self.source = "slurm" if slurm else "machine"
        self.nodes: list[Node] = nodes[:requested_nodes]
        granted = {(node.rank, index) for node in nodes for index in node.accelerators}
        groups = list(read_key(config, "node_groups", ()))
        self.node_groups: dict[str, NodeGroup] = _read_groups(groups, self.nodes)
        gres = gpus_in(read_key(config, "gres")) if slurm else None
        self._set_accelerators(groups, read_key(config, "accelerators_per_node"), gres, trust_gres=slurm)
        # Slurm's variables may not name the accelerators of a component; then the configuration gives their number.
        self.granted = frozenset(granted.union(self.accelerators_of() if slurm else ()))
        num_missing = 0 if slurm else len(self.nodes[0].accelerators) - len(visible_accelerators(env))
        if num_missing > 0 and not env.get(VIRTUAL):
            raise ConfigError(
                f"cluster.accelerators_per_node is {len(self.nodes[0].accelerators)}, but {origin} has no visible accelerator "
                "(CUDA_VISIBLE_DEVICES, /dev/nvidia*); set cluster.accelerators_per_node=0 to compute on the CPU, or start "
                "it where there are some (rlhpc submit)"
            )
        self.interface: str | None = read_key(config, "interface")
        self.bind_cores = bool(read_key(config, "bind_cores", True))
        self._read_step_options(config)

    @classmethod
    def local(
        cls,
        num_nodes: int = 1,
        accelerators_per_node: int = 0,
        node_groups: Sequence[SectionSource] = (),
        *,
        cpus: int | None = None,
    ) -> Cluster:
        """Creates virtual nodes on this machine, for tests and for planning.

        Args:
            num_nodes: Number of nodes.
            accelerators_per_node: Accelerators of each node, unless the node's group sets another number.
            node_groups: Node groups as in the configuration. Groups with a `het_component` are sorted by component, like the
                nodes of a Slurm job.
            cpus: Cores of each node, unless the node's group sets another number; 0 means unknown. By default the number of
                cores of this machine.
        """
        return cls._virtual(num_nodes, accelerators_per_node, None, 0, node_groups, cpus)

    @classmethod
    def planned(
        cls, config: SectionSource, environ: Mapping[str, str] | None = None, *, cpus: int | None = None
    ) -> Cluster:
        """Creates virtual nodes for the nodes that a `cluster:` section requests, inside or outside of a Slurm job.

        The number of accelerators of a node is the section's `accelerators_per_node`, else the number in the section's
        `gres`, else the number of visible accelerators of this machine. A node group that requests separate nodes from Slurm
        has the accelerators in the group's `gres` instead of the visible ones.
        """
        visible_devices = visible_accelerators(os.environ if environ is None else environ)
        if (common_cpus := read_key(config, "cpus_per_node")) is not None:
            cpus = _count(common_cpus, "cluster.cpus_per_node", 1)
        cluster = cls._virtual(
            read_key(config, "num_nodes", 1),
            read_key(config, "accelerators_per_node"),
            gpus_in(read_key(config, "gres")),
            len(visible_devices),
            read_key(config, "node_groups", ()),
            cpus,
        )
        cluster._read_step_options(config)
        return cluster

    def _read_step_options(self, config: SectionSource) -> None:
        self.srun: tuple[str, ...] = tuple(map(str, read_key(config, "srun", ())))
        self.container: tuple[str, ...] = tuple(map(str, read_key(config, "container", ())))
        self.container_python: str | None = read_key(config, "container_python")

    def interpreter(self, label: str | None, *, in_step: bool) -> str | None:
        """Returns the Python that starts the ranks of a node group; None is the driver's.

        Args:
            label: Label of the node group; None for ranks without one.
            in_step: Whether the ranks are tasks of job steps, whose commands `container` precedes.
        """
        of_group = self.node_group(label).python_interpreter if label else None
        return of_group or (self.container_python if in_step and self.container else None)

    @classmethod
    def _virtual(
        cls,
        num_nodes: int,
        per_node: Any,
        gres: int | None,
        num_visible: int,
        node_groups: Sequence[SectionSource],
        cpus: int | None,
    ) -> Cluster:
        """Creates virtual nodes with `per_node` accelerators, or with `gres` accelerators if `per_node` is None.

        If both are None, nodes that could be this machine get `num_visible` accelerators.
        """
        cluster = cls.__new__(cls)
        cluster.source, cluster.interface, cluster.bind_cores = "virtual", None, False
        cluster._read_step_options(None)
        cluster.granted = frozenset()
        num_nodes = _count(num_nodes, "cluster.num_nodes", 1)
        groups = list(node_groups)
        host, cores = node_name(), granted_cpus() if cpus is None else cpus
        components = _find_virtual_components(num_nodes, groups)
        cluster.nodes = [
            Node(rank, f"{host}-v{rank}" if num_nodes > 1 else host, cores, het_group=components[rank])
            for rank in range(num_nodes)
        ]
        cluster.node_groups = _read_groups(groups, cluster.nodes)
        by_rank = cluster._find_sections_by_rank(groups)
        for rank, section in by_rank.items():
            if (group_cpus := read_key(section, "cpus_per_node")) is not None:
                cluster.nodes[rank] = replace(cluster.nodes[rank], cpus=_count(group_cpus, "cpus_per_node", 1))
        cluster._set_accelerators(groups, per_node, gres, trust_gres=True)
        if per_node is None and gres is None:
            for node in list(cluster.nodes):
                section = by_rank.get(node.rank)
                if not without_accelerators(section) and not requests_nodes(section):
                    cluster.nodes[node.rank] = _limit_accelerators(node, num_visible, "cluster.accelerators_per_node")
        return cluster

    def _find_sections_by_rank(self, groups: Sequence[SectionSource]) -> dict[int, SectionSource]:
        """Returns the node group's section for each node in a group, by node rank."""
        return {
            rank: section for section in groups for rank in self.node_groups[str(read_key(section, "label"))].node_ranks
        }

    def _set_accelerators(
        self, groups: Sequence[SectionSource], per_node: Any, common_cpus: int | None, *, trust_gres: bool
    ) -> None:
        """Sets each node's accelerators.

        The number is the node group's, else `per_node`, else the number of accelerators that the node has already, else
        `common_cpus`. With `trust_gres`, the group's `gres` gives the number for a node without known accelerators.
        """
        by_rank = self._find_sections_by_rank(groups)
        for node in list(self.nodes):
            section = by_rank.get(node.rank)
            key, num_accelerators = "cluster.accelerators_per_node", per_node
            if num_accelerators is None and not node.accelerators:
                num_accelerators = common_cpus
            gres = gpus_in(read_key(section, "gres")) if trust_gres and not node.accelerators else None
            if (num_per_node := read_key(section, "accelerators_per_node")) is not None:
                key, num_accelerators = (
                    f"cluster.node_groups[{read_key(section, 'label')}].accelerators_per_node",
                    num_per_node,
                )
            elif without_accelerators(section):
                num_accelerators = 0
            elif gres is not None:
                num_accelerators = gres
            if num_accelerators is not None:
                self.nodes[node.rank] = _limit_accelerators(node, _count(num_accelerators, key, 0), key)

    def node_group(self, label: str) -> NodeGroup:
        """Returns the node group with this label; the labels `cluster` and `node` return all nodes.

        Raises:
            ConfigError: The cluster has no node group with this label.
        """
        if label in RESERVED_LABELS:
            return NodeGroup(label, tuple(n.rank for n in self.nodes))
        if label not in self.node_groups:
            labels = ", ".join([*self.node_groups, *RESERVED_LABELS])
            raise ConfigError(f"no node group {label!r}; there are: {labels}")
        return self.node_groups[label]

    def accelerators_of(self, label: str = "cluster") -> list[tuple[int, int]]:
        """Returns (node rank, index on the node) of each accelerator of a group, ordered by accelerator number."""
        return [(rank, i) for rank in self.node_group(label).node_ranks for i in self.nodes[rank].accelerators]

    def accelerator_rank(self, node_rank: int, index: int) -> int:
        """Returns the cluster-wide number of an accelerator of a node."""
        return sum(len(n.accelerators) for n in self.nodes[:node_rank]) + index

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        return sum(len(n.accelerators) for n in self.nodes)

    def __repr__(self) -> str:
        return f"Cluster({self.num_nodes} nodes, {self.num_accelerators} accelerators)"


def _count(count_value: Any, key: str, minimum: int) -> int:
    if isinstance(count_value, bool) or not isinstance(count_value, int) or count_value < minimum:
        raise ConfigError(f"{key} is {count_value!r}; it must be a whole number, {minimum} or more")
    return count_value


def requests_nodes(section: SectionSource) -> bool:
    """Returns whether a node group requests separate nodes from Slurm (`JOB_REQUEST_KEYS`)."""
    return any(read_key(section, key) is not None for key in JOB_REQUEST_KEYS)


def without_accelerators(section: SectionSource) -> bool:
    """Returns whether a node group declares that the run does not use the accelerators of its nodes."""
    return str(read_key(section, "accelerator_kind", "")).lower() in NO_ACCELERATOR_KINDS


def _limit_accelerators(node: Node, num_accelerators: int, key: str) -> Node:
    """Returns the node with its first `num_accelerators` accelerators, or with `num_accelerators` virtual ones if its
    devices are not known.
    """
    visible_devices = node.visible_devices
    if visible_devices and num_accelerators > len(visible_devices):
        raise ConfigError(
            f"{key} is {num_accelerators}, but node {node.name} has {len(visible_devices)} visible accelerator(s) "
            f"({','.join(visible_devices)})"
        )
    visible_devices = (
        visible_devices[:num_accelerators] if visible_devices else tuple(str(i) for i in range(num_accelerators))
    )
    return replace(node, accelerators=tuple(range(num_accelerators)), visible_devices=visible_devices)


# -- node groups ------------------------------------------------------------------------------------------------------


def _read_groups(groups: Sequence[SectionSource], nodes: Sequence[Node]) -> dict[str, NodeGroup]:
    """Returns the node groups of the configuration by label.

    Raises:
        ConfigError: A label is missing, reserved or repeated, or a node is in two groups.
    """
    by_label: dict[str, NodeGroup] = {}
    owner: dict[int, str] = {}
    for index, group_config in enumerate(groups):
        label = str(read_key(group_config, "label", "")).strip()
        if not label:
            raise ConfigError(f"cluster.node_groups[{index}].label is missing")
        if label in RESERVED_LABELS or label in by_label:
            reason = (
                "is given twice" if label in by_label else f"is reserved ({', '.join(RESERVED_LABELS)} always exist)"
            )
            raise ConfigError(f"cluster.node_groups[{index}].label {label!r} {reason}; choose another")
        ranks = _find_group_ranks(group_config, f"cluster.node_groups[{label}]", nodes, assigned_ranks=set(owner))
        for rank in ranks:
            if rank in owner:
                raise ConfigError(
                    f"cluster.node_groups[{label}] has node {rank}, which {owner[rank]!r} has already: "
                    f"a node belongs to one group"
                )
            owner[rank] = label
        by_label[label] = NodeGroup(
            label=label,
            node_ranks=ranks,
            env_vars={str(k): str(v) for k, v in dict(read_key(group_config, "env_vars", {})).items()},
            python_interpreter=read_key(group_config, "python_interpreter"),
            accelerator_kind=read_key(group_config, "accelerator_kind"),
            het_component=read_key(group_config, "het_component"),
        )
    return by_label


def _find_group_ranks(
    raw_group: SectionSource, key: str, nodes: Sequence[Node], assigned_ranks: set[int]
) -> tuple[int, ...]:
    component, group_size = read_key(raw_group, "het_component"), read_key(raw_group, "num_nodes")
    configured_ranks = read_key(raw_group, "node_ranks")
    component_ranks = [n.rank for n in nodes if component is None or (n.het_group or 0) == component]
    if not component_ranks:
        raise ConfigError(
            f"{key}.het_component is {component}, but none of the {len(nodes)} node(s) used comes from it: "
            f"submit a job with that component, or set cluster.num_nodes to all nodes of the job"
        )
    if configured_ranks is not None:
        ranks = parse_node_ranks(configured_ranks, key, len(nodes))
        if foreign_ranks := sorted(set(ranks) - set(component_ranks)):
            raise ConfigError(
                f"{key}.node_ranks has node {foreign_ranks[0]}, which is not of its het_component {component}"
            )
    elif component is None and group_size is not None:
        free_ranks = [r for r in component_ranks if r not in assigned_ranks]
        if _count(group_size, f"{key}.num_nodes", 1) > len(free_ranks):
            raise ConfigError(
                f"{key}.num_nodes is {group_size}, but {len(free_ranks)} of the {len(nodes)} node(s) are left for it"
            )
        ranks = tuple(free_ranks[:group_size])
    else:
        ranks = tuple(component_ranks)
    if group_size is not None and len(ranks) != group_size:
        raise ConfigError(f"{key}.num_nodes is {group_size}, but it has {len(ranks)} node(s): {list(ranks)}")
    return ranks


def parse_node_ranks(ranks_value: Any, key: str, num_nodes: int) -> tuple[int, ...]:
    """Parses the node ranks of a group: an int, a list, or text such as `0-1,3` or `all`. Returns the ranks in ascending
    order.

    Args:
        ranks_value: The configured value.
        key: Configuration key of the group, for error messages.
        num_nodes: Number of nodes of the cluster.

    Raises:
        ConfigError: The value is not a list of ranks, is empty, repeats a rank, or has a rank that the cluster does not have.
    """
    ranks_text = str(ranks_value).strip()
    if ranks_text == "all":
        return tuple(range(num_nodes))
    try:
        if isinstance(ranks_value, bool):
            raise ValueError
        range_texts = ranks_text.split(",") if isinstance(ranks_value, (int, str)) else [str(v) for v in ranks_value]
        ranks = [int(n) for range_text in range_texts for n in expand_range(range_text.strip(), ranks_text)]
    except (ConfigError, TypeError, ValueError):
        raise ConfigError(f"{key}.node_ranks is {ranks_value!r}; write ranks like 0-1,3") from None
    if not ranks:
        raise ConfigError(f"{key}.node_ranks is {ranks_value!r}: a group has at least one node")
    if repeated_ranks := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise ConfigError(f"{key}.node_ranks is {ranks_value!r}: {repeated_ranks[0]} stands there twice")
    if max(ranks) >= num_nodes:
        raise ConfigError(
            f"{key}.node_ranks is {ranks_value!r}: node {max(ranks)} does not exist; the cluster has nodes 0 to "
            f"{num_nodes - 1}"
        )
    return tuple(sorted(ranks))


def _find_virtual_components(num_nodes: int, groups: Sequence[SectionSource]) -> list[int | None]:
    """Returns the Slurm component of each virtual node, sorted by component; None for all nodes if no group has a component.

    A component has as many nodes as its group's `num_nodes` or `node_ranks`. One group may omit both keys and gets the
    remaining nodes. If no group has component 0, the remaining nodes are component 0.
    """
    component_sizes: dict[int, int | None] = {}
    for group_config in groups:
        if (component := read_key(group_config, "het_component")) is None:
            continue
        key, group_size = f"cluster.node_groups[{read_key(group_config, 'label')}]", read_key(group_config, "num_nodes")
        if (configured_ranks := read_key(group_config, "node_ranks")) is not None:
            group_size = len(parse_node_ranks(configured_ranks, key, num_nodes))
        earlier_size = component_sizes.get(_count(component, f"{key}.het_component", 0))
        component_sizes[component] = group_size if earlier_size is None else earlier_size + (group_size or 0)
    if not component_sizes:
        return [None] * num_nodes
    component_sizes.setdefault(0, None)
    if sorted(component_sizes) != list(range(len(component_sizes))):
        raise ConfigError(
            f"cluster.node_groups: het_component values are {sorted(component_sizes)}; they count 0, 1, 2, ..."
        )
    num_assigned = sum(component_size or 0 for component_size in component_sizes.values())
    open_components = [component for component in sorted(component_sizes) if component_sizes[component] is None]
    if (
        len(open_components) > 1
        or num_assigned + len(open_components) > num_nodes
        or (not open_components and num_assigned != num_nodes)
    ):
        raise ConfigError(
            f"cluster.num_nodes is {num_nodes}, but the components of cluster.node_groups have "
            + " + ".join(str(component_sizes[c] or "?") for c in sorted(component_sizes))
            + " nodes: give each group its num_nodes, and cluster.num_nodes their sum"
        )
    for component in open_components:
        component_sizes[component] = num_nodes - num_assigned
    return [component for component in sorted(component_sizes) for _ in range(component_sizes[component] or 0)]
