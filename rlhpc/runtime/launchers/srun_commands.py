"""Command lines of job steps, which `rlhpc plan` prints and the driver starts. Pure functions.

A worker group has one `srun` for each component of the job on which it has ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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


#: Options that the launcher sets for each step, or that contradict these, or that end srun or change what it reads and prints.
_RESERVED_OPTIONS = (
    "--async", "--cpus-per-gpu", "--cpus-per-task", "--distribution", "--error", "--exact", "--exclude",
    "--exclusive", "--external-launcher", "--gpu-bind", "--gpus", "--gpus-per-node", "--gpus-per-socket",
    "--gpus-per-task", "--gres", "--help", "--het-group", "--immediate", "--input", "--job-name", "--jobid",
    "--kill-on-bad-exit", "--label", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--multi-prog", "--no-allocate",
    "--no-kill", "--nodefile", "--nodelist", "--nodes", "--ntasks", "--ntasks-per-core", "--ntasks-per-gpu",
    "--ntasks-per-node", "--ntasks-per-socket", "--ntasks-per-tres", "--output", "--overcommit", "--overlap",
    "--oversubscribe", "--pack-group", "--preserve-env", "--pty", "--relative", "--test-only", "--tres-per-task",
    "--usage", "--version", "--wait", "--whole",
)  # fmt: skip
#: The same options by their letters.
_RESERVED_LETTERS = frozenset("ceEFGhIiJKklmNnOorsVWwxZ")


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
    command_prefix: Sequence[str] = (),
) -> list[SrunStep]:
    """Returns the steps of a worker group.

    Args:
        group: Name of the worker group.
        ranks: Placements of the group's ranks, in rank order.
        cluster: The nodes; in a plan, their numbers of cores may be unknown (0).
        components: Component of each node.
        hosts: Host name of each node.
        interpreter: Python of the ranks (`Cluster.interpreter`); None is this one.
        command_prefix: Command that starts each rank's interpreter, such as a profiler.
    """
    program = run_module("rlhpc.runtime.worker_process", "step", python=interpreter)
    command = [*cluster.container, *command_prefix, *program]
    steps = []
    for component in sorted(set(components)):
        component_ranks = [rank for rank in ranks if components[rank.node_rank] == component]
        if component_ranks:
            options = _options(component_ranks, cluster)
            argv = (*_build_srun(group, component, len(set(components)), cluster.srun), *options, *command)
            node_names = tuple(hosts[rank.node_rank] for rank in component_ranks)
            steps.append(SrunStep(group, component, tuple(rank.rank for rank in component_ranks), node_names, argv))
    return steps


def broken_srun_rule(srun_arguments: Sequence[str]) -> str:
    """Returns the rule that an option in `cluster.srun` breaks; "" if srun may get all of them."""
    example = "such as --network=single_node_vni"
    for srun_argument in srun_arguments:
        name, _, option_value = srun_argument.partition("=")
        if not re.fullmatch(r"--[a-z][a-z0-9_-]*|-[A-Za-z]\S*", name):
            return f"{srun_argument!r} is not an option: write each option as one word, {example}"
        if name == "--export":
            if option_value.split(",")[0] != "ALL":
                return "ranks need the variables of their step; allowed: --export=ALL, and --export=ALL,NAME=VALUE"
        elif _is_reserved(name):
            option_name = name if name.startswith("--") else name[:2]
            return (
                f"{option_name} is an option that rlhpc itself sets for its job steps, or whose default it needs; "
                f"allowed: other "
                f"options of srun, {example}"
            )
    return ""


def _is_reserved(name: str) -> bool:
    """Returns whether an option is reserved, even if it is abbreviated as srun allows, or written by its letter."""
    if name.startswith("--"):
        return any(srun_option.startswith(name) for srun_option in _RESERVED_OPTIONS)
    return name[1] in _RESERVED_LETTERS


def with_default_options(srun_arguments: Sequence[str]) -> list[str]:
    """Returns the options of `cluster.srun`, after the default `--mpi=none` unless they select an MPI type.

    A rank is no MPI program, so the site's default for `--mpi` must not apply.
    """
    selects_mpi = any(srun_argument.partition("=")[0] == "--mpi" for srun_argument in srun_arguments)
    return [*([] if selects_mpi else ["--mpi=none"]), *srun_arguments]


#: Options of one letter of `nsys profile` → their names.
_NSYS_LETTERS = {"f": "force-overwrite", "o": "output", "s": "sample", "t": "trace"}
_NSYS_OPTIONS = {"trace": "cuda,nvtx,osrt,cublas,cudnn", "sample": "none", "force-overwrite": "true"}
#: Options that `nsys_options` must not have: the run folder decides where reports are.
NSYS_RESERVED = ("o", "output")


def nsys_options(options: Mapping[str, Any], steps: Collection[int] = ()) -> dict[str, str | None]:
    """Returns the options of `nsys profile`, by name; None is an option without a value.

    Args:
        options: The user's options (`runner.trace.profile.nsys_options`), which replace the others.
        steps: Steps to record (`runner.trace.profile.nsys_steps`), one report for each run of neighbouring steps; empty for
            the process from its start to its end. The rank opens and closes the range (`Instrumented.capture_profile_range`).
    """
    values: dict[str, str | None] = dict(_NSYS_OPTIONS)
    if steps:
        num_ranges = sum(step - 1 not in steps for step in steps)
        range_end = "stop" if num_ranges == 1 else f"repeat:{num_ranges}"
        values |= {"capture-range": "cudaProfilerApi", "capture-range-end": range_end}
    for name, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[_NSYS_LETTERS.get(name, name)] = None if value is True and name not in values else text
    return values


def nsys_command(folder: Path, group: str, options: Mapping[str, str | None]) -> list[str]:
    """Returns the command that runs a rank under Nsight Systems; the rank's own command follows.

    Each process writes `<group>-<host>-<pid>.nsys-rep` when it ends, or when a range of steps ends.

    Args:
        folder: Folder of the reports.
        group: Worker group of the rank.
        options: Result of `nsys_options`.
    """
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    return ["nsys", "profile", *words, f"--output={folder}/{group}-%h-%p"]


def _step_on_nodes(
    component: int, num_components: int, nodes: Collection[str], command: Sequence[str], srun: Sequence[str] = ()
) -> list[str]:
    """Returns a step that runs a command once on each of the given nodes of a component, at the same time as other steps.

    Args:
        component: Component of the nodes.
        num_components: Number of the job's components.
        nodes: Names of the nodes.
        command: The command.
        srun: Further options of srun (`cluster.srun`).
    """
    # Without --mem=0 a step has to wait until other steps release memory.
    srun_options = [
        "srun",
        "--overlap",
        *with_default_options(srun),
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--cpus-per-task=1",
        "--mem=0",
        "--gres=none",
    ]
    component_option = [f"--het-group={component}"] if num_components > 1 else []
    return [*srun_options, *component_option, f"--nodelist={','.join(sorted(nodes))}", *command]


def node_commands(cluster: Cluster) -> list[tuple[list[str], list[str]]]:
    """Returns the nodes of each component of the job, and the words of a step that runs a command once on each of them."""
    nodes_by_component: dict[int, list[str]] = {}
    for node in cluster.nodes:
        nodes_by_component.setdefault(node.het_group or 0, []).append(node.name)
    return [
        (nodes, _step_on_nodes(component, len(nodes_by_component), nodes, [], cluster.srun))
        for component, nodes in nodes_by_component.items()
    ]


def clearing_step(
    component: int, num_components: int, nodes: Collection[str], folders: Sequence[str], srun: Sequence[str] = ()
) -> list[str]:
    """Returns a step that removes folders on nodes of a component of the job."""
    return _step_on_nodes(component, num_components, nodes, ["rm", "-rf", "--", *folders], srun)


#: Shell script that kills the processes of a task and all of their children, and waits until all have ended, because an
#: ending process may still use devices and files. It finds the processes by inherited environment variables. Arguments: the
#: step's mark, the number of the task, the session's socket folder (`node_fork.pid_file`).
_KILL_TASK = """
of_task() {
    for file in $(grep -lsxzF -- "$1" /proc/[0-9]*/environ); do
        grep -qsxzF -- "SLURM_PROCID=$2" "$file" && file=${file#/proc/} && echo "${file%/environ}"
    done
}
with_children() {
    for pid; do echo "$pid"; with_children $(cat /proc/$pid/task/*/children 2>/dev/null); done
}
# a forked rank has the environment of the process that forked it
known=$(with_children $(cat "$3/forked-${1#*=}-$2" 2>/dev/null))
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


def killing_step(
    component: int, num_components: int, node: str, step_mark: str, task: int, folder: Path, srun: Sequence[str] = ()
) -> list[str]:
    """Returns a step that kills one task of another step, and ends with exit code 0 when the task's processes have ended.

    Args:
        component: Component of the task's node.
        num_components: Number of the job's components.
        node: Node of the task.
        step_mark: `NAME=VALUE` of an environment variable that only the processes of the other step have.
        task: Number of the task.
        folder: The session's socket folder on the node.
        srun: Further options of srun (`cluster.srun`).
    """
    command = ["bash", "-c", _KILL_TASK, "bash", step_mark, str(task), str(folder)]
    return _step_on_nodes(component, num_components, [node], command, srun)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables that srun reads as options or that belong to the batch step.

    Keeps `SLURM_CONF` and the variables of the job.
    """
    return {name: variable_value for name, variable_value in environ.items() if not _DROPPED.match(name)}


def _build_srun(name: str, component: int, num_components: int, srun: Sequence[str]) -> list[str]:
    srun_options = ["srun", f"--job-name={name}", "--overlap", *with_default_options(srun)]
    return [*srun_options, f"--het-group={component}"] if num_components > 1 else srun_options


def _options(ranks: Sequence[RankPlacement], cluster: Cluster) -> list[str]:
    """Returns srun's options. A step states all its resources, because srun does not inherit all of them from the job."""
    ranks_by_node = {rank: sum(r.node_rank == rank for r in ranks) for rank in {r.node_rank for r in ranks}}
    nodes = {rank: cluster.nodes[rank] for rank in ranks_by_node}
    cores_known = all(node.cpus for node in nodes.values())
    cores = (
        min(max(1, nodes[rank].cpus // num_ranks) for rank, num_ranks in ranks_by_node.items()) if cores_known else None
    )
    # The hostfile determines the number of nodes: srun of 24.11 refuses `--nodes` in addition.
    options = [f"--ntasks={len(ranks)}", f"--cpus-per-task={cores or '?'}", "--mem=0"]
    # A step gets all accelerators of a node, and each rank selects its accelerators among them. `none` clears the mask that
    # a step would otherwise inherit from component 0.
    on_device = any(rank.accelerators for rank in ranks)
    accelerators = max(len(node.accelerators) for node in nodes.values()) if on_device else 0
    options.append(f"--gres=gpu:{accelerators}" if accelerators else "--gres=none")
    if cores is not None and any(num_ranks * cores > nodes[rank].cpus for rank, num_ranks in ranks_by_node.items()):
        options.append("--overcommit")
    # The driver decides which other ranks end when a rank dies, so the site's defaults must not apply.
    return [*options, "--distribution=arbitrary", "--kill-on-bad-exit=0", "--wait=0"]
