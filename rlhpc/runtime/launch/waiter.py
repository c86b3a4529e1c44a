"""Waiting for a segment: the marker file first and often, the job second and seldom."""

from __future__ import annotations

import contextlib
import time
from typing import Any, TextIO

from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError, SubmitError
from rlhpc.runtime.launch.claim import Claim, SegmentFiles, read_json
from rlhpc.runtime.launch.driver_job import first_failure
from rlhpc.runtime.launch.jobs import JobReport, JobState
from rlhpc.runtime.launch.record import JobRecord, job_words, owner_of, probe_for
from rlhpc.runtime.launch.requeue import hasten
from rlhpc.runtime.launch.status import progress_line

#: Between the end of a job's processes and its last files being visible on a shared file system.
_SETTLE_S = 2.0
#: How long a job may be unheard of, or Slurm be silent, before waiting is pointless.
_UNKNOWN_S = 900.0
_FORGOTTEN_S = 90.0
#: How often a job that is held after a requeue is let go.
_HASTEN_S = 60.0


class DriverFailed(RlhpcError):
    """The driver ended without finishing its segment; the message is its first error.

    Attributes:
        exit_code: The driver's exit code.
        log_path: Its stderr file.
    """

    def __init__(self, message: str, *, exit_code: int = 1, log_path: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code if 0 < exit_code < 256 else 1
        self.log_path = log_path


class DriverRejected(SubmitError):
    """The driver refused what it was given (its exit code was 2): an error of the user, as if it had run here."""


class JobLost(DriverFailed):
    """The job is gone and left neither a finished segment nor an error: killed, or its node died."""


def say(out: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"rlhpc: {text}", file=out, flush=True)


class Waiter:
    """Polls the marker file often and the job seldom."""

    def __init__(
        self,
        files: SegmentFiles,
        record: JobRecord,
        out: TextIO,
        poll_s: float,
        progress_s: float,
        deadline_s: float | None,
    ) -> None:
        self._files = files
        self._record = record
        self._out = out
        self._poll_s = poll_s
        self._progress_s = progress_s
        self._deadline = None if deadline_s is None else (time.monotonic() + deadline_s, deadline_s)
        self._probe = probe_for(record, files)
        self._last_line = ""
        self._silent_since: float | None = None
        self._next_hasten = 0.0

    def wait(self) -> dict[str, Any]:
        """What the driver wrote when it finished."""
        next_probe = next_line = time.monotonic()
        while True:
            done = read_json(self._files.marker)
            if done is not None:
                return done
            self._raise_if_failed()
            now = time.monotonic()
            if now >= next_probe:
                next_probe = now + max(self._poll_s, 1.0)
                report = self._look()
                if report is None:
                    return self._settle()
                if now >= next_line:
                    next_line = now + self._progress_s
                    self._show(report)
            if self._deadline is not None and now > self._deadline[0]:
                raise DeadlineExceeded(
                    f"segment {self._files.segment} was not finished within {self._deadline[1]:.0f} s; "
                    f"{job_words(self._record)} goes on; log: {self._files.driver_err}"
                )
            time.sleep(self._poll_s)

    def _look(self) -> JobReport | None:
        """How the job is; None when it is over."""
        claim = Claim.newest(self._files)
        if claim is not None and claim.token != self._record.token:
            owner = owner_of(self._files, self._record)
            if owner.token != self._record.token:  # another submitter's job was first
                self._record, self._probe = owner, probe_for(owner, self._files)
        if claim is not None and claim.alive_here():
            return JobReport(JobState.RUNNING, source="proc")
        report = self._probe.query_one(self._record.job_id)
        if self._record.executor == "local" and report.conclusive:
            return report if report.state is JobState.RUNNING else None
        if report.state.is_terminal:
            return None
        if report.state is not JobState.UNKNOWN:
            self._silent_since = None
            held = report.state is JobState.PENDING and report.reason == "BeginTime"
            if held and claim is not None and time.monotonic() > self._next_hasten:
                self._next_hasten = time.monotonic() + _HASTEN_S
                hasten(self._record.job_id)  # it ran before, so this is the hold after a requeue
            return report
        if claim is not None and not report.conclusive and claim.alive():  # another host: does it still renew?
            self._silent_since = None
            return JobReport(JobState.RUNNING, source="claim")
        self._silent_since = self._silent_since or time.monotonic()
        patience = _FORGOTTEN_S if report.conclusive else _UNKNOWN_S
        return report if time.monotonic() - self._silent_since < patience else None

    def _settle(self) -> dict[str, Any]:
        """The job is over: give its last files a moment to become visible, then say how it ended."""
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            done = read_json(self._files.marker)
            if done is not None:
                return done
            self._raise_if_failed()
            time.sleep(0.1)
        claim = Claim.newest(self._files)
        offset = claim.err_offset if claim is not None and claim.token == self._record.token else 0
        report = self._probe.query_one(self._record.job_id)
        how = report.state.value if report.state.is_terminal else "killed, or its node is gone"
        text = first_failure(self._files.driver_err, offset, lines=10)
        raise JobLost(
            f"segment {self._files.segment}: {job_words(self._record)} ended without a result ({how}"
            f"{': ' + report.reason if report.reason else ''})\n"
            + (f"{text}\n" if text else "")
            + f"  driver log: {self._files.driver_err}\n  job log:    {self._record.job_log}\n"
            "  the same command again resumes from the last checkpoint",
            log_path=str(self._files.driver_err),
        )

    def _raise_if_failed(self) -> None:
        ended = read_json(self._files.exit)
        if ended is None or ended.get("token") != self._record.token:
            return
        code = int(ended.get("exit_code") or 1)
        name = str(ended.get("signal") or "")
        words = str(ended.get("message") or "").strip()
        if ended.get("cancelled"):
            head = f"{job_words(self._record)} was cancelled" + (f"\n{words}" if words else "")
        else:
            head = words or f"the driver ended with exit code {code} and said nothing"
            if name:
                head = f"the driver was ended by {name}" + (f"; its last words:\n{words}" if words else "")
        message = f"{head}\n  driver log: {self._files.driver_err} (segment {self._files.segment})"
        if code == 2:
            raise DriverRejected(message)
        raise DriverFailed(message, exit_code=code, log_path=str(self._files.driver_err))

    def _show(self, report: JobReport) -> None:
        state = report.state.value.lower() + (f": {report.reason}" if report.reason else "")
        line = f"segment {self._files.segment}: {job_words(self._record)} {state}"
        # an earlier segment's numbers are of no interest
        progress = progress_line(self._files.paths, since=self._record.submitted)
        line += f", {progress}" if progress else ""
        if line != self._last_line:
            self._last_line = line
            say(self._out, line)
