"""Waiter for a segment, with rare reads of the run folder and even rarer queries of the job.

To spare the shared filesystem, a check first reads the modification times of two folders. It reads files only if a file was
written since the last check. The longer the wait lasts, the rarer the checks become.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.alerts import AlertSender, AlertTargets, ending_name, send_requeued, send_stalled
from rlhpc.jobs.driver_job import first_failure
from rlhpc.jobs.job_record import job_words, owner_of, probe_for, segment_job_name
from rlhpc.jobs.lease import LEASE_S
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, ProcessId, SlurmProbe
from rlhpc.jobs.segment import Claim, JobRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file, revalidate_folder
from rlhpc.jobs.shared_probe import SharedProbe
from rlhpc.jobs.slurm import bring_start_forward
from rlhpc.jobs.state import number_of
from rlhpc.jobs.status import progress_line
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError, SubmitError

#: Seconds from the end of a job's processes until its last files are visible on a shared filesystem.
_SETTLE_S = 2.0
#: Seconds after which the wait ends: without an answer from Slurm, and while Slurm does not know the job.
_UNKNOWN_S = 900.0
_FORGOTTEN_S = 90.0
#: Seconds between two attempts to bring forward the start of a requeued job.
_RELEASE_S = 60.0
#: Maximum seconds between two checks of the run's folders; otherwise a tenth of the time waited so far.
_MAX_CHECK_INTERVAL_S = 5.0
#: Seconds between two reads of the files if the folders seem unchanged: two changes may fall into one clock tick.
_READ_INTERVAL_S = 30.0
#: Maximum seconds between two looks at the status of a run that may stall.
_STALL_CHECK_S = 15.0
#: Maximum seconds between two lines of progress; the interval grows during the wait.
_MAX_LINE_INTERVAL_S = 60.0


class DriverFailed(RlhpcError):
    """Error: the driver ended without finishing its segment. The message is the driver's first error.

    Attributes:
        exit_code: The driver's exit code.
        log_path: The driver's stderr file.
    """

    def __init__(self, message: str, *, exit_code: int = 1, log_path: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code if 0 < exit_code < 256 else 1
        self.log_path = log_path


class DriverRejected(SubmitError):
    """Error: the driver rejected its input (exit code 2). It counts as a user error of this command."""


class JobLost(DriverFailed):
    """Error: the job was killed or its node died, so the job ended without a finished segment and without a message."""


class FolderRemoved(DriverFailed):
    """Error: the run's folder was removed before its job ended, so the run cannot continue."""


class JobCancelled(DriverFailed):
    """Error: the job was cancelled. A user can restart the job; a retry of the workflow does not."""


class WaitInterrupted(RlhpcError):
    """Error raised if Ctrl-C or the end of the requesting workflow ends the wait; the job continues."""

    exit_code = 130


def print_message(out: TextIO, message_text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"rlhpc: {message_text}", file=out, flush=True)


def answer(state: str, record: JobRecord | None, segment: int, result: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the result of a submission; see `Submission.run`."""
    return {
        "state": state,
        "segment": segment,
        "executor": record.executor if record else "",
        "job_id": record.job_id if record else "",
        "result": result,
    }


def answer_line(answer: dict[str, Any]) -> str:
    """Formats the last line of output for a submission's result."""
    end_text = f" at step {answer['result']['global_step']}" if answer["result"] else f", job {answer['job_id']}"
    return f"segment {answer['segment']}: {answer['state']}{end_text}"


def interruption_text(files: SegmentJournal, record: JobRecord) -> str:
    """Returns the message for a user who stops the wait."""
    return (
        f"stopped waiting; {job_words(record)} goes on with segment {files.segment} of {files.paths.root}\n"
        "  wait for it again: run the same command\n"
        f"  stop it:           rlhpc cancel {shlex.quote(str(files.paths.root))}"
    )


def cancelled_error(files: SegmentJournal, record: JobRecord, reason_text: str = "") -> JobCancelled:
    """Builds the error for a job that was cancelled."""
    return JobCancelled(
        f"segment {files.segment} of {files.paths.root.name}: {job_words(record)} was cancelled"
        + (f"\n{reason_text}" if reason_text else "")
        + "\n  no retry starts it again; to go on from its last checkpoint, run the same command (snakemake, rlhpc submit) "
        f"again\n  driver log: {files.driver_err}",
        exit_code=143,
        log_path=str(files.driver_err),
    )


def _probe_for(record: JobRecord, files: SegmentJournal) -> JobProbe:
    """Builds the probe for a job; all waits on this host share one Slurm query."""
    probe = probe_for(record, files)
    return SharedProbe(probe) if isinstance(probe, SlurmProbe) else probe


class Waiter:
    """Waiter for one segment. `poll` never blocks for long, so that one process can wait for many runs.

    Args:
        files: Journal of the segment.
        record: Record of the segment's job.
        out: Called with each line of progress.
        find_probe: Builds the probe that queries a job; by default one for this waiter.
        poll_s: Minimum seconds between two checks.
        progress_s: Minimum seconds between two lines of progress; the interval grows to a minute.
        deadline_s: Maximum seconds to wait, after which `poll` raises; the job continues.
        asked_by: Process that requested the wait; the wait ends with this process.
        began: Start of the wait, in monotonic seconds, if another process waited before; now by default.
        environment: Environment variables to which the run's configuration refers; those of this process by default.
    """

    def __init__(
        self,
        files: SegmentJournal,
        record: JobRecord,
        out: Callable[[str], None],
        *,
        find_probe: Callable[[JobRecord, SegmentJournal], JobProbe] | None = None,
        poll_s: float = 0.5,
        progress_s: float = 5.0,
        deadline_s: float | None = None,
        asked_by: ProcessId | None = None,
        began: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.files = files
        self.record = record
        self._out = out
        self._find_probe = find_probe or _probe_for
        self._probe = self._find_probe(record, files)
        self.poll_s = poll_s
        self.progress_s = progress_s
        self.deadline_s = deadline_s
        self.asked_by = asked_by
        self.began = time.monotonic() if began is None else began
        self._folder_times = (0, 0)
        self._claim: Claim | None = None
        self._report = JobReport(JobState.UNKNOWN, conclusive=False)
        self._next_check = self._next_read = self._next_probe = self._next_line = self._next_release = 0.0
        self._ended_claim = 0
        self._last_line = ""
        self._silent_since: float | None = None
        self._over_since: float | None = None
        self._last_renewal: tuple[int, int, float | None] = (0, 0, None)
        self._environment = os.environ if environment is None else environment
        self._alerts: AlertSender | None = None
        self._next_stall_check, self._status_mtime, self._status_since = 0.0, 0, 0.0

    def wait(self, on_unfinished: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Waits for the segment and returns its driver's result; calls `on_unfinished` after each unfinished check."""
        try:
            while (wait_result := self.poll()) is None:
                on_unfinished()
                time.sleep(self.poll_s)
            return wait_result
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the wait, so that the probe no longer queries the job."""
        self._probe.leave([self.record.job_id])

    def answer(self, segment_result: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a submission (`Submission.run`) from the result of a finished segment."""
        return answer("finished", owner_of(self.files, self.record), self.files.segment, segment_result)

    def poll(self) -> dict[str, Any] | None:
        """Returns the result that the driver wrote at the end of the segment; None if the driver has not finished.

        Raises:
            DriverFailed, DriverRejected, JobLost, JobCancelled: The segment will not finish.
            DeadlineExceeded: `deadline_s` has passed.
            WaitInterrupted: The process that requested the wait has ended.
        """
        now = time.monotonic()
        # the processes of a job on this host show its state without a read of the shared filesystem
        claim = self._claim
        has_ended = claim is not None and claim.number != self._ended_claim and claim.alive_here() is False
        if has_ended and claim is not None:
            self._ended_claim = claim.number
        if now >= self._next_check or has_ended or self._over_since is not None:
            self._next_check = now + min(max(self.poll_s, (now - self.began) / 10), _MAX_CHECK_INTERVAL_S)
            wait_result = self._read_files(now, is_forced=has_ended or self._over_since is not None)
            if wait_result is not None:
                return wait_result
        if self._over_since is not None:
            if now - self._over_since > (LEASE_S if self._may_have_successor() else _SETTLE_S):
                error = self._make_lost_error()
                self._report_end(error)
                raise error
            return None
        if now >= self._next_probe:
            self._next_probe = now + max(self.poll_s, 1.0)
            report = self._query_job()
            if report is None:
                self._over_since = now  # its last files may take a moment to become visible
                return None
            self._check_stall(report, now)
            if now >= self._next_line:
                self._next_line = now + max(self.progress_s, min((now - self.began) / 60, _MAX_LINE_INTERVAL_S))
                self._print_progress(report)
        if self.deadline_s is not None and now - self.began > self.deadline_s:
            raise DeadlineExceeded(
                f"segment {self.files.segment} was not finished within {self.deadline_s:.0f} s; "
                f"{job_words(self.record)} goes on; log: {self.files.driver_err}"
            )
        if self.asked_by is not None and self.asked_by.alive() is False:
            raise WaitInterrupted(interruption_text(self.files, self.record))
        return None

    def _read_files(self, now: float, *, is_forced: bool) -> dict[str, Any] | None:
        """Reads marker, exit record and claim if a file was written since the last check or `is_forced` is true; returns the
        result of a finished driver, otherwise None.
        """
        paths = self.files.paths
        folder_times = (revalidate_folder(paths.submit), revalidate_folder(paths.segments))
        if folder_times == self._folder_times and now < self._next_read and not is_forced:
            return None
        self._folder_times, self._next_read = folder_times, now + _READ_INTERVAL_S
        segment_result = self.files.result()
        if segment_result is None:
            self._claim = Claim.newest(self.files)
            if self._claim is not None and self._claim.token != self.record.token and self._is_claim_alive(self._claim):
                self._follow_job(
                    owner_of(self.files, self.record, must_be_alive=True)
                )  # another submitter's job came first
            self._raise_if_failed()
        return segment_result

    def _follow_job(self, owner: JobRecord) -> None:
        if owner.token != self.record.token:
            self._probe.leave([self.record.job_id])
            self.record = owner
            self._over_since = None
            self._probe = self._find_probe(owner, self.files)

    def _may_have_successor(self) -> bool:
        """Returns whether the job ended because the segment belongs to a job on another host that renews its claim.

        This holds if two hosts have submitted the segment without knowing of each other.
        """
        claim = self._claim
        return claim is not None and claim.token != self.record.token and claim.alive_here() is None

    def _is_claim_alive(self, claim: Claim) -> bool:
        """Returns whether the holder of a claim is alive: by its processes on this host, by its renewals on other hosts."""
        alive_here = claim.alive_here()
        if alive_here is not None:
            return alive_here
        try:
            mtime_ns = claim.path.stat().st_mtime_ns
        except OSError:
            return False
        claim_number, last_mtime_ns, renewed_s = self._last_renewal
        if (claim_number, last_mtime_ns) != (claim.number, mtime_ns):
            self._last_renewal = (
                claim.number,
                mtime_ns,
                time.monotonic() if claim_number == claim.number else renewed_s,
            )
        renewed_at = self._last_renewal[2]
        return renewed_at is not None and time.monotonic() - renewed_at < LEASE_S

    def _query_job(self) -> JobReport | None:
        """Returns the report on the job's state; None if the job is over."""
        claim = self._claim
        if claim is not None and claim.alive_here():
            return JobReport(JobState.RUNNING, source="proc")
        report = self._report = self._probe.query_job(self.record.job_id)
        if self.record.executor == "local" and report.conclusive:
            return report if report.state is JobState.RUNNING else None
        if report.state.is_terminal:
            return None
        if report.state is not JobState.UNKNOWN:
            self._silent_since = None
            is_held = report.state is JobState.PENDING and report.reason == "BeginTime"
            if is_held and claim is not None and time.monotonic() > self._next_release:
                self._next_release = time.monotonic() + _RELEASE_S
                reason = "Slurm starts the job again: its node failed, or it was preempted or requeued"
                send_requeued(self.alerts, self.files.segment, claim.number, reason)
                # a claim exists, so the job ran before and waits after a requeue
                bring_start_forward(self.record.job_id, segment_job_name(self.files))
            return report
        if claim is not None and not report.conclusive and self._is_claim_alive(claim):
            self._silent_since = None
            return JobReport(JobState.RUNNING, source="claim")
        self._silent_since = self._silent_since or time.monotonic()
        max_silence_s = _FORGOTTEN_S if report.conclusive else _UNKNOWN_S
        return report if time.monotonic() - self._silent_since < max_silence_s else None

    # -- alerts ---------------------------------------------------------------------------------------------------

    @property
    def alerts(self) -> AlertSender:
        """Sender of alerts about a driver that cannot report itself."""
        if self._alerts is None:
            targets = AlertTargets.from_file(self.files.config, self._environment)
            self._alerts = AlertSender(self.files.paths, targets, "waiter")
        return self._alerts

    def _report_end(self, error: DriverFailed) -> None:
        """Reports a job that ended without a result."""
        rule = "cancelled" if isinstance(error, JobCancelled) else "failed"
        reason = str(error).splitlines()[0]
        self.alerts.send(rule, ending_name(self.files.segment, self.record.token), reason, step=self._last_step())
        self.alerts.close()

    def _last_step(self) -> int | None:
        step = number_of(read_json_file(self.files.paths.driver_state) or {}, "step")
        return None if step is None else int(step)

    def _check_stall(self, report: JobReport, now: float) -> None:
        """Reports a driver that has not finished a step within the limit in `status.json`; the driver may be unable to.

        The time without a new status counts from this process's first read of it: the clocks of two hosts may differ.
        """
        if now < self._next_stall_check:
            return
        self._next_stall_check = now + _STALL_CHECK_S
        claim, path = self._claim, self.files.paths.driver_state
        try:
            mtime_ns = path.stat().st_mtime_ns
        except OSError:
            return
        if report.state is not JobState.RUNNING or mtime_ns != self._status_mtime:
            self._status_mtime, self._status_since = mtime_ns, now
            return
        status = read_json_file(path) or {}
        limit_s, step = number_of(status, "stall_after_s"), number_of(status, "step")
        is_current = claim is not None and claim.driver is not None and status.get("pid") == claim.driver.pid
        if not is_current or status.get("state") != "running" or limit_s is None or step is None:
            return
        self._next_stall_check = now + min(_STALL_CHECK_S, limit_s / 4)
        if now - self._status_since > limit_s:
            send_stalled(
                self.alerts, int(step), now - self._status_since, limit_s, "; the driver does not report it itself"
            )

    def _make_lost_error(self) -> DriverFailed:
        """Builds the error for a job that ended without a result, with the cause of its end."""
        claim, report = Claim.newest(self.files), self._report
        if report.state is JobState.CANCELLED or self.files.is_cancelled(self.record.token):
            if not self.files.is_cancelled(self.record.token):
                with contextlib.suppress(OSError):  # Slurm forgets the cancellation; a retry must not
                    self.files.mark_cancelled(self.record.token)
            return cancelled_error(self.files, self.record)
        offset = claim.err_offset if claim is not None and claim.token == self.record.token else 0
        path = next((p for p in (self.files.paths.root, self.files.paths.submit) if not p.is_dir()), None)
        if path is not None:
            folder = "run folder" if path == self.files.paths.root else "folder of its submissions"
            return FolderRemoved(
                f"segment {self.files.segment}: the {folder} {path} was removed while {job_words(self.record)} was pending "
                "or ran, so the job ended without a result, and its logs may be gone with it\n"
                "  to go on, put it back from a copy (a snapshot of the file system), then run the same command\n"
                "  without one, the same command starts "
                + ("the run anew, at step 0" if folder == "run folder" else "from the last checkpoint that is left")
            )
        cause_text = report.state.value if report.state.is_terminal else "killed, or its node is gone"
        failure_text = first_failure(self.files.driver_err, offset, num_lines=10)
        # A job that ended before its driver began has its error only at the end of its log.
        failure_text = (
            failure_text or first_failure(Path(self.record.job_log), num_lines=2)
            if self.record.job_log
            else failure_text
        )
        checkpoints = self.files.paths.complete_steps()
        resume_text = "resumes from the last checkpoint" if checkpoints else "starts anew: there is no checkpoint"
        if report.state is JobState.TIMEOUT and not checkpoints:
            resume_text += "; if no step ends within the walltime, give it more (cluster.time)"
        return JobLost(
            f"segment {self.files.segment}: {job_words(self.record)} ended without a result ({cause_text}"
            f"{': ' + report.reason if report.reason else ''})\n"
            + (f"{failure_text}\n" if failure_text else "")
            + f"  driver log: {self.files.driver_err}\n  job log:    {self.record.job_log}\n"
            f"  the same command again {resume_text}",
            log_path=str(self.files.driver_err),
        )

    def _raise_if_failed(self) -> None:
        exit_record = self.files.exit_of(self.record.token)
        if exit_record is None:
            return
        if exit_record.cancelled:
            raise cancelled_error(self.files, self.record, exit_record.message)
        head = exit_record.message or f"the driver ended with exit code {exit_record.exit_code} and said nothing"
        if exit_record.signal:
            message_text = f"; its last words:\n{exit_record.message}" if exit_record.message else ""
            head = f"the driver was ended by {exit_record.signal}{message_text}"
        message = f"{head}\n  driver log: {self.files.driver_err} (segment {self.files.segment})"
        if exit_record.exit_code == 2:
            raise DriverRejected(message)
        raise DriverFailed(message, exit_code=exit_record.exit_code, log_path=str(self.files.driver_err))

    def _print_progress(self, report: JobReport) -> None:
        if report.state is JobState.UNKNOWN and not report.reason:
            return  # not queried from Slurm yet
        state_text = report.state.value.lower() + (f": {report.reason}" if report.reason else "")
        line = f"{self.files.paths.root.name} segment {self.files.segment}: {job_words(self.record)} {state_text}"
        # ignores the numbers of an earlier segment or attempt
        is_current = self._claim is not None and self._claim.token == self.record.token
        start_time = self._claim.started if is_current and self._claim is not None else self.record.submitted
        progress = (
            progress_line(self.files.paths, start_time=start_time) if report.state is not JobState.PENDING else ""
        )
        line += f", {progress}" if progress else ""
        if line != self._last_line:
            self._last_line = line
            self._out(line)
