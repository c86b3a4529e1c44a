"""Command lines of job steps: what `rlhpc plan` prints and the driver starts. Pure functions.

A worker group is one `srun`, or one for each component of the job that it has ranks on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.import_paths import run_module

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster

#: Variables of the batch step that would bind or resize a step that states its own resources.
_DROPPED = re.compile(
    r"SLURM_(CPU_BIND|NTASKS|NPROCS|GPUS|GPU_|CPUS_PER_|TRES_PER_|MEM_PER_|MEM_BIND|DISTRIBUTION|HINT|EXCLUSIVE"
    r"|THREADS_PER_CORE|NNODES|TASKS_PER_NODE|STEP_|STEPID|PROCID|LOCALID|NODEID|GTIDS|OVERCOMMIT|EXPORT_ENV|HOSTFILE"
    r"|HET_SIZE_STEP|LAUNCH_NODE|SRUN_COMM|UMASK|WHOLE|EXACT)"
    r"|SBATCH_|SRUN_CPUS|CUDA_VISIBLE_DEVICES$|ROCR_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$|SUBMITIT_"
)


@dataclass(frozen=True)
class Step:
    """What starts a worker group, or the part of it in one component of the job.

    Attributes:
        group: Name of the worker group.
        component: Component that it runs on.
        ranks: Ranks of the group, in the order of the step's tasks.
        hosts: The node of each rank: the lines of the file that `SLURM_HOSTFILE` names.
        argv: The command.
    """

    group: str
    component: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    argv: tuple[str, ...]


class Placed(Protocol):
    """What a step needs to know of a rank's place."""

    @property
    def rank(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def accelerators(self) -> tuple[int, ...]: ...


def job_steps(
    group: str,
    ranks: Sequence[Placed],
    cluster: Cluster,
    components: Sequence[int],
    hosts: Sequence[str],
    interpreter: str | None,
) -> list[Step]:
    """The steps of a worker group.

    Args:
        group: Its name.
        ranks: Where its ranks are, in order.
        cluster: The nodes; their cores may be unknown (0), in a plan.
        components: Component of the job that each node belongs to.
        hosts: What each node is called.
        interpreter: Python of the ranks' node group, if it has one of its own.
    """
    command = [*cluster.container, *run_module("rlhpc.runtime.process", "step", python=interpreter)]
    steps = []
    for component in sorted(set(components)):
        mine = [rank for rank in ranks if components[rank.node_rank] == component]
        if mine:
            options = _options(mine, cluster)
            argv = (*_srun(group, component, len(set(components))), *options, *command)
            names = tuple(hosts[rank.node_rank] for rank in mine)
            steps.append(Step(group, component, tuple(rank.rank for rank in mine), names, argv))
    return steps


def clearing_step(component: int, components: int, nodes: Collection[str], folders: Sequence[str]) -> list[str]:
    """The step that removes folders on nodes of a component of the job."""
    start = ["srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--mem=0", "--gres=none"]
    where = [f"--het-group={component}"] if components > 1 else []
    return [*start, *where, f"--nodelist={','.join(sorted(nodes))}", "rm", "-rf", "--", *folders]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The batch step's environment without what Slurm set for that step alone. `SLURM_CONF` and the job's own stay."""
    return {name: value for name, value in environ.items() if not _DROPPED.match(name)}


def _srun(name: str, component: int, components: int) -> list[str]:
    start = ["srun", f"--job-name={name}", "--overlap"]
    return [*start, f"--het-group={component}"] if components > 1 else start


def _options(ranks: Sequence[Placed], cluster: Cluster) -> list[str]:
    """srun's options. A step states all its resources, because srun does not inherit all of them from the job."""
    counts = {rank: sum(r.node_rank == rank for r in ranks) for rank in {r.node_rank for r in ranks}}
    nodes = {rank: cluster.nodes[rank] for rank in counts}
    known = all(node.cpus for node in nodes.values())
    cores = min(max(1, nodes[rank].cpus // count) for rank, count in counts.items()) if known else None
    options = [f"--nodes={len(nodes)}", f"--ntasks={len(ranks)}", f"--cpus-per-task={cores or '?'}", "--mem=0"]
    # A rank picks its own among all accelerators of the node. `none` clears the mask that a step would otherwise inherit
    # from component 0.
    on_device = any(rank.accelerators for rank in ranks)
    accelerators = max(len(node.accelerators) for node in nodes.values()) if on_device else 0
    options.append(f"--gres=gpu:{accelerators}" if accelerators else "--gres=none")
    if cores is not None and any(count * cores > nodes[rank].cpus for rank, count in counts.items()):
        options.append("--overcommit")
    # The driver decides which others end when a rank dies, whatever the site's defaults are.
    return [*options, "--distribution=arbitrary", "--kill-on-bad-exit=0", "--wait=0"]
