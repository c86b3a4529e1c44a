"""submitit executors for local and Slurm jobs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import SubmitError
from rlhpc.runtime.files import rename

#: References to all local controllers: Python warns when it collects the Popen of a running process.
_controllers: list[subprocess.Popen[bytes]] = []
_CONTROLLER = (
    "import sys; from pathlib import Path; from submitit.local.local import Controller; "
    "Controller(Path(sys.argv[1])).run(max_retry=10**6)"
)


def make_local_executor(folder: str, *, timeout_min: float, max_num_timeout: int) -> Any:
    """Builds a `submitit.LocalExecutor` whose controller has its own session.

    The executor of submitit starts the controller in the submitter's process group and on its terminal. Ctrl-C, a hang-up
    or a workflow engine that kills its process group would end the job. That executor also hides all GPUs from a job that
    requests none, and stops after six requeues.

    Args:
        folder: Folder for the jobs' pickles and logs.
        timeout_min: Time limit of a job.
        max_num_timeout: Maximum number of times that a job may reach the limit.
    """
    from submitit.local.local import LocalExecutor, LocalJob

    class SharedLocalJob(LocalJob[Any]):
        @property
        def paths(self) -> Any:
            return shared_paths(super().paths)

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
            _controllers.append(process)
            return SharedLocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    python_command = f"{shlex.quote(sys.executable)} -P"
    executor = DetachedLocalExecutor(folder=folder, max_num_timeout=max_num_timeout, python=python_command)
    executor.update_parameters(timeout_min=timeout_min)
    return executor


def shared_paths(paths: Any) -> Any:
    """Returns a `JobPaths` of submitit that moves files on a filesystem which may lose the reply to a rename (`rename`)."""
    from submitit.core.utils import JobPaths

    class SharedJobPaths(JobPaths):
        def move_temporary_file(self, tmp_path: Path | str, name: str, keep_as_symlink: bool = False) -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            target = rename(Path(tmp_path), getattr(self, name))
            if keep_as_symlink:
                Path(tmp_path).symlink_to(target)

    return SharedJobPaths(paths._folder, paths.job_id, paths.task_id)


def python_path() -> str:
    """Returns PYTHONPATH of this process; adds the folder of this package if the package is not installed."""
    inherited_path = os.environ.get("PYTHONPATH", "")
    package_root = Path(__file__).resolve().parents[2]
    if package_root.name in ("site-packages", "dist-packages") or str(package_root) in inherited_path.split(os.pathsep):
        return inherited_path
    return os.pathsep.join(path for path in (inherited_path, str(package_root)) if path)


#: Time limit in minutes for jobs without a limit, because submitit requires one.
NO_LIMIT_MIN = 10 * 365 * 24 * 60


def make_slurm_executor(folder: str, job_name: str, slurm: Mapping[str, Any], *, max_num_timeout: int) -> Any:
    """Builds a `submitit.SlurmExecutor`. In its jobs, Python replaces the batch shell.

    Args:
        folder: Folder for the jobs' pickles and logs.
        job_name: Name of the jobs.
        slurm: Parameters of submitit. Slurm may requeue the job unless `additional_parameters` contain `no-requeue`.
        max_num_timeout: Maximum number of times that a job may reach its walltime.

    Raises:
        SubmitError: The batch script of the installed submitit has an unknown form.
    """
    import submitit

    class SharedSlurmJob(submitit.SlurmJob[Any]):
        @property
        def paths(self) -> Any:
            return shared_paths(super().paths)

    class SlurmExecutor(submitit.SlurmExecutor):
        """Slurm executor that requests no walltime if none is configured; submitit would request five minutes."""

        job_class = SharedSlurmJob

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            script = str(super()._make_submission_file_text(command, uid))
            time_line, has_no_limit = f"#SBATCH --time={NO_LIMIT_MIN}\n", self.parameters.get("time") == NO_LIMIT_MIN
            if has_no_limit and time_line not in script:  # otherwise submitit would ask for years
                raise SubmitError(
                    f"this submitit writes its batch script otherwise than rlhpc knows: no {time_line.strip()!r}"
                )
            return script.replace(time_line, "")

    # "exec": the batch shell becomes this process, so that a signal for the batch shell (B:) reaches it
    python_command = f"exec {shlex.quote(sys.executable)} -P"
    executor = SlurmExecutor(folder=folder, max_num_timeout=max_num_timeout, python=python_command)
    parameters = dict(slurm)
    setup = list(parameters.pop("setup", None) or [])  # may begin with the #SBATCH lines of other job components
    if python_path():
        setup.append(f"export PYTHONPATH={shlex.quote(python_path())}")
    additional_parameters = {"signal": "B:USR2@120", **parameters.pop("additional_parameters", {})}
    if "no-requeue" not in additional_parameters:
        additional_parameters["requeue"] = True
    executor.update_parameters(
        **{
            "job_name": job_name,
            "nodes": 1,
            "ntasks_per_node": 1,
            "use_srun": False,
            "time": NO_LIMIT_MIN,
            **parameters,
            "setup": setup or None,
            "additional_parameters": additional_parameters,
        }
    )
    return executor
