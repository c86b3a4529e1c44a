"""submitit's local executor for jobs that outlive the terminal, the shell and the workflow that started them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Keeps every Popen alive: one that is garbage-collected while its process is running emits a warning.
_started: list[subprocess.Popen[bytes]] = []
_CONTROLLER = (
    "import sys; from pathlib import Path; from submitit.local.local import Controller; "
    "Controller(Path(sys.argv[1])).run(max_retry=10**6)"
)


def make_local_executor(folder: str, *, timeout_min: float, max_num_timeout: int) -> Any:
    """Makes a `submitit.LocalExecutor` whose controller has a session of its own.

    submitit's own executor starts the controller in the submitter's process group and on its terminal, where Ctrl-C, a
    hang-up or a workflow engine that kills its group would end the job. It also hides every GPU from a job that asks
    for none, and stops after six requeues.

    Args:
        folder: Folder for the jobs' pickles and logs.
        timeout_min: Time limit of a job.
        max_num_timeout: How many times a job may reach that limit.
    """
    from submitit.local.local import LocalExecutor, LocalJob

    class DetachedLocalExecutor(LocalExecutor):
        def _submit_command(self, command: str) -> Any:
            limit_s = int(60 * self.parameters.get("timeout_min", 5))
            environment = {
                **os.environ,
                "PYTHONPATH": python_path(),
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_COMMAND": command,
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_NTASKS": "1",
                "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "60",
                "SUBMITIT_LOCAL_TIMEOUT_S": str(limit_s),
                "SUBMITIT_LOCAL_WITH_SHELL": "",
                "SUBMITIT_STDERR_TO_STDOUT": "",
            }
            with (Path(folder) / "controller.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CONTROLLER, str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            _started.append(process)
            return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    python = f"{shlex.quote(sys.executable)} -P"
    executor = DetachedLocalExecutor(folder=folder, max_num_timeout=max_num_timeout, python=python)
    executor.update_parameters(timeout_min=timeout_min)
    return executor


def python_path() -> str:
    """PYTHONPATH of this process, plus the folder this package was imported from if it is not installed."""
    given = os.environ.get("PYTHONPATH", "")
    home = Path(__file__).resolve().parents[2]
    if home.name in ("site-packages", "dist-packages") or str(home) in given.split(os.pathsep):
        return given
    return os.pathsep.join(part for part in (given, str(home)) if part)
