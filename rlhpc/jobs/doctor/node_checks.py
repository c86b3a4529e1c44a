"""Checks of the nodes' reports. They send no queries."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhpc.jobs.doctor.probe_jobs import Probed, ProbeJob
from rlhpc.jobs.doctor.slurm_facts import Finding, Site, names, size
from rlhpc.runtime.allocation import visible_accelerators
from rlhpc.runtime.devices import VIRTUAL, why_unseen

_LEAST_FILES = 4096
_LEAST_SHM = 2**30
_SLOW_MS = 2000.0
_CLOCK_S = 5.0
_FAST = re.compile(r"^(ib|hsn|opa|roce)\d")


def started(jobs: Iterable[ProbeJob]) -> list[Finding]:
    """Checks that a probe job started in each partition, and that all of its nodes reported."""
    lines = []
    for job in jobs:
        subject = f"probe in {job.partition or '(default)'}"
        request = f"{job.nodes} nodes" + (f" with {job.gres}" if job.gres else "")
        if job.error and job.error.startswith("sbatch:"):
            lines.append(Finding("fail", subject, f"not accepted ({request}): {job.error}", "correct the site file"))
        elif job.error.startswith("did not start"):
            lines.append(
                Finding("warn", subject, f"{job.error}; it was cancelled, and its nodes were not looked at",
                     "try again when the partition is less busy, or with a longer --start")
            )  # fmt: skip
        elif job.error:
            lines.append(Finding("fail", subject, job.error, "a run's steps would fail alike"))
        elif len(job.hello) < job.nodes:
            lines.append(
                Finding("fail", subject, f"{len(job.hello)} of {job.nodes} nodes answered ({names(job.hello)})",
                     "look at the others with srun --nodelist=… hostname")
            )  # fmt: skip
        else:
            lines.append(Finding("pass", subject, f"looked at {names(job.hello)}"))
    return lines


def shared_folder(probed: Probed) -> list[Finding]:
    """Checks that every node sees files written here, and this side sees files of every node."""
    subject, folder = "shared folder", probed.folder
    if probed.folder_error:
        return [
            Finding("fail", subject, f"cannot write in {folder}: {probed.folder_error}", "name another with --folder")
        ]
    hellos = probed.hellos
    if not hellos:
        return []
    problems: dict[str, list[str]] = {}
    latencies = {}
    for job in probed.jobs:
        for node, report in job.hello.items():
            canary, second_node = report["canary"], job.peers.get(node, {}).get("second", {})
            canary_view = job.canary_views.get(node, {})
            if "error" in canary:
                reason = "have another folder of that name" if canary["parent"] else "have no such folder"
            elif "write_error" in canary:
                reason = f"cannot write there ({canary['write_error']})"
            elif "error" in canary_view:
                reason = "write files there that are not seen here"
            elif "error" in second_node:
                reason = "do not see a file that was written after they had looked for it"
            else:
                latencies[node] = max(canary["ms"], canary_view.get("ms", 0.0), second_node.get("ms", 0.0))
                continue
            problems.setdefault(reason, []).append(node)
    lines = [
        Finding("fail", subject, f"{folder} is not shared: {names(nodes)} {reason}",
             "put runs (runner.run_dir) on a filesystem that all nodes and this one share")
        for reason, nodes in problems.items()
    ]  # fmt: skip
    if latencies:
        slowest = max(latencies, key=lambda node: latencies[node])
        summary = f"{folder}: seen alike from {names(latencies)}, within {math.ceil(latencies[slowest])} ms ({slowest})"
        if latencies[slowest] > _SLOW_MS:
            lines.append(
                Finding(
                    "warn", subject, summary, "slow: ask for acdirmax/lookupcache settings, or use another filesystem"
                )
            )
        else:
            lines.append(Finding("pass", subject, summary))
    return lines


def interface(probed: Probed, site: Site) -> list[Finding]:
    """Checks the interface between the nodes: the site's, on every node, or the default one."""
    subject, hellos = "interface", probed.hellos
    if not hellos:
        return []
    if site.interface:
        missing_nodes = [node for node, report in hellos.items() if site.interface not in report["interfaces"]]
        if missing_nodes:
            available = sorted({name for node in missing_nodes for name in hellos[node]["interfaces"]})
            return [
                Finding("fail", subject, f"{site.interface} has no address on {names(missing_nodes)}; there are: "
                     f"{', '.join(available)}", "correct interface in the site file")
            ]  # fmt: skip
        return [Finding("pass", subject, f"{site.interface}, on every node looked at")]
    nodes_by_interface: dict[str, set[str]] = {}
    for node, report in probed.peers.items():
        for peer, connection in report["reach"].items():
            if peer != node and connection.get("interface"):
                nodes_by_interface.setdefault(connection["interface"], set()).add(node)
    if not nodes_by_interface:
        return []
    routes = "; ".join(f"{name}: {names(nodes)}" for name, nodes in sorted(nodes_by_interface.items()))
    fast_interfaces = set.intersection(
        *({n for n in report["interfaces"] if _FAST.match(n)} for report in hellos.values())
    ) - set(nodes_by_interface)
    if fast_interfaces:
        return [
            Finding("warn", subject, f"the route goes by {routes}; every node has {', '.join(sorted(fast_interfaces))}, too",
                 f"if that is the faster network, set interface: {min(fast_interfaces)} in the site file")
        ]  # fmt: skip
    if any(name.startswith(("lo", "docker", "virbr")) for name in nodes_by_interface) and len(hellos) > 1:
        return [Finding("warn", subject, f"the route goes by {routes}", "set interface in the site file")]
    return [Finding("pass", subject, f"by the route between nodes: {routes}")]


def ports(probed: Probed) -> list[Finding]:
    """Checks that nodes reach one another on ports that the kernel picks, both ways."""
    peers = probed.peers
    connections = {
        (node, peer): connection
        for node, report in peers.items()
        for peer, connection in report["reach"].items()
        if peer != node
    }
    if not connections:
        if probed.hellos:
            return [
                Finding(
                    "warn", "ports", "only one node was looked at, so no connection was tried", "use --nodes 2 or more"
                )
            ]
        return []
    errors = {node_pair: connection["error"] for node_pair, connection in connections.items() if "error" in connection}
    if errors:
        (source_node, peer), reason = next(iter(errors.items()))
        return [
            Finding("fail", "ports",
                 f"{len(errors)} of {len(connections)} connections between nodes fail: {source_node} → {peer}: {reason}",
                 "open TCP between compute nodes (net.ipv4.ip_local_port_range), or name the interface they share")
        ]  # fmt: skip
    slowest = max(connection["ms"] for connection in connections.values())
    return [Finding("pass", "ports", f"{names(peers)} reach one another both ways, within {math.ceil(slowest)} ms")]


def gpu_masks(probed: Probed, environ: Mapping[str, str]) -> list[Finding]:
    """Checks that each node's mask names as many GPUs as the job requested."""
    problems: dict[str, list[str]] = {}
    correct_nodes: list[str] = []
    unmasked: list[str] = []
    stale = environ.get("CUDA_VISIBLE_DEVICES")
    for job in probed.jobs:
        for node, report in job.hello.items():
            mask = report["mask"]
            count = len(visible_accelerators({"CUDA_VISIBLE_DEVICES": mask})) if mask is not None else None
            if job.gpus and count is None:
                unmasked.append(node)
            elif (count or 0) == job.gpus:
                correct_nodes.append(node)
            else:
                problem = f"CUDA_VISIBLE_DEVICES={mask} names {count}, the job asked for {job.gpus}"
                problems.setdefault(problem + (" (it is this shell's)" if mask == stale else ""), []).append(node)
    way_out = "unset CUDA_VISIBLE_DEVICES before submitting" if stale is not None else (
        "something sets it on the node: look in ~/.bashrc, modules and the task prolog"
    )  # fmt: skip
    lines = [
        Finding("fail", "GPU mask", f"stale on {names(nodes)}: {problem}", way_out)
        for problem, nodes in problems.items()
    ]
    if unmasked:
        lines.append(
            Finding("warn", "GPU mask", f"none on {names(unmasked)}, though a GPU was asked for",
                 "ask for whole nodes (sbatch: [--exclusive]), or for File= in gres.conf")
        )  # fmt: skip
    if correct_nodes and not problems:
        lines.append(Finding("pass", "GPU mask", f"as asked for on {names(correct_nodes)}"))
    return lines


def gpus_in_torch(probed: Probed, environ: Mapping[str, str]) -> list[Finding]:
    """Checks that torch, in the Python that trains, can use the GPUs that each node was granted."""
    subject = "GPUs in torch"
    jobs_by_node = {
        node: job
        for job in probed.jobs
        if job.gpus
        for node, report in job.hello.items()
        if report["packages"]["torch"]
    }
    if not jobs_by_node:
        return []
    if environ.get(VIRTUAL):
        return [
            Finding("warn", subject, f"not looked at on {names(jobs_by_node)}: {VIRTUAL} says that GPUs are only a number "
                 "here", f"unset {VIRTUAL} unless they are")
        ]  # fmt: skip
    problems: dict[tuple[str, str], list[str]] = {}
    correct_nodes: dict[str, list[str]] = {}
    for node, job in jobs_by_node.items():
        report = job.torch.get(node, {"hung_s": 0.0})
        if problem_and_fix := _trouble(report, job.gpus, job.hello[node]["mask"]):
            problems.setdefault(problem_and_fix, []).append(node)
        else:
            summary = f"torch {report['torch']} computes on the {job.gpus} granted"
            summary += f", and sums over {report['seen']} of them by NCCL" if report.get("nccl") else ""
            correct_nodes.setdefault(summary, []).append(node)
    return [
        *(
            Finding("fail", subject, f"{names(nodes)}: {problem}", way_out)
            for (problem, way_out), nodes in problems.items()
        ),
        *(Finding("pass", subject, f"{summary} ({names(nodes)})") for summary, nodes in correct_nodes.items()),
    ]


def _trouble(report: Mapping[str, Any], granted: int, mask: str | None) -> tuple[str, str] | None:
    """Returns the problem in torch's report on a node, with advice; None if everything works."""
    way_out = "look at that node with nvidia-smi and dmesg"
    if "torch" not in report:
        stage, way_out = "importing torch", "run python -c 'import torch' there"
    elif "seen" not in report:
        stage = "counting GPUs"
    elif report["seen"] < granted:
        reason, fix = why_unseen(report["seen"], report["cuda"], report["hip"], mask, report.get("driver", ""))
        driver = (
            f"the driver takes CUDA up to {report['driver']}" if report.get("driver") else "there is no libcuda.so.1"
        )
        warning_text = f" ({report['warning']})" if report["warning"] else ""
        return (
            f"granted {granted}, torch sees {report['seen']}: torch {report['torch']} {reason}{warning_text}; {driver}",
            fix,
        )
    elif "computes" not in report:
        stage = "computing on a GPU"
        way_out += "; where the build has no kernel for it, take another: RLHPC_TORCH=cu126 bash envs/setup.sh"
    elif report.get("nccl") is False:
        return (
            "NCCL's all-reduce gave a wrong sum",
            "try NCCL_P2P_DISABLE=1; if that mends it, see PCIe ACS and the IOMMU",
        )
    elif report.get("error") or report.get("code") != 0:
        stage, way_out = "NCCL's all-reduce", "try NCCL_DEBUG=INFO, and NCCL_P2P_DISABLE=1 (PCIe ACS, the IOMMU)"
    else:
        return None
    if report.get("error"):
        return f"{stage} failed: {report['error']}", way_out
    if "hung_s" in report:
        return f"{stage} did not end" + (
            f" within {report['hung_s']:.0f} s" if report["hung_s"] else " in time"
        ), way_out
    return f"{stage} ended with exit code {report['code']}: {report.get('words', '')}", way_out


def _grouped(hellos: Mapping[str, Any], judge: Callable[[Mapping[str, Any]], str | None]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for node, report in hellos.items():
        if reason := judge(report):
            problems.setdefault(reason, []).append(node)
    return problems


def python(probed: Probed, executable: str = sys.executable) -> list[Finding]:
    """Checks that the nodes have the same Python as this host, with the packages."""

    def judge(report: Mapping[str, Any]) -> str | None:
        if tuple(report["python"][:2]) != sys.version_info[:2]:
            return (
                f"have Python {'.'.join(map(str, report['python']))} ({report['executable']}), here it is {executable}"
            )
        missing_packages = [name for name, is_installed in report["packages"].items() if not is_installed]
        return f"have no {', '.join(missing_packages)} in {report['executable']}" if missing_packages else None

    return _lines(
        probed, "Python", judge, "fail", "install rlhpc on a filesystem of all nodes",
        f"{'.'.join(map(str, sys.version_info[:3]))} with its packages",
    )  # fmt: skip


def shared_memory(probed: Probed) -> list[Finding]:
    def judge(report: Mapping[str, Any]) -> str | None:
        space = report["space"]["/dev/shm"]
        if "error" in space or not space["writable"]:
            return "cannot use /dev/shm"
        return f"have {size(space['free'])} left in /dev/shm" if space["free"] < _LEAST_SHM else None

    free_bytes = [report["space"]["/dev/shm"].get("free", 0) for report in probed.hellos.values()]
    return _lines(
        probed, "/dev/shm", judge, "warn", "data between ranks goes to files instead; set cluster.scratch to a fast disk",
        f"{size(min(free_bytes, default=0))} or more free",
    )  # fmt: skip


def node_disks(probed: Probed, site: Site) -> list[Finding]:
    def judge(report: Mapping[str, Any]) -> str | None:
        for name in ("/tmp", "scratch"):
            space = report["space"].get(name)
            location = site.scratch if name == "scratch" else name
            if space and ("error" in space or not space["writable"]):
                return f"cannot write in {location} ({space.get('error', 'not writable')})"
            if space and space["free"] < 2**30:
                return f"have {size(space['free'])} left in {location}"
        return None

    success_text = f"room in /tmp{f' and {site.scratch}' if site.scratch else ''}"
    return _lines(
        probed, "node-local disk", judge, "fail", "correct scratch in the site file, or have it cleaned", success_text
    )


def simulators(probed: Probed) -> list[Finding]:
    """Checks that Vulkan works, on the nodes where a GPU was requested or, without any, on all."""
    hellos = {node: report for job in probed.jobs if job.gpus for node, report in job.hello.items()} or probed.hellos

    def judge(report: Mapping[str, Any]) -> str | None:
        if not report["vulkan"]["loader"]:
            return "have no libvulkan.so.1"
        return None if report["vulkan"]["drivers"] else "have no Vulkan driver (icd.d)"

    drivers = sorted({name for report in hellos.values() for name in report["vulkan"]["drivers"]})
    return _lines(
        probed, "Vulkan", judge, "warn", "simulators that render need it: install libvulkan1 and the GPU's driver with it",
        ", ".join(drivers), hellos,
    )  # fmt: skip


def clocks(probed: Probed) -> list[Finding]:
    offsets = {node: node_offset for job in probed.jobs for node, node_offset in job.offsets.items()}
    if not offsets:
        return []
    wrong = {
        node: offset_s
        for node, (offset_s, uncertainty_s) in offsets.items()
        if abs(offset_s) - uncertainty_s > _CLOCK_S
    }
    if wrong:
        node = max(wrong, key=lambda name: abs(wrong[name]))
        return [
            Finding("warn", "clocks", f"of {names(wrong)} differ from this one's, by up to {abs(wrong[node]):.0f} s ({node})",
                 "ask for NTP on all nodes; a requeued job may be refused by a node whose clock is behind")
        ]  # fmt: skip
    uncertainty_s = max(abs(offset_s) + uncertainty for offset_s, uncertainty in offsets.values())
    return [Finding("pass", "clocks", f"within {max(uncertainty_s, 0.1):.1f} s of this one's")]


def limits(probed: Probed) -> list[Finding]:
    def judge(report: Mapping[str, Any]) -> str | None:
        node_limits = report["limits"]
        if 0 <= node_limits["nofile"] < _LEAST_FILES:
            return f"allow {node_limits['nofile']} open files (ulimit -n)"
        if 0 <= node_limits["nproc"] < _LEAST_FILES:
            return f"allow {node_limits['nproc']} processes and threads (ulimit -u)"
        if 0 <= node_limits["memlock"] < 2**30 and any(_FAST.match(name) for name in report["interfaces"]):
            return f"allow {size(node_limits['memlock'])} of locked memory (ulimit -l), too little for InfiniBand"
        return None

    success_text = "enough open files, processes and locked memory"
    return _lines(
        probed, "limits", judge, "warn", "raise it in setup of the site file, or ask the administrators", success_text
    )


def _lines(
    probed: Probed,
    subject: str,
    judge: Callable[[Mapping[str, Any]], str | None],
    level: Any,
    do: str,
    passed: str,
    hellos: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Returns a finding for each kind of problem that some nodes have, or one that all nodes passed."""
    hellos = probed.hellos if hellos is None else hellos
    problems = _grouped(hellos, judge)
    lines = [Finding(level, subject, f"{names(nodes)} {reason}", do) for reason, nodes in problems.items()]
    return lines or ([Finding("pass", subject, passed)] if hellos else [])


_LEAST_SPACE = 5 * 2**30
_LEAST_INODES = 20_000


def environment(environ: Mapping[str, str]) -> list[Finding]:
    """Checks variables of this shell that a job would inherit and should not."""
    lines = []
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and "SLURM_JOB_ID" not in environ:
        lines.append(
            Finding("warn", "this shell's GPU mask", f"CUDA_VISIBLE_DEVICES={mask!r} goes along with every job",
                 "unset CUDA_VISIBLE_DEVICES (look in ~/.bashrc) before submitting")
        )  # fmt: skip
    inherited_names = sorted(name for name in environ if name.startswith(("SBATCH_", "SALLOC_")))
    if inherited_names:
        lines.append(
            Finding("warn", "this shell's options", f"set: {', '.join(inherited_names)}; they win over what a run asks for",
                 f"unset {' '.join(inherited_names)}")
        )  # fmt: skip
    return lines


def packages(versions: Mapping[str, str | None], conf: str | None) -> list[Finding]:
    """Checks versions of the packages that submit; `conf` is the path of slurm.conf if it is not the usual one."""
    lines = []
    min_versions = {"snakemake": (9,), "submitit": (1, 5), "snakemake-executor-plugin-slurm": (2,)}
    for name, version_text in versions.items():
        installed_version = tuple(int(digits) for digits in re.findall(r"\d+", version_text or "")[:3])
        required_version = ".".join(map(str, min_versions.get(name, ())))
        if version_text is None and name.startswith("snakemake-executor"):
            lines.append(
                Finding("warn", name, "not installed", "pip install 'rlhpc[slurm]' (only profiles/slurm needs it)")
            )
        elif version_text is None:
            lines.append(Finding("fail", name, "not installed", f"pip install {name}"))
        elif installed_version < min_versions.get(name, ()):
            lines.append(
                Finding(
                    "fail", name, f"{version_text}; {required_version} or later is needed", f"pip install -U {name}"
                )
            )
        elif name.endswith("jobstep") and installed_version == (0, 6, 1) and conf:
            lines.append(
                Finding("warn", name, f"{version_text} loses SLURM_CONF in its jobs, and here it is {conf}",
                     f"pip install {name}==0.6.0, or have the file at /etc/slurm/slurm.conf")
            )  # fmt: skip
        else:
            lines.append(Finding("pass", name, version_text))
    return lines


def disk(subject: str, path: str, status: Mapping[str, Any]) -> Finding:
    """Checks space and inodes of a filesystem, as `node_probe.space` reports them."""
    if "error" in status:
        return Finding("fail", subject, f"{path}: {status['error']}", "make the folder, or name another")
    summary = f"{path}: {size(status['free'])} of {size(status['total'])} free"
    if status["inodes"]:
        summary += f", {status['inodes_free']} of {status['inodes']} inodes"
    if not status["writable"]:
        return Finding("fail", subject, f"{path} is not writable", "name a folder of your own")
    if status["free"] < _LEAST_SPACE or (status["inodes"] and status["inodes_free"] < _LEAST_INODES):
        return Finding("warn", subject, summary, "make room, or use another folder: a run that cannot save stops")
    return Finding("pass", subject, summary)


def quotas(text: str) -> list[Finding]:
    """Checks the output of `quota -wp` (with raw times): used and limits of blocks and of files."""
    lines = []
    for row in text.splitlines():
        cells = [cell.rstrip("*") for cell in row.split()]
        if len(cells) < 9 or not all(cell.isdigit() for cell in cells[1:]):
            continue
        for resource, unit, (used, soft, hard_limit) in (
            ("space", 1024, cells[1:4]),
            ("inodes", 1, cells[5:8]),
        ):
            limit = int(soft) or int(hard_limit)
            if not limit:
                continue
            usage = f"{100 * int(used) / limit:.0f} % of {size(limit * unit) if unit > 1 else limit} {resource} on {cells[0]}"
            if int(used) > 0.9 * limit:
                lines.append(Finding("warn", "quota", usage, "make room: caches in $HOME are often the cause"))
            else:
                lines.append(Finding("pass", "quota", usage))
    return lines


def nearest_folder(path: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
