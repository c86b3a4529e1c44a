"""Queries and commands to Slurm about jobs: their steps, their ends, their next start."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.slurm import ask


def component_ids(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Job ids of this job's components; the job's own id if it has none."""
    size = environ.get("SLURM_HET_SIZE") or "0"
    ids = [environ.get(f"SLURM_JOB_ID_HET_GROUP_{k}", "") for k in range(int(size) if size.isdigit() else 0)]
    return [job for job in ids if job] or [job for job in [environ.get("SLURM_JOB_ID", "")] if job]


def end_steps(patience_s: float = 20.0) -> bool:
    """Kills the steps that a dead driver left behind, and waits for their end; True if none is left."""
    end, pause = time.monotonic() + patience_s, 0.5
    jobs = component_ids()
    while True:
        found = ask("squeue", "--noheader", "--steps", f"--jobs={','.join(jobs)}", "--format=%i")
        steps = [word for word in found.text.split() if word.rpartition(".")[2].isdigit()] if found.ok else []
        if found.ok and not steps:
            return True
        if steps:
            ask("scancel", "--signal=KILL", *steps)
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 4.0)


#: A node refuses to start a job again with a credential that is older, by the node's clock, than the end of the job's
#: previous start; the job would be lost. Slurm waits two minutes to be safe; this leaves room for clocks that disagree.
_HASTE_S = 15


def hasten(job_id: str) -> None:
    """Lets a requeued job start soon instead of after the two minutes for which Slurm holds it back by default.

    Use only for a job whose processes have all ended (state PENDING, no longer COMPLETING).
    """
    found = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%A|%T|%r|%S")
    rows = [line.split("|") for line in found.lines if line.count("|") == 3]
    if not found.ok or not all(row[1:3] == ["PENDING", "BeginTime"] for row in rows):
        return
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + _HASTE_S))
    for job, _, _, start in rows:
        if start > soon:
            ask("scontrol", "update", f"JobId={job.strip()}", f"StartTime={soon}")


def requeue_without(job_id: str, node: str) -> bool:
    """Requeues this job with a node excluded; True if Slurm agreed, in which case it will soon end this process.

    The requeue ends every process of the job, so a process that ignores the first signal makes the update that follows.
    """
    if "Requeue=1" not in ask("scontrol", "show", "job", job_id).text:
        return False
    jobs = " ".join(component_ids())
    script = (
        f"trap '' TERM; scontrol requeue {job_id} || exit 1; for job in {jobs}; do for i in 1 2 3 4 5 6 7 8; do "
        f'scontrol update JobId="$job" ExcNodeList={node} && break; sleep 0.5; done; done'
    )
    return ask("bash", "-c", script, timeout_s=30, apart=True).ok


def end_of(job_id: str) -> float | None:
    """Unix time at which Slurm ends a job; None if it does not say."""
    try:
        words = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%e").text.split()
        return min(time.mktime(time.strptime(word, "%Y-%m-%dT%H:%M:%S")) for word in words)
    except ValueError:
        return None  # no answer, or N/A: no known limit; the signal before the end still comes


def nothing_queued() -> bool:
    """Whether this user has no job at all, so that a limit on their number will never leave room for one."""
    found = ask("squeue", "--noheader", "--me", "--format=%i")
    return found.ok and not found.text.strip()


def scancel(job_id: str, *options: str) -> None:
    """Ends a job, or signals it; it is no error if the job has already ended.

    Raises:
        RlhpcError: Slurm refused, or did not answer.
    """
    done = ask("scancel", *options, job_id, timeout_s=60)
    if not done.ok and "already completing or completed" not in done.error:
        raise RlhpcError(f"scancel {job_id} failed: {done.words}")
