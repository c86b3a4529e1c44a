"""Probe jobs of the doctor: small Slurm jobs, at most one per partition, which the doctor always cancels at the end."""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhpc.jobs.doctor import node_probe, torch_probe
from rlhpc.jobs.doctor.slurm_facts import Site, SiteNodeGroup, SlurmFacts, is_asleep, is_usable, seconds_of
from rlhpc.runtime.devices import VIRTUAL
from rlhpc.runtime.imports import LEAVE_FOLDER
from rlhpc.runtime.launchers.srun_commands import step_environment
from rlhpc.runtime.network import node_addresses
from rlhpc.runtime.slurm import ask

PACKAGES = ("rlhpc", "torch", "zmq", "submitit")
_FILE_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 40.0
_TORCH_TIMEOUT_S = 60.0
_MEMORY = "500M"
#: Memory for torch with its libraries, and for host memory of CUDA and NCCL.
_MEMORY_WITH_TORCH = "4G"
_POLL_S = 1.0


@dataclass
class ProbeJob:
    """Probe job with the reports of its nodes.

    Attributes:
        partition: Partition of the job; None is the default partition.
        labels: Node groups of the site in that partition.
        gpus: Number of GPUs requested per node: two if available, for an all-reduce. `gres` is the same request for Slurm.
        nodes: Number of nodes requested; `usable_nodes` could start a job at once.
        error: Reason why the job did not run. `reason` is Slurm's reason why the job waits.
        requeue: Slurm's setting after `--requeue`: "1", "0", or "" if unknown.
        hello, peers, torch: Reports of each node on itself, on the other nodes, and on GPUs in torch.
        offsets: Node → (seconds by which the node's clock is ahead, uncertainty in seconds).
        canary_views: Node → result of this host's read of the node's file: `{"ms": …}` or `{"error": …}`.
    """

    partition: str | None
    labels: tuple[str, ...]
    options: tuple[str, ...]
    gres: str | None
    gpus: int
    nodes: int
    usable_nodes: int
    job_id: str = ""
    error: str = ""
    reason: str = ""
    requeue: str = ""
    hello: dict[str, dict[str, Any]] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    torch: dict[str, dict[str, Any]] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    canary_views: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Records the reason why the job did not run."""
        self.error = reason


def plan_jobs(site: Site, facts: SlurmFacts, max_nodes: int) -> list[ProbeJob]:
    """Returns one probe job for each existing partition of the site."""
    by_partition: dict[str | None, list[SiteNodeGroup]] = {}
    for group in site.groups:
        record = facts.partition(group.partition)
        if record is not None:
            by_partition.setdefault(group.partition, []).append(group)
    jobs = []
    for partition, groups in by_partition.items():
        first_group = groups[0]
        nodes = facts.nodes_of(partition)
        gpu_nodes = [node for node in nodes if first_group.matches(node.get("Gres", ""))]
        wants_gpus = bool(gpu_nodes) and (first_group.gres is not None or len(gpu_nodes) == len(nodes))
        num_ready = sum(is_usable(node) for node in (gpu_nodes if wants_gpus else nodes))
        options = [
            f"--{key}={option_value}" for key in ("account", "qos") if (option_value := getattr(first_group, key))
        ]
        if first_group.constraint and len({group.constraint for group in groups}) == 1:
            options.append(f"--constraint={first_group.constraint}")
        count = max(1, min(max_nodes, num_ready))
        labels = tuple(group.label for group in groups)
        gpus = min(2, *(first_group.matches(node.get("Gres", "")) for node in gpu_nodes)) if wants_gpus else 0
        gres = f"{first_group.gres or 'gpu'}:{gpus}" if wants_gpus else None
        jobs.append(ProbeJob(partition, labels, tuple(options), gres, gpus, count, num_ready))
    return jobs


def wake_up_s(jobs: Sequence[ProbeJob], facts: SlurmFacts) -> float:
    """Returns the seconds to wait for nodes to power up: Slurm's ResumeTimeout if a job has no usable node and a powered-down
    node exists in its partition, otherwise 0.
    """
    nodes = [node for job in jobs if not job.usable_nodes for node in facts.nodes_of(job.partition)]
    return float(seconds_of(facts.config.get("ResumeTimeout", "")) or 0) if any(map(is_asleep, nodes)) else 0.0


def script_of(job: ProbeJob, site: Site, seconds: int) -> str:
    """Returns the job's batch script, which only sleeps; the probe runs as a job step."""
    memory = _MEMORY_WITH_TORCH if job.gpus else _MEMORY
    options = [
        "--job-name=rlhpc-doctor", "--output=/dev/null", "--error=/dev/null", "--requeue",
        *([f"--partition={job.partition}"] if job.partition else []), *job.options,
        f"--nodes={job.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", f"--mem={memory}",
        f"--time={math.ceil(seconds / 60)}", *([f"--gres={job.gres}"] if job.gres else []), *site.sbatch,
    ]  # fmt: skip
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), f"exec sleep {seconds}", ""])


def source_of(module: ModuleType) -> str:
    """Returns source code for `python -c` that runs the module's source."""
    return f"{LEAVE_FOLDER}; exec(compile({inspect.getsource(module)!r}, {module.__name__!r}, 'exec'))"


class _Step:
    """Job step of a probe job: the srun process, and the reports of its tasks."""

    def __init__(self, job: ProbeJob, site: Site) -> None:
        argv = [
            "srun", f"--jobid={job.job_id}", "--job-name=doctor", "--overlap", f"--nodes={job.nodes}",
            f"--ntasks={job.nodes}", "--cpus-per-task=1", "--mem=0", *([f"--gres={job.gres}"] if job.gres else []),
        ]  # fmt: skip
        setup = "\n".join(site.setup)
        shell = f'{{ :\n{setup}\n}} >&2 </dev/null; p=$1; [ -x "$p" ] || p=python3; exec "$p" -c "$2"'
        command = [*site.container, "bash", "-c", shell, "rlhpc-doctor", sys.executable, source_of(node_probe)]
        # passes this shell's GPU mask, because a job's batch step would inherit the mask
        masks = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        self.process = subprocess.Popen(
            [*argv, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**step_environment(os.environ), **masks}, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.job = job
        self.output_lines: list[str] = []
        self.sent_at = 0.0
        self._node_of: dict[str, str] = {}
        self._pieces: dict[tuple[str, str], dict[int, str]] = {}
        self._readers = [
            threading.Thread(target=read_stream, daemon=True) for read_stream in (self._read_reports, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def send(self, content: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.sent_at = time.time()
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output_lines = [*self.output_lines[-9:], line.strip()]

    def _read_reports(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            fields = line.split()
            if len(fields) != 6 or fields[0] != node_probe.MARK:
                continue
            _, task, stage, piece_index, total, piece = fields
            pieces = self._pieces.setdefault((task, stage), {})
            pieces[int(piece_index)] = piece
            if len(pieces) == int(total):
                encoded = base64.b64decode("".join(pieces[i] for i in range(len(pieces))))
                self._record_report(task, stage, json.loads(encoded))

    def _record_report(self, task: str, stage: str, content: dict[str, Any]) -> None:
        if stage == "hello":
            self._node_of[task] = content["node"]
            self.job.hello[content["node"]] = content
        elif stage == "clock" and task in self._node_of:
            now = time.time()
            middle_s, uncertainty_s = (self.sent_at + now) / 2, (now - self.sent_at) / 2
            self.job.offsets[self._node_of[task]] = (content["now"] - middle_s, uncertainty_s)
        elif task in self._node_of:
            reports = self.job.torch if stage == "torch" else self.job.peers
            reports[self._node_of[task]] = content

    @property
    def last_words(self) -> str:
        """Last error line of srun; without an error line, the last line of the step's stderr."""
        srun_errors = [line for line in self.output_lines if line.startswith("srun: error")]
        return next(reversed(srun_errors or self.output_lines), "nothing")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(2)


@dataclass
class Probed:
    """Results of all probe jobs, and the examined folder."""

    folder: Path
    jobs: list[ProbeJob]
    folder_error: str = ""

    @property
    def hellos(self) -> dict[str, dict[str, Any]]:
        return {node: report for job in self.jobs for node, report in job.hello.items()}

    @property
    def peers(self) -> dict[str, dict[str, Any]]:
        return {node: report for job in self.jobs for node, report in job.peers.items()}


def probe_this_machine(site: Site, folder: Path, gpus: int) -> Probed:
    """Examines this machine like the only node of a job.

    Args:
        site: Site description, which names the scratch folder.
        folder: Folder for runs.
        gpus: Number of GPUs that torch should see.
    """
    job = ProbeJob(None, (), (), None, gpus, 1, 1)
    report = node_probe.collect_facts({"canary": str(folder / "canary"), "packages": PACKAGES, "scratch": site.scratch})
    job.hello[report["node"]] = report
    if gpus and not os.environ.get(VIRTUAL):
        job.torch[report["node"]] = node_probe.ask_torch(source_of(torch_probe), _TORCH_TIMEOUT_S)
    return Probed(folder, [job])


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Handles SIGTERM and SIGHUP in the block like Ctrl-C, so that the block can cancel jobs and remove files."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {
        signum: signal.signal(signum, signal.default_int_handler) for signum in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def run_probes(jobs: Sequence[ProbeJob], site: Site, folder: Path, *, start_s: float) -> Probed:
    """Submits the probe jobs, collects the reports of their nodes, and cancels the jobs.

    Args:
        jobs: Probe jobs from `plan_jobs`.
        site: Site description.
        folder: Folder for runs; must exist.
        start_s: Maximum seconds for a job to start, after which the job is cancelled.
    """
    results = Probed(folder, list(jobs))
    token = secrets.token_hex(16)
    canary = folder / f".rlhpc-doctor-{token[:8]}"
    steps: list[_Step] = []
    with _interruptible():
        try:
            try:
                canary.mkdir(mode=0o700)
                _write(canary / "login", token)
            except OSError as error:
                results.folder_error = error.strerror or str(error)
            tests_torch = not os.environ.get(VIRTUAL) and any(job.gpus for job in jobs)
            limit = int(start_s + 2 * _ANSWER_TIMEOUT_S + tests_torch * _TORCH_TIMEOUT_S + 20)
            for job in jobs:
                _submit(job, site, limit)
            plan = {
                "token": token, "canary": str(canary), "timeout_s": _FILE_TIMEOUT_S, "limit_s": limit,
                "packages": PACKAGES, "scratch": site.scratch,
            }  # fmt: skip
            torch = {"torch": source_of(torch_probe), "torch_s": _TORCH_TIMEOUT_S} if tests_torch else {}
            for job in _iter_started(jobs, start_s):
                steps.append(_Step(job, site))
                steps[-1].send({**plan, **torch} if job.gpus else plan)
            _wait_until(
                lambda: all(step.has_ended or len(step.job.hello) == step.job.nodes for step in steps),
                _ANSWER_TIMEOUT_S,
            )
            _check_node_files(results, canary, token)
            _exchange_addresses(steps, site, canary, token)
            _wait_until(
                lambda: all(step.has_ended or len(step.job.peers) == step.job.nodes for step in steps),
                _ANSWER_TIMEOUT_S,
            )
            if tests_torch:
                torch_steps = [step for step in steps if step.job.gpus]
                _wait_until(
                    lambda: all(step.has_ended or len(step.job.torch) == step.job.nodes for step in torch_steps),
                    _TORCH_TIMEOUT_S,
                )
            for step in steps:
                step.end()
                if not step.job.hello:
                    step.job.fail(f"its srun said: {step.last_words}")
        finally:
            if ids := [job.job_id for job in jobs if job.job_id]:
                ask("scancel", *ids)
            for step in steps:
                step.end()
            shutil.rmtree(canary, ignore_errors=True)
    return results


def _write(path: Path, text: str) -> None:
    new_path = path.with_suffix(".new")
    new_path.write_text(text)
    new_path.replace(path)


def _submit(job: ProbeJob, site: Site, limit: int) -> None:
    sbatch_output = ask("sbatch", "--parsable", stdin=script_of(job, site, limit), timeout_s=60)
    if sbatch_output.code != 0:
        job.fail(f"sbatch: {sbatch_output.words.removeprefix('sbatch: ').removeprefix('error: ')}")
        return
    job.job_id = sbatch_output.text.strip().splitlines()[-1].partition(";")[0]
    for record in ask("scontrol", "--oneliner", "show", "job", job.job_id).records:
        job.requeue = record.get("Requeue", "")


def _iter_started(jobs: Sequence[ProbeJob], start_s: float) -> Iterator[ProbeJob]:
    """Yields each job when it starts; cancels the jobs that do not start within `start_s` seconds."""
    waiting_jobs = {job.job_id: job for job in jobs if job.job_id}
    deadline = time.monotonic() + start_s
    while waiting_jobs:
        squeue_output = ask(
            "squeue", "--noheader", "--states=all", f"--jobs={','.join(waiting_jobs)}", "--format=%A|%T|%r"
        )
        rows = [line.strip().split("|") for line in squeue_output.text.splitlines()]
        for job_id, state, reason in (row for row in rows if len(row) == 3 and row[0] in waiting_jobs):
            waiting_jobs[job_id].reason = reason if state == "PENDING" else state
            if state == "RUNNING":
                yield waiting_jobs.pop(job_id)
            elif state not in ("PENDING", "CONFIGURING"):
                waiting_jobs.pop(job_id).fail(f"its job ended as {state} ({reason})")
        if waiting_jobs and time.monotonic() > deadline:
            for job in waiting_jobs.values():
                job.fail(f"did not start within {start_s:.0f} s ({job.reason or 'Slurm did not say why'})")
            ask("scancel", *waiting_jobs)
            return
        if waiting_jobs:
            time.sleep(_POLL_S)


def _check_node_files(results: Probed, canary: Path, token: str) -> None:
    """Reads the file that each node wrote, and adds the results to the jobs."""
    for job in results.jobs:
        for node, report in job.hello.items():
            if "ms" in report["canary"] and "write_error" not in report["canary"]:
                job.canary_views[node] = node_probe.wait_for(str(canary / f"node-{node}"), token, _FILE_TIMEOUT_S)


def _exchange_addresses(steps: Sequence[_Step], site: Site, canary: Path, token: str) -> None:
    """Sends every node the addresses of all nodes, and writes a second file that each node must find."""
    hellos = {node: report for step in steps for node, report in step.job.hello.items()}
    addresses = node_addresses(list(hellos)) if hellos else {}
    address_by_node = {
        node: (report["interfaces"].get(site.interface or "", addresses.get(node, node)), report["port"])
        for node, report in hellos.items()
    }
    with contextlib.suppress(OSError):
        _write(canary / "second", token)
    peers = [(node, *address) for node, address in address_by_node.items()]
    for step in steps:
        step.send(
            {
                "peers": peers,
                "second": (canary / "second").exists() and any("ms" in s["canary"] for s in step.job.hello.values()),
            }
        )
