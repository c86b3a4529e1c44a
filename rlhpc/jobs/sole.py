"""One driver per run: a second one is refused before it can do harm, with a message that names the first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from rlhpc.jobs.claim import read_json_file
from rlhpc.jobs.lease import Lease, is_held
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobState, ProcessId, SlurmProbe
from rlhpc.runtime.errors import UserError


@contextlib.contextmanager
def sole_driver(paths: RunPaths) -> Iterator[None]:
    """Holds the run for this process until the block or the process ends. An earlier start of this very job, or a process or
    job that has ended, gives way.

    Raises:
        UserError: Another driver trains this run.
    """
    lease = Lease(paths.driver_record, {"job": os.environ.get("SLURM_JOB_ID", "")})
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        while not lease.take():
            content = read_json_file(paths.driver_record)
            _require_dead(paths, content)
            lease.remove_dead(content)
    except OSError:  # the code that opens the run's folder, or has something to lose, reports what is wrong with it
        yield
        return
    try:
        yield
    finally:
        lease.release()


def require_no_driver(paths: RunPaths) -> None:
    """Refuses a second driver before it looks at anything, and writes nothing.

    Looking for a checkpoint removes what killed saves left behind, and would take the live driver's save for one.

    Raises:
        UserError: Another driver trains this run.
    """
    _require_dead(paths, read_json_file(paths.driver_record))


def _require_dead(paths: RunPaths, content: dict[str, Any] | None) -> None:
    if content is None:
        return
    job = str(content.get("job") or "")
    if job and job == os.environ.get("SLURM_JOB_ID") and _is_elsewhere(content):
        return  # an earlier start of this job
    if not is_held(paths.driver_record, content, lambda: _is_running(job)):
        return
    process = ProcessId.from_json(content["process"])
    assert process is not None
    where = f"process {process.pid} on {process.host.split('/')[0]}"
    raise UserError(
        f"{paths.root} is being trained by {f'Slurm job {job} ({where})' if job else where}: one run, one driver. "
        f"Wait for it, end it ({_ending(paths, content)}), or give this one a name of its own (runner.name=…)"
    )


def _is_elsewhere(content: dict[str, Any]) -> bool:
    process = ProcessId.from_json(content.get("process"))
    return process is not None and process.alive() is None


def _is_running(job: str) -> bool | None:
    """Returns whether a job runs; None where Slurm does not know, or there is none."""
    if not job:
        return None
    report = SlurmProbe().query_one(job)
    if report.state is JobState.UNKNOWN:
        return False if report.conclusive else None
    return not report.state.is_terminal


def _ending(paths: RunPaths, found: dict[str, Any]) -> str:
    job = str(found.get("job") or "")
    submitted = paths.submit.is_dir()
    return (
        f"rlhpc cancel {paths.root}" if submitted else f"scancel --batch --signal=TERM {job}" if job else "Ctrl-C there"
    )
