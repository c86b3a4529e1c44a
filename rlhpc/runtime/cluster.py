"""Cluster: the nodes a run may use, read from Slurm's variables inside a job and from this machine outside of one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError

RESERVED_LABELS = ("cluster", "node")


@dataclass(frozen=True)
class Node:
    """One machine, or one virtual node of this machine.

    Attributes:
        rank: Position in the cluster.
        name: Host name.
        cpus: Cores granted to the run there.
        accelerators: Indices 0..n-1 of the accelerators granted there; index i is the i-th visible one.
        visible_devices: What `CUDA_VISIBLE_DEVICES` calls them, in the same order.
        het_group: Component of a heterogeneous job, or None.
        is_local: Whether processes there can be started without the scheduler.
        address: Network address, where known.
    """

    rank: int
    name: str
    cpus: int = 1
    accelerators: tuple[int, ...] = ()
    visible_devices: tuple[str, ...] = ()
    het_group: int | None = None
    is_local: bool = True
    address: str | None = None


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with a label: one kind of accelerator, their own environment variables and interpreter."""

    label: str
    node_ranks: tuple[int, ...]
    env_vars: Mapping[str, str] = field(default_factory=dict)
    python_interpreter: str | None = None
    accelerator_kind: str | None = None
    het_component: int | None = None


def expand_hostlist(text: str) -> list[str]:
    """Slurm's compressed host list: `n[1-3,07]`, `a1,b[2-3]c[0-1]`.

    Raises:
        ConfigError: The text is not a host list.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            pieces = [literal] if literal else [n for r in ranges.split(",") for n in _range(r, text)]
            expanded = [head + piece for head in expanded for piece in pieces]
        names += expanded
    if not names or any(c in name for name in names for c in "[]"):
        raise ConfigError(f"cannot read the host list {text!r}")
    return names


def _range(text: str, whole: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ConfigError(f"cannot read {text!r} in the host list {whole!r}")
    first, last = match[1], match[2] or match[1]
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def _repeated(text: str) -> list[int]:
    """`4(x2),8` → [4, 4, 8]."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ConfigError(f"cannot read {part!r} in {text!r}")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def granted_cpus() -> int:
    """Cores this process may use: the affinity mask, lowered by a cgroup quota."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cpus


def visible_accelerators(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs this process may use, by the mask if there is one, else by device files; never through torch."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        return tuple(m for m in mask.split(",") if m.strip() not in ("", "-1", "NoDevFiles"))
    devices = [p.name for p in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted((d.removeprefix("nvidia") for d in devices), key=int))


def _from_slurm(env: Mapping[str, str]) -> list[Node]:
    size = int(env.get("SLURM_HET_SIZE", "0") or 0)
    components: list[int | None] = list(range(size)) if size else [None]
    me = {os.uname().nodename, os.uname().nodename.split(".")[0], env.get("SLURMD_NODENAME", "")}
    nodes: list[Node] = []
    for component in components:
        tail = "" if component is None else f"_HET_GROUP_{component}"
        names = expand_hostlist(env[f"SLURM_JOB_NODELIST{tail}"])
        cpus = _repeated(env.get(f"SLURM_JOB_CPUS_PER_NODE{tail}", "1"))
        cpus += cpus[-1:] * (len(names) - len(cpus))
        # Slurm masks the devices of the step or job it started; with the cgroup plugin the i-th visible one is GPU i.
        ids = env.get(f"SLURM_JOB_GPUS{tail}") or (env.get("SLURM_JOB_GPUS") if component in (None, 0) else None)
        per_node = env.get(f"SLURM_GPUS_ON_NODE{tail}") or (
            env.get("SLURM_GPUS_ON_NODE") if component in (None, 0) else None
        )
        for index, name in enumerate(names):
            local = name in me
            if local and component in (None, 0) and "CUDA_VISIBLE_DEVICES" in env:
                visible = visible_accelerators(env)
            elif ids:
                visible = tuple(_ids(ids))
            elif per_node and per_node.isdigit():
                visible = tuple(str(i) for i in range(int(per_node)))
            else:
                visible = ()
            nodes.append(Node(len(nodes), name, cpus[index], tuple(range(len(visible))), visible, component, local))
    return nodes


def _ids(text: str) -> list[str]:
    return [
        n for part in text.split(",") for n in (_range(part, text) if re.fullmatch(r"\d+(-\d+)?", part) else [part])
    ]


class Cluster:
    """The nodes and node groups of a run.

    Args:
        config: The `cluster:` section of a configuration, or a number of nodes.
        num_nodes: Nodes to use; more than there are is an error.
        environ: Environment to read Slurm's variables from.

    Raises:
        ConfigError: More nodes are asked for than there are, or a node group is wrong.
    """

    def __init__(
        self, config: Any = None, *, num_nodes: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        env = os.environ if environ is None else environ
        if isinstance(config, int):
            config, num_nodes = None, config
        asked = num_nodes if num_nodes is not None else _get(config, "num_nodes", None)
        if env.get("SLURM_JOB_ID") and (env.get("SLURM_JOB_NODELIST") or env.get("SLURM_HET_SIZE")):
            nodes, source = _from_slurm(env), f"the Slurm job {env['SLURM_JOB_ID']}"
        else:
            count = _get(config, "accelerators_per_node", None)
            visible = visible_accelerators(env) if count is None else tuple(str(i) for i in range(count))
            nodes = [Node(0, os.uname().nodename, granted_cpus(), tuple(range(len(visible))), visible)]
            source = "this machine (outside a Slurm job)"
        if asked is not None and asked > len(nodes):
            raise ConfigError(
                f"cluster.num_nodes is {asked}, but {source} has {len(nodes)} "
                f"({', '.join(n.name for n in nodes)}); set cluster.num_nodes={len(nodes)} or ask for more nodes"
            )
        self.nodes: list[Node] = nodes if asked is None else nodes[:asked]
        self.node_groups: dict[str, NodeGroup] = {}
        self._read_groups(_get(config, "node_groups", None) or [])

    @classmethod
    def local(cls, num_nodes: int = 1, accelerators_per_node: int = 0, node_groups: Sequence[Any] = ()) -> Cluster:
        """Virtual nodes on this machine, for tests and for planning."""
        cluster = cls.__new__(cls)
        ids = tuple(range(accelerators_per_node))
        cpus = granted_cpus()
        cluster.nodes = [
            Node(rank, f"{os.uname().nodename}-v{rank}" if num_nodes > 1 else os.uname().nodename, cpus, ids,
                 tuple(str(i) for i in ids))
            for rank in range(num_nodes)
        ]  # fmt: skip
        cluster.node_groups = {}
        cluster._read_groups(node_groups)
        return cluster

    def _read_groups(self, groups: Sequence[Any]) -> None:
        for raw in groups:
            label = str(_get(raw, "label", "") or "")
            if not label or label in RESERVED_LABELS or label in self.node_groups:
                why = "is reserved" if label in RESERVED_LABELS else "is given twice" if label else "is missing"
                raise ConfigError(
                    f"cluster.node_groups: label {label!r} {why}; reserved labels: {', '.join(RESERVED_LABELS)}"
                )
            component = _get(raw, "het_component", None)
            ranks = _get(raw, "node_ranks", None)
            if ranks is None and component is not None:
                found = tuple(n.rank for n in self.nodes if n.het_group == component)
            else:
                found = parse_node_ranks(ranks, label, len(self.nodes))
            env_vars = {str(k): str(v) for k, v in dict(_get(raw, "env_vars", None) or {}).items()}
            kind = _get(raw, "accelerator_kind", None)
            interpreter = _get(raw, "python_interpreter", None)
            self.node_groups[label] = NodeGroup(label, found, env_vars, interpreter, kind, component)
            if kind in ("cpu", "none"):
                self.nodes = [
                    replace(n, accelerators=(), visible_devices=()) if n.rank in found else n for n in self.nodes
                ]

    def node_group(self, label: str) -> NodeGroup:
        """The group; `cluster` is all nodes.

        Raises:
            ConfigError: No such label.
        """
        if label == "cluster" or (label == "node" and label not in self.node_groups):
            return NodeGroup(label, tuple(n.rank for n in self.nodes))
        if label not in self.node_groups:
            raise ConfigError(f"no node group {label!r}; there are: {', '.join(['cluster', *self.node_groups])}")
        return self.node_groups[label]

    def accelerators_of(self, label: str = "cluster") -> list[tuple[int, int]]:
        """(node rank, local index) of the group's accelerators in global order."""
        return [(rank, i) for rank in self.node_group(label).node_ranks for i in self.nodes[rank].accelerators]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        return sum(len(n.accelerators) for n in self.nodes)

    def __repr__(self) -> str:
        return f"Cluster({self.num_nodes} nodes, {self.num_accelerators} accelerators)"


def parse_node_ranks(value: Any, label: str, num_nodes: int) -> tuple[int, ...]:
    """Node ranks of a group: an int, a list, or text such as `0-1,3`."""
    if value is None:
        return tuple(range(num_nodes))
    try:
        if isinstance(value, (int, str)):
            ranks = [int(n) for part in str(value).split(",") for n in _range(part.strip(), str(value))]
        else:
            ranks = [int(v) for v in value]
    except (ConfigError, ValueError):
        raise ConfigError(f"cluster.node_groups[{label}].node_ranks is {value!r}; write ranks like 0-1,3") from None
    wrong = [r for r in ranks if not 0 <= r < num_nodes]
    if wrong or len(set(ranks)) != len(ranks):
        raise ConfigError(
            f"cluster.node_groups[{label}].node_ranks is {value!r}: {wrong or 'repeated ranks'}; the cluster has nodes "
            f"0 to {num_nodes - 1}"
        )
    return tuple(ranks)


def _get(source: Any, key: str, default: Any) -> Any:
    if source is None:
        return default
    if isinstance(source, Mapping) or hasattr(source, "get"):
        value = source.get(key, default)
    else:
        value = getattr(source, key, default)
    return value
