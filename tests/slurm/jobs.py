"""Waits for the end of jobs, and says what is left of those that do not end."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

from .cluster import SlurmCluster
from .processes import tail

#: After so long without an answer Slurm asks a node again whether a job has ended there: KillWait and two MessageTimeout.
#: Of a het job, before Slurm 25.05, it asks no further than the first component that has not been over for MinJobAge
#: (_purge_complete_het_job in its job_mgr.c), and nothing while that one waits to start again. An answer is lost where it
#: takes longer than MessageTimeout, as slurmd's may on a starved machine: then the job stays COMPLETING for five to six
#: minutes, or, if it is to start again, for good.
ASKED_AGAIN_S = 15 + 2 * 10


@dataclass(frozen=True)
class Job:
    """A job (a component of one) in the queue, with the nodes that it has still."""

    id: str
    name: str
    state: str
    reason: str
    nodes: tuple[str, ...]


def end_jobs(cluster: SlurmCluster, *, asked_again_s: float = ASKED_AGAIN_S) -> None:
    """Ends this user's jobs, and waits for that as `wait_gone` does."""
    cluster.run("scancel", "--me")
    wait_gone(cluster, asked_again_s=asked_again_s)


def wait_gone(
    cluster: SlurmCluster, job: str = "", *, deadline_s: float = 90.0, asked_again_s: float = ASKED_AGAIN_S
) -> None:
    """Until this user's jobs (that one) have left the queue.

    A node is taken down and back, as an administrator would, where Slurm waits for a job's end although nothing has run there
    for `asked_again_s`.

    Raises:
        AssertionError: They have not after `deadline_s`; says which are left, in which state, and what runs on their nodes.
    """
    end, silent = time.monotonic() + deadline_s, dict[str, float]()
    while left := in_queue(cluster, job):
        now = time.monotonic()
        assert now < end, f"waited {deadline_s:.0f} s for the end of jobs\n{account(cluster, left)}"
        waited_for = {node for one in left if one.state == "COMPLETING" for node in one.nodes}
        silent = {node: silent.get(node, now) for node in waited_for if not cluster.running_on(node)}
        for node in [node for node, since in silent.items() if now - since > asked_again_s]:
            warnings.warn(f"Slurm has missed an end on {node}:\n{account(cluster, left)}", stacklevel=2)
            cluster.take_back(node)
            del silent[node]
        time.sleep(0.2)


def in_queue(cluster: SlurmCluster, job: str = "") -> list[Job]:
    """This user's jobs that have not ended; the components of one."""
    which = f"--jobs={job}" if job else "--me"
    rows = [
        row.split("|") for row in cluster.run("squeue", "--noheader", which, "--format=%i|%j|%T|%r|%N").splitlines()
    ]
    return [
        Job(*row[:4], tuple(cluster.run("scontrol", "show", "hostnames", row[4]).split() if row[4] else ()))  # type: ignore[call-arg]
        for row in rows
    ]


def account(cluster: SlurmCluster, jobs: list[Job]) -> str:
    """What may explain why these jobs are there."""
    parts = []
    for job in jobs:
        parts.append(
            f"job {job.id} ({job.name}) is {job.state}, reason {job.reason}, on {' '.join(job.nodes) or 'no node'}"
        )
        for node in job.nodes:
            running = cluster.running_on(node) or ["nothing but slurmd"]
            parts += [f"  {node} is {cluster.node_state(node)}; there runs:", *(f"    {words}" for words in running)]
    logs = ["slurmctld", *sorted({f"slurmd-{node}" for job in jobs for node in job.nodes})]
    return "\n".join([*parts, tail([cluster.root / "log" / f"{log}.log" for log in logs], lines=30)])
