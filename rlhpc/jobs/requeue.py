"""What a job asks of Slurm about itself: end its steps, and run again on other nodes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping

_TIMEOUT_S = 30.0


def _run(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def component_ids(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Job ids of this job's components; of a job without components its own."""
    size = environ.get("SLURM_HET_SIZE") or "0"
    ids = [environ.get(f"SLURM_JOB_ID_HET_GROUP_{k}", "") for k in range(int(size) if size.isdigit() else 0)]
    return [job for job in ids if job] or [job for job in [environ.get("SLURM_JOB_ID", "")] if job]


def end_steps(patience_s: float = 20.0) -> bool:
    """Kills the steps that a driver which died left behind, and waits; True when none is left."""
    end, pause = time.monotonic() + patience_s, 0.5
    jobs = component_ids()
    while True:
        code, text = _run("squeue", "--noheader", "--steps", f"--jobs={','.join(jobs)}", "--format=%i")
        steps = [word for word in text.split() if word.rpartition(".")[2].isdigit()] if code == 0 else []
        if code == 0 and not steps:
            return True
        if steps:
            _run("scancel", "--signal=KILL", *steps)
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 4.0)


#: A node refuses a job's second start with a credential from before the first one's end, by its own clock, and the job
#: would be lost. Slurm is on the safe side with two minutes; this leaves room for clocks that disagree.
_HASTE_S = 15


def hasten(job_id: str) -> None:
    """Lets a requeued job start soon, instead of after the two minutes that Slurm holds it back by default.

    Only for a job whose processes have all ended (state PENDING, no longer COMPLETING).
    """
    code, text = _run("squeue", "--noheader", f"--jobs={job_id}", "--format=%A|%T|%r|%S")
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    if code != 0 or not all(row[1:3] == ["PENDING", "BeginTime"] for row in rows):
        return
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + _HASTE_S))
    for job, _, _, start in rows:
        if start > soon:
            _run("scontrol", "update", f"JobId={job.strip()}", f"StartTime={soon}")


def requeue_without(job_id: str, node: str) -> bool:
    """Puts this job back into the queue with a node excluded; True when Slurm agreed, and will soon end this process.

    The requeue ends every process of the job, so the update that follows it is made by one that ignores the first signal.
    """
    code, text = _run("scontrol", "show", "job", job_id)
    if code != 0 or "Requeue=1" not in text:
        return False
    jobs = " ".join(component_ids())
    script = (
        f"trap '' TERM; scontrol requeue {job_id} || exit 1; for job in {jobs}; do for i in 1 2 3 4 5 6 7 8; do "
        f'scontrol update JobId="$job" ExcNodeList={node} && break; sleep 0.5; done; done'
    )
    try:
        done = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S,
                              start_new_session=True)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
