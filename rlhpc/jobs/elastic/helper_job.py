"""Helper job: the process that replaces the batch shell of a Slurm job, and starts ranks that join a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.jobs.elastic.helper_plan import HelperPlan
from rlhpc.jobs.slurm import without_job_variables
from rlhpc.runtime.allocation import granted_cpus, visible_accelerators
from rlhpc.runtime.errors import SubmitError
from rlhpc.runtime.imports import python_path, run_module
from rlhpc.runtime.launchers.srun_commands import step_environment, with_default_options
from rlhpc.runtime.os_resources import start_bound_to_parent
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.slurm import ask

_POLL_S = 0.2
#: Signals on which the job leaves; `rlhpc join` documents their meanings.
_LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class HelperJob:
    """Callable for submitit: starts `rlhpc join` for each rank of the job, and makes all ranks leave when the job must end.

    Args:
        run_root: The run folder.
        group: Worker group that the ranks join.
        ranks: Number of ranks.
        accelerators: Number of accelerators per rank.
        container: argv of the container runtime, before the command.
        python: Python in the container; None is this one.
        patience_s: Maximum seconds to wait for a driver that has ended or has not started yet.
        srun: Options of srun (`cluster.srun`). With some, each rank is a job step, because they may select an image or a
            network; without any, the ranks are children of this process.
    """

    run_root: str
    group: str
    ranks: int
    accelerators: int
    container: list[str]
    python: str | None
    patience_s: float
    srun: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        """Runs until all ranks have ended, and exits with the greatest exit code of the ranks."""
        rank_processes = list[subprocess.Popen[bytes]]()
        for leave_signal in _LEAVE_SIGNALS:
            signal.signal(leave_signal, lambda signum, _: self._forward_signal(rank_processes, signum))
        signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE_SIGNALS)
        for rank in range(self.ranks):
            # the rank gets SIGTERM if this process is killed
            process = start_bound_to_parent(
                self._command(rank), signal.SIGTERM, env=self._environment(rank), stdin=subprocess.DEVNULL
            )
            rank_processes.append(process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEAVE_SIGNALS)
        while any(process.poll() is None for process in rank_processes):
            if any(self._was_killed(process.returncode or 0) for process in rank_processes):
                # a rank was killed: the job ends, so that the driver does not wait for it
                self._forward_signal(rank_processes, signal.SIGTERM)
            time.sleep(_POLL_S)
        if exit_code := max(abs(process.returncode) for process in rank_processes):
            sys.exit(exit_code)

    def _command(self, rank: int) -> list[str]:
        join_arguments = (
            "--group",
            self.group,
            "--accelerators",
            str(self.accelerators),
            "--patience",
            f"{self.patience_s:g}",
        )
        join = run_module("rlhpc.cli", "join", self.run_root, *join_arguments, "--await-driver", python=self.python)
        command = [*self.container, *join]
        if not self.srun:
            return command
        # A step gets all accelerators of the job; its mask selects the rank's.
        mask = [f"CUDA_VISIBLE_DEVICES={self._devices(rank)}"] if self.accelerators else []
        gres_text = f"gpu:{self.ranks * self.accelerators}" if self.accelerators else "none"
        return [
            "srun", f"--job-name={self.group}", "--overlap", *with_default_options(self.srun), "--nodes=1", "--ntasks=1",
            f"--cpus-per-task={self._cores}", "--mem=0", f"--gres={gres_text}", "--wait=0", "env", *mask, *command,
        ]  # fmt: skip

    def _environment(self, rank: int) -> dict[str, str]:
        environment = dict(os.environ) if self.srun else {**os.environ, "SLURM_CPUS_PER_TASK": str(self._cores)}
        if self.python:
            environment["PYTHONPATH"] = python_path(foreign=True)
        if self.srun:
            return step_environment(environment)
        if self.accelerators:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices(rank)
        return environment

    @property
    def _cores(self) -> int:
        """Number of cores for each rank."""
        num_cores = int(os.environ.get("SLURM_CPUS_PER_TASK") or granted_cpus())
        return max(1, num_cores // self.ranks)

    def _devices(self, rank: int) -> str:
        """Returns the device mask of a rank."""
        visible_devices = visible_accelerators(os.environ)
        return ",".join(visible_devices[rank * self.accelerators : (rank + 1) * self.accelerators])

    def _was_killed(self, exit_code: int) -> bool:
        """Returns whether a rank was killed; srun reports that as 128 plus the signal."""
        return exit_code < 0 or (bool(self.srun) and exit_code > 128)

    def _forward_signal(self, processes: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
        """Sends a signal to the ranks. SIGTERM would have srun kill its step; it forwards SIGUSR1, the request to leave."""
        if self.srun and signum == signal.SIGTERM:
            signum = signal.SIGUSR1
        for process in processes:
            if process.returncode is None:
                os.kill(process.pid, signum)


#: Maximum seconds for `sbatch`.
_SUBMIT_S = 60.0


def submit(folder: Path, name: str, plan: HelperPlan, run_root: Path) -> str:
    """Submits one helper job and returns its id.

    Raises:
        SubmitError: Slurm or submitit refused the job; the error contains the message.
    """
    make_private(folder, parents=True)
    job = HelperJob(
        str(run_root), plan.group, plan.bounds.per_job, plan.accelerators, list(plan.container), plan.python,
        60.0 * plan.minutes, list(plan.srun),
    )  # fmt: skip
    request = {"folder": str(folder), "name": name, "slurm": plan.submitit_parameters(), "job": asdict(job)}
    sbatch_output = ask(
        *run_module("rlhpc.jobs.elastic.helper_job"), stdin=json.dumps(request), timeout_s=_SUBMIT_S,
        environment=without_job_variables(os.environ), has_session=True,
    )  # fmt: skip
    output_words = sbatch_output.text.split()
    if not sbatch_output.ok or not output_words or not output_words[-1].isdigit():
        raise SubmitError(f"a job of helpers could not be submitted: {sbatch_output.last_line}")
    return output_words[-1]


def main() -> None:
    """Submits the helper job that stdin describes as JSON, and prints the job's id."""
    from rlhpc.jobs.executors import make_slurm_executor

    request: dict[str, Any] = json.loads(sys.stdin.read())
    executor = make_slurm_executor(request["folder"], request["name"], request["slurm"], max_num_timeout=1)
    try:
        print(executor.submit(HelperJob(**request["job"])).job_id)
    except Exception as error:  # submitit raises RuntimeError, CalledProcessError's text, OSError, ValueError, …
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
