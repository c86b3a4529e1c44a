"""What a job asks of Slurm about itself: end its steps, and run again on other nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

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


def hasten(jobs: Sequence[str]) -> None:
    """Lets a requeued job start as soon as there is room: Slurm holds it back for two minutes by default."""
    for job in jobs:
        _run("scontrol", "update", f"JobId={job}", "StartTime=now")


def hasten_after_requeue() -> None:
    """The same from inside the job that is about to be requeued, by a process that outlives its first signal."""
    jobs = " ".join(component_ids())
    # as long as the job runs, Slurm refuses the update
    script = (
        f"trap '' TERM HUP INT; left='{jobs}'; for i in $(seq 40); do sleep 0.5; again=; for job in $left; do "
        'scontrol update JobId="$job" StartTime=now >/dev/null 2>&1 || again="$again $job"; done; left=$again; '
        '[ -z "$left" ] && break; done'
    )
    with contextlib.suppress(OSError):
        subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


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
        f'scontrol update JobId="$job" ExcNodeList={node} StartTime=now && break; sleep 0.5; done; done'
    )
    try:
        done = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S,
                              start_new_session=True)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
