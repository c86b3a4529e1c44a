"""Allocation of this process: nodes, cores and accelerators, read from Slurm's variables or from the machine."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_names
from rlhpc.runtime.slurm import ask

#: Slurm's limit on the nodes of a job. A longer list is a typing mistake, and its expansion would fill the memory.
_MAX_NODES = 65533


@dataclass(frozen=True)
class Node:
    """One machine, or one virtual node of this machine.

    Attributes:
        rank: Position in the cluster.
        name: Host name.
        cpus: Cores of the node that the run may use.
        accelerators: Indices 0..n-1 of the accelerators that the run may use; index i is the i-th visible one.
        visible_devices: Names of the accelerators in `CUDA_VISIBLE_DEVICES`, in the same order. For a node that is not local,
            these are the names on this node, because Slurm does not publish the masks of other nodes. A job step on the other
            node therefore looks up index i in its own mask.
        het_group: Component of a heterogeneous job, or None.
        is_local: Whether this process can start processes on the node without the scheduler.
        address: Network address, if known.
    """

    rank: int
    name: str
    cpus: int = 1
    accelerators: tuple[int, ...] = ()
    visible_devices: tuple[str, ...] = ()
    het_group: int | None = None
    is_local: bool = True
    address: str | None = None


def expand_range(range_text: str, full_text: str) -> list[str]:
    """Expands a range of numbers: `3` → ["3"]; `08-11` → ["08", "09", "10", "11"]. Keeps the first number's width.

    Raises:
        ConfigError: Not a number or an ascending range; quotes `full_text`, the text that contains it.
    """
    range_match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", range_text)
    if not range_match:
        raise ConfigError(f"cannot read {range_text!r} in {full_text!r}: write a number (3) or a range (0-3)")
    first_number, last_number = int(range_match[1]), int(range_match[2] or range_match[1])
    if last_number < first_number or last_number - first_number >= _MAX_NODES:
        raise ConfigError(
            f"cannot read {range_text!r} in {full_text!r}: "
            f"{'it runs backwards' if last_number < first_number else 'it is too long'}"
        )
    return [str(n).zfill(len(range_match[1])) for n in range(first_number, last_number + 1)]


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands Slurm's compressed host list: `n[1-3,07]` → n1, n2, n3, n07; `a[1-2]b[3-4],c` → a1b3, a1b4, a2b3, a2b4, c.

    Raises:
        ConfigError: The text is not a host list.
    """
    segment_pattern = r"[^,\[\]\s]+|\[[^\[\]]*\]"
    if not re.fullmatch(rf"(?:{segment_pattern})+(?:,(?:{segment_pattern})+)*", hostlist):
        raise ConfigError(f"cannot read the host list {hostlist!r}")
    host_names: list[str] = []
    for host in re.findall(rf"(?:{segment_pattern})+", hostlist):
        bracket_alternatives = [
            [n for range_text in segment[1:-1].split(",") for n in expand_range(range_text, hostlist)]
            if segment.startswith("[")
            else [segment]
            for segment in re.findall(segment_pattern, host)
        ]
        host_names += itertools.islice(map("".join, itertools.product(*bracket_alternatives)), _MAX_NODES + 1)
        if len(host_names) > _MAX_NODES:
            raise ConfigError(f"the host list {hostlist!r} names more than {_MAX_NODES} hosts")
    return host_names


def expand_counts(counts_text: str) -> list[int]:
    """Expands Slurm's repetition: `4(x2),8` → [4, 4, 8].

    Raises:
        ConfigError: The text is not a list of counts.
    """
    node_counts: list[int] = []
    for count_text in counts_text.split(","):
        count_match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", count_text.strip())
        if not count_match or int(count_match[2] or 1) > _MAX_NODES:
            raise ConfigError(f"cannot read {count_text!r} in {counts_text!r}: write counts as 4 or 4(x2)")
        node_counts += [int(count_match[1])] * int(count_match[2] or 1)
    return node_counts


def gpus_in(text: str | None) -> int | None:
    """Returns the number of GPUs in a list of Slurm's generic resources, such as `gpu:a100:4` or `gpu:2,nvme:1`.

    Returns None if the list has no entry for GPUs.
    """
    num_gpus = None
    without_sockets = re.sub(r"\([^)]*\)", "", text or "")  # sockets may have a comma: `gpu:4(S:0,2)`
    for gres_text in without_sockets.removeprefix("gres:").split(","):
        fields = gres_text.strip().removeprefix("gres/").replace("=", ":").split(":")
        if fields[0] == "gpu":
            count_text = fields[-1] if len(fields) > 1 else "1"
            num_gpus = (num_gpus or 0) + (int(count_text) if count_text.isdigit() else 1)
    return num_gpus


def granted_cpus(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the number of cores that this process may use.

    This is the size of the affinity mask, or the smallest quota of the process's control groups if a quota is smaller.

    Args:
        root: Mount point of the control groups.
        membership: File that names this process's control groups.
    """
    cpu_counts = [len(os.sched_getaffinity(0))]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in ["0::/", *lines]:  # a container may mount its own group as the root and still show the host's path
        _, controllers, cgroup_path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (root / controllers, root / "cpu") if controllers else (root,):
            folder = mount / cgroup_path.lstrip("/")
            groups = [group for group in (folder, *folder.parents) if group.is_relative_to(mount)]
            cpu_counts += [quota for group in groups if (quota := _read_quota(group)) is not None]
    return max(1, min(cpu_counts))


def _read_quota(group: Path) -> int | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def visible_accelerators(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the GPUs that this process may use: the entries of `CUDA_VISIBLE_DEVICES` if it is set, else the device files.

    Does not use torch, because torch would initialize the GPUs.
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        # CUDA reads a mask up to the first entry that is no device
        return tuple(itertools.takewhile(lambda m: m not in ("", "-1", "NoDevFiles"), map(str.strip, mask.split(","))))
    indices = [
        device_match[1]
        for path in dev.glob("nvidia[0-9]*")
        if (device_match := re.fullmatch(r"nvidia([0-9]+)", path.name))
    ]
    return tuple(sorted(indices, key=int))


def in_slurm_job(environ: Mapping[str, str]) -> bool:
    """Returns whether `environ` has the variables of a Slurm allocation."""
    return bool(environ.get("SLURM_JOB_ID") and (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_HET_SIZE")))


def steps_possible() -> bool:
    """Returns whether this process is in a Slurm job and can start job steps."""
    return in_slurm_job(os.environ) and shutil.which("srun") is not None


def slurm_nodes(environ: Mapping[str, str], *, asks_slurm: bool = False) -> list[Node]:
    """Returns the nodes of the Slurm job, component by component.

    Args:
        environ: The job's variables.
        asks_slurm: Query Slurm for the GPUs if no variable names them and this host is not one of the job's nodes.

    Raises:
        ConfigError: A variable is missing or cannot be read.
    """
    het_size_text = environ.get("SLURM_HET_SIZE") or "0"
    if not het_size_text.isdigit():
        raise ConfigError(f"SLURM_HET_SIZE is {het_size_text!r}; it should be a number")
    components: list[int | None] = list(range(int(het_size_text))) if int(het_size_text) else [None]
    local_names = node_names(environ)
    nodes: list[Node] = []
    for component in components:
        suffix = "" if component is None else f"_HET_GROUP_{component}"
        hostlist = environ.get(f"SLURM_JOB_NODELIST{suffix}")
        if not hostlist:
            raise ConfigError(
                f"this is a Slurm job, but SLURM_JOB_NODELIST{suffix} is not set: was the environment changed?"
            )
        host_names = expand_hostlist(hostlist)
        cpus = expand_counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}") or "1")
        cpus += cpus[-1:] * (len(host_names) - len(cpus))
        visible_devices = _find_slurm_mask(environ, suffix, is_first=component in (None, 0))
        for name, num_cpus in zip(host_names, cpus, strict=False):
            is_local = name in local_names or name.split(".")[0] in local_names
            nodes.append(
                Node(
                    rank=len(nodes),
                    name=name,
                    # a step can be given fewer cores than its job
                    cpus=min(num_cpus, granted_cpus()) if is_local else num_cpus,
                    accelerators=tuple(range(len(visible_devices))),
                    visible_devices=visible_devices,
                    het_group=component,
                    is_local=is_local,
                )
            )
    if asks_slurm and not any(node.is_local or node.accelerators for node in nodes):
        gpu_counts = query_gpus_of_job(environ.get("SLURM_JOB_ID", ""))
        devices = [range(gpu_counts.get(node.het_group or 0, 0)) for node in nodes]
        nodes = [
            replace(node, accelerators=tuple(indices), visible_devices=tuple(map(str, indices)))
            for node, indices in zip(nodes, devices, strict=True)
        ]
    return nodes


def query_gpus_of_job(job_id: str) -> dict[int, int]:
    """Queries Slurm for the GPUs per node of each component of a job.

    A shell that `salloc` opens on a login node needs this query, because its variables do not name the GPUs.
    """
    gpus_by_node = {}
    for record in ask("scontrol", "--oneliner", "show", "job", job_id).records:
        num_gpus = gpus_per_node(record)
        offset = record.get("HetJobOffset", "0")
        if num_gpus and offset.isdigit():
            gpus_by_node[int(offset)] = num_gpus
    return gpus_by_node


def gpus_per_node(record: Mapping[str, str]) -> int | None:
    """Returns the GPUs on each node of a job, from the job's record (`scontrol show job`).

    The job may request GPUs per node, per task or for the whole job. Returns None if the job has no GPUs, or if its nodes
    have different numbers of GPUs.
    """
    per_node = gpus_in(record.get("TresPerNode"))
    if per_node is not None:
        return per_node
    num_nodes, num_tasks = (int(n) if (n := record.get(key, "")).isdigit() else 0 for key in ("NumNodes", "NumTasks"))
    num_gpus = gpus_in(record.get("TresPerJob"))
    if num_gpus is None and (per_task := gpus_in(record.get("TresPerTask"))) is not None:
        num_gpus = per_task * num_tasks
    if num_gpus is None or not num_nodes or num_gpus % num_nodes:
        return None
    return num_gpus // num_nodes


def _find_slurm_mask(environ: Mapping[str, str], suffix: str, is_first: bool) -> tuple[str, ...]:
    """Returns the devices of a component's nodes.

    Args:
        environ: The job's variables.
        suffix: End of the names of the component's variables.
        is_first: Whether the driver runs in this component. Variables without a suffix also describe this component.
    """
    if is_first and environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return visible_accelerators(environ)

    def read(name: str) -> str:
        return environ.get(name + suffix) or (environ.get(name) if is_first else None) or ""

    if ids := read("SLURM_STEP_GPUS") or read("SLURM_JOB_GPUS"):
        return tuple(
            device
            for range_text in ids.split(",")
            for device in (expand_range(range_text, ids) if range_text[:1].isdigit() else [range_text])
        )
    count_texts = (
        range_text.rpartition(":")[2]
        for range_text in (read("SLURM_GPUS_ON_NODE") or read("SLURM_GPUS_PER_NODE")).split(",")
    )
    return tuple(map(str, range(sum(int(count_text) for count_text in count_texts if count_text.isdigit()))))
