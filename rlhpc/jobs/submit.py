"""Submission of a segment's driver through submitit, and the wait for it. Another process can continue a killed wait.

The job and the waiter share only the run folder: `submit/segment_<k>.json` names the submitted job,
`submit/segment_<k>.claim.<n>.json` names the job that owns the segment, and `submit/segment_<k>.exit.json` records how a
driver failed. The driver writes `segments/<k>.json` last, which marks the segment as finished.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.driver_job import DriverJob
from rlhpc.jobs.executors import NO_LIMIT_MIN, make_local_executor, make_slurm_executor
from rlhpc.jobs.job_record import cancelled_submission, end_process, find_job, job_words, owner_of, segment_job_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim, JobRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.slurm import has_no_jobs
from rlhpc.jobs.submit_backoff import Backoff, TemporaryRefusal, find_temporary_refusal, refusal_text
from rlhpc.jobs.waiter import (
    DriverFailed,
    DriverRejected,
    JobCancelled,
    JobLost,
    Waiter,
    WaitInterrupted,
    answer,
    cancelled_error,
    interruption_text,
    print_message,
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
    "Submission",
    "SubmitRequest",
    "TemporaryRefusal",
    "WaitInterrupted",
    "WaitOptions",
    "cancel",
    "choose_executor",
    "driver_command",
]

EXECUTORS = ("auto", "local", "slurm")
#: Maximum number of timeouts for submitit, never reached: `DriverJob.max_stalled` ends jobs without progress instead.
_MAX_TIMEOUTS = 10**6
#: Seconds after the attachment to a live job. A job that is lost within this time was already ending at the attachment.
DYING_S = 10.0


def driver_command(config_path: str | Path, overrides: Sequence[str] = (), *, segment: int | None = 0) -> list[str]:
    """Returns the driver's argv: `rlhpc train` for one segment, or for the whole run if `segment` is None."""
    config = str(expand_home(config_path).absolute())
    segment_option = [] if segment is None else ["--segment", str(segment)]
    return run_module("rlhpc.cli", "train", config, *segment_option, *overrides)


@dataclass(frozen=True)
class SubmitRequest:
    """Request to run the driver of a segment as a job.

    Attributes:
        run_root: The run folder.
        command: argv of the driver, from `driver_command`.
        segment: Number of the segment, from 0.
        executor: "local", "slurm", or "auto": Slurm if sbatch exists and this process is not inside a job.
        environment: Variables to set for the driver.
        slurm: Slurm parameters for submitit (`partition`, `time`, `setup`, `additional_parameters`, …) from the plan.
        save_grace_s: Maximum seconds for the driver to save when its job must end.
        max_restarts: Maximum number of restarts of a killed driver in a row, without a new checkpoint in between.
        attempt: Number of the workflow engine's attempt, from 1. A retry (2 and more) does not restart a cancelled job.
        on_decision: Called under the submit lock before this submission attaches to a live job (True) or submits a new job
            (False). An exception in the callable ends the submission.
    """

    run_root: Path
    command: Sequence[str]
    segment: int = 0
    executor: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: Mapping[str, Any] = field(default_factory=dict)
    save_grace_s: float = 600.0
    max_restarts: int = 0
    attempt: int = 1
    on_decision: Callable[[bool], None] = lambda live: None


@dataclass(frozen=True)
class WaitOptions:
    """Options of the wait for a segment.

    Attributes:
        enabled: False returns as soon as the job is submitted.
        poll_s: Seconds between two checks for the marker file.
        progress_s: Seconds between two lines of progress.
        deadline_s: Maximum seconds to wait, after which the wait ends with an error; the job continues.
        patient: Whether to wait while the site accepts no more jobs or Slurm does not answer; False raises `TemporaryRefusal`.
        requester: Process that requested the wait. When the process ends, the wait ends; the job continues.
        hand_over: Called once, when only the wait for this job remains. If the callable lets another process wait, it does
            not return.
        stream: Stream for progress; None for stderr.
    """

    enabled: bool = True
    poll_s: float = 0.5
    progress_s: float = 5.0
    deadline_s: float | None = None
    patient: bool = True
    requester: ProcessId | None = None
    hand_over: Callable[[Waiter], None] = lambda waiter: None
    stream: TextIO | None = None


@dataclass(frozen=True)
class _Job:
    """Job to wait for.

    Attributes:
        record: Record of the job.
        attached_at: Time of the attachment to a live job, in monotonic seconds; None if this submission started the job.
    """

    record: JobRecord
    attached_at: float | None

    @property
    def state(self) -> str:
        return "submitted" if self.attached_at is None else "attached"

    @property
    def is_new(self) -> bool:
        """True shortly after the attachment: a job that ends now was probably already ending at the attachment."""
        return self.attached_at is not None and time.monotonic() - self.attached_at <= DYING_S


class Submission:
    """Submission of a segment's driver as a job, or attachment to the live job, and the wait for that job.

    A repeated submission is always safe. If the segment has finished, `run` returns at once. If its job is alive, `run` waits
    for that job. If the job is dead, a new job resumes the segment. Two concurrent submissions start only one job.

    Args:
        request: Command and resources of the job.
        wait: Options of the wait.

    Raises:
        SubmitError: The executor does not exist.
    """

    def __init__(self, request: SubmitRequest, wait: WaitOptions | None = None) -> None:
        self.request, self.wait = request, wait or WaitOptions()
        self.files = SegmentJournal(RunPaths(expand_home(request.run_root).absolute()), request.segment)
        self.executor = choose_executor(request.executor)
        self._stream = self.wait.stream or sys.stderr
        self._started_at = time.monotonic()
        self._backoff = Backoff(self.wait.deadline_s)
        #: Content of the cancel marker at the start; an earlier cancellation does not stop this submission.
        self._cancel_mark = read_json_file(self.files.cancel)
        self._is_handed_over = False

    def run(self) -> dict[str, Any]:
        """Submits a job or attaches to the live job, then waits.

        Returns:
            `{"state": "finished" | "submitted" | "attached", "segment", "executor", "job_id", "result"}`; `result` is the
            content of `segments/<k>.json`, None while the segment has not finished.

        Raises:
            SubmitError: The job could not be submitted.
            DriverRejected: The driver found the configuration wrong.
            DriverFailed: The driver failed; the message is its first error. JobLost or JobCancelled if the job was killed or
                cancelled.
            WaitInterrupted: Ctrl-C, or the requester has ended.
            DeadlineExceeded: The deadline has passed.
        """
        files, segment = self.files, self.request.segment
        if (segment_result := files.result()) is not None:
            return answer("finished", JobRecord.read(files), segment, segment_result)
        _make_folders(files)
        while True:
            _await_orphan(files, self.request.save_grace_s, self._stream)
            outcome_text = self._submit_or_attach()
            if isinstance(outcome_text, dict):
                return answer("finished", JobRecord.read(files), segment, outcome_text)
            if isinstance(outcome_text, TemporaryRefusal):
                print_message(self._stream, f"{files.paths.root.name} segment {segment}: {refusal_text(outcome_text)}")
                self._backoff.wait(outcome_text, self._check_still_requested)
                continue
            if not self.wait.enabled:
                return answer(outcome_text.state, outcome_text.record, segment, None)
            print_message(self._stream, start_message(files, outcome_text.record, outcome_text.state))
            try:
                return self._wait(outcome_text)
            except (JobLost, JobCancelled) as error:
                if not self._was_ending_when_found(outcome_text, error):
                    raise

    def _submit_or_attach(self) -> dict[str, Any] | TemporaryRefusal | _Job:
        """Finds the live job or submits a new job, under the submit lock, so that two submissions start only one job.

        Returns:
            The result of a finished segment, the refusal if no job can be submitted at present, or the job to wait for.
        """
        files, request = self.files, self.request
        with files.submit_lock():
            if (segment_result := files.result()) is not None:
                return segment_result
            try:
                if (record := find_job(files)) is not None:
                    request.on_decision(True)
                    return _Job(record, time.monotonic())
                if request.attempt > 1 and (cancelled_record := cancelled_submission(files)) is not None:
                    raise cancelled_error(files, cancelled_record)
                self._check_still_requested()
                request.on_decision(False)
                return _Job(self._start_job(), None)
            except TemporaryRefusal as refusal:
                if not self.wait.patient:
                    raise
                return refusal

    def _check_still_requested(self) -> None:
        """Raises if the segment was cancelled since the start of this submission, or if the requester has ended."""
        files = self.files
        if read_json_file(files.cancel) != self._cancel_mark and (waiting_record := JobRecord.read(files)) is not None:
            raise cancelled_error(files, waiting_record)
        if self.wait.requester is not None and self.wait.requester.alive() is False:
            raise WaitInterrupted(
                f"stopped waiting: who asked for segment {files.segment} of {files.paths.root} is gone"
            )

    # -- the wait -------------------------------------------------------------------------------------------------

    def _wait(self, job: _Job) -> dict[str, Any]:
        """Waits for the job to finish the segment; returns the result of `run`."""
        options = self.wait
        elapsed_s = time.monotonic() - self._started_at
        waiter = Waiter(
            self.files,
            job.record,
            lambda line: print_message(self._stream, line),
            poll_s=options.poll_s,
            progress_s=options.progress_s,
            deadline_s=None if options.deadline_s is None else max(0.0, options.deadline_s - elapsed_s),
            asked_by=options.requester,
        )
        try:
            return waiter.answer(waiter.wait(lambda: self._hand_over(job, waiter)))
        except KeyboardInterrupt:
            raise WaitInterrupted(interruption_text(self.files, owner_of(self.files, job.record))) from None

    def _hand_over(self, job: _Job, waiter: Waiter) -> None:
        """Calls `WaitOptions.hand_over` once, when no other job must follow this job.

        A job that was already ending at the attachment may need a successor, so the call waits for `DYING_S`.
        """
        cancelled_before = self._cancel_mark is not None and self._cancel_mark.get("token") == waiter.record.token
        if self._is_handed_over or job.is_new or (job.attached_at is not None and cancelled_before):
            return
        self._is_handed_over = True
        self.wait.hand_over(waiter)

    def _was_ending_when_found(self, job: _Job, error: JobLost | JobCancelled) -> bool:
        """Returns whether to submit another job: the job was already ending at the attachment, or was cancelled before this
        command started.
        """
        if isinstance(error, JobLost):
            return job.is_new
        return (
            self.request.attempt == 1
            and self._cancel_mark is not None
            and read_json_file(self.files.cancel) == self._cancel_mark
        )

    # -- the job --------------------------------------------------------------------------------------------------

    def _start_job(self) -> JobRecord:
        """Submits a `DriverJob` through submitit and returns its record. The caller must hold the submit lock."""
        files, request, command = self.files, self.request, list(self.request.command)
        previous_record = JobRecord.read(files)
        record = JobRecord(
            segment=files.segment,
            attempt=previous_record.attempt + bool(previous_record.job_id) if previous_record else 1,
            token=secrets.token_hex(8),
            executor=self.executor,
            command=command,
            job_name=segment_job_name(files),
            submitted=time.time(),
            logs={"out": str(files.driver_out), "err": str(files.driver_err)},
        )
        job = DriverJob(
            run_root=str(files.paths.root),
            segment=files.segment,
            command=command,
            token=record.token,
            executor=self.executor,
            environment=dict(request.environment),
            save_grace_s=request.save_grace_s,
            max_restarts=request.max_restarts,
        )
        record.write(files)
        try:
            submitit_job = self._make_submitit_executor(record.job_name).submit(job)
        except RlhpcError:
            raise
        except Exception as error:  # submitit raises RuntimeError, CalledProcessError's text, OSError, ValueError, …
            raise self._explain_refusal(record, error) from error
        job_id = str(submitit_job.job_id)
        record = replace(
            record,
            job_id=job_id,
            phase="submitted",
            process=ProcessId.from_pid(int(job_id)) if self.executor == "local" else None,
            job_log=str(submitit_job.paths.stderr),
        )
        record.write(files)
        return record

    def _explain_refusal(self, record: JobRecord, error: Exception) -> SubmitError:
        """Builds the error for a refused job, `TemporaryRefusal` if waiting may help; writes the reason to the record."""
        files = self.files
        refusal = find_temporary_refusal(files.segment, str(error)) if self.executor == "slurm" else None
        if refusal is None:
            message = f"segment {files.segment} could not be submitted ({self.executor}): {error}"
            replace(record, phase="refused", reason=message.splitlines()[0]).write(files)
            return SubmitError(message)
        if "PerUser" in refusal.reason and has_no_jobs():
            replace(record, phase="refused", reason=f"could not be submitted: {refusal.reason}").write(files)
            return SubmitError(
                f"{refusal}\n  no job of yours is in the queue, so this one will never be let in: it has as many components "
                "as the run has node groups; ask for another QOS (cluster.qos), or for fewer node groups"
            )
        if not refusal.is_silent:  # without an answer from Slurm, the job may be in the queue
            replace(record, phase="waiting", reason=refusal.reason).write(files)
        return refusal

    def _make_submitit_executor(self, name: str) -> Any:
        folder = str(self.files.paths.submit)
        if self.executor == "local":
            return make_local_executor(folder, timeout_min=NO_LIMIT_MIN, max_num_timeout=_MAX_TIMEOUTS)
        return make_slurm_executor(folder, name, self.request.slurm, max_num_timeout=_MAX_TIMEOUTS)


def start_message(files: SegmentJournal, record: JobRecord, segment_state: str) -> str:
    """Returns the line to print after a job was submitted or attached to."""
    verb = "waiting for" if segment_state == "attached" else "submitted"
    return f"{files.paths.root.name} segment {files.segment}: {verb} {job_words(record)}; logs in {files.driver_err.parent}"


def choose_executor(name: str) -> str:
    """Returns `local` or `slurm`; `auto` is Slurm if sbatch exists and this process is not inside a job.

    Raises:
        SubmitError: The name is unknown.
    """
    if name not in EXECUTORS:
        raise SubmitError(f"executor: found {name!r}, allowed are {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    return "slurm" if shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ else "local"


def _make_folders(files: SegmentJournal) -> None:
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


def _await_orphan(files: SegmentJournal, grace_s: float, out: TextIO) -> None:
    """Waits until the driver of a killed job has saved and ended; kills the driver after `grace_s` seconds.

    The next driver must not start before.
    """
    deadline = time.monotonic() + grace_s
    is_reported = False
    while (claim := Claim.newest(files)) is not None and claim.driver is not None:
        if claim.job.alive() is not False or not claim.driver.alive():
            return
        if not is_reported:
            is_reported = True
            print_message(
                out, f"segment {files.segment}: the job was killed; its driver (pid {claim.driver.pid}) saves and ends"
            )
        if time.monotonic() > deadline:
            with contextlib.suppress(PermissionError):
                end_process(claim.driver, files.paths, signal.SIGKILL)
            deadline += 10.0
        time.sleep(0.2)
