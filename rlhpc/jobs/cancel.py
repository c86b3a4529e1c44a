"""Cancellation of a run's jobs: the driver saves and stops, and no retry starts the job again."""

from __future__ import annotations

import os
import pwd
import signal
import time

from rlhpc.jobs.elastic.records import end_helpers
from rlhpc.jobs.job_record import end_process, find_job, job_words, probe_for, segment_job_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobState
from rlhpc.jobs.segment import Claim, JobRecord, SegmentJournal
from rlhpc.jobs.slurm import is_job_named, scancel
from rlhpc.runtime.errors import RlhpcError, UserError


def require_ownership(paths: RunPaths) -> None:
    """Checks that this user submitted the run and may therefore cancel its jobs; root may cancel the jobs of any run.

    Raises:
        UserError: Another user submitted the run; the message names that user.
    """
    try:
        owner = paths.submit.stat().st_uid
    except OSError:
        return
    if os.geteuid() not in (0, owner):
        raise UserError(f"{paths.root} was submitted by {user_name(owner)}, so its jobs are not yours to cancel")


def user_name(uid: int) -> str:
    """Returns the name of a user; `user <uid>` if this host knows no name for the uid."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def cancel(paths: RunPaths, segment: int | None = None, *, grace_s: float = 60.0) -> list[str]:
    """Cancels the jobs of a run: the drivers save and stop. Processes that remain after the grace period are killed.

    Args:
        paths: The run.
        segment: Number of the segment to cancel; by default all segments and helper jobs.
        grace_s: Maximum time for the driver to save.

    Returns:
        A sentence for every cancelled job; empty if there is no live job.

    Raises:
        RlhpcError: A job runs on another host, or scancel failed.
        UserError: The run belongs to another user, or names a job or a process that does not belong to the run.
    """
    require_ownership(paths)
    sentences = []
    for segment_number in paths.submitted_segments() if segment is None else [segment]:
        files = SegmentJournal(paths, segment_number)
        if files.marker.exists() and _wait_for_ending_job(files):
            continue
        record = find_job(files)
        if record is None:
            if _end_waiting(files):
                sentences.append(f"segment {files.segment}: was waiting to be submitted, and will not be")
            continue
        if record.executor == "slurm":
            _end_slurm(files, record, grace_s)
        else:
            _end_local(files, record, grace_s)
        sentences.append(f"segment {files.segment}: {job_words(record)} was cancelled")
    if segment is None and (helpers := end_helpers(paths)):
        sentences.append(f"{helpers} job{'s' if helpers > 1 else ''} of helpers of this run: cancelled")
    return sentences


def _wait_for_ending_job(files: SegmentJournal) -> bool:
    """Waits for a finished segment's job, which ends shortly after writing its marker; returns whether it has ended."""
    deadline = time.monotonic() + 3.0
    while (claim := Claim.newest(files)) is not None and claim.alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _end_waiting(files: SegmentJournal) -> bool:
    """Marks a segment that waits for room in the queue as cancelled, which stops the submitting process.

    Returns False if the segment does not wait, or is already cancelled.
    """
    with files.submit_lock():
        record = JobRecord.read(files)
        if record is None or record.phase != "waiting" or files.is_cancelled(record.token):
            return False
        files.mark_cancelled(record.token)
        return True


def _end_slurm(files: SegmentJournal, record: JobRecord, grace_s: float) -> None:
    """Signals only the driver, which saves and stops; then ends the job. A plain scancel would kill the ranks at once."""
    name = segment_job_name(files)
    is_job_named(record.job_id, name)  # refuses another job before anything is written
    files.mark_cancelled(record.token)  # pending or running: no other job may follow when this one ends
    probe = probe_for(record, files)
    if probe.query_job(record.job_id).state is JobState.RUNNING:
        scancel(record.job_id, "--batch", "--signal=TERM", name=name)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            if files.marker.exists() or files.exit_of(record.token) is not None:
                break
            time.sleep(0.5)
    scancel(record.job_id, name=name)


def _end_local(files: SegmentJournal, record: JobRecord, grace_s: float) -> None:
    """Sends SIGTERM to the job, which makes the driver save; sends SIGKILL to the processes that remain."""
    deadline = time.monotonic() + grace_s
    signalled_pids: set[int] = set()
    while time.monotonic() < deadline + 10.0:
        claim = Claim.newest(files)
        claim_processes = [claim.job, claim.driver] if claim is not None else []
        processes = [p for p in [*claim_processes, record.process] if p is not None]
        foreign_processes = [p for p in processes if p.alive() is None]
        if foreign_processes:
            raise RlhpcError(
                f"{job_words(record)} runs on {foreign_processes[0].host.split('/')[0]}; cancel it from there"
            )
        living_processes = [p for p in processes if p.alive()]
        if not living_processes:
            return
        is_overdue = time.monotonic() > deadline
        # the job before its controller, since a controller kills its task one second after SIGTERM
        for process in living_processes if is_overdue else living_processes[:1]:
            if is_overdue or process.pid not in signalled_pids:
                signalled_pids.add(process.pid)
                end_process(process, files.paths, signal.SIGKILL if is_overdue else signal.SIGTERM)
        time.sleep(0.1)
