"""Launcher of ranks as tasks of job steps, on all nodes of a Slurm job."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rlhpc.runtime.allocation import expand_range
from rlhpc.runtime.errors import ConfigError, PlacementError, StepFailed, WorkerFailed, log_errors
from rlhpc.runtime.launchers import RankProcess, Reports, node_imports, rank_environment
from rlhpc.runtime.launchers.srun_commands import SrunStep, clearing_step, job_steps, killing_step, step_environment
from rlhpc.runtime.os_resources import start_bound_to_parent
from rlhpc.runtime.slurm import ask
from rlhpc.runtime.text import tail
from rlhpc.runtime.worker_spec import for_input

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.scratch import Scratch
    from rlhpc.runtime.worker_spec import WorkerSpec

_TASK_ENDED = re.compile(r"^srun: error: (\S+?): tasks? ([\d,\- ]+): (.*)$")
_SIGNALS = {signal.strsignal(signal_number): signal_number for signal_number in range(1, 32)}
_MAX_LINES = 40
#: Seconds that a step that kills a rank may take, and seconds to wait after a failure before the next attempt.
_KILL_TIMEOUT_S, _RETRY_S = 30.0, 30.0
#: Seconds until the processes of a killed step are gone.
_STEP_END_S = 10.0

log = logging.getLogger(__name__)


def task_status(status_text: str) -> int | None:
    """Returns the wait status of a task from srun's message, such as `Killed` or `Exited with exit code 3`.

    Returns None for any other message. An exit code of 128 + n is signal n: shells and container runtimes end so after a
    program that a signal ended.
    """
    message = status_text.strip()
    if exit_match := re.match(r"Exited with exit code (\d+)", message):
        exit_code = int(exit_match[1])
        return exit_code - 128 if exit_code - 128 in _SIGNALS.values() else exit_code << 8
    if message.lower().startswith("out of memory"):
        return int(signal.SIGKILL)
    return _SIGNALS.get(message.removesuffix("(core dumped)").strip())


class SrunLauncher:
    """Launcher that runs a group as one srun for each component of the job on which the group has ranks.

    Args:
        log_dir: Folder for the steps' logs.
        scratch: The session's folders on each node.
        reports: Receiver of the ranks' events.
        preload: Modules that the tasks of a step on a node import before their ranks are forked.
    """

    #: Seconds that srun may take to end a step before Slurm's controller has to end it, and seconds in total.
    grace_s = 5.0
    limit_s = 15.0

    def __init__(self, log_dir: Path, scratch: Scratch, reports: Reports, preload: Sequence[str] = ()) -> None:
        self._log_dir, self._scratch, self._reports = log_dir, scratch, reports
        self._preload = list(preload)
        self._steps: dict[str, JobStep] = {}
        self._num_components = 1
        self._srun_options: tuple[str, ...] = ()
        #: Ranks that are being killed one by one; the value is True once srun has reported the end of the rank's task.
        self._being_killed: dict[RankProcess, bool] = {}
        self._being_killed_lock = threading.Lock()

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Sets the modules that a node imports once; a task reads its device mask from its environment."""
        spec.preload = node_imports(spec, self._preload, fork)

    def start(self, processes: Sequence[RankProcess], cluster: Cluster) -> None:
        components = [node.het_group or 0 for node in cluster.nodes]
        self._num_components, self._srun_options = len(set(components)), cluster.srun
        process_by_rank = {process.spec.rank: process for process in processes}
        worker_spec, steps = processes[0].spec, []
        if len(interpreters := sorted({process.spec.interpreter for process in processes})) > 1:
            raise PlacementError(
                f"{worker_spec.group}: its node groups have different Pythons ({', '.join(filter(None, interpreters))}), "
                "and a job step has one; launch a group for each"
            )
        try:
            for step_plan in job_steps(
                worker_spec.group, [process.spec for process in processes], cluster, components,
                [node.name for node in cluster.nodes], worker_spec.interpreter or None,
                worker_spec.command_prefix,
            ):  # fmt: skip
                name = f"{worker_spec.group}-{step_plan.component}" if self._num_components > 1 else worker_spec.group
                steps.append(JobStep(
                    step_plan, [process_by_rank[rank] for rank in step_plan.ranks], self._log_dir / f"{name}.step.err",
                    self._report_exit, self._on_step_end,
                ))  # fmt: skip
        except OSError as error:
            self._reports.fail(StepFailed(f"cannot start srun: {error}", node=worker_spec.node))
            return
        self._steps = {name: step for name, step in self._steps.items() if step.running}
        for step in steps:
            self._steps.update({process.spec.name: step for process in step.processes})
        for step in steps:  # `_steps` must be complete before a step reports an event
            step.listen()

    def _report_exit(self, process: RankProcess, status: int) -> None:
        """Reports the end of a task, but not of a rank that `_kill_task` is killing, because its children may still run."""
        with self._being_killed_lock:
            if process in self._being_killed:
                self._being_killed[process] = True
                return
        self._reports.record_exit(process, status)

    def _on_step_end(self, step: JobStep, exit_code: int) -> None:
        """Registers that srun and thus all ranks of its step have ended; reports ranks that ended unexpectedly."""
        unexpected_ends = self._reports.record_ends(step.processes)
        if not unexpected_ends:
            return
        worker_spec, srun_output = unexpected_ends[0].spec, step.last_output or "(it said nothing)"
        ranks_text = f"{worker_spec.group} (ranks {', '.join(str(m.spec.rank) for m in unexpected_ends)})"
        exit_text = f"with exit code {exit_code}" if exit_code else "before its ranks had"
        message = f"srun ended {exit_text}:\n{srun_output}\n  log: {step.log_err}"
        if unexpected_ends[0].record:
            self._reports.fail(WorkerFailed(
                f"the job step of {ranks_text} on node {worker_spec.node} ended; {message}{tail(worker_spec.log_err)}",
                group=worker_spec.group, rank=worker_spec.rank, node=worker_spec.node, log_path=worker_spec.log_err,
            ))  # fmt: skip
        else:
            srun_output = f"the job step of {ranks_text} did not start on node {worker_spec.node}: {message}"
            for process in unexpected_ends:  # an elastic group may continue without ranks that cannot be started again
                self._reports.fail(
                    StepFailed(srun_output, group=worker_spec.group, rank=process.spec.rank, node=worker_spec.node)
                )

    def _list_steps_only_of(self, processes: Sequence[RankProcess]) -> set[JobStep]:
        """Returns the running steps whose ranks are all in `processes` or have ended. These steps can end as a whole."""
        ending_processes = set(processes)
        return {
            step
            for process in processes
            if (step := self._step_of(process))
            and all(o in ending_processes or o.state == "ended" for o in step.processes)
        }

    def _step_of(self, process: RankProcess) -> JobStep | None:
        """Returns the running step of a rank; None if the step has ended, even if a successor of the rank runs."""
        step = self._steps.get(process.spec.name)
        return step if step is not None and step.running and process in step.processes else None

    def end(self, processes: Sequence[RankProcess]) -> None:
        for step in self._list_steps_only_of(processes):
            step.end()

    def kill(self, processes: Sequence[RankProcess]) -> None:
        """Kills complete steps if all their ranks have to end; otherwise kills each rank's processes on its node."""
        steps = self._list_steps_only_of(processes)
        for whole_step in steps:
            whole_step.kill()
        for process in processes:
            step = self._step_of(process)
            with self._being_killed_lock:
                if process.has_exited or step is None or step in steps or process in self._being_killed:
                    continue
                self._being_killed[process] = False
            name = f"rlhpc-kill-{process.spec.name}"
            threading.Thread(target=self._kill_task, args=(step, process), name=name, daemon=True).start()

    def _kill_task(self, step: JobStep, process: RankProcess) -> None:
        """Kills a single rank of a step and reports its end. Runs on a separate thread, because a node may not answer."""
        task, worker_spec = step.processes.index(process), process.spec
        node = step.planned.hosts[task]
        argv = killing_step(step.planned.component, self._num_components, node, step.mark, task, self._scratch.sockets,
                            self._srun_options)  # fmt: skip
        srun_output = ask(*argv, timeout_s=_KILL_TIMEOUT_S, environment=step_environment(os.environ), has_session=True)
        if not srun_output.ok:
            log.warning(
                "%s on node %s was given up and could not be killed: %s",
                worker_spec.name,
                worker_spec.node,
                srun_output.last_line,
            )
            time.sleep(_RETRY_S)
        with self._being_killed_lock:
            has_exited = self._being_killed.pop(process)
        if has_exited or srun_output.ok:
            self._reports.record_exit(process, int(signal.SIGKILL))

    def early_output(self, process: RankProcess) -> str:
        step = self._steps.get(process.spec.name)
        return step.last_output if step is not None else ""

    def arrival_report(self, processes: Sequence[RankProcess]) -> list[str]:
        return [
            f"srun said: {output}" for output in sorted({self.early_output(process) for process in processes}) if output
        ]

    def close(self, clears_folders: bool) -> None:
        """Removes the session's folders on nodes where ranks were killed before they could do so themselves."""
        nodes: dict[int, set[str]] = {}
        for step in set(self._steps.values()) if clears_folders else ():
            nodes.setdefault(step.planned.component, set()).update(step.planned.hosts)
        for component, node_names in nodes.items():
            folders = list(map(str, self._scratch.folders))
            argv = clearing_step(component, self._num_components, node_names, folders, self._srun_options)
            ask(*argv, timeout_s=10, environment=step_environment(os.environ))


class JobStep:
    """Process of srun, and the ranks that are its tasks.

    Args:
        planned_step: Command and nodes of the step.
        processes: The ranks, in the order of the tasks.
        log_err: File for the output of srun, and of ranks that have not opened their logs.
        on_exit: Called with the rank and its wait status when a task ended with another exit code than 0.
        on_end: Called with this step and srun's exit code when the step has ended.
    """

    def __init__(
        self,
        planned_step: SrunStep,
        processes: Sequence[RankProcess],
        log_err: Path,
        on_exit: Callable[[RankProcess, int], None],
        on_end: Callable[[JobStep, int], None],
    ) -> None:
        self.planned, self.processes, self.log_err = planned_step, list(processes), log_err
        self._on_exit, self._on_end = on_exit, on_end
        self._output_lines: list[str] = []
        self._is_killed = False
        self._host_file = log_err.with_suffix(f".{time.time_ns():x}.hosts")
        self._host_file.write_text("".join(f"{host}\n" for host in planned_step.hosts))
        # Job id of the component: in a task, SLURM_JOB_ID is the id of the whole job, to which this step does not belong.
        job = os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{planned_step.component}") or os.environ.get("SLURM_JOB_ID", "")
        step_mark = f"{planned_step.group}-{time.time_ns():x}"
        #: Environment variable that only the processes of this step have.
        self.mark = f"RLHPC_STEP={step_mark}"
        worker_spec = processes[0].spec
        environment = rank_environment(
            step_environment(os.environ), worker_spec.threads, foreign=bool(worker_spec.interpreter)
        )
        environment |= {"SLURM_HOSTFILE": str(self._host_file), "RLHPC_STEP_JOB": job, "RLHPC_STEP": step_mark}
        self.process = start_bound_to_parent(
            planned_step.argv, signal.SIGTERM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._send_specs, name=f"rlhpc-srun-{planned_step.group}", daemon=True).start()

    def listen(self) -> None:
        """Starts reporting the step's events."""
        threading.Thread(target=self._read_output, name=f"rlhpc-srun-{self.planned.group}", daemon=True).start()

    def _send_specs(self) -> None:
        """Sends the ranks their specifications; the pipe stays open afterwards."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(for_input([process.spec for process in self.processes]))
            self.process.stdin.flush()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with contextlib.ExitStack() as files:
            file: IO[bytes] | None = None
            with contextlib.suppress(OSError):  # without a log, for example on a full disk, ranks must still end
                file = files.enter_context(self.log_err.open("ab", buffering=0))
            for line in self.process.stdout:
                with contextlib.suppress(OSError):
                    if file is not None:
                        file.write(line)
                with log_errors(f"cannot make out what srun says: {line!r}"):
                    self._handle_line(line.decode(errors="replace").rstrip())
        exit_code = self.process.wait()
        if self._is_killed:
            self._await_end_of_step()
        with contextlib.suppress(OSError):
            self._host_file.unlink(missing_ok=True)
        self._on_end(self, exit_code)

    def _handle_line(self, line: str) -> None:
        self._output_lines = [*self._output_lines[1 - _MAX_LINES :], line]
        end_match = _TASK_ENDED.match(line)
        status = task_status(end_match[3]) if end_match else None
        if end_match is None or status is None:
            return
        with contextlib.suppress(ConfigError):
            for range_text in end_match[2].replace(" ", "").split(","):
                for task in expand_range(range_text, line):
                    if int(task) < len(self.processes):
                        self._on_exit(self.processes[int(task)], status)

    def _await_end_of_step(self) -> None:
        """Waits until Slurm reports the end of the step, because a killed srun cannot report it."""
        deadline = time.monotonic() + _STEP_END_S
        while self._step_id and time.monotonic() < deadline:
            squeue_output = ask(
                "squeue", "--noheader", "--steps", f"--jobs={self._step_id.partition('.')[0]}", "--format=%i"
            )
            if squeue_output.ok and self._step_id not in squeue_output.text.split():
                return
            time.sleep(0.5)

    @property
    def _step_id(self) -> str:
        """Id of the step, `<job>.<step>`, which ranks report when they are ready; "" before."""
        return next((step_id for process in self.processes if (step_id := process.record.get("step"))), "")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def last_output(self) -> str:
        """Last lines of srun's output."""
        return "\n".join(line for line in self._output_lines if line.strip())

    def end(self) -> None:
        """Ends the step with SIGTERM to srun, which then kills every task."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the step with scancel, because srun may hang; then kills srun."""
        self._is_killed = True
        if self._step_id:
            ask("scancel", "--signal=KILL", self._step_id, timeout_s=10)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
