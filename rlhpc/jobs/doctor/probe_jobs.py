"""Probe jobs of the doctor: small Slurm jobs, at most one per partition, which the doctor always cancels at the end."""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import math
import os
import secrets
import shlex
import shutil
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
from rlhpc.runtime.interrupts import Interrupts
from rlhpc.runtime.launchers.srun_commands import step_environment, with_default_options
from rlhpc.runtime.network import query_node_addresses
from rlhpc.runtime.slurm import ask

PACKAGES = ("rlhpc", "torch", "zmq", "submitit")
_FILE_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 40.0
#: Limits of a second step, and of another job on a node, which may have to wait for resources.
_SECOND_STEP_TIMEOUT_S, _NEIGHBOUR_TIMEOUT_S = 30.0, 6.0
_TORCH_TIMEOUT_S = 60.0
#: Limit of an engine's start, which imports vLLM in two processes from a shared filesystem and compiles the model.
_ENGINE_TIMEOUT_S = 300.0
#: Seconds within which a node reports that its engine did not start in time.
_REPORT_S = 15.0
_MEMORY = "500M"
#: Memory for torch with its libraries, and for host memory of CUDA and NCCL.
_MEMORY_WITH_TORCH = "4G"
#: Memory and cores for two ranks of vLLM.
_MEMORY_WITH_ENGINE, _CPUS_WITH_ENGINE = "24G", 4
#: Source of the engine probe, for `python -c` on a node.
_ENGINE_PROBE = (
    f"{LEAVE_FOLDER}; import sys; sys.argv[1:] = ['2', 'accelerators']; "
    "from rlhpc.language.rollout.engine_probe import main; main()"
)
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
        hello, peers, torch, engine: Reports of each node on itself, on the other nodes, on GPUs in torch, and on the engine.
        offsets: Node → (seconds by which the node's clock is ahead, uncertainty in seconds).
        srun_error: srun's error with the site's options, if a step without them works.
        second_steps: Reports of a second step that runs at the same time, by node; `second_step_error` is srun's error.
        batch_folders: Node of the batch script → its `folder_ids`; {} if they are unknown.
        neighbour_folders: The same of another job on that node.
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
    engine: dict[str, dict[str, Any]] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    canary_views: dict[str, dict[str, Any]] = field(default_factory=dict)
    srun_error: str = ""
    second_steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    second_step_error: str = ""
    batch_folders: dict[str, dict[str, str]] = field(default_factory=dict)
    neighbour_folders: dict[str, dict[str, str]] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Records the reason why the job did not run."""
        self.error = reason

    def fail_second_step(self, reason: str) -> None:
        """Records srun's error of the second step."""
        self.second_step_error = reason

    def record_folders(self, batch: dict[str, dict[str, str]], neighbours: Sequence[dict[str, dict[str, str]]]) -> None:
        """Records the folders of the batch script, and the folders of another job on its node, if such a job ran."""
        self.batch_folders = batch
        self.neighbour_folders = next((folders for folders in neighbours if folders.keys() == batch.keys()), {})

    @property
    def starts_engine(self) -> bool:
        """True if the first node starts a vLLM engine of two ranks: with two GPUs, if vLLM is installed here."""
        return self.gpus >= 2 and not os.environ.get(VIRTUAL) and node_probe.has_package("vllm")

    @property
    def memory(self) -> str:
        """Memory per node, in Slurm's form."""
        return _MEMORY_WITH_ENGINE if self.starts_engine else _MEMORY_WITH_TORCH if self.gpus else _MEMORY

    @property
    def cpus(self) -> int:
        """Number of cores per node."""
        return _CPUS_WITH_ENGINE if self.starts_engine else 1


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
        num_nodes = max(1, min(max_nodes, num_ready))
        labels = tuple(group.label for group in groups)
        gpus = min(2, *(first_group.matches(node.get("Gres", "")) for node in gpu_nodes)) if wants_gpus else 0
        gres = f"{first_group.gres or 'gpu'}:{gpus}" if wants_gpus else None
        jobs.append(ProbeJob(partition, labels, tuple(options), gres, gpus, num_nodes, num_ready))
    return jobs


def wake_up_s(jobs: Sequence[ProbeJob], facts: SlurmFacts) -> float:
    """Returns the seconds to wait for nodes to power up: Slurm's ResumeTimeout if a job has no usable node and a powered-down
    node exists in its partition, otherwise 0.
    """
    nodes = [node for job in jobs if not job.usable_nodes for node in facts.nodes_of(job.partition)]
    return float(seconds_of(facts.config.get("ResumeTimeout", "")) or 0) if any(map(is_asleep, nodes)) else 0.0


def script_of(job: ProbeJob, site: Site, sleep_s: int, folder: Path | None = None) -> str:
    """Returns the job's batch script, which only sleeps; the probe runs as a job step.

    Args:
        job: The job.
        site: Site description.
        sleep_s: Seconds to sleep.
        folder: Folder in which the script reports its node and its folders for sockets and shared memory.
    """
    options = [
        "--job-name=rlhpc-doctor", "--output=/dev/null", "--error=/dev/null", "--requeue",
        *([f"--partition={job.partition}"] if job.partition else []), *job.options,
        f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={job.cpus}", f"--mem={job.memory}",
        f"--time={math.ceil(sleep_s / 60)}", *([f"--gres={job.gres}"] if job.gres else []), *site.sbatch,
    ]  # fmt: skip
    report = []
    if folder is not None:
        ids_command, name = f"$(stat -L -c %D.%i {' '.join(node_probe.MEETING_FOLDERS)})", "batch-$SLURM_JOB_ID"
        command = (
            f"cd {shlex.quote(str(folder))} && echo $SLURMD_NODENAME {ids_command} >{name}.new && mv {name}.new {name}"
        )
        report = [f"({command}) 2>/dev/null"]
    return "\n".join(
        ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in options), *report, f"exec sleep {sleep_s}", ""]
    )


def source_of(module: ModuleType) -> str:
    """Returns source code for `python -c` that runs the module's source."""
    return f"{LEAVE_FOLDER}; exec(compile({inspect.getsource(module)!r}, {module.__name__!r}, 'exec'))"


class _Step:
    """Job step of a probe job: the srun process, and the reports of its tasks.

    Args:
        job: The job, which gets the reports.
        site: Site description.
        srun: Options of srun besides those of each step.
    """

    def __init__(self, job: ProbeJob, site: Site, srun: Sequence[str]) -> None:
        argv = [
            "srun", f"--jobid={job.job_id}", "--job-name=doctor", "--overlap", *with_default_options(srun),
            f"--nodes={job.nodes}", f"--ntasks={job.nodes}", f"--cpus-per-task={job.cpus}", "--mem=0",
            *([f"--gres={job.gres}"] if job.gres else []),
        ]  # fmt: skip
        setup_script = "\n".join(site.setup)
        shell = f'{{ :\n{setup_script}\n}} >&2 </dev/null; p=$1; [ -x "$p" ] || p=python3; exec "$p" -c "$2"'
        python = site.container_python if site.container and site.container_python else sys.executable
        command = [*site.container, "bash", "-c", shell, "rlhpc-doctor", python, source_of(node_probe)]
        # passes this shell's GPU mask, because a job's batch step would inherit the mask
        masks = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        self.process = subprocess.Popen(
            [*argv, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**step_environment(os.environ), **masks}, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.job, self.srun = job, srun
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
            _, task, stage, piece_index, num_pieces, text_piece = fields
            received_pieces = self._pieces.setdefault((task, stage), {})
            received_pieces[int(piece_index)] = text_piece
            if len(received_pieces) == int(num_pieces):
                encoded_report = base64.b64decode("".join(received_pieces[i] for i in range(len(received_pieces))))
                self._record_report(task, stage, json.loads(encoded_report))

    def _record_report(self, task: str, stage: str, report_content: dict[str, Any]) -> None:
        if stage == "hello":
            self._node_of[task] = report_content["node"]
            self.job.hello[report_content["node"]] = report_content
        elif stage == "second_step":
            self.job.second_steps[report_content["node"]] = report_content
        elif stage == "clock" and task in self._node_of:
            now = time.time()
            middle_s, uncertainty_s = (self.sent_at + now) / 2, (now - self.sent_at) / 2
            self.job.offsets[self._node_of[task]] = (report_content["now"] - middle_s, uncertainty_s)
        elif task in self._node_of:
            reports = {"torch": self.job.torch, "engine": self.job.engine}.get(stage, self.job.peers)
            reports[self._node_of[task]] = report_content

    @property
    def last_words(self) -> str:
        """Last error line of srun; without one, srun's last line, and without any, the last line of the step's stderr."""
        srun_lines = [line for line in self.output_lines if line.startswith("srun: ")]
        srun_errors = [line for line in srun_lines if line.startswith("srun: error")]
        return next(reversed(srun_errors or srun_lines or self.output_lines), "nothing")

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
    """Results of all probe jobs, and the examined folder; `lock_error` is the error of a lock that this host takes there."""

    folder: Path
    jobs: list[ProbeJob]
    folder_error: str = ""
    lock_error: str = ""

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
        torch_report = job.torch[report["node"]] = node_probe.ask_child(source_of(torch_probe), _TORCH_TIMEOUT_S)
        if job.starts_engine and node_probe.can_start_engine(torch_report):
            job.engine[report["node"]] = node_probe.ask_child(_ENGINE_PROBE, _ENGINE_TIMEOUT_S)
    return Probed(folder, [job])


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
    canary_path = folder / f".rlhpc-doctor-{token[:8]}"
    steps: list[_Step] = []
    second_steps: list[_Step] = []
    neighbours: list[ProbeJob] = []
    lock: int | None = None
    with Interrupts():
        try:
            try:
                canary_path.mkdir(mode=0o700)
                _write(canary_path / "login", token)
                lock, results.lock_error = node_probe.lock(str(canary_path / "lock"), _FILE_TIMEOUT_S)
            except OSError as error:
                results.folder_error = error.strerror or str(error)
            tests_torch = not os.environ.get(VIRTUAL) and any(job.gpus for job in jobs)
            starts_engine = tests_torch and any(job.starts_engine for job in jobs)
            gpu_timeout_s = tests_torch * _TORCH_TIMEOUT_S + starts_engine * _ENGINE_TIMEOUT_S
            job_limit_s = int(start_s + 2 * _ANSWER_TIMEOUT_S + _SECOND_STEP_TIMEOUT_S + gpu_timeout_s + 20)
            for job in jobs:
                _submit(job, site, job_limit_s, canary_path)
            plan = {
                "token": token, "canary": str(canary_path), "timeout_s": _FILE_TIMEOUT_S, "limit_s": job_limit_s,
                "packages": PACKAGES, "scratch": site.scratch,
            }  # fmt: skip
            torch = {"torch": source_of(torch_probe), "torch_s": _TORCH_TIMEOUT_S} if tests_torch else {}
            for job in _iter_started(jobs, start_s):
                engine = {"engine": _ENGINE_PROBE, "engine_s": _ENGINE_TIMEOUT_S} if job.starts_engine else {}
                instructions = {**plan, **torch, **(engine if torch else {})} if job.gpus else plan
                steps.append(_start_step(job, site, instructions))
            _wait_until(
                lambda: all(step.has_ended or len(step.job.hello) == step.job.nodes for step in steps),
                _ANSWER_TIMEOUT_S,
            )
            _check_node_files(results, canary_path, token)
            running_steps = [step for step in steps if step.job.hello and not step.has_ended]
            for step in running_steps:
                second_steps.append(_Step(step.job, site, step.srun))
                second_steps[-1].send({"is_second_step": True, "limit_s": job_limit_s})
                neighbours += _submit_neighbours(step.job, site, canary_path)
            _exchange_addresses(steps, site, canary_path, token)
            _wait_until(
                lambda: all(step.has_ended or len(step.job.peers) == step.job.nodes for step in steps),
                _ANSWER_TIMEOUT_S,
            )
            _await_second_steps(second_steps)
            _read_batch_folders(running_steps, neighbours, canary_path)
            if tests_torch:
                torch_steps = [step for step in steps if step.job.gpus]
                _wait_until(
                    lambda: all(step.has_ended or len(step.job.torch) == step.job.nodes for step in torch_steps),
                    _TORCH_TIMEOUT_S,
                )
            if starts_engine:
                engine_steps = [step for step in steps if step.job.starts_engine]
                _wait_until(
                    lambda: all(step.has_ended or len(step.job.engine) == step.job.nodes for step in engine_steps),
                    _ENGINE_TIMEOUT_S + _REPORT_S,
                )
            for step in steps:
                step.end()
                if not step.job.hello:
                    step.job.fail(f"its srun said: {step.last_words}")
        finally:
            if ids := [job.job_id for job in (*jobs, *neighbours) if job.job_id]:
                ask("scancel", *ids)
            for step in (*steps, *second_steps):
                step.end()
            if lock is not None:
                os.close(lock)
            shutil.rmtree(canary_path, ignore_errors=True)
    return results


def _start_step(job: ProbeJob, site: Site, instructions: Mapping[str, Any]) -> _Step:
    """Starts the probe of a job's nodes; without the site's options of srun, if srun does not accept them."""
    step = _Step(job, site, site.srun)
    step.send(instructions)
    if site.srun:
        _wait_until(lambda: step.has_ended or bool(job.hello), _ANSWER_TIMEOUT_S)
        if step.has_ended and not job.hello:
            step.end()
            job.srun_error = step.last_words
            step = _Step(job, site, ())
            step.send(instructions)
    return step


def _submit_neighbours(job: ProbeJob, site: Site, canary_path: Path) -> list[ProbeJob]:
    """Submits another small job to the node of a job's batch script; [] if the site's jobs have nodes for themselves."""
    is_shared = any("ms" in report["canary"] for report in job.hello.values())
    if not is_shared or any("exclusive" in sbatch_option for sbatch_option in site.sbatch):
        return []
    batch_file = canary_path / f"batch-{job.job_id}"
    _wait_until(batch_file.exists, _NEIGHBOUR_TIMEOUT_S)
    if not (node := _read_batch_report(batch_file)):
        return []
    options = (*job.options, f"--nodelist={next(iter(node))}")
    neighbour = ProbeJob(job.partition, job.labels, options, None, 0, 1, 1)
    _submit(neighbour, site, int(_SECOND_STEP_TIMEOUT_S), canary_path)
    return [neighbour]


def _await_second_steps(steps: Sequence[_Step]) -> None:
    """Waits for the reports of the second steps; srun's error stands in for a missing one."""
    _wait_until(
        lambda: all(step.has_ended or len(step.job.second_steps) == step.job.nodes for step in steps),
        _SECOND_STEP_TIMEOUT_S,
    )
    for step in steps:
        if len(step.job.second_steps) < step.job.nodes:
            step.job.fail_second_step(step.last_words)
        step.end()


def _read_batch_folders(steps: Sequence[_Step], neighbours: Sequence[ProbeJob], canary_path: Path) -> None:
    """Adds the folder reports of the batch scripts of the jobs and of their neighbours."""
    neighbour_files = [canary_path / f"batch-{neighbour.job_id}" for neighbour in neighbours if neighbour.job_id]
    _wait_until(lambda: all(file.exists() for file in neighbour_files), _NEIGHBOUR_TIMEOUT_S)
    by_node = [_read_batch_report(file) for file in neighbour_files]
    for step in steps:
        step.job.record_folders(_read_batch_report(canary_path / f"batch-{step.job.job_id}"), by_node)


def _read_batch_report(file: Path) -> dict[str, dict[str, str]]:
    """Reads the report of a batch script; {} if it is missing or incomplete."""
    try:
        node, *ids = file.read_text().split()
    except (OSError, ValueError):
        return {}
    return {node: dict(zip(node_probe.MEETING_FOLDERS, ids, strict=False))} if len(ids) > 1 else {}


def _write(path: Path, file_text: str) -> None:
    new_path = path.with_suffix(".new")
    new_path.write_text(file_text)
    new_path.replace(path)


def _submit(job: ProbeJob, site: Site, job_limit_s: int, folder: Path) -> None:
    sbatch_output = ask("sbatch", "--parsable", stdin=script_of(job, site, job_limit_s, folder), timeout_s=60)
    if sbatch_output.code != 0:
        job.fail(f"sbatch: {sbatch_output.last_line.removeprefix('sbatch: ').removeprefix('error: ')}")
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
        for job_id, job_state, reason in (row for row in rows if len(row) == 3 and row[0] in waiting_jobs):
            waiting_jobs[job_id].reason = reason if job_state == "PENDING" else job_state
            if job_state == "RUNNING":
                yield waiting_jobs.pop(job_id)
            elif job_state not in ("PENDING", "CONFIGURING"):
                waiting_jobs.pop(job_id).fail(f"its job ended as {job_state} ({reason})")
        if waiting_jobs and time.monotonic() > deadline:
            for job in waiting_jobs.values():
                job.fail(f"did not start within {start_s:.0f} s ({job.reason or 'Slurm did not say why'})")
            ask("scancel", *waiting_jobs)
            return
        if waiting_jobs:
            time.sleep(_POLL_S)


def _check_node_files(results: Probed, canary_path: Path, token: str) -> None:
    """Reads the file that each node wrote, and adds the results to the jobs."""
    for job in results.jobs:
        for node, report in job.hello.items():
            if "ms" in report["canary"] and "write_error" not in report["canary"]:
                job.canary_views[node] = node_probe.wait_for(str(canary_path / f"node-{node}"), token, _FILE_TIMEOUT_S)


def _exchange_addresses(steps: Sequence[_Step], site: Site, canary_path: Path, token: str) -> None:
    """Sends every node the addresses of all nodes, and writes a second file that each node must find."""
    hellos = {node: report for step in steps for node, report in step.job.hello.items()}
    addresses = query_node_addresses(list(hellos)) if hellos else {}
    address_by_node = {
        node: (report["interfaces"].get(site.interface or "", addresses.get(node, node)), report["port"])
        for node, report in hellos.items()
    }
    with contextlib.suppress(OSError):
        _write(canary_path / "second", token)
    peers = [
        {
            "node": node, "address": address, "port": port, "interfaces": hellos[node]["interfaces"],
            "host": hellos[node]["host"],
        }
        for node, (address, port) in address_by_node.items()
    ]  # fmt: skip
    for step in steps:
        step.send(
            {
                "peers": peers,
                "second": (canary_path / "second").exists()
                and any("ms" in s["canary"] for s in step.job.hello.values()),
            }
        )
