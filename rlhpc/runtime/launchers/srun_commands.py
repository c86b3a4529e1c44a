"""Command lines of job steps, which `rlhpc plan` prints and the driver starts. Pure functions.

A worker group has one `srun` for each component of the job on which it has ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.imports import run_module

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster

#: Variables that srun reads as options and that batch steps and users set. They are removed, because a step states its
#: resources, binding, input, output and end itself. From the lists of Slurm 22.05, 24.11 and 26.05.
_DROPPED = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|TASKS_PER_NODE|CPUS_PER_|GPUS|GPU_|TRES_|MEM_PER_|GRES|STEP_|OVERCOMMIT|OVERLAP"
    r"|EXCLUSIVE|EXACT|WHOLE|THREADS|THREAD_SPEC|CORE_SPEC|NCORES_|NSOCKETS_|CONSTRAINT|CLUSTER_CONSTRAINT|RESV_PORTS"
    r"|HOSTFILE|ARBITRARY_NODELIST|DISTRIBUTION|DIST_PLANESIZE|SPREAD_|CONSOLIDATE_|USE_MIN_NODES"
    r"|CPU_BIND|MEM_BIND|HINT"
    r"|STDINMODE|STDOUTMODE|STDERRMODE|LABELIO|UNBUFFEREDIO|OPEN_MODE|IO_STDIN|PTY_|REMOTE_CWD|WORKING_DIR|DISABLE_STATUS"
    r"|SRUN_|MPI_TYPE|EXTERNAL_LAUNCHER|TEST_EXEC|CONTAINER|BCAST|SEND_LIBS|COMPRESS"
    r"|WAIT|KILL_BAD_EXIT|NO_KILL|OOM_KILL_STEP|EXIT_|IMMEDIATE|TIMELIMIT|SIGNAL"
    r"|STEPID|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|EXPORT_ENV|HET_SIZE_STEP|LAUNCH_NODE|UMASK)"
    r"|SBATCH_|SRUN_|(CUDA|HIP|ROCR)_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$|ZE_AFFINITY_MASK$|SUBMITIT_"
)


@dataclass(frozen=True)
class SrunStep:
    """Command that starts the ranks of a worker group in one component of the job.

    Attributes:
        group: Name of the worker group.
        component: Index of the component.
        ranks: Ranks of the group, in the order of the step's tasks.
        hosts: Node of each rank; these are the lines of the file in `SLURM_HOSTFILE`.
        argv: The command.
    """

    group: str
    component: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    argv: tuple[str, ...]


class RankPlacement(Protocol):
    """Placement of a rank in a job step."""

    @property
    def rank(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def accelerators(self) -> tuple[int, ...]: ...


def job_steps(
    group: str,
    ranks: Sequence[RankPlacement],
    cluster: Cluster,
    components: Sequence[int],
    hosts: Sequence[str],
    interpreter: str | None,
) -> list[SrunStep]:
    """Returns the steps of a worker group.

    Args:
        group: Name of the worker group.
        ranks: Placements of the group's ranks, in rank order.
        cluster: The nodes; in a plan, their numbers of cores may be unknown (0).
        components: Component of each node.
        hosts: Host name of each node.
        interpreter: Python of the ranks' node group, if it has a separate one.
    """
    command = [*cluster.container, *run_module("rlhpc.runtime.worker_process", "step", python=interpreter)]
    steps = []
    for component in sorted(set(components)):
        component_ranks = [rank for rank in ranks if components[rank.node_rank] == component]
        if component_ranks:
            options = _options(component_ranks, cluster)
            argv = (*_srun(group, component, len(set(components))), *options, *command)
            names = tuple(hosts[rank.node_rank] for rank in component_ranks)
            steps.append(SrunStep(group, component, tuple(rank.rank for rank in component_ranks), names, argv))
    return steps


def step_on_nodes(component: int, components: int, nodes: Collection[str], command: Sequence[str]) -> list[str]:
    """Returns a step that runs a command once on each of the given nodes of a component, at the same time as other steps."""
    # Without --mem=0 a step has to wait until other steps release memory.
    srun_options = [
        "srun",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--cpus-per-task=1",
        "--mem=0",
        "--gres=none",
    ]
    component_option = [f"--het-group={component}"] if components > 1 else []
    return [*srun_options, *component_option, f"--nodelist={','.join(sorted(nodes))}", *command]


def clearing_step(component: int, components: int, nodes: Collection[str], folders: Sequence[str]) -> list[str]:
    """Returns a step that removes folders on nodes of a component of the job."""
    return step_on_nodes(component, components, nodes, ["rm", "-rf", "--", *folders])


#: Shell script that kills the processes of a task and all of their children, and waits until all have ended, because an
#: ending process may still use devices and files. It finds the processes by inherited environment variables. Arguments: the
#: step's mark, the number of the task.
_KILL_TASK = """
of_task() {
    for file in $(grep -lsxzF -- "$1" /proc/[0-9]*/environ); do
        grep -qsxzF -- "SLURM_PROCID=$2" "$file" && file=${file#/proc/} && echo "${file%/environ}"
    done
}
with_children() {
    for pid; do echo "$pid"; with_children $(cat /proc/$pid/task/*/children 2>/dev/null); done
}
known=
for second in 1 2 3 4 5 6 7 8 9 10; do
    known=$(printf '%s\\n' $known $(with_children $(of_task "$@")) | sort -un)
    for pid in $known; do kill -KILL "$pid" 2>/dev/null; done
    for moment in 1 2 3 4 5; do
        alive=
        for pid in $known; do grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$pid/status" && alive="$alive $pid"; done
        known=$alive
        [ -n "$known" ] || break
        sleep 0.2
    done
    [ -n "$known$(of_task "$@")" ] || exit 0
done
exit 1
"""


def killing_step(component: int, components: int, node: str, mark: str, task: int) -> list[str]:
    """Returns a step that kills one task of another step, and ends with exit code 0 when the task's processes have ended.

    Args:
        component: Component of the task's node.
        components: Number of the job's components.
        node: Node of the task.
        mark: `NAME=VALUE` of an environment variable that only the processes of the other step have.
        task: Number of the task.
    """
    return step_on_nodes(component, components, [node], ["bash", "-c", _KILL_TASK, "bash", mark, str(task)])


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables that srun reads as options or that belong to the batch step.

    Keeps `SLURM_CONF` and the variables of the job.
    """
    return {name: value for name, value in environ.items() if not _DROPPED.match(name)}


def _srun(name: str, component: int, components: int) -> list[str]:
    srun_options = [
        "srun",
        f"--job-name={name}",
        "--overlap",
        "--mpi=none",
    ]  # a rank is no MPI program, so the site's default for --mpi must not apply
    return [*srun_options, f"--het-group={component}"] if components > 1 else srun_options


def _options(ranks: Sequence[RankPlacement], cluster: Cluster) -> list[str]:
    """Returns srun's options. A step states all its resources, because srun does not inherit all of them from the job."""
    counts = {rank: sum(r.node_rank == rank for r in ranks) for rank in {r.node_rank for r in ranks}}
    nodes = {rank: cluster.nodes[rank] for rank in counts}
    cores_known = all(node.cpus for node in nodes.values())
    cores = min(max(1, nodes[rank].cpus // count) for rank, count in counts.items()) if cores_known else None
    # The hostfile determines the number of nodes: srun of 24.11 refuses `--nodes` in addition.
    options = [f"--ntasks={len(ranks)}", f"--cpus-per-task={cores or '?'}", "--mem=0"]
    # A step gets all accelerators of a node, and each rank selects its accelerators among them. `none` clears the mask that
    # a step would otherwise inherit from component 0.
    on_device = any(rank.accelerators for rank in ranks)
    accelerators = max(len(node.accelerators) for node in nodes.values()) if on_device else 0
    options.append(f"--gres=gpu:{accelerators}" if accelerators else "--gres=none")
    if cores is not None and any(count * cores > nodes[rank].cpus for rank, count in counts.items()):
        options.append("--overcommit")
    # The driver decides which other ranks end when a rank dies, so the site's defaults must not apply.
    return [*options, "--distribution=arbitrary", "--kill-on-bad-exit=0", "--wait=0"]
