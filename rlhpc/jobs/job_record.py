"""Lookup of a segment's live job, and reopening of a finished segment when a run becomes longer."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, JobState, LocalProbe, ProcessId, SlurmProbe
from rlhpc.jobs.segment import Claim, JobRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.runtime.errors import ConfigError, SubmitError, UserError
from rlhpc.runtime.files import rename


def job_name(paths: RunPaths, purpose: str) -> str:
    """Returns a job name that is unique to run folder and purpose; it identifies jobs with an unrecorded id."""
    digest = hashlib.sha256(str(paths.root.resolve()).encode()).hexdigest()[:8]
    folder = paths.root.name.replace(",", "_")  # squeue separates names by commas
    return f"rlhpc-{folder}-{purpose}-{digest}"


def segment_job_name(files: SegmentJournal) -> str:
    """Returns the Slurm name of a segment's jobs. Does not read the record, because the run folder may be a copy."""
    return job_name(files.paths, str(files.segment))


def end_process(process: ProcessId, paths: RunPaths, signum: int) -> None:
    """Signals a process of a run on this host; ignores a process that has already ended.

    Raises:
        UserError: The process has no file of the run folder open, such as a log, so the folder was copied from elsewhere.
    """
    has_open_files = process.has_open_below(paths.root)
    if has_open_files is False and process.alive():
        raise UserError(
            f"process {process.pid}, which {paths.submit} names, has no file of this run open: it was left alone. A run "
            "folder that was copied from elsewhere names processes that are not its own"
        )
    if has_open_files:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def job_words(record: JobRecord) -> str:
    return f"{'Slurm' if record.executor == 'slurm' else 'local'} job {record.job_id or '(starting)'}"


def probe_for(record: JobRecord, files: SegmentJournal) -> JobProbe:
    if record.executor == "slurm":
        return SlurmProbe(has_finished=lambda job_id: files.marker.exists())
    return LocalProbe({record.job_id: record.process} if record.process else {})


def owner_of(files: SegmentJournal, record: JobRecord, *, must_be_alive: bool = False) -> JobRecord:
    """Returns the record of the job that owns a segment.

    This is the given record, unless another job holds the claim or the job's id was never recorded.

    Args:
        files: Journal of the segment.
        record: Record of the segment's last submission.
        must_be_alive: True if the holder of the claim is known to be alive.
    """
    claim = Claim.newest(files)
    if claim is None or (claim.token == record.token and record.job_id) or not (must_be_alive or claim.alive()):
        return record
    current_record = JobRecord.read(files)
    if current_record is not None and current_record.token == claim.token and current_record.job_id:
        return current_record
    return JobRecord(
        segment=files.segment,
        attempt=record.attempt,
        token=claim.token,
        executor=claim.executor,
        command=record.command,
        job_name=record.job_name,
        job_id=claim.job_id,
        phase="submitted",
        process=claim.job if claim.executor == "local" else None,
        logs=record.logs,
    )


def find_job(files: SegmentJournal) -> JobRecord | None:
    """Returns the live job of a segment: the recorded job, the holder of the claim, or a job found by name; else None."""
    record = JobRecord.read(files)
    if record is None or record.phase == "refused" or files.exit_of(record.token) is not None:
        return None
    probe = probe_for(record, files)
    claim = Claim.newest(files)
    if claim is not None and claim.alive(probe if record.executor == "slurm" else None):
        return owner_of(files, record)
    if record.phase in ("submitting", "waiting") and record.executor == "slurm" and isinstance(probe, SlurmProbe):
        job_id = probe.find(segment_job_name(files))
        if job_id is None:
            return None
        record = replace(record, job_id=job_id, phase="submitted")
        record.write(files)
        return record
    if not record.job_id:
        return None
    report = probe.query_job(record.job_id)
    # a local job on another host that no longer renews its claim
    has_stopped = record.executor == "local" and not report.conclusive and claim is not None
    return None if report.is_over or has_stopped else record


def cancelled_submission(files: SegmentJournal) -> JobRecord | None:
    """Returns the last submission of a segment if `rlhpc cancel` or scancel ended it; otherwise None."""
    record = JobRecord.read(files)
    if record is None or files.is_cancelled(record.token):
        return record
    if (exit_record := files.exit_of(record.token)) is not None:
        return record if exit_record.cancelled else None
    is_known = record.executor == "slurm" and record.job_id
    return (
        record if is_known and probe_for(record, files).query_job(record.job_id).state is JobState.CANCELLED else None
    )


#: Seconds between two checks of a job that is ending: a local job, and a Slurm job.
_POLL_S = (0.05, 2.0)
#: Stop reasons of a segment that reached its planned end.
_PLANNED_STOP_REASONS = ("max_steps", "segment_end")


def segment_to_reopen(paths: RunPaths, segment_end_steps: Sequence[int], *, goal_moved: bool = False) -> int | None:
    """Returns the finished segment that must continue because the run became longer; None if no segment must continue.

    Args:
        paths: The run.
        segment_end_steps: New end step of each segment.
        goal_moved: True if the goal `runner.stop_return` has changed, so that a segment that reached it must continue.

    Raises:
        ConfigError: A finished segment would get another end step, and it is not the last segment or would become shorter.
    """
    done_segments = {
        k: marker
        for k in range(len(segment_end_steps))
        if (marker := read_json_file(paths.segment_done(k))) is not None
    }
    later_segments = [k for k in paths.finished_segments() if k >= len(segment_end_steps)]
    for segment, record in done_segments.items():
        step = int(record.get("global_step", segment_end_steps[segment]))
        if step == segment_end_steps[segment] or (
            str(record.get("stop_reason")) not in _PLANNED_STOP_REASONS and not goal_moved
        ):
            continue
        if step < segment_end_steps[segment] and segment == max([*done_segments, *later_segments]):
            return segment
        raise ConfigError(
            f"{paths.root}: segment {segment} ended at step {step}, and with this runner.max_steps and runner.segments it "
            f"would end at {segment_end_steps[segment]}. A run can only be made longer, and segments that later ones "
            f"follow keep their "
            "ends: choose runner.max_steps and runner.segments so, or another runner.name"
        )
    if later_segments:
        raise ConfigError(
            f"{paths.root}: segment {later_segments[-1]} is finished, but runner.segments is {len(segment_end_steps)} "
            f"now; keep "
            f"runner.segments at {later_segments[-1] + 1} or more, or choose another runner.name"
        )
    return None


def wait_for_end(paths: RunPaths, segment: int, *, within_s: float = 60.0) -> None:
    """Waits until the job that finished a segment has ended.

    If the segment were reopened earlier, it would seem to have a live job without a marker file.

    Raises:
        SubmitError: The job has not ended after `within_s` seconds.
    """
    files, deadline = SegmentJournal(paths, segment), time.monotonic() + within_s
    while (job := find_job(files)) is not None:
        if time.monotonic() > deadline:
            raise SubmitError(
                f"segment {segment} of {paths.root} is finished, but {job_words(job)} has not ended {within_s:g} s later; "
                f"end it first: rlhpc cancel {paths.root}"
            )
        time.sleep(_POLL_S[job.executor == "slurm"])


def reopen(paths: RunPaths, segment: int) -> Path:
    """Renames the marker file of a finished segment, so that training continues; returns the new path.

    The new name still ends in .json, so that the checkpoint of the segment's previous end step is kept.
    """
    marker = paths.segment_done(segment)
    record = read_json_file(marker) or {}
    return rename(marker, marker.with_name(f"{segment}.until_{record.get('global_step', 0)}.json"))
