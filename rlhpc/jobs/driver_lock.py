"""Driver lock of a run: a second driver is rejected before it changes anything, with an error that names the first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlhpc.jobs.lease import Lease, holder, is_holder_alive
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobState, ProcessId, SlurmProbe
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.runtime.allocation import in_slurm_job, steps_possible
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, UserError
from rlhpc.runtime.network import job_address
from rlhpc.runtime.text import format_names


@contextlib.contextmanager
def sole_driver(paths: RunPaths) -> Iterator[None]:
    """Holds the driver lock of a run until the block or the process ends.

    Takes over a lock that an earlier start of the same job left, or a process or job that has ended.

    Raises:
        UserError: Another driver trains this run.
    """
    record = {"job": os.environ.get("SLURM_JOB_ID", ""), "started": time.time(), **holder()}
    lease = Lease(paths.driver_record, record)
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        while (driver_record := lease.take_or_read()) is not None:
            _require_dead(paths, driver_record)
            lease.remove_dead(driver_record)
    except OSError:  # the code that opens the run's folder reports the error
        yield
        return
    try:
        yield
    finally:
        lease.release()


def require_no_driver(paths: RunPaths) -> None:
    """Checks that no other driver trains the run, before this driver reads or writes anything.

    The search for a checkpoint removes unfinished saves. With a second driver, it would remove a save in progress.

    Raises:
        UserError: Another driver trains this run.
    """
    _require_dead(paths, read_json_file(paths.driver_record))


def _require_dead(paths: RunPaths, lock_content: Mapping[str, Any] | None) -> None:
    if lock_content is None:
        return
    job = str(lock_content.get("job") or "")
    process = ProcessId.from_json(lock_content.get("process"))
    if process is None or (job and job == os.environ.get("SLURM_JOB_ID") and process.alive() is None):
        return  # no process is named, or an earlier start of this job holds the lock
    if not is_holder_alive(paths.driver_record, lock_content, lambda: _is_running(job)):
        return
    holder_text = f"process {process.pid} on {process.host.split('/')[0]}"
    raise UserError(
        f"{paths.root} is being trained by {f'Slurm job {job} ({holder_text})' if job else holder_text}: one run, one driver. "
        f"Wait for it, end it ({_end_command(paths, job)}), or give this one a name of its own (runner.name=…)"
    )


def _is_running(job_id: str) -> bool | None:
    """Returns whether a job is alive in Slurm; None if Slurm gives no answer, or for an empty job id."""
    if not job_id:
        return None
    report = SlurmProbe().query_job(job_id)
    return False if report.is_over else None if report.state is JobState.UNKNOWN else True


def _end_command(paths: RunPaths, job_id: str) -> str:
    """Returns the command that ends the driver."""
    if paths.submit.is_dir():
        return f"rlhpc cancel {paths.root}"
    return f"scancel --batch --signal=TERM {job_id}" if job_id else "Ctrl-C there"


def require_live_allocation(environ: Mapping[str, str] = os.environ) -> None:
    """Checks with one Slurm query that the job named in the environment is not over.

    Passes if Slurm does not answer, because `srun` reports that error later.

    Raises:
        ConfigError: The job is over.
    """
    if not in_slurm_job(environ):
        return
    job = environ["SLURM_JOB_ID"]
    report = SlurmProbe().query_job(job)
    if report.is_over:
        reason = f"it is {report.state.value}" if report.state.is_terminal else "Slurm does not know it any more"
        raise ConfigError(
            f"SLURM_JOB_ID is {job}, but that job is over ({reason}): this shell still has the variables of an allocation "
            "that has ended. To train on this machine: unset SLURM_JOB_ID SLURM_JOBID; for a new allocation: leave this "
            "shell, then salloc. Nothing was written"
        )


def require_hosts(cluster: Cluster) -> None:
    """Checks that `srun` can start ranks on other hosts, and that those ranks can connect to this host.

    Raises:
        ConfigError: A node is another host, and there is no `srun` here or no route between the hosts.
    """
    remote_nodes = [node.name for node in cluster.nodes if not node.is_local]
    if cluster.source == "slurm" and remote_nodes and not steps_possible():
        raise ConfigError(
            f"SLURM_JOB_ID is {os.environ['SLURM_JOB_ID']}, a job on other hosts ({format_names(remote_nodes)}), "
            f"and there is no srun here to start ranks there. Were these variables "
            "left by another place? To train on this machine: unset SLURM_JOB_ID SLURM_JOBID. Are Slurm's commands missing "
            "in this shell or container? Put them on its PATH. Nothing was written"
        )
    if cluster.source == "slurm" and steps_possible():
        job_address(cluster.interface)
