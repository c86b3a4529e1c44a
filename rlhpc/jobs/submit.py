"""Submission of a segment's driver through submitit, with a wait that survives a kill of the waiting process.

The job and the waiter share nothing but the run folder: `submit/segment_<k>.json` names the started job,
`submit/segment_<k>.claim.<n>.json` the job that owns the segment, `submit/segment_<k>.exit.json` how a driver failed, and
`segments/<k>.json`, which the driver writes last, marks the segment as finished. A waiter can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.driver_job import DriverJob
from rlhpc.jobs.executors import NO_LIMIT_MIN, make_local_executor, make_slurm_executor
from rlhpc.jobs.job_record import JobRecord, end_process, find_job, job_words, owner_of, segment_job_name, was_cancelled
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim, SegmentFiles, read_json_file
from rlhpc.jobs.slurm import nothing_queued
from rlhpc.jobs.submit_backoff import NotNow, Patience, not_now, room_words
from rlhpc.jobs.submit_lock import SubmitLock
from rlhpc.jobs.waiter import (
    DriverFailed,
    DriverRejected,
    JobCancelled,
    JobLost,
    Waiter,
    WaitInterrupted,
    answer,
    cancelled_error,
    goes_on,
    say,
)
from rlhpc.runtime.errors import RlhpcError, SubmitError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.ownership import make_private, require_own_run_folder

__all__ = [
    "DriverFailed",
    "DriverRejected",
    "JobCancelled",
    "JobLost",
    "JobRecord",
    "NotNow",
    "WaitInterrupted",
    "cancel",
    "choose_executor",
    "driver_command",
    "submit_segment",
]

EXECUTORS = ("auto", "local", "slurm")
#: submitit counts timeouts and gives up; here, progress between attempts decides instead (`DriverJob.max_stalled`).
_NO_COUNT = 10**6
#: A job lost within this time after it was found was already ending when it was found.
DYING_S = 10.0


def driver_command(config_path: str | Path, overrides: Sequence[str] = (), *, segment: int | None = 0) -> list[str]:
    """Returns the argv of the driver: the command to train without submitting; `segment` None trains the whole run."""
    config = str(expand_home(config_path).absolute())
    part = [] if segment is None else ["--segment", str(segment)]
    return run_module("rlhpc.cli", "train", config, *part, *overrides)


def submit_segment(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_root: Path,
    segment: int = 0,
    executor: str = "auto",
    wait: bool = True,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    slurm: Mapping[str, Any] | None = None,
    poll_s: float = 0.5,
    progress_s: float = 5.0,
    deadline_s: float | None = None,
    save_grace_s: float = 600.0,
    max_restarts: int = 0,
    on_found: Callable[[bool], None] = lambda live: None,
    attempt: int = 1,
    patient: bool = True,
    asked_by: ProcessId | None = None,
    hand_over: Callable[[Waiter], None] = lambda waiter: None,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Starts the driver of a segment as a job, or finds the one that is running, and waits for it.

    It is always safe to call this again: a finished segment returns at once, a live job is waited for, and a dead one
    is followed by a new job, which resumes. Two concurrent callers start only one job.

    Args:
        config_path: The run's configuration.
        overrides: `key=value` arguments, passed on to the driver.
        run_root: The run folder.
        segment: Number of the segment, from 0.
        executor: "local", "slurm", or "auto": Slurm if sbatch exists and this process is not inside a job.
        wait: False returns as soon as the job is submitted.
        command: argv of a driver to run instead.
        environment: Variables to set for the driver.
        slurm: submitit's Slurm parameters (`partition`, `time`, `setup`, `additional_parameters`, …) from the plan.
        poll_s: Seconds between two checks for the marker file.
        progress_s: Seconds between two lines of progress.
        deadline_s: Waiting longer than this is an error; the job goes on.
        save_grace_s: Maximum time for the driver to save when its job must end.
        max_restarts: Maximum number of restarts of a killed driver in a row, without a new checkpoint in between.
        on_found: Called under the submission's lock, with whether a live job exists, before a job is submitted or
            attached to; an exception from it ends the submission.
        attempt: Number of this try by a workflow engine. From 2 on it is a retry, which does not restart a cancelled job.
        patient: Wait while the site accepts no more jobs or Slurm does not answer; False raises `NotNow` instead.
        asked_by: Waiting ends when this process has ended; the job goes on.
        hand_over: Called once, when only the wait for this job remains; may have another process do the waiting,
            and then does not return.
        stream: Stream for progress; stderr by default.

    Returns:
        `{"state": "finished" | "submitted" | "attached", "segment", "executor", "job_id", "result"}`; `result` is the
        content of `segments/<k>.json`, None while the segment has not finished.

    Raises:
        SubmitError: The job could not be submitted.
        DriverRejected: The driver found the configuration wrong.
        DriverFailed: The driver failed, with its first error; JobLost if it was killed, JobCancelled if it was cancelled.
        WaitInterrupted: Ctrl-C, or `asked_by` has ended.
        DeadlineExceeded: `deadline_s` is over.
    """
    files = SegmentFiles(RunPaths(expand_home(run_root).absolute()), segment)
    done = read_json_file(files.marker)
    if done is not None:
        return answer("finished", JobRecord.read(files), segment, done)
    kind = choose_executor(executor)
    out = stream or sys.stderr
    argv = list(command) if command is not None else driver_command(config_path, overrides, segment=segment)
    began = time.monotonic()
    room = Patience(deadline_s)
    cancel_mark = read_json_file(files.cancel)
    tried = False
    _make_folders(files)

    def wanted_still() -> None:
        if read_json_file(files.cancel) != cancel_mark and (waiting := JobRecord.read(files)) is not None:
            raise cancelled_error(files, waiting)
        if asked_by is not None and asked_by.alive() is False:
            raise WaitInterrupted(f"stopped waiting: who asked for segment {segment} of {files.paths.root} is gone")

    while True:
        _await_orphan(files, save_grace_s, out)
        refusal = None
        with SubmitLock(files):
            done = read_json_file(files.marker)
            if done is not None:
                return answer("finished", JobRecord.read(files), segment, done)
            try:
                record, state = find_job(files), "attached"
                if record is not None:
                    on_found(True)
                else:
                    cancelled = was_cancelled(files) if attempt > 1 else None
                    if cancelled is not None:
                        raise cancelled_error(files, cancelled)
                    wanted_still()
                    on_found(False)
                    record, state = (
                        _submit(files, argv, kind, dict(environment or {}), slurm or {}, save_grace_s, max_restarts),
                        "submitted",
                    )
            except NotNow as error:
                refusal = error
                if not patient:
                    raise
        if refusal is not None or record is None:
            assert refusal is not None
            say(out, f"{files.paths.root.name} segment {segment}: {room_words(refusal)}")
            room.wait(refusal, wanted_still)
            continue
        if not wait:
            return answer(state, record, segment, None)
        say(out, started_line(files, record, state))
        attached = time.monotonic() if state == "attached" else None
        remaining_s = None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - began))
        waiter = Waiter(
            files, record, lambda line: say(out, line), poll_s=poll_s, progress_s=progress_s, deadline_s=remaining_s,
            asked_by=asked_by,
        )  # fmt: skip

        def settled(waiter: Waiter = waiter, attached: float | None = attached) -> None:
            # until then, another job would be submitted if the job that was found ended
            dying = cancel_mark is not None and cancel_mark.get("token") == waiter.record.token
            nonlocal tried
            if not tried and (attached is None or (time.monotonic() - attached > DYING_S and not dying)):
                tried = True
                hand_over(waiter)

        try:
            done = waiter.wait(settled)
        except JobLost:
            # it was already ending when found, as after a kill and restart of the run
            if attached is None or time.monotonic() - attached > DYING_S:
                raise
            continue
        except JobCancelled:
            # likewise for a job that was cancelled before this command started
            if attempt > 1 or cancel_mark is None or read_json_file(files.cancel) != cancel_mark:
                raise
            continue
        except KeyboardInterrupt:
            raise WaitInterrupted(goes_on(files, owner_of(files, record))) from None
        return waiter.answer(done)


def started_line(files: SegmentFiles, record: JobRecord, state: str) -> str:
    """Returns the line printed when a job was submitted or found."""
    verb = "waiting for" if state == "attached" else "submitted"
    return f"{files.paths.root.name} segment {files.segment}: {verb} {job_words(record)}; logs in {files.driver_err.parent}"


def choose_executor(name: str) -> str:
    """Returns `local` or `slurm`; `auto` is Slurm if sbatch exists and this process is not inside a job."""
    if name not in EXECUTORS:
        raise SubmitError(f"executor: found {name!r}, allowed are {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    return "slurm" if shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ else "local"


def _make_folders(files: SegmentFiles) -> None:
    try:
        require_own_run_folder(files.paths.root)
        make_private(files.paths.submit, parents=True)  # job pickles: other users may not read or replace them
        files.driver_err.parent.mkdir(parents=True, exist_ok=True)
        files.paths.segments.mkdir(exist_ok=True)
    except OSError as error:
        raise SubmitError(
            f"cannot write to the run folder {files.paths.root}: {error.strerror or error} ({error.filename}); "
            "choose another with runner.run_dir=…"
        ) from error


def _await_orphan(files: SegmentFiles, grace_s: float, out: TextIO) -> None:
    """Waits for a driver whose job was killed: it saves and ends by itself, and the next driver must not start before that."""
    end = time.monotonic() + grace_s
    is_reported = False
    while (claim := Claim.newest(files)) is not None and claim.driver is not None:
        if claim.job.alive() is not False or not claim.driver.alive():
            return
        if not is_reported:
            is_reported = True
            say(out, f"segment {files.segment}: the job was killed; its driver (pid {claim.driver.pid}) saves and ends")
        if time.monotonic() > end:
            with contextlib.suppress(PermissionError):
                end_process(claim.driver, files.paths, signal.SIGKILL)
            end += 10.0
        time.sleep(0.2)


def _submit(
    files: SegmentFiles,
    argv: list[str],
    kind: str,
    environment: dict[str, str],
    slurm: Mapping[str, Any],
    save_grace_s: float,
    max_restarts: int = 0,
) -> JobRecord:
    """Submits a `DriverJob` through submitit; the caller holds the lock."""
    before = JobRecord.read(files)
    record = JobRecord(
        segment=files.segment,
        attempt=before.attempt + bool(before.job_id) if before else 1,
        token=secrets.token_hex(8),
        executor=kind,
        command=argv,
        job_name=segment_job_name(files),
        submitted=time.time(),
        logs={"out": str(files.driver_out), "err": str(files.driver_err)},
    )
    job = DriverJob(
        run_root=str(files.paths.root),
        segment=files.segment,
        command=argv,
        token=record.token,
        executor=kind,
        environment=environment,
        save_grace_s=save_grace_s,
        max_restarts=max_restarts,
    )
    record.write(files)
    try:
        submitted = _executor(kind, files, record.job_name, slurm).submit(job)
    except Exception as error:  # submitit raises RuntimeError, CalledProcessError's text, OSError, ValueError, …
        if isinstance(error, RlhpcError):
            raise
        refusal = not_now(files.segment, str(error)) if kind == "slurm" else None
        if refusal is None:
            message = f"segment {files.segment} could not be submitted ({kind}): {error}"
            replace(record, phase="refused", reason=message.splitlines()[0]).write(files)
            raise SubmitError(message) from error
        if "PerUser" in refusal.reason and nothing_queued():
            replace(record, phase="refused", reason=f"could not be submitted: {refusal.reason}").write(files)
            raise SubmitError(
                f"{refusal}\n  no job of yours is in the queue, so this one will never be let in: it has as many components "
                "as the run has node groups; ask for another QOS (cluster.qos), or for fewer node groups"
            ) from error
        if not refusal.silent:  # without an answer from Slurm, the job may be in the queue
            replace(record, phase="waiting", reason=refusal.reason).write(files)
        raise refusal from error
    job_id = str(submitted.job_id)
    record = replace(
        record,
        job_id=job_id,
        phase="submitted",
        process=ProcessId.of(int(job_id)) if kind == "local" else None,
        job_log=str(submitted.paths.stderr),
    )
    record.write(files)
    return record


def _executor(kind: str, files: SegmentFiles, name: str, slurm: Mapping[str, Any]) -> Any:
    folder = str(files.paths.submit)
    if kind == "local":
        return make_local_executor(folder, timeout_min=NO_LIMIT_MIN, max_num_timeout=_NO_COUNT)
    return make_slurm_executor(folder, name, slurm, max_num_timeout=_NO_COUNT)
