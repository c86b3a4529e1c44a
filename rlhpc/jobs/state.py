"""State of a run's newest attempt, from the run's files and, for Slurm jobs, a single query."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.jobs.cancel import user_name
from rlhpc.jobs.driver_job import error_line
from rlhpc.jobs.job_record import job_words
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobReport, JobState, SlurmProbe
from rlhpc.jobs.segment import Attempts, Claim, ExitRecord, JobRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.runtime.host import node_name

#: States of a driver that ended by itself.
FINAL = ("finished", "failed", "stopped")
#: States in which no process of the run remains.
OVER = (*FINAL, "cancelled", "dead")
#: Seconds without a new status after which a driver on another host no longer counts as running.
_SILENT_S = 300.0
_QUEUED = (JobState.PENDING, JobState.CONFIGURING, JobState.REQUEUED, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT,
           JobState.REQUEUE_FED, JobState.EXPEDITING, JobState.RESV_DEL_HOLD)  # fmt: skip
#: Slurm's states of a job between running and ended → the run's state.
_TRANSITIONS = {JobState.COMPLETING: "ending", JobState.STAGE_OUT: "ending", JobState.SUSPENDED: "suspended",
                JobState.STOPPED: "suspended"}  # fmt: skip
#: The driver's stop reason at the end of a segment.
_SEGMENT_END = "segment_end"
#: The driver's stop reasons for a planned end, in words.
_STOP_REASON_TEXTS = {
    "max_steps": "all steps are done",
    "stop_return": "runner.stop_return is reached",
    _SEGMENT_END: "the segment is finished",
}


@dataclass(frozen=True)
class RunState:
    """State of one run at one moment.

    Attributes:
        state: waiting (for the queue's limit), pending, starting, running, ending, stopped, finished, failed,
            cancelled, dead (its processes are gone) or unknown.
        reason: Consequence or cause of the state.
        job: Name of the job, such as `Slurm job 27`; "" for a run that was not submitted.
        is_current: Whether `status.json` is from the newest attempt.
    """

    state: str
    reason: str = ""
    job: str = ""
    is_current: bool = True


@dataclass(frozen=True)
class Facts:
    """Content of the files of a run's newest segment."""

    paths: RunPaths
    status: dict[str, Any]
    files: SegmentJournal | None = None
    record: JobRecord | None = None
    claim: Claim | None = None
    exit_record: ExitRecord | None = None

    @classmethod
    def read(cls, paths: RunPaths) -> Facts:
        status = read_json_file(paths.driver_state) or {}
        files = newest_segment(paths)
        record = JobRecord.read(files) if files is not None else None
        if files is None or record is None:
            return cls(paths, status)
        claim = Claim.newest(files)
        is_current = claim is not None and claim.token == record.token
        return cls(paths, status, files, record, claim if is_current else None, files.exit_of(record.token))

    @property
    def slurm_job(self) -> str | None:
        """Job to query from Slurm; None if the files suffice."""
        record = self.record
        if (
            record is None
            or record.executor != "slurm"
            or not record.job_id
            or self.exit_record
            or self._is_segment_finished()
        ):
            return None
        return None if self.claim is not None and self.claim.alive_here() else record.job_id

    def state(self, report: JobReport | None = None) -> RunState:
        """Returns the run's state; `report` is Slurm's report on `slurm_job`, None without a report."""
        record, files = self.record, self.files
        if record is None or files is None or self._is_trained_without_job():
            return RunState(*self._state_from_status())
        job = job_words(record)
        if self._is_segment_finished():
            return RunState(*self._finished_state(), job)
        is_cancelled = files.cancelled(record.token)
        cancelled_state = RunState("cancelled", f"{job}; submit the run again to go on", job)
        if self.exit_record:
            failure = self.exit_record.message.partition("\n")[0]
            return cancelled_state if self.exit_record.cancelled else RunState("failed", failure, job)
        if record.phase == "refused":
            return RunState("failed", record.reason)
        if record.phase == "waiting":
            reason = f"not submitted yet: {record.reason}; waits for room"
            return RunState("cancelled", "before it was submitted") if is_cancelled else RunState("waiting", reason)
        if self.claim is not None and self.claim.alive_here():
            return self._running_state(job)
        has_ended = report is not None and report.state.is_terminal
        if (report is not None and report.state is JobState.CANCELLED) or (is_cancelled and has_ended):
            return cancelled_state
        if report is not None and report.state is not JobState.UNKNOWN:
            return self._state_from_report(report, job)
        return cancelled_state if is_cancelled else self._state_from_processes(report, job)

    def _is_segment_finished(self) -> bool:
        return self.files is not None and self.files.marker.exists()

    def _is_trained_without_job(self) -> bool:
        """Returns whether `rlhpc train` trained the run after the last submission ended."""
        started_at, claim, record = number_of(self.status, "started"), self.claim, self.record
        if started_at is None or record is None:
            return False
        if claim is not None and (claim.alive_here() is not False or self._has_written_status(claim)):
            return False
        last_end = max(
            record.submitted, claim.started if claim else 0.0, self.exit_record.end_time if self.exit_record else 0.0
        )
        return (
            bool(self.exit_record or self._is_segment_finished())
            and started_at > last_end
            and self.status.get("segment") is None
        )

    def _has_written_status(self, claim: Claim) -> bool:
        """Returns whether `status.json` was written by the claim's driver."""
        driver = claim.driver
        if driver is None or self.status.get("pid") != driver.pid:
            return False
        return str(self.status.get("host") or "").partition(":")[0] == driver.host.split("/")[0]

    def _running_state(self, job: str) -> RunState:
        """Returns the state of a run whose job is running, which depends on whether its driver is training."""
        claim, files, record = self.claim, self.files, self.record
        if claim is None or files is None or record is None:
            return RunState("starting", job, job, is_current=False)
        state, reason = self._driver_state()
        attempts = Attempts(files, record.token)
        start_text = f", start {attempts.count}" if attempts.count > 1 else ""
        if attempts.last_end:
            return RunState("starting", f"{job}, again after: {attempts.last_end}", job, is_current=False)
        if not self._has_written_status(claim):
            return RunState("starting", f"{job}{start_text}", job, is_current=False)
        if state in ("finished", "stopped") and claim.alive_here() is not False:
            return RunState("ending", f"{job}: {ending_words(reason)}", job)
        if state in FINAL:
            return RunState("starting", f"{job}, again after: {ending_words(reason)}", job, is_current=False)
        return RunState("running", f"{job}{start_text}", job)

    def _state_from_report(self, report: JobReport, job: str) -> RunState:
        if report.state in _QUEUED:
            resume_text = ", to go on" if self.claim is not None else ""
            is_current = self.claim is None or not self._has_written_status(self.claim)
            reason = (
                "" if report.reason == "None" else report.reason
            )  # Slurm's placeholder before it has determined a reason
            reason = reason or ("" if report.state is JobState.PENDING else report.state.value.lower())
            reason_text = f": {reason}" if reason else ""
            return RunState("pending", f"{job}{resume_text}{reason_text}", job, is_current=is_current)
        if report.state.is_terminal:
            outcome = f"{job} ended without a result ({report.state.value}); submit the run again to resume it"
            return RunState("dead", outcome, job)
        state = _TRANSITIONS.get(report.state)
        return RunState(state, job, job) if state else self._running_state(job)

    def _state_from_processes(self, report: JobReport | None, job: str) -> RunState:
        """Returns the state from the processes on this host, if neither the files nor Slurm determine the state."""
        claim, record = self.claim, self.record
        assert record is not None
        if report is not None and report.conclusive:
            return RunState("dead", f"Slurm does not know {job} any more; submit the run again to resume it", job)
        controller = record.process.alive() if record.process is not None else None
        if claim is None:
            if controller is False:
                return RunState("dead", f"{job} is gone; submit the run again", job)
            silence_note = "; Slurm does not answer" if report is not None else ""
            return RunState("waiting", f"{job}: submitted, not started yet{silence_note}", job, is_current=False)
        if controller:
            return RunState("starting", f"{job}, again", job, is_current=False)
        if claim.alive_here() is False:
            pid = claim.driver.pid if claim.driver else claim.job.pid
            return RunState("dead", f"its driver (pid {pid}) is gone; submit the run again to resume it", job)
        if self._has_written_status(claim):
            return RunState(*self._state_from_status(), job)
        return RunState("starting", job, job, is_current=False)

    def _driver_state(self) -> tuple[str, str]:
        """Returns the driver's state and stop reason from `status.json`; "" for a missing one."""
        return str(self.status.get("state") or ""), str(self.status.get("stop_reason") or "")

    def _finished_state(self) -> tuple[str, str]:
        state, reason = self._driver_state()
        if state == "stopped" and reason == _SEGMENT_END and self.files is not None:
            return "stopped", f"segment {self.files.segment} is finished, and the next one not submitted"
        return (state, ending_words(reason)) if state in FINAL else ("finished", "")

    def _state_from_status(self) -> tuple[str, str]:
        """Returns state and explanation from `status.json` alone."""
        status, paths = self.status, self.paths
        state, reason = self._driver_state()
        if state in FINAL:
            return state, ending_words(reason)
        if not state:
            if not _is_readable(paths.submit):
                return "unknown", f"submitted by {owner(paths)}; what it does before its first step only they can see"
            refusal = _refusal(paths)
            return ("failed", f"refused before its start: {refusal}") if refusal else ("unknown", "no status.json")
        pid, host = status.get("pid"), str(status.get("host") or "").partition(":")[0]
        if host == node_name() and isinstance(pid, int):
            if Path(f"/proc/{pid}").exists():
                return state, reason
            return "dead", f"its driver (pid {pid}) is gone; submit the run again to resume it"
        silent_s = time.time() - (number_of(status, "updated") or 0.0)
        if silent_s > _SILENT_S:
            return "dead", f"its driver on {host or '?'} has not been heard of for {duration(silent_s)}"
        return state, reason


def ending_words(reason: str) -> str:
    """Returns the stop reason of a run as text; the keywords for a planned end are translated."""
    return _STOP_REASON_TEXTS.get(reason, reason)


def states(folders: Sequence[RunPaths], probe: SlurmProbe | None = None) -> list[tuple[Facts, RunState]]:
    """Returns facts and states of runs; queries Slurm once for all of their jobs."""
    facts = [Facts.read(paths) for paths in folders]
    jobs = {job for run in facts if (job := run.slurm_job)}
    reports = (probe or SlurmProbe(command_timeout_s=10.0)).query(sorted(jobs)) if jobs else {}
    return [(run, run.state(reports.get(run.slurm_job or ""))) for run in facts]


def run_state(paths: RunPaths) -> tuple[str, str]:
    """Returns (state, explanation) of one run; see `RunState`."""
    [(_, run)] = states([paths])
    return run.state, run.reason


def newest_segment(paths: RunPaths) -> SegmentJournal | None:
    """Returns the journal of the segment that was submitted last; None without a submission, or if the folder belongs to
    another user.
    """
    try:
        segments = paths.submitted()
    except OSError:
        return None
    return SegmentJournal(paths, segments[-1]) if segments else None


def owner(paths: RunPaths) -> str:
    """Returns the name of the user who owns the run's folder."""
    return user_name(paths.root.stat().st_uid)


def find_runs(folder: Path, depth: int = 3) -> Iterable[RunPaths]:
    """Yields the runs below a folder, sorted by name. Does not search inside run folders."""
    try:
        subfolders = [
            subfolder for subfolder in os.scandir(folder) if subfolder.is_dir() and not subfolder.name.startswith(".")
        ]
    except OSError:
        return
    for subfolder in sorted(subfolders, key=lambda e: e.name):
        paths = RunPaths(Path(subfolder.path))
        if any(marker.exists() for marker in (paths.config, paths.submit, paths.driver_state)):
            yield paths
        elif depth > 1:
            yield from find_runs(Path(subfolder.path), depth - 1)


def duration(seconds: float | None) -> str:
    """Formats seconds as `1h02m`, `3m20s` or `12s`; as `?` for unknown durations."""
    if seconds is None or seconds != seconds or seconds < 0 or seconds == float("inf"):
        return "?"
    minutes, remaining_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{remaining_s:02d}s" if minutes else f"{remaining_s}s"


def _refusal(paths: RunPaths) -> str:
    """Returns the error line of the run's failed workflow plan; "" if the plan exists."""
    if (paths.root / "workflow" / "plan.txt").exists():
        return ""
    return error_line(paths.logs / "workflow" / "prepare.log")


def _is_readable(folder: Path) -> bool:
    return not folder.exists() or os.access(folder, os.R_OK | os.X_OK, effective_ids=True)


def number_of(values: dict[str, Any], key: str) -> float | None:
    """Returns the number under a key of a JSON object; None if the key is missing or its value is not a number."""
    number = values.get(key)
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


#: Minimum seconds between two Slurm queries, and the number of equal answers in a row that are required: between the end of
#: one attempt and the start of the next, a run may look dead for a moment.
_CHECK_INTERVAL_S, _NUM_EQUAL_ANSWERS = 10.0, 2
_ENDED_STATES = ("finished", "failed", "cancelled", "dead")


class RunEndCheck:
    """Callable that returns whether the run has ended and will not continue by itself.

    Args:
        paths: The run.
        interval_s: Minimum seconds between two checks of the job; the run's status is read in every call.
    """

    def __init__(self, paths: RunPaths, interval_s: float = _CHECK_INTERVAL_S) -> None:
        self._paths, self._interval_s = paths, interval_s
        self._checked_at, self._num_equal_answers = -interval_s, 0

    def __call__(self) -> bool:
        if (read_json_file(self._paths.driver_state) or {}).get("state") == "finished":
            return True
        if time.monotonic() - self._checked_at >= self._interval_s:
            self._checked_at = time.monotonic()
            self._num_equal_answers = self._num_equal_answers + 1 if self._is_over() else 0
        return self._num_equal_answers >= _NUM_EQUAL_ANSWERS

    def _is_over(self) -> bool:
        [(facts, run)] = states([self._paths])
        # A run that stopped at a terminal has ended; the job of a submitted run continues it.
        return run.state in _ENDED_STATES or (run.state == "stopped" and facts.record is None)
