"""Checks of the nodes' reports and of this host. Each check turns collected facts into findings and runs no command."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.jobs.doctor.probe_jobs import Probed, ProbeJob
from rlhpc.jobs.doctor.slurm_facts import Finding, Level, Site, decide, names
from rlhpc.runtime.allocation import visible_accelerators
from rlhpc.runtime.devices import VIRTUAL, explain_unseen
from rlhpc.runtime.os_resources import max_ranks_of_driver
from rlhpc.runtime.text import format_bytes

_MIN_FILES = 4096
_MIN_SHM_BYTES = 2**30
_MAX_LATENCY_MS = 2000.0
_MAX_CLOCK_OFFSET_S = 5.0
_FAST_INTERFACE = re.compile(r"^(ib|hsn|opa|roce)\d")


def job_starts(jobs: Iterable[ProbeJob]) -> Iterator[Finding]:
    """Checks that a probe job started in each partition, and that all of its nodes reported."""
    for job in jobs:
        request = f"{job.nodes} nodes" + (f" with {job.gres}" if job.gres else "")
        yield decide(
            f"probe in {job.partition or '(default)'}", f"looked at {names(job.hello)}",
            (job.error.startswith("sbatch:"), "fail", f"not accepted ({request}): {job.error}", "correct the site file"),
            (job.error.startswith("did not start"), "warn",
             f"{job.error}; it was cancelled, and its nodes were not looked at",
             "try again when the partition is less busy, or with a longer --start"),
            (job.error, "fail", job.error, "a run's steps would fail alike"),
            (len(job.hello) < job.nodes, "fail",
             f"{len(job.hello)} of {job.nodes} nodes answered ({names(job.hello)})",
             "look at the others with srun --nodelist=… hostname"),
        )  # fmt: skip


def shared_folder(results: Probed) -> Iterator[Finding]:
    """Checks that every node sees files written on this host, and that this host sees files written on every node."""
    subject, folder = "shared folder", results.folder
    if results.folder_error:
        yield Finding(
            "fail", subject, f"cannot write in {folder}: {results.folder_error}", "name another with --folder"
        )
        return
    problems: dict[str, list[str]] = {}
    latencies = {}
    for job in results.jobs:
        for node, report in job.hello.items():
            canary, second_node = report["canary"], job.peers.get(node, {}).get("second", {})
            canary_view = job.canary_views.get(node, {})
            if "error" in canary:
                problem = "have another folder of that name" if canary["parent"] else "have no such folder"
            elif "write_error" in canary:
                problem = f"cannot write there ({canary['write_error']})"
            elif "error" in canary_view:
                problem = "write files there that are not seen here"
            elif "error" in second_node:
                problem = "do not see a file that was written after they had looked for it"
            else:
                latencies[node] = max(canary["ms"], canary_view.get("ms", 0.0), second_node.get("ms", 0.0))
                continue
            problems.setdefault(problem, []).append(node)
    advice = "put runs (runner.run_dir) on a filesystem that all nodes and this one share"
    for problem, nodes in problems.items():
        yield Finding("fail", subject, f"{folder} is not shared: {names(nodes)} {problem}", advice)
    if latencies:
        slowest_node = max(latencies, key=lambda node: latencies[node])
        max_ms = math.ceil(latencies[slowest_node])
        summary = f"{folder}: seen alike from {names(latencies)}, within {max_ms} ms ({slowest_node})"
        yield decide(
            subject, summary,
            (latencies[slowest_node] > _MAX_LATENCY_MS, "warn", summary,
             "slow: ask for acdirmax/lookupcache settings, or use another filesystem"),
        )  # fmt: skip


def _connections(results: Probed) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the connections between different nodes, keyed by (node, peer)."""
    return {
        (node, peer): connection
        for node, report in results.peers.items()
        for peer, connection in report["reach"].items()
        if peer != node
    }


def interface(results: Probed, site: Site, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the interface by which nodes reach one another, which sets `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` of
    ranks.

    Args:
        results: The nodes' reports.
        site: Site description, which may name the interface.
        environ: Environment of this shell, whose variables ranks inherit and keep.
    """
    subject, hellos = "interface", results.hellos
    yield from _check_inherited_interfaces(results, environ)
    if site.interface and hellos:
        missing_nodes = [node for node, report in hellos.items() if site.interface not in report["interfaces"]]
        available_interfaces = sorted({name for node in missing_nodes for name in hellos[node]["interfaces"]})
        yield decide(
            subject, f"{site.interface}, on every node looked at; ranks get {_format_socket_variables(site.interface)}",
            (missing_nodes, "fail", f"{site.interface} has no address on {names(missing_nodes)}; there are: "
             f"{', '.join(available_interfaces)}", "correct interface in the site file"),
        )  # fmt: skip
        return
    nodes_by_interface: dict[str, set[str]] = {}
    connections = _connections(results)
    for (node, _), connection in connections.items():
        if connection.get("interface"):
            nodes_by_interface.setdefault(connection["interface"], set()).add(node)
    if not nodes_by_interface:
        return
    routes_text = "; ".join(f"{name}: {names(nodes)}" for name, nodes in sorted(nodes_by_interface.items()))
    interfaces = [{name for name in report["interfaces"] if _FAST_INTERFACE.match(name)} for report in hellos.values()]
    fast_interfaces = sorted(set.intersection(*interfaces) - set(nodes_by_interface))
    is_local = any(name.startswith(("lo", "docker", "virbr")) for name in nodes_by_interface)
    reached_interfaces = [set(connection.get("interfaces", ())) for connection in connections.values()]
    alternative_names = sorted(set.intersection(*reached_interfaces) - set(nodes_by_interface))
    route_interface, alternative_name = min(nodes_by_interface), "".join(alternative_names[:1])
    node_counts = Counter(node for nodes in nodes_by_interface.values() for node in nodes)
    mixed_nodes = [node for node, num_interfaces in node_counts.items() if num_interfaces > 1]
    variables_text = f"; ranks get {_format_socket_variables(route_interface)}" if len(nodes_by_interface) == 1 else ""
    yield decide(
        subject, f"by the route between nodes: {routes_text}{variables_text}",
        (fast_interfaces, "warn", f"the route goes by {routes_text}; every node has {', '.join(fast_interfaces)}, too",
         f"if that is the faster network, set interface: {''.join(fast_interfaces[:1])} in the site file"),
        (is_local and len(hellos) > 1, "warn", f"the route goes by {routes_text}", "set interface in the site file"),
        (mixed_nodes, "warn", f"{names(mixed_nodes)} reach other nodes by several interfaces ({routes_text})",
         "set interface in the site file to the one that all nodes share"),
        (alternative_names, "warn",
         f"the route goes by {routes_text}; the nodes reach one another by {', '.join(alternative_names)}, too",
         f"set interface in the site file: {alternative_name} gives ranks {_format_socket_variables(alternative_name)}, "
         f"{route_interface} leaves it as "
         "it is"),
    )  # fmt: skip


def _format_socket_variables(interface: str) -> str:
    return f"NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}"


def _check_inherited_interfaces(results: Probed, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that interfaces which this shell's variables select exist on the nodes."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        interface_text = environ.get(variable, "")
        if not interface_text or interface_text.startswith("^"):  # all interfaces but these
            continue
        is_exact = variable.startswith("GLOO") or interface_text.startswith("=")
        selected_names = tuple(interface_text.removeprefix("=").split(","))
        missing_nodes = [
            node
            for node, report in results.hellos.items()
            if not any(
                name in selected_names or (not is_exact and name.startswith(selected_names))
                for name in report["interfaces"]
            )
        ]
        available_interfaces = sorted({name for node in missing_nodes for name in results.hellos[node]["interfaces"]})
        if missing_nodes:
            yield Finding(
                "fail", variable, f"{interface_text} of this shell is no interface of {names(missing_nodes)}; there are: "
                f"{', '.join(available_interfaces)}", f"unset {variable}, and set interface in the site file",
            )  # fmt: skip


def host_names(results: Probed) -> Iterator[Finding]:
    """Checks that every node can resolve the names of all nodes, including its own, to addresses other than loopback."""
    subject = "host names"
    problems: dict[tuple[str, str], dict[str, list[str]]] = {}
    for node, report in results.peers.items():
        for host, answer in report.get("names", {}).items():
            addresses = answer.get("addresses", [])
            if "error" in answer:
                problem = ("cannot look up", f"({answer['error']})")
            elif any(address.startswith("127.") for address in addresses):
                problem = ("look up", f"as {', '.join(addresses)}, an address of each machine for itself")
            else:
                continue
            problems.setdefault(problem, {}).setdefault(host, []).append(node)
    for (verb, reason), nodes_by_host in problems.items():
        askers = {node for nodes in nodes_by_host.values() for node in nodes}
        yield Finding(
            "warn", subject, f"{names(askers)} {verb} {names(nodes_by_host)} {reason}",
            "runs use addresses; for programs that use names (DeepSpeed, MPI), ask for DNS, or for /etc/hosts on all nodes",
        )  # fmt: skip
    if results.peers and not problems:
        yield Finding("pass", subject, f"{names(results.peers)} look up one another's names")


def srun_options(results: Probed, site: Site) -> Iterator[Finding]:
    """Checks that srun accepts the options of the site (`cluster.srun`)."""
    refused_jobs = [job for job in results.jobs if job.srun_error and job.hello]
    if site.srun and any(job.hello for job in results.jobs):
        partition_names = names(job.partition or "(default)" for job in refused_jobs)
        yield decide(
            "srun options", f"{' '.join(site.srun)}: accepted",
            (refused_jobs, "fail",
             f"{' '.join(site.srun)}: refused in {partition_names}: {refused_jobs[0].srun_error if refused_jobs else ''}",
             "correct srun in the site file; the other checks were made without these options"),
        )  # fmt: skip


def overlapping_steps(results: Probed) -> Iterator[Finding]:
    """Checks that two job steps run at the same time on the same nodes, and that both see the job's GPUs."""
    for job in (job for job in results.jobs if job.hello):
        subject = f"overlapping steps in {job.partition or '(default)'}"
        missing_nodes = [node for node in job.hello if node not in job.second_steps]
        masks = {
            node: (job.hello[node]["mask"], report["mask"])
            for node, report in job.second_steps.items()
            if job.gpus and node in job.hello and job.hello[node]["mask"] != report["mask"]
        }
        node = min(masks, default="")
        shared_text = f", both with {job.gres}" if job.gres else ""
        yield decide(
            subject, f"two at the same time{shared_text}",
            (missing_nodes, "fail", f"a second step{' with ' + job.gres if job.gres else ''} did not start on "
             f"{names(missing_nodes)} while the first one ran: {job.second_step_error or 'nothing was heard of it'}",
             "each group of a run is a step: srun must get --overlap (does a wrapper of srun or a cli_filter drop it?)"),
            (masks, "fail", f"the GPUs of two steps differ on {names(masks)}: CUDA_VISIBLE_DEVICES is "
             f"{masks[node][0] if node else ''} and {masks[node][1] if node else ''}",
             "groups that share GPUs must see the same ones: ask for --overlap and --gres to apply to all steps of a job"),
        )  # fmt: skip


def meeting_folders(results: Probed) -> Iterator[Finding]:
    """Checks that the driver and all steps of a job see the same /tmp and /dev/shm on a node; reports whether two jobs do."""
    subject = "/tmp of steps"
    nodes_by_folder: dict[str, set[str]] = {}
    shared_nodes, private_jobs, shared_jobs = set[str](), set[str](), set[str]()
    for job in results.jobs:
        for node, report in job.hello.items():
            reports = (job.second_steps.get(node, {}).get("folders"), job.batch_folders.get(node))
            known_folders = [folders for folders in reports if folders]
            for folder, folder_id in report["folders"].items():
                if any(folders[folder] != folder_id for folders in known_folders):
                    nodes_by_folder.setdefault(folder, set()).add(node)
            shared_nodes |= {node} if known_folders else set()
            if (neighbour := job.neighbour_folders.get(node)) and (batch := job.batch_folders.get(node)):
                (shared_jobs if neighbour == batch else private_jobs).add(node)
    if private_jobs:
        jobs_text = f"; each job on {names(private_jobs)} has its own, so ranks of helper jobs reach the run's by TCP"
    else:
        jobs_text = f"; two jobs on {names(shared_jobs)} share it, too" if shared_jobs else ""
    if shared_nodes:
        nodes = {node for folder_nodes in nodes_by_folder.values() for node in folder_nodes}
        yield decide(
            subject, f"the driver and all steps of a job share /tmp and /dev/shm{jobs_text}",
            (nodes_by_folder, "fail", f"steps of one job have their own {' and '.join(nodes_by_folder)} on {names(nodes)}",
             "ranks of a node and the driver meet there: mount both into the steps (Pyxis: --container-mounts=/tmp:/tmp,"
             "/dev/shm:/dev/shm in srun; Apptainer: --bind /tmp,/dev/shm in container)"),
        )  # fmt: skip


def file_locks(results: Probed) -> Iterator[Finding]:
    """Checks that a flock on a file of the shared folder holds on all nodes. rlhpc takes no such lock, but caches do."""
    subject, folder = "file locks between nodes", results.folder
    advice = (
        "runs take no locks there, but caches do (Hugging Face, Triton): keep these elsewhere (HF_HOME, TRITON_CACHE_DIR), "
        "or ask for locks of the whole cluster (Lustre: mount -o flock; NFS: local_lock=none)"
    )
    if results.folder_error:
        return
    if results.lock_error:
        yield Finding("warn", subject, f"{folder}: this machine cannot lock a file ({results.lock_error})", advice)
        return
    nodes_by_problem: dict[str, list[str]] = {}
    held_nodes = []
    for node, report in results.hellos.items():
        error = report.get("lock")
        if error == "held":
            held_nodes.append(node)
        elif error is not None:
            problem = (
                f"cannot lock a file ({error})" if error else "get a lock that this machine holds: locks are node-local"
            )
            nodes_by_problem.setdefault(problem, []).append(node)
    for problem, nodes in nodes_by_problem.items():
        yield Finding("warn", subject, f"{folder}: {names(nodes)} {problem}", advice)
    if held_nodes and not nodes_by_problem:
        yield Finding("pass", subject, f"{folder}: a lock taken here holds on {names(held_nodes)}")


def ports(results: Probed) -> Iterator[Finding]:
    """Checks that nodes can connect to one another, in both directions, on ports that the kernel selects."""
    connections = _connections(results)
    errors = [(*pair, connection["error"]) for pair, connection in connections.items() if "error" in connection]
    slowest_ms = max((connection.get("ms", 0.0) for connection in connections.values()), default=0.0)
    node, peer, problem = errors[0] if errors else ("", "", "")
    if results.hellos:
        yield decide(
            "ports", f"{names(results.peers)} reach one another both ways, within {math.ceil(slowest_ms)} ms",
            (not connections, "warn", "only one node was looked at, so no connection was tried", "use --nodes 2 or more"),
            (errors, "fail",
             f"{len(errors)} of {len(connections)} connections between nodes fail: {node} → {peer}: {problem}",
             "open TCP between compute nodes (net.ipv4.ip_local_port_range), or name the interface they share"),
        )  # fmt: skip


def gpu_masks(results: Probed, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that CUDA_VISIBLE_DEVICES on each node names as many GPUs as the job requested."""
    problems: dict[str, list[str]] = {}
    correct_nodes: list[str] = []
    unmasked_nodes: list[str] = []
    shell_mask = environ.get("CUDA_VISIBLE_DEVICES")
    for job in results.jobs:
        for node, report in job.hello.items():
            mask = report["mask"]
            num_visible = len(visible_accelerators({"CUDA_VISIBLE_DEVICES": mask})) if mask is not None else None
            if job.gpus and num_visible is None:
                unmasked_nodes.append(node)
            elif (num_visible or 0) == job.gpus:
                correct_nodes.append(node)
            else:
                problem = f"CUDA_VISIBLE_DEVICES={mask} names {num_visible}, the job asked for {job.gpus}"
                problems.setdefault(problem + (" (it is this shell's)" if mask == shell_mask else ""), []).append(node)
    advice = "unset CUDA_VISIBLE_DEVICES before submitting" if shell_mask is not None else (
        "something sets it on the node: look in ~/.bashrc, modules and the task prolog"
    )  # fmt: skip
    for problem, nodes in problems.items():
        yield Finding("fail", "GPU mask", f"stale on {names(nodes)}: {problem}", advice)
    if unmasked_nodes:
        yield Finding("warn", "GPU mask", f"none on {names(unmasked_nodes)}, though a GPU was asked for",
                 "ask for whole nodes (sbatch: [--exclusive]), or for File= in gres.conf")  # fmt: skip
    if correct_nodes and not problems:
        yield Finding("pass", "GPU mask", f"as asked for on {names(correct_nodes)}")


def gpus_in_torch(results: Probed, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that torch can use the GPUs that Slurm granted on each node."""
    subject = "GPUs in torch"
    jobs_by_node = {
        node: job
        for job in results.jobs
        if job.gpus
        for node, report in job.hello.items()
        if report["packages"]["torch"]
    }
    if not jobs_by_node:
        return
    if environ.get(VIRTUAL):
        yield Finding("warn", subject, f"not looked at on {names(jobs_by_node)}: {VIRTUAL} says that GPUs are only a number "
                 "here", f"unset {VIRTUAL} unless they are")  # fmt: skip
        return
    nodes_by_result: dict[tuple[str, str], list[str]] = {}
    for node, job in jobs_by_node.items():
        report = job.torch.get(node, {"hung_s": 0.0})
        summary = f"torch {report.get('torch')} computes on the {job.gpus} granted"
        summary += ", loads vLLM's kernels" if report.get("vllm") else ""
        summary += f", and sums over {report.get('seen')} of them by NCCL" if report.get("nccl") else ""
        problem_and_advice = _find_torch_problem(report, job.gpus, job.hello[node]["mask"])
        nodes_by_result.setdefault(problem_and_advice or (summary, ""), []).append(node)
    for (result, advice), nodes in sorted(nodes_by_result.items(), key=lambda result_nodes: not result_nodes[0][1]):
        yield (
            Finding("fail", subject, f"{names(nodes)}: {result}", advice)
            if advice
            else Finding("pass", subject, f"{result} ({names(nodes)})")
        )


#: NVIDIA driver that CUDA 13, for which vLLM's wheel is built, needs.
MINIMUM_DRIVER = "NVIDIA driver 580"
#: Key of torch's report that a stage adds → name of the stage, advice if the stage failed.
_TORCH_STAGES = {
    "torch": ("importing torch", "run python -c 'import torch' there"),
    "seen": ("counting GPUs", "look at that node with nvidia-smi and dmesg"),
    "computes": (
        "computing on a GPU",
        "look at that node with nvidia-smi and dmesg; where the build has no kernel for it, take another: RLHPC_TORCH=cu126 "
        "bash envs/setup.sh",
    ),
    "vllm": (
        "importing vLLM's kernels",
        f"torch and vLLM must be built for the same CUDA: bash envs/setup.sh installs both ({MINIMUM_DRIVER} or newer), or "
        "generate with rollout.rollout_backend=hf",
    ),
}
_NCCL_STAGE = ("NCCL's all-reduce", "try NCCL_DEBUG=INFO, and NCCL_P2P_DISABLE=1 (PCIe ACS, the IOMMU)")


def _find_torch_problem(report: Mapping[str, Any], num_granted: int, mask: str | None) -> tuple[str, str] | None:
    """Returns the problem in torch's report on a node, with advice; None if everything works."""
    num_seen, error, driver = report.get("seen", num_granted), report.get("error"), report.get("driver", "")
    if num_seen < num_granted:
        reason, advice = explain_unseen(num_seen, report["cuda"], report["hip"], mask, driver)
        driver_text = f"the driver takes CUDA up to {driver}" if driver else "there is no libcuda.so.1"
        warning_text = f" ({report['warning']})" if report["warning"] else ""
        counts_text = f"granted {num_granted}, torch sees {num_seen}"
        problem = f"{counts_text}: torch {report['torch']} {reason}{warning_text}; {driver_text}"
        return problem, advice
    if report.get("nccl") is False:
        advice = "try NCCL_P2P_DISABLE=1; if that mends it, see PCIe ACS and the IOMMU"
        return "NCCL's all-reduce gave a wrong sum", advice
    missing_stages = [stage for key, stage in _TORCH_STAGES.items() if key not in report]
    if not missing_stages and not error and report.get("code") == 0:
        return None
    stage, advice = (*missing_stages, _NCCL_STAGE)[0]
    if error:
        return f"{stage} failed: {error}", advice
    if "hung_s" in report:
        return f"{stage} did not end " + (f"within {report['hung_s']:.0f} s" if report["hung_s"] else "in time"), advice
    return f"{stage} ended with exit code {report['code']}: {report.get('words', '')}", advice


#: Key of the engine's report that a stage adds → name of the stage, advice if the stage failed.
_ENGINE_STAGES = {
    "ranks": ("launching two ranks", "look at that node with df -h /dev/shm and ulimit -a"),
    "device": (
        "starting vLLM on two GPUs",
        "set NCCL_DEBUG=INFO, then NCCL_P2P_DISABLE=1 (PCIe ACS, the IOMMU), then "
        "rollout.engine_kwargs={disable_custom_all_reduce: true}; engines of one rank do not need it",
    ),
    "tokens": (
        "generating with two ranks",
        "try rollout.engine_kwargs={enforce_eager: true}, then {disable_custom_all_reduce: true}; engines of one rank do "
        "not need it",
    ),
}


def engines(results: Probed) -> Iterator[Finding]:
    """Checks that vLLM starts and generates as one engine of two ranks, on the first node of each job with two GPUs."""
    subject = "engine of two ranks"
    for job in results.jobs:
        working_nodes = [
            node for node, report in job.torch.items() if report.get("seen", 0) >= 2 and report.get("vllm")
        ]
        if job.starts_engine and working_nodes and not job.engine:
            yield Finding("fail", subject, f"{names(working_nodes)}: nothing was heard of it", "run rlhpc doctor again")
        for node, report in job.engine.items():
            if not report:  # another node of the job was to start it, or torch's report says why none was started
                continue
            missing_stages = [stage for key, stage in _ENGINE_STAGES.items() if key not in report]
            if not missing_stages and "error" not in report and report.get("code") == 0:
                yield Finding("pass", subject, f"vLLM starts in {report['start_s']:.0f} s and generates ({node})")
                continue
            stage, advice = missing_stages[0] if missing_stages else ("ending two ranks", "look at that node's log")
            if "error" in report:
                problem = f"failed: {report['error']}"
            elif "hung_s" in report:
                problem = f"did not end within {report['hung_s']:.0f} s"
            else:
                problem = f"ended with exit code {report.get('code')}: {report.get('words', '')}"
            yield Finding("fail", subject, f"{node}: {stage} {problem}", advice)


def python(results: Probed, executable: str = sys.executable) -> list[Finding]:
    """Checks that the nodes have the same Python version as this host, and the required packages."""

    def find_problem(report: Mapping[str, Any]) -> str | None:
        if tuple(report["python"][:2]) != sys.version_info[:2]:
            return (
                f"have Python {'.'.join(map(str, report['python']))} ({report['executable']}), here it is {executable}"
            )
        missing_packages = [name for name, is_installed in report["packages"].items() if not is_installed]
        return f"have no {', '.join(missing_packages)} in {report['executable']}" if missing_packages else None

    return _check_nodes(
        results, "Python", find_problem, "fail", "install rlhpc on a filesystem of all nodes",
        f"{'.'.join(map(str, sys.version_info[:3]))} with its packages",
    )  # fmt: skip


def shared_memory(results: Probed) -> list[Finding]:
    def find_problem(report: Mapping[str, Any]) -> str | None:
        space = report["space"]["/dev/shm"]
        if "error" in space or not space["writable"]:
            return "cannot use /dev/shm"
        return f"have {format_bytes(space['free'], 0)} left in /dev/shm" if space["free"] < _MIN_SHM_BYTES else None

    free_bytes = [report["space"]["/dev/shm"].get("free", 0) for report in results.hellos.values()]
    return _check_nodes(
        results, "/dev/shm", find_problem, "warn",
        "data between ranks goes to files instead; set cluster.scratch to a fast disk",
        f"{format_bytes(min(free_bytes, default=0), 0)} or more free",
    )  # fmt: skip


def node_disks(results: Probed, site: Site) -> list[Finding]:
    def find_problem(report: Mapping[str, Any]) -> str | None:
        for name in ("/tmp", "scratch"):
            space = report["space"].get(name)
            location = site.scratch if name == "scratch" else name
            if space and ("error" in space or not space["writable"]):
                return f"cannot write in {location} ({space.get('error', 'not writable')})"
            if space and space["free"] < 2**30:
                return f"have {format_bytes(space['free'], 0)} left in {location}"
        return None

    success_text = f"room in /tmp{f' and {site.scratch}' if site.scratch else ''}"
    return _check_nodes(
        results,
        "node-local disk",
        find_problem,
        "fail",
        "correct scratch in the site file, or have it cleaned",
        success_text,
    )


def simulators(results: Probed) -> list[Finding]:
    """Checks that nodes have Vulkan, a driver for it, and SAPIEN's library for GPU simulation: the nodes where a GPU was
    requested or, if none was, all nodes.
    """
    gpu_hellos = {node: report for job in results.jobs if job.gpus for node, report in job.hello.items()}
    hellos = gpu_hellos or results.hellos

    def find_problem(report: Mapping[str, Any]) -> str | None:
        if not report["vulkan"]["loader"]:
            return "have no libvulkan.so.1"
        return None if report["vulkan"]["drivers"] else "have no Vulkan driver (icd.d)"

    def find_missing_library(report: Mapping[str, Any]) -> str | None:
        return None if report["physx"] else "have no libPhysXGpu_64.so in ~/.sapien/physx"

    drivers = sorted({name for report in hellos.values() for name in report["vulkan"]["drivers"]})
    findings = _check_nodes(
        results, "Vulkan", find_problem, "warn",
        "simulators that render need it: install libvulkan1 and the GPU's driver with it", ", ".join(drivers), hellos,
    )  # fmt: skip
    with_sapien = {node: report for node, report in gpu_hellos.items() if report["physx"] is not None}
    if with_sapien:
        findings += _check_nodes(
            results, "GPU simulation", find_missing_library, "warn",
            "ManiSkill downloads it at the first simulation on a GPU; where a network is, run once: "
            "python -c 'import sapien; sapien.physx.enable_gpu()'", "PhysX for GPUs is there", with_sapien,
        )  # fmt: skip
    return findings


def clocks(results: Probed) -> Iterator[Finding]:
    """Checks that the clocks of the nodes agree with this one's and with one another."""
    offsets = {node: node_offset for job in results.jobs for node, node_offset in job.offsets.items()}
    if not offsets:
        return
    wrong_nodes = [
        node for node, (offset_s, error_s) in offsets.items() if abs(offset_s) - error_s > _MAX_CLOCK_OFFSET_S
    ]
    worst_node = max(wrong_nodes or offsets, key=lambda node: abs(offsets[node][0]))
    max_offset_s = max(abs(offset_s) + error_s for offset_s, error_s in offsets.values())
    earliest_node, latest_node = (choose(offsets, key=lambda node: offsets[node][0]) for choose in (min, max))
    spread_s = offsets[latest_node][0] - offsets[earliest_node][0]
    advice = "ask for NTP on all nodes; a requeued job may be refused by a node whose clock is behind"
    yield decide(
        "clocks", f"within {max(max_offset_s, 0.1):.1f} s of this one's",
        (wrong_nodes, "warn",
         f"of {names(wrong_nodes)} differ from this one's, by up to {abs(offsets[worst_node][0]):.0f} s ({worst_node})",
          advice),
        (spread_s - offsets[earliest_node][1] - offsets[latest_node][1] > _MAX_CLOCK_OFFSET_S, "warn",
         f"of {earliest_node} and {latest_node} differ by {spread_s:.0f} s", advice),
    )  # fmt: skip


def limits(results: Probed) -> list[Finding]:
    def find_problem(report: Mapping[str, Any]) -> str | None:
        node_limits = report["limits"]
        if 0 <= node_limits["nofile"] < _MIN_FILES:
            num_ranks = max_ranks_of_driver(node_limits["nofile"])
            return f"allow {node_limits['nofile']} open files (ulimit -Hn), enough for {num_ranks} ranks"
        if 0 <= node_limits["nproc"] < _MIN_FILES:
            return f"allow {node_limits['nproc']} processes and threads (ulimit -u)"
        if 0 <= node_limits["memlock"] < 2**30 and any(_FAST_INTERFACE.match(name) for name in report["interfaces"]):
            return f"allow {format_bytes(node_limits['memlock'], 0)} of locked memory (ulimit -l), too little for InfiniBand"
        return None

    success_text = "enough open files, processes and locked memory"
    return _check_nodes(
        results,
        "limits",
        find_problem,
        "warn",
        "raise it in setup of the site file, or ask the administrators",
        success_text,
    )


def _check_nodes(
    results: Probed,
    subject: str,
    find_problem: Callable[[Mapping[str, Any]], str | None],
    level: Level,
    advice: str,
    pass_result: str,
    hellos: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Returns a finding for each problem of some nodes; one `pass` without problems, [] without reports."""
    nodes_by_problem: dict[str, list[str]] = {}
    hellos = results.hellos if hellos is None else hellos
    for node, report in hellos.items():
        if problem := find_problem(report):
            nodes_by_problem.setdefault(problem, []).append(node)
    findings = [
        Finding(level, subject, f"{names(nodes)} {problem_text}", advice)
        for problem_text, nodes in nodes_by_problem.items()
    ]
    return findings or ([Finding("pass", subject, pass_result)] if hellos else [])


_MIN_SPACE_BYTES = 5 * 2**30
_MIN_INODES = 20_000


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks for variables of this shell that a job would inherit but should not."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and "SLURM_JOB_ID" not in environ:
        yield Finding("warn", "this shell's GPU mask", f"CUDA_VISIBLE_DEVICES={mask!r} goes along with every job",
                 "unset CUDA_VISIBLE_DEVICES (look in ~/.bashrc) before submitting")  # fmt: skip
    if inherited_names := sorted(name for name in environ if name.startswith(("SBATCH_", "SALLOC_"))):
        yield Finding("warn", "this shell's options", f"set: {', '.join(inherited_names)}; they win over what a run asks for",
                 f"unset {' '.join(inherited_names)}")  # fmt: skip


_MIN_VERSIONS = {"snakemake": (9,), "submitit": (1, 5), "snakemake-executor-plugin-slurm": (2,)}


def packages(versions: Mapping[str, str | None], conf: str | None) -> Iterator[Finding]:
    """Checks the versions of the packages that submit jobs; `conf` is the path of slurm.conf, None for the default path."""
    for name, version_text in versions.items():
        installed_version = tuple(int(digits) for digits in re.findall(r"\d+", version_text or "")[:3])
        required_version = _MIN_VERSIONS.get(name, ())
        yield decide(
            name, version_text or "",
            (version_text is None and name.startswith("snakemake-executor"), "warn", "not installed",
             "pip install 'rlhpc[slurm]' (only profiles/slurm needs it)"),
            (version_text is None, "fail", "not installed", f"pip install {name}"),
            (installed_version < required_version, "fail",
             f"{version_text}; {'.'.join(map(str, required_version))} or later is needed", f"pip install -U {name}"),
            (name.endswith("jobstep") and installed_version == (0, 6, 1) and conf, "warn",
             f"{version_text} loses SLURM_CONF in its jobs, and here it is {conf}",
             f"pip install {name}==0.6.0, or have the file at /etc/slurm/slurm.conf"),
        )  # fmt: skip


def disk(subject: str, path: str, status: Mapping[str, Any]) -> Finding:
    """Checks the free space and inodes of a filesystem, as `node_probe.space` reports them."""
    if "error" in status:
        return Finding("fail", subject, f"{path}: {status['error']}", "make the folder, or name another")
    summary = f"{path}: {format_bytes(status['free'], 0)} of {format_bytes(status['total'], 0)} free"
    summary += f", {status['inodes_free']} of {status['inodes']} inodes" if status["inodes"] else ""
    is_full = status["free"] < _MIN_SPACE_BYTES or (status["inodes"] and status["inodes_free"] < _MIN_INODES)
    return decide(
        subject, summary,
        (not status["writable"], "fail", f"{path} is not writable", "name a folder of your own"),
        (is_full, "warn", summary, "make room, or use another folder: a run that cannot save stops"),
    )  # fmt: skip


def quotas(quota_text: str) -> Iterator[Finding]:
    """Checks the quotas of blocks and files in the output of `quota -wp`; warns above 90 % of a limit."""
    for row in quota_text.splitlines():
        cells = [cell.rstrip("*") for cell in row.split()]
        if len(cells) < 9 or not all(cell.isdigit() for cell in cells[1:]):
            continue
        for resource, (used_amount, soft, hard_limit) in {"space": cells[1:4], "inodes": cells[5:8]}.items():
            if not (limit_kib := int(soft) or int(hard_limit)):
                continue
            limit_text = format_bytes(limit_kib * 1024, 0) if resource == "space" else limit_kib
            usage = f"{100 * int(used_amount) / limit_kib:.0f} % of {limit_text} {resource} on {cells[0]}"
            is_near_limit = int(used_amount) > 0.9 * limit_kib
            yield decide(
                "quota", usage, (is_near_limit, "warn", usage, "make room: caches in $HOME are often the cause")
            )


def nearest_folder(path: Path) -> Path:
    """Returns the folder, or its nearest existing parent if the folder does not exist."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
