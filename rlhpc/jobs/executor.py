"""submitit's Slurm executor, as this project uses it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from rlhpc.jobs.local import python_path
from rlhpc.runtime.errors import SubmitError

#: In minutes; submitit requires a limit, but not every job has one.
NO_LIMIT_MIN = 10 * 365 * 24 * 60


def make_slurm_executor(folder: str, job_name: str, slurm: Mapping[str, Any], *, max_num_timeout: int) -> Any:
    """Makes a `submitit.SlurmExecutor` whose jobs run one Python in place of the batch shell.

    Args:
        folder: Folder for the jobs' pickles and logs.
        job_name: Name of its jobs.
        slurm: submitit's parameters. A job is requeued where `additional_parameters` do not say `no-requeue`.
        max_num_timeout: How many times a job may reach its walltime.

    Raises:
        SubmitError: This submitit writes its batch script in another way than rlhpc knows.
    """
    import submitit

    class SlurmExecutor(submitit.SlurmExecutor):
        """Without a walltime, submitit asks for five minutes; this one leaves it to the partition's own limit."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text = str(super()._make_submission_file_text(command, uid))
            given, none = f"#SBATCH --time={NO_LIMIT_MIN}\n", self.parameters.get("time") == NO_LIMIT_MIN
            if none and given not in text:  # otherwise submitit would ask for years
                raise SubmitError(
                    f"this submitit writes its batch script otherwise than rlhpc knows: no {given.strip()!r}"
                )
            return text.replace(given, "")

    # "exec": the batch shell becomes this process, so that a signal for the batch shell (B:) reaches it
    python = f"exec {shlex.quote(sys.executable)} -P"
    executor = SlurmExecutor(folder=folder, max_num_timeout=max_num_timeout, python=python)
    given = dict(slurm)
    setup = list(given.pop("setup", None) or [])  # may begin with the #SBATCH lines of further components
    if python_path():
        setup.append(f"export PYTHONPATH={shlex.quote(python_path())}")
    additional = {"signal": "B:USR2@120", **given.pop("additional_parameters", {})}
    if "no-requeue" not in additional:
        additional["requeue"] = True
    executor.update_parameters(
        **{
            "job_name": job_name,
            "nodes": 1,
            "ntasks_per_node": 1,
            "use_srun": False,
            "time": NO_LIMIT_MIN,
            **given,
            "setup": setup or None,
            "additional_parameters": additional,
        }
    )
    return executor
