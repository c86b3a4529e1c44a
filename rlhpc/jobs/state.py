"""State of a run's newest attempt, from the run's files and, for Slurm jobs, a single query."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.jobs.cancel import user_name
from rlhpc.jobs.driver_job import error_line
from rlhpc.jobs.job_record import job_words
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, ProcessId, SlurmProbe
from rlhpc.jobs.segment import Attempts, Claim, ExitRecord, JobRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file, revalidate_folder
from rlhpc.jobs.shared_probe import PATIENCE_S, SharedAnswer, SharedProbe
from rlhpc.runtime.files import read_file
from rlhpc.runtime.host import node_name
from rlhpc.runtime.registry import CURRENT

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
        """Returns the run's state; `report` is Slurm's report on `slurm_job`, None if there is no report."""
        record, files = self.record, self.files
        if record is None or files is None or self._is_trained_without_job():
            return self._find_starting_state() or RunState(*self._read_state_from_status())
        job = job_words(record)
        if self._is_segment_finished():
            return RunState(*self._find_finished_state(), job)
        is_cancelled = files.is_cancelled(record.token)
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
            return self._find_running_state(job)
        has_ended = report is not None and report.state.is_terminal
        if (report is not None and report.state is JobState.CANCELLED) or (is_cancelled and has_ended):
            return cancelled_state
        if report is not None and report.state is not JobState.UNKNOWN:
            return self._state_from_job_report(report, job)
        return cancelled_state if is_cancelled else self._find_state_from_processes(report, job)

    def _is_segment_finished(self) -> bool:
        return self.files is not None and self.files.marker.exists()

    def _is_trained_without_job(self) -> bool:
        """Returns whether `rlhpc train` trained the run after the last submission ended."""
        start_time, claim, record = number_of(self.status, "started"), self.claim, self.record
        if start_time is None or record is None:
            return False
        if claim is not None and (claim.alive_here() is not False or self._has_written_status(claim)):
            return False
        last_end = max(
            record.submitted, claim.started if claim else 0.0, self.exit_record.end_time if self.exit_record else 0.0
        )
        return (
            bool(self.exit_record or self._is_segment_finished())
            and start_time > last_end
            and self.status.get("segment") is None
        )

    def _has_written_status(self, claim: Claim) -> bool:
        """Returns whether `status.json` was written by the claim's driver."""
        driver = claim.driver
        if driver is None or self.status.get("pid") != driver.pid:
            return False
        return str(self.status.get("host") or "").partition(":")[0] == driver.host.split("/")[0]

    def _find_running_state(self, job_id: str) -> RunState:
        """Returns the state of a run whose job is running, which depends on whether its driver is training."""
        claim, files, record = self.claim, self.files, self.record
        if claim is None or files is None or record is None:
            return RunState("starting", job_id, job_id, is_current=False)
        state, reason = self._read_driver_state()
        attempts = Attempts(files, record.token)
        start_text = f", start {attempts.count}" if attempts.count > 1 else ""
        if attempts.last_end:
            return RunState("starting", f"{job_id}, again after: {attempts.last_end}", job_id, is_current=False)
        if not self._has_written_status(claim):
            return RunState("starting", f"{job_id}{start_text}", job_id, is_current=False)
        if state in ("finished", "stopped") and claim.alive_here() is not False:
            return RunState("ending", f"{job_id}: {ending_words(reason)}", job_id)
        if state in FINAL:
            return RunState("starting", f"{job_id}, again after: {ending_words(reason)}", job_id, is_current=False)
        return RunState("running", f"{job_id}{start_text}", job_id)

    def _state_from_job_report(self, report: JobReport, job_id: str) -> RunState:
        if report.state in _QUEUED:
            resume_text = ", to go on" if self.claim is not None else ""
            is_current = self.claim is None or not self._has_written_status(self.claim)
            reason = (
                "" if report.reason == "None" else report.reason
            )  # Slurm's placeholder before it has determined a reason
            reason = reason or ("" if report.state is JobState.PENDING else report.state.value.lower())
            reason_text = f": {reason}" if reason else ""
            return RunState("pending", f"{job_id}{resume_text}{reason_text}", job_id, is_current=is_current)
        if report.state.is_terminal:
            outcome_text = f"{job_id} ended without a result ({report.state.value}); submit the run again to resume it"
            return RunState("dead", outcome_text, job_id)
        reported_state = _TRANSITIONS.get(report.state)
        return RunState(reported_state, job_id, job_id) if reported_state else self._find_running_state(job_id)

    def _find_state_from_processes(self, report: JobReport | None, job_id: str) -> RunState:
        """Returns the state from the processes on this host, if neither the files nor Slurm determine the state."""
        claim, record = self.claim, self.record
        assert record is not None
        if report is not None and report.conclusive:
            return RunState("dead", f"Slurm does not know {job_id} any more; submit the run again to resume it", job_id)
        controller = record.process.alive() if record.process is not None else None
        if claim is None:
            if controller is False:
                return RunState("dead", f"{job_id} is gone; submit the run again", job_id)
            silence_note = "; Slurm does not answer" if report is not None else ""
            return RunState("waiting", f"{job_id}: submitted, not started yet{silence_note}", job_id, is_current=False)
        if controller:
            return RunState("starting", f"{job_id}, again", job_id, is_current=False)
        if claim.alive_here() is False:
            pid = claim.driver.pid if claim.driver else claim.job.pid
            return RunState("dead", f"its driver (pid {pid}) is gone; submit the run again to resume it", job_id)
        if self._has_written_status(claim):
            return RunState(*self._read_state_from_status(), job_id)
        return RunState("starting", job_id, job_id, is_current=False)

    def _read_driver_state(self) -> tuple[str, str]:
        """Returns the driver's state and stop reason from `status.json`; "" for a missing one."""
        return str(self.status.get("state") or ""), str(self.status.get("stop_reason") or "")

    def _find_finished_state(self) -> tuple[str, str]:
        state, reason = self._read_driver_state()
        if state == "stopped" and reason == _SEGMENT_END and self.files is not None:
            return "stopped", f"segment {self.files.segment} is finished, and the next one not submitted"
        return (state, ending_words(reason)) if state in FINAL else ("finished", "")

    def _find_starting_state(self) -> RunState | None:
        """Returns the state of a run whose driver holds the lock and has not written its status yet; None otherwise."""
        driver_record = read_json_file(self.paths.driver_record) or {}
        process, start_time = ProcessId.from_json(driver_record.get("process")), number_of(driver_record, "started")
        if process is None or start_time is None or self.status.get("pid") == process.pid:
            return None
        is_alive = process.alive()
        if is_alive is None:  # on another host, where the driver renews the file
            with contextlib.suppress(OSError):  # the driver has just ended
                is_alive = time.time() - self.paths.driver_record.stat().st_mtime < _SILENT_S
        if not is_alive:
            return None
        elapsed_text = duration(max(0.0, time.time() - start_time))
        return RunState(
            "starting", f"for {elapsed_text}, pid {process.pid} on {process.host.split('/')[0]}", is_current=False
        )

    def _read_state_from_status(self) -> tuple[str, str]:
        """Returns state and explanation, read only from `status.json`."""
        status, paths = self.status, self.paths
        state, reason = self._read_driver_state()
        if state in FINAL:
            return state, ending_words(reason)
        if not state:
            if not _is_readable(paths.submit):
                return "unknown", f"submitted by {owner(paths)}; what it does before its first step only they can see"
            refusal = _plan_error(paths)
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


def queue_probe(patience_s: float = PATIENCE_S) -> JobProbe:
    """Returns the probe of commands that display states, whose answers all commands of a user on this host share."""
    probe = SlurmProbe(command_timeout_s=10.0)
    return SharedProbe(probe, patience_s=patience_s) if shutil.which("squeue") else probe


def states(folders: Sequence[RunPaths], probe: JobProbe | None = None) -> list[tuple[Facts, RunState]]:
    """Returns facts and states of runs; queries Slurm at most once for all of their jobs (`shared_probe`)."""
    facts_by_run = [Facts.read(paths) for paths in folders]
    jobs = {job for run in facts_by_run if (job := run.slurm_job)}
    reports = (probe or queue_probe()).query(sorted(jobs)) if jobs else {}
    return [(run, run.state(reports.get(run.slurm_job or ""))) for run in facts_by_run]


def run_state(paths: RunPaths) -> tuple[str, str]:
    """Returns (state, explanation) of one run; see `RunState`."""
    [(_, run)] = states([paths])
    return run.state, run.reason


def newest_segment(paths: RunPaths) -> SegmentJournal | None:
    """Returns the journal of the segment that was submitted last; None if there is no submission, or if the folder belongs to
    another user.
    """
    try:
        segments = paths.submitted_segments()
    except OSError:
        return None
    return SegmentJournal(paths, segments[-1]) if segments else None


def owner(paths: RunPaths) -> str:
    """Returns the name of the user who owns the run's folder."""
    return user_name(paths.root.stat().st_uid)


def holds_run(paths: RunPaths) -> bool:
    """Returns whether a folder is the folder of a run: it has a configuration, a submission or a status.

    False for a folder that this user may not open, such as a run of another user in the same parent folder.
    """
    return any(os.path.exists(marker) for marker in (paths.config, paths.submit, paths.driver_state))


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
        if holds_run(paths):
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


def _plan_error(paths: RunPaths) -> str:
    """Returns the error line of the run's failed workflow plan; "" if the plan exists."""
    if (paths.root / "workflow" / "plan.txt").exists():
        return ""
    return error_line(paths.logs / "workflow" / "prepare.log")


def _is_readable(folder: Path) -> bool:
    return not folder.exists() or os.access(folder, os.R_OK | os.X_OK, effective_ids=True)


def number_of(json_values: dict[str, Any], key: str) -> float | None:
    """Returns the number under a key of a JSON object; None if the key is missing or its value is not a number."""
    json_value = json_values.get(key)
    return float(json_value) if isinstance(json_value, int | float) and not isinstance(json_value, bool) else None


#: Minimum seconds between two Slurm queries, and the number of equal answers in a row that are required: between the end of
#: one attempt and the start of the next, a run may look dead for a moment.
_CHECK_INTERVAL_S, _NUM_EQUAL_ANSWERS = 10.0, 2
#: Seconds after which the files of a run that looks unchanged are read again: a driver on this host may have been killed.
_FULL_CHECK_S = 120.0
_ENDED_STATES = ("finished", "failed", "cancelled", "dead")


class RunEndCheck:
    """Callable that returns whether the run has ended and no job or retry will continue it.

    A check looks at the times of the run's folders and at Slurm's shared answer about its job. It reads the run's files only
    if one of these has changed, if the last check found the run over, or after `_FULL_CHECK_S`.

    Args:
        paths: The run.
        interval_s: Minimum seconds between two checks.
    """

    def __init__(self, paths: RunPaths, interval_s: float = _CHECK_INTERVAL_S) -> None:
        self._paths, self._interval_s = paths, interval_s
        self._checked_at, self._read_at, self._num_equal_answers = -interval_s, float("-inf"), 0
        self._probe = queue_probe(patience_s=0.0)
        self._job_id: str | None = None
        self._last_look: tuple[Any, ...] = ()

    def __call__(self) -> bool:
        if time.monotonic() - self._checked_at >= self._interval_s and self._num_equal_answers < _NUM_EQUAL_ANSWERS:
            self._checked_at = time.monotonic()
            if self._has_changed():
                self._read_at = time.monotonic()
                self._num_equal_answers = self._num_equal_answers + 1 if self._is_over() else 0
        return self._num_equal_answers >= _NUM_EQUAL_ANSWERS

    def _has_changed(self) -> bool:
        report = self._probe.query_job(self._job_id) if self._job_id else None
        file_states = (report, *map(revalidate_folder, (self._paths.root, self._paths.submit, self._paths.segments)))
        is_unchanged = file_states == self._last_look and time.monotonic() - self._read_at < _FULL_CHECK_S
        self._last_look = file_states
        return not is_unchanged or self._num_equal_answers > 0

    def _is_over(self) -> bool:
        if (read_json_file(self._paths.driver_state) or {}).get("state") == "finished":
            self._num_equal_answers = _NUM_EQUAL_ANSWERS
            return True
        [(facts, run)] = states([self._paths], self._probe)
        self._job_id = facts.slurm_job
        # A run that stopped at a terminal has ended; the job of a submitted run continues it.
        return run.state in _ENDED_STATES or (run.state == "stopped" and facts.record is None)


#: Seconds between two looks of a host at a run without a driver.
_LOOK_S = 5.0


class SharedRunFiles:
    """State of a run's files, read once for all ranks of this host that wait for a driver (`joining.RunFiles`).

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._has_ended = paths, RunEndCheck(paths)
        self._shared_answer = SharedAnswer(f"run {paths.root.absolute()}", self._read, _LOOK_S)

    def generation(self) -> str:
        """Returns the run's current generation; "" before the first."""
        return str(self._shared_answer.answer()[0])

    def is_over(self) -> bool:
        """Returns whether the run has ended and will not continue by itself."""
        return bool(self._shared_answer.answer()[1])

    def release(self) -> None:
        """Ends the reading by this process, so that another process takes over."""
        self._shared_answer.release()

    def _read(self) -> list[Any]:
        try:
            generation = read_file(self._paths.registry / CURRENT).decode()
        except (OSError, ValueError):
            generation = ""
        return [generation, self._has_ended()]
