"""Job steps: in a Slurm job, a worker group is one `srun` (one for each component of the job that it has ranks on).

A task of the step is a rank. It reads what it is to do from its standard input, which stays open: when the driver or its
srun is gone, however they died, the input ends and the rank with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.allocation import expand_range, in_slurm_job, slurm_nodes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.import_paths import python_path, run_module
from rlhpc.runtime.network import address_of, address_towards, node_addresses
from rlhpc.runtime.spec import WorkerSpec

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.scratch import Scratch

log = logging.getLogger(__name__)

#: Variables of the batch step that would bind or resize a step which states its own resources.
_DROPPED = re.compile(
    r"SLURM_(CPU_BIND|NTASKS|NPROCS|GPUS|GPU_|CPUS_PER_|TRES_PER_|MEM_PER_|MEM_BIND|DISTRIBUTION|HINT|EXCLUSIVE"
    r"|THREADS_PER_CORE|NNODES|TASKS_PER_NODE|STEP_|STEPID|PROCID|LOCALID|NODEID|GTIDS|OVERCOMMIT|EXPORT_ENV|HOSTFILE"
    r"|HET_SIZE_STEP|LAUNCH_NODE|SRUN_COMM|UMASK|WHOLE|EXACT)"
    r"|SBATCH_|SRUN_CPUS|CUDA_VISIBLE_DEVICES$|ROCR_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$|SUBMITIT_"
)
_ENDED = re.compile(r"^srun: error: (\S+?): tasks? ([\d,\- ]+): (.*)$")
_SIGNALS = {signal.strsignal(number): number for number in range(1, 32)}
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!Q")
_KEPT_LINES = 40


def steps_possible() -> bool:
    """Whether this process is in a Slurm job that lets it start job steps."""
    return in_slurm_job(os.environ) and shutil.which("srun") is not None


def own_address(interface: str | None) -> str | None:
    """This host's address for the job's other hosts; None where there are none."""
    nodes = slurm_nodes(os.environ)
    others = [node.name for node in nodes if not node.is_local]
    if not others:
        return None
    return address_of(interface) if interface else address_towards(node_addresses(others[:1])[others[0]])


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The batch step's environment without what Slurm set for that step alone. `SLURM_CONF` and the job's own stay."""
    return {name: value for name, value in environ.items() if not _DROPPED.match(name)}


def srun_argv(
    *,
    name: str,
    component: int,
    components: int,
    nodes: int,
    tasks: int,
    cores: int | None,
    accelerators: int,
    overcommit: bool,
) -> list[str]:
    """The start of a step's command line. It states all its resources: srun does not inherit every one from the job.

    Args:
        name: What Slurm calls the step: the worker group's name.
        component, components: Component of the job that the step runs on, and how many there are.
        nodes, tasks: Nodes and ranks of the step; `SLURM_HOSTFILE` says which rank goes where.
        cores: Cores of a rank; None where the nodes' are not known yet, in a plan.
        accelerators: Accelerators that the job has on each of the nodes: a rank picks its own among them. 0 clears the
            mask, which a step would inherit from component 0 else.
        overcommit: There are more ranks than cores.
    """
    argv = ["srun", f"--job-name={name}", "--overlap"]
    if components > 1:
        argv.append(f"--het-group={component}")
    argv += [f"--nodes={nodes}", f"--ntasks={tasks}", f"--cpus-per-task={cores or '?'}", "--mem=0"]
    argv.append(f"--gres=gpu:{accelerators}" if accelerators else "--gres=none")
    if overcommit:
        argv.append("--overcommit")
    # The driver decides who else ends when a rank dies, whatever the site's defaults are.
    return [*argv, "--distribution=arbitrary", "--kill-on-bad-exit=0", "--wait=0"]


def task_status(words: str) -> int | None:
    """Wait status of a task from what srun says of it: `Killed`, `Exited with exit code 3`, `Segmentation fault (core
    dumped)`; None where it says nothing of the kind."""
    text = words.strip()
    if match := re.match(r"Exited with exit code (\d+)", text):
        return int(match[1]) << 8
    if text.lower().startswith("out of memory") or text.startswith("Out Of Memory"):
        return int(signal.SIGKILL)
    return _SIGNALS.get(text.removesuffix("(core dumped)").strip())


class JobStep:
    """One srun and the ranks that it runs.

    Args:
        specs: What each task is told, in the order of the tasks.
        place: Component of the job, and how many components it has.
        argv: srun and its options.
        command: What a task runs.
        log_err: File for what srun and a rank that has not opened its own log say.
        on_exit: Called with (spec, wait status) when a task ended otherwise than with exit code 0.
        on_end: Called with srun's exit code when the step is over.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        place: tuple[int, int],
        argv: Sequence[str],
        command: Sequence[str],
        log_err: Path,
        on_exit: Callable[[WorkerSpec, int], None],
        on_end: Callable[[JobStep, int], None],
    ) -> None:
        self.specs, self.log_err = list(specs), log_err
        self.component, self.total = place
        self.step_id = ""
        self._on_exit, self._on_end = on_exit, on_end
        self._said: list[str] = []
        self._hosts = log_err.with_suffix(f".{time.time_ns():x}.hosts")
        self._hosts.write_text("".join(f"{spec.node}\n" for spec in specs))
        environment = {**step_environment(os.environ), "SLURM_HOSTFILE": str(self._hosts)}
        environment["PYTHONPATH"] = python_path(foreign=bool(specs[0].interpreter))
        environment["OMP_NUM_THREADS"] = str(specs[0].threads)
        environment.setdefault("GOMP_SPINCOUNT", "1000")  # as the fork server has it
        # of its component: in a task SLURM_JOB_ID is the whole job's, which this step is not one of
        job = os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{self.component}") or os.environ.get("SLURM_JOB_ID", "")
        environment["RLHPC_STEP_JOB"] = job
        parent = os.getpid()
        self.process = subprocess.Popen(
            [*argv, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True, preexec_fn=lambda: _end_with(parent),
        )  # fmt: skip
        threading.Thread(target=self._feed, name=f"rlhpc-srun-{specs[0].group}", daemon=True).start()

    def listen(self) -> None:
        """Begins to report what happens to the step."""
        threading.Thread(target=self._listen, name=f"rlhpc-srun-{self.specs[0].group}", daemon=True).start()

    def _feed(self) -> None:
        """Tells the ranks what to do; the pipe stays open after that."""
        body = pickle.dumps(self.specs)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(_LENGTH.pack(len(body)) + body)
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.log_err.open("ab", buffering=0) as file:
            for line in self.process.stdout:
                with contextlib.suppress(OSError):
                    file.write(line)
                self._hear(line.decode(errors="replace").rstrip())
        code = self.process.wait()
        with contextlib.suppress(OSError):
            self._hosts.unlink(missing_ok=True)
        self._on_end(self, code)

    def _hear(self, line: str) -> None:
        self._said = [*self._said[1 - _KEPT_LINES :], line]
        match = _ENDED.match(line)
        status = task_status(match[3]) if match else None
        if match is None or status is None:
            return
        with contextlib.suppress(ConfigError):
            for part in match[2].replace(" ", "").split(","):
                for task in expand_range(part, line):
                    if int(task) < len(self.specs):
                        self._on_exit(self.specs[int(task)], status)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def last_words(self) -> str:
        """What srun said last."""
        return "\n".join(line for line in self._said if line.strip())

    def end(self) -> None:
        """Kills the step: srun forwards this as SIGKILL to every task."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The same by way of the controller, where srun itself hangs; then srun."""
        if self.step_id:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["scancel", "--signal=KILL", self.step_id],
                    capture_output=True,
                    timeout=10,
                    stdin=subprocess.DEVNULL,
                )
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Placed(Protocol):
    """A rank as far as its step's command line depends on it."""

    @property
    def node_rank(self) -> int: ...
    @property
    def accelerators(self) -> tuple[int, ...]: ...


def step_words(
    group: str, place: tuple[int, int], ranks: Sequence[Placed], cluster: Cluster, interpreter: str | None
) -> tuple[list[str], list[str]]:
    """The command line of a worker group's step, or of its part in one component of the job.

    Args:
        group: Name of the worker group.
        place: Component of the job, and how many there are.
        ranks: The step's tasks, in order.
        cluster: The nodes; their cores may be unknown (0), in a plan.
        interpreter: Python of the ranks' node group, where it has one of its own.

    Returns:
        srun with its options, and what each task runs.
    """
    counts = {rank: sum(r.node_rank == rank for r in ranks) for rank in {r.node_rank for r in ranks}}
    nodes = {rank: cluster.nodes[rank] for rank in counts}
    known = all(node.cpus for node in nodes.values())
    cores = min(max(1, nodes[rank].cpus // count) for rank, count in counts.items()) if known else None
    on_device = any(rank.accelerators for rank in ranks)
    argv = srun_argv(
        name=group,
        component=place[0],
        components=place[1],
        nodes=len(nodes),
        tasks=len(ranks),
        cores=cores,
        accelerators=max(len(node.accelerators) for node in nodes.values()) if on_device else 0,
        overcommit=cores is not None and any(count * cores > nodes[rank].cpus for rank, count in counts.items()),
    )
    return argv, [*cluster.container, *run_module("rlhpc.runtime.process", "step", python=interpreter)]


def start_steps(
    specs: Sequence[WorkerSpec],
    cluster: Cluster,
    log_dir: Path,
    on_exit: Callable[[WorkerSpec, int], None],
    on_end: Callable[[JobStep, int], None],
) -> list[JobStep]:
    """Starts a group: one step for each component of the job that it has ranks on. Call `listen` on each.

    Raises:
        OSError: There is no srun, or no process can be started.
    """
    total = len({node.het_group for node in cluster.nodes})
    parts: dict[int, list[WorkerSpec]] = {}
    for spec in specs:
        parts.setdefault(cluster.nodes[spec.node_rank].het_group or 0, []).append(spec)
    steps = []
    for component, tasks in sorted(parts.items()):
        group = tasks[0].group
        argv, command = step_words(group, (component, total), tasks, cluster, tasks[0].interpreter or None)
        name = f"{group}-{component}" if total > 1 else group
        steps.append(JobStep(tasks, (component, total), argv, command, log_dir / f"{name}.step.err", on_exit, on_end))
    return steps


def clear_nodes(steps: Collection[JobStep], scratch: Scratch) -> None:
    """Removes the session's folders on nodes where ranks were killed before they could do so themselves."""
    nodes: dict[int, set[str]] = {}
    totals = {step.component: step.total for step in steps}
    for step in steps:
        nodes.setdefault(step.component, set()).update(spec.node for spec in step.specs)
    for component, names in nodes.items():
        argv = ["srun", "--overlap", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--mem=0", "--gres=none"]
        argv += [f"--het-group={component}"] if totals[component] > 1 else []
        argv += [f"--nodelist={','.join(sorted(names))}", "rm", "-rf", "--", *map(str, scratch.folders)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                argv, env=step_environment(os.environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=10
            )


def _end_with(parent: int) -> None:
    """In srun, before exec: it ends the step when the driver dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def read_specs(stream: int) -> list[WorkerSpec]:
    """In a task: what `JobStep` sent.

    Raises:
        EOFError: The driver is gone.
    """

    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = os.read(stream, min(size, 1 << 20))
            if not part:
                raise EOFError("the driver was gone before it said what to do")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    specs: list[WorkerSpec] = pickle.loads(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))
    return specs


def end_with_input(stream: int, leave: Callable[[], None]) -> None:
    """In a task: ends this process as soon as its input ends, because the driver or srun is gone; calls `leave` before."""

    def watch() -> None:
        while True:
            try:
                if not os.read(stream, 4096):
                    break
            except OSError:
                break
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, b"the driver of this run is gone; this rank ends\n")
        with contextlib.suppress(Exception):
            leave()
        os._exit(1)

    threading.Thread(target=watch, name="rlhpc-lifeline", daemon=True).start()


def own_devices(spec: WorkerSpec, environ: Mapping[str, str], visible: Sequence[str]) -> str:
    """The rank's `CUDA_VISIBLE_DEVICES`: index i is the i-th device that this step was given on this node.

    Raises:
        ConfigError: The step was given fewer devices than the placement needs.
    """
    if not spec.accelerators:
        return ""
    if not visible and "CUDA_VISIBLE_DEVICES" not in environ:
        return ",".join(str(i) for i in spec.accelerators)  # a site that masks nothing
    if max(spec.accelerators) >= len(visible):
        raise ConfigError(
            f"{spec.name} on node {spec.node} is placed on accelerator {max(spec.accelerators)}, but the step was given "
            f"{len(visible)} there (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r})"
        )
    return ",".join(visible[i] for i in spec.accelerators)
