"""What a job asks of Slurm about itself: end its steps, and run again on other nodes."""

from __future__ import annotations

import os
import subprocess
import time

_TIMEOUT_S = 30.0


def _run(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def end_steps(job_id: str, patience_s: float = 20.0) -> bool:
    """Kills the steps that a driver which died left behind, and waits; True when none is left."""
    end = time.monotonic() + patience_s
    pause = 0.5
    while True:
        code, text = _run("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
        steps = [word for word in text.split() if word.rpartition(".")[2].isdigit()] if code == 0 else []
        if code == 0 and not steps:
            return True
        if steps:
            _run("scancel", "--signal=KILL", *steps)
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 4.0)


def requeue_without(job_id: str, node: str) -> bool:
    """Puts this job back into the queue with a node excluded; True when Slurm agreed, and will soon end this process.

    The requeue ends every process of the job, so the update that follows it is made by one that ignores the first signal.
    """
    code, text = _run("scontrol", "show", "job", job_id)
    if code != 0 or "Requeue=1" not in text:
        return False
    script = f"trap '' TERM; scontrol requeue {job_id} && for i in 1 2 3 4 5 6; do " \
             f"scontrol update JobId={job_id} ExcNodeList={node} && break; sleep 0.5; done"  # fmt: skip
    try:
        done = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S,
                              start_new_session=True, env=dict(os.environ))  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
