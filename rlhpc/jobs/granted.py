"""Checks that the allocation in the environment can still be used: in a shell, a job's variables outlive the job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlhpc.jobs.probes import JobState, SlurmProbe
from rlhpc.runtime.allocation import in_slurm_job, steps_possible
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.network import own_address


def require_live_allocation(environ: Mapping[str, str] = os.environ) -> None:
    """Asks Slurm once about the job named in the environment; if Slurm does not answer, `srun` will say what is wrong.

    Raises:
        ConfigError: The job is over.
    """
    if not in_slurm_job(environ):
        return
    job = environ["SLURM_JOB_ID"]
    report = SlurmProbe().query_one(job)
    over = report.state.is_terminal or (report.state is JobState.UNKNOWN and report.conclusive)
    if over:
        found = f"it is {report.state.value}" if report.state.is_terminal else "Slurm does not know it any more"
        raise ConfigError(
            f"SLURM_JOB_ID is {job}, but that job is over ({found}): this shell still has the variables of an allocation that "
            "has ended. To train on this machine: unset SLURM_JOB_ID SLURM_JOBID; for a new allocation: leave this shell, "
            "then salloc. Nothing was written"
        )


def require_hosts(cluster: Cluster) -> None:
    """Requires that `srun` can start ranks on other hosts, and that they can connect to this one.

    Raises:
        ConfigError: A node is another host, and there is no `srun` here or no route between the hosts.
    """
    away = [node.name for node in cluster.nodes if not node.is_local]
    if cluster.source == "slurm" and away and not steps_possible():
        raise ConfigError(
            f"SLURM_JOB_ID is {os.environ['SLURM_JOB_ID']}, a job on other hosts ({', '.join(away[:3])}"
            f"{', …' if len(away) > 3 else ''}), and there is no srun here to start ranks there. Were these variables left by "
            "another place? To train on this machine: unset SLURM_JOB_ID SLURM_JOBID. Are Slurm's commands missing in this "
            "shell or container? Put them on its PATH. Nothing was written"
        )
    if cluster.source == "slurm" and steps_possible():
        own_address(cluster.interface)
