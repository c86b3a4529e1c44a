"""Job states, and probes that determine whether a job is alive.

`JobState` has every state that Slurm can report. `JobProbe` queries the states of many jobs at once: `LocalProbe` reads
/proc; `SlurmProbe` asks squeue, sacct and scontrol, and then looks for a marker file of rlhpc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rlhpc.jobs.slurm import QUEUE_ARGUMENTS, QueuedJob, parse_queue
from rlhpc.jobs.submit_backoff import TemporaryRefusal
from rlhpc.runtime.host import process_space
from rlhpc.runtime.slurm import TIMEOUT_S, CommandOutput, ask


class JobState(Enum):
    """State of a batch job, by Slurm's name; `meaning` describes the state and its consequences."""

    meaning: str
    code: str

    def __new__(cls, value: str, code: str, meaning: str) -> JobState:
        member = object.__new__(cls)
        member._value_ = value
        member.code = code
        member.meaning = meaning
        return member

    # waiting or running
    PENDING = ("PENDING", "PD", "Waits in the queue, or for its begin time after a requeue.")
    CONFIGURING = ("CONFIGURING", "CF", "Has its nodes, which are booting or being prepared.")
    RUNNING = ("RUNNING", "R", "Runs.")
    SUSPENDED = ("SUSPENDED", "S", "Keeps its nodes but is paused by the scheduler; goes on by itself.")
    STOPPED = ("STOPPED", "ST", "Paused by SIGSTOP, keeps its nodes.")
    SIGNALING = ("SIGNALING", "SI", "Is being sent a signal.")
    STAGE_OUT = ("STAGE_OUT", "SO", "Its processes ended; files are being staged out.")
    RESIZING = ("RESIZING", "RS", "Is about to change its size.")
    COMPLETING = ("COMPLETING", "CG", "Its processes are ending; the end state is not known yet.")
    REQUEUED = ("REQUEUED", "RQ", "On its way back into the queue; the same job id runs again.")
    EXPEDITING = ("EXPEDITING", "EX", "Requeued, and first in the queue; the same job id runs again.")
    REQUEUE_FED = ("REQUEUE_FED", "RF", "Requeued by its federation.")
    REQUEUE_HOLD = ("REQUEUE_HOLD", "RH", "Requeued and held: somebody must release it (scontrol release).")
    RESV_DEL_HOLD = ("RESV_DEL_HOLD", "RD", "Held because its reservation was deleted.")
    SPECIAL_EXIT = ("SPECIAL_EXIT", "SE", "Requeued and held in a special state by an epilog or an admin.")
    # ended
    COMPLETED = ("COMPLETED", "CD", "Every process ended with exit code 0.")
    FAILED = ("FAILED", "F", "Ended with another exit code than 0.")
    CANCELLED = ("CANCELLED", "CA", "Cancelled by its user or an admin, perhaps before it started.")
    TIMEOUT = ("TIMEOUT", "TO", "Ran into its time limit.")
    PREEMPTED = ("PREEMPTED", "PR", "Ended in favour of another job, and was not requeued by Slurm.")
    NODE_FAIL = ("NODE_FAIL", "NF", "One of its nodes failed; its own work is not to blame.")
    OUT_OF_MEMORY = ("OUT_OF_MEMORY", "OOM", "Used more memory than it had asked for.")
    BOOT_FAIL = ("BOOT_FAIL", "BF", "A node did not boot.")
    DEADLINE = ("DEADLINE", "DL", "Could not end before the deadline it was submitted with.")
    REVOKED = ("REVOKED", "RV", "A sibling of this job runs on another cluster of the federation.")
    # not known
    UNKNOWN = ("UNKNOWN", "?", "Nobody could say. Neither an end nor a success.")

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended for good."""
        return self in _TERMINAL

    @property
    def has_processes(self) -> bool:
        """True if processes of the job exist on its nodes, running or paused."""
        return self in (JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.SIGNALING, JobState.RESIZING)

    @property
    def is_success(self) -> bool:
        """True if the job ended well; an unknown state is not a success."""
        return self is JobState.COMPLETED

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Parses a state as squeue, sacct or scontrol prints it: `CANCELLED by 123`, `OUT_OF_ME+`, `PD`, `running`."""
        name, _, _ = text.strip().upper().partition(" ")
        state_word = name.rstrip("+")
        matching_states = [state for state in cls if state_word in (state.value, state.code)]
        if not matching_states and name.endswith("+"):  # sacct cuts long words off
            matching_states = [job_state for job_state in cls if job_state.value.startswith(state_word)]
        return matching_states[0] if len(matching_states) == 1 else cls.UNKNOWN


_TERMINAL = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.PREEMPTED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.REVOKED,
    }
)


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Returns (state letter, start time in clock ticks since boot) of a process; None if it does not exist."""
    try:
        stat_text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat_text.rpartition(")")[2].split()  # the name before it may contain spaces and parentheses
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process; a later process with the same pid has another identity."""

    pid: int
    start: int
    host: str

    @classmethod
    def from_pid(cls, pid: int) -> ProcessId:
        """Returns the identity of a process on this host; `start` is 0 if the process has ended."""
        stat = _read_stat(pid)
        return cls(pid=pid, start=stat[1] if stat else 0, host=process_space())

    @classmethod
    def from_json(cls, value: Any) -> ProcessId | None:
        """Reads the value of `to_json`; returns None for anything else."""
        try:
            return cls(pid=int(value["pid"]), start=int(value["start"]), host=str(value["host"]))
        except (TypeError, KeyError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start": self.start, "host": self.host}

    def alive(self) -> bool | None:
        """Returns whether the process is alive: False after a reboot of its host, None if it belongs to another host."""
        if self.host != process_space():
            name, boot, _ = (*self.host.split("/"), "", "")[:3]
            local_host, boot_here, _ = (*process_space().split("/"), "", "")[:3]
            return False if name == local_host and boot != boot_here else None
        stat = _read_stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and stat[1] == self.start

    def has_open_below(self, folder: Path) -> bool | None:
        """Returns whether the process has a file below a folder open; None if the process is dead, or is ending and has no
        open files.
        """
        root, has_open = folder.resolve(), None
        with contextlib.suppress(OSError):
            for fd_entry in os.scandir(f"/proc/{self.pid}/fd"):
                has_open = has_open or False
                with contextlib.suppress(OSError):
                    has_open = has_open or Path(os.readlink(fd_entry.path)).is_relative_to(root)
        return has_open if self.alive() else None


@dataclass(frozen=True)
class JobReport:
    """Report of a probe on one job.

    Attributes:
        state: The job's state.
        reason: Reason why the job is waiting or how it ended, as the scheduler prints it.
        source: Source of the answer: proc, squeue, sacct, scontrol, marker or none.
        conclusive: False if no source answered. UNKNOWN then does not mean that the job has ended.
    """

    state: JobState
    reason: str = ""
    source: str = "none"
    conclusive: bool = True

    @property
    def is_over(self) -> bool:
        """True if the job has ended, or if Slurm has forgotten it."""
        return self.state.is_terminal or (self.state is JobState.UNKNOWN and self.conclusive)


class JobProbe(ABC):
    """Interface of probes, which query the states of many jobs at once."""

    @abstractmethod
    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        """Returns a report for each job id; does not raise if the scheduler fails."""

    def query_job(self, job_id: str) -> JobReport:
        return self.query([job_id])[job_id]

    def leave(self, job_ids: Iterable[str]) -> None:
        """Removes jobs that will not be queried again."""
        return


class LocalProbe(JobProbe):
    """Probe of jobs that are processes on this host.

    Args:
        processes: Job id → process.
    """

    def __init__(self, processes: Mapping[str, ProcessId]) -> None:
        self._processes = dict(processes)

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        return {job_id: self._report(job_id) for job_id in job_ids}

    def _report(self, job_id: str) -> JobReport:
        process = self._processes.get(job_id)
        if process is None:
            return JobReport(JobState.UNKNOWN, conclusive=False)
        is_alive = process.alive()
        if is_alive is None:
            return JobReport(JobState.UNKNOWN, f"runs on {process.host.split('/')[0]}", conclusive=False)
        if is_alive:
            return JobReport(JobState.RUNNING, source="proc")
        # /proc does not show how the process ended: a waiter reads the marker or the exit record
        return JobReport(JobState.UNKNOWN, f"process {process.pid} is gone", source="proc")


def _leader(job_id: str) -> str:
    """Returns the leader of a job id: `12` for `12+1` (a het component); `12_3` is its own leader."""
    return job_id.strip().partition("+")[0]


def _has_answered(answer: CommandOutput) -> bool:
    """Returns whether Slurm answered. "Invalid job id" is an answer too: Slurm has forgotten all of the jobs."""
    return answer.ok or any("nvalid job id" in line for line in answer.lines)


#: Maximum number of jobs for which one snapshot runs `scontrol show job`, once per job.
_MAX_SCONTROL = 4


@dataclass(frozen=True)
class QueueSnapshot:
    """Slurm's answer about all jobs of this user at one moment.

    Attributes:
        jobs: The jobs that Slurm's controller knows, including recently ended jobs; None if `squeue` failed.
        reports: Reports on these jobs and on requested jobs, by job id.
        num_commands: Number of commands that the snapshot took.
    """

    jobs: list[QueuedJob] | None
    reports: dict[str, JobReport]
    num_commands: int = 1


class SlurmProbe(JobProbe):
    """Probe of Slurm jobs: squeue, then sacct, then scontrol, then a marker file; one query for all jobs.

    Args:
        has_finished: Returns whether the job with this id has written its marker file; called last.
        interval_s: Minimum time between two queries; in between, the last answer is returned.
        max_interval_s: Limit of the interval, which doubles while Slurm does not answer.
        command_timeout_s: Maximum seconds for a command, after which it counts as failed.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        has_finished: Callable[[str], bool] | None = None,
        *,
        interval_s: float = 10.0,
        max_interval_s: float = 120.0,
        command_timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_finished = has_finished
        self._interval_s = interval_s
        self._max_interval_s = max_interval_s
        self._timeout_s = command_timeout_s
        self._clock = clock
        self._pause_s = interval_s
        self._queried_at: float | None = None
        self._reports: dict[str, JobReport] = {}

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(dict.fromkeys(job_ids))
        open_ids = [i for i in ids if i not in self._reports or not self._reports[i].state.is_terminal]
        is_fresh = self._queried_at is not None and self._clock() - self._queried_at < self._pause_s
        if open_ids and not (is_fresh and all(i in self._reports for i in ids)):
            self._query_slurm(open_ids)
            self._queried_at = self._clock()
        return {i: self._reports[i] for i in ids}

    def find(self, job_name: str) -> str | None:
        """Returns the id of this user's waiting or running job with this name; None if there is no such job.

        Raises:
            TemporaryRefusal: Slurm does not answer, so the job may exist.
        """
        squeue_output = ask(
            "squeue", "--noheader", "--me", f"--name={job_name}", "--format=%i", timeout_s=self._timeout_s
        )
        if not _has_answered(squeue_output) and shutil.which("squeue"):
            output = " ".join(squeue_output.lines)
            raise TemporaryRefusal(
                f"squeue does not say whether there is a job {job_name}: {output}",
                reason="Slurm does not answer",
                silent=True,
            )
        ids = [_leader(line) for line in squeue_output.lines if line.strip()]
        return ids[0] if squeue_output.ok and ids else None

    def snapshot(self, job_ids: Iterable[str]) -> QueueSnapshot:
        """Asks Slurm for all jobs of this user; asks separately about requested jobs that this list does not have.

        One list of a user's jobs is cheaper for the controller than a list of job ids, for which `squeue` reads the jobs of
        all users. It also answers later questions about other jobs of this user.

        Args:
            job_ids: Requested jobs, which may be forgotten by the controller or belong to another user.
        """
        output = ask("squeue", *QUEUE_ARGUMENTS, timeout_s=self._timeout_s)
        queue = parse_queue(output.lines)
        reports: dict[str, JobReport] = {}
        listed_ids = [_leader(job.id) for job in queue]
        self._add_reports(([job.id, job.state, job.reason] for job in queue), listed_ids, reports, "squeue")
        missing_ids = [job for job in dict.fromkeys(job_ids) if job not in reports]
        num_commands = 1
        if missing_ids:
            num_commands += self._ask_others(missing_ids, reports, _has_answered(output), max_scontrol=_MAX_SCONTROL)
        return QueueSnapshot(queue if output.ok else None, reports, num_commands)

    def _query_slurm(self, ids: list[str]) -> None:
        reports: dict[str, JobReport] = {}
        has_answered = self._ask_squeue(ids, reports)
        if any(job_id not in reports for job_id in ids):
            self._ask_others(ids, reports, has_answered)
        self._reports |= reports
        # a site sees one query per interval, and fewer while its scheduler is in trouble
        is_silent = not any(report.conclusive for report in reports.values())
        self._pause_s = min(self._pause_s * 2, self._max_interval_s) if is_silent else self._interval_s

    def _ask_others(
        self, ids: list[str], reports: dict[str, JobReport], has_answered: bool, max_scontrol: int | None = None
    ) -> int:
        """Adds reports on the jobs that squeue has not reported: from sacct, scontrol and the marker files.

        Args:
            ids: Requested jobs.
            reports: Reports so far.
            has_answered: Whether squeue has answered.
            max_scontrol: Maximum number of calls of scontrol; jobs beyond it get no report this time.

        Returns:
            Number of commands.
        """
        missing_ids = [job_id for job_id in ids if job_id not in reports]
        sacct_answered, num_commands = self._ask_sacct(missing_ids, reports), 1
        missing_ids = [job_id for job_id in missing_ids if job_id not in reports]
        if missing_ids:
            missing_ids = missing_ids[:max_scontrol]
            has_answered = self._ask_scontrol(missing_ids, reports) and has_answered
            num_commands += len(missing_ids)
        for job_id in missing_ids:
            if job_id in reports:
                continue
            if self._has_finished is not None and self._has_finished(job_id):
                reports[job_id] = JobReport(JobState.COMPLETED, source="marker")
            elif has_answered:  # the controller no longer knows the job
                reason = "Slurm does not know the job" + ("" if sacct_answered else " and has no accounting")
                reports[job_id] = JobReport(JobState.UNKNOWN, reason, source="squeue")
            else:
                last_report = self._reports.get(job_id, JobReport(JobState.UNKNOWN))
                reports[job_id] = replace(last_report, reason="Slurm does not answer", conclusive=False)
        return num_commands

    def _ask_squeue(self, ids: list[str], reports: dict[str, JobReport]) -> bool:
        squeue_output = ask("squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r",
                     timeout_s=self._timeout_s)  # fmt: skip
        self._add_reports((line.split("|") for line in squeue_output.lines), ids, reports, "squeue")
        return _has_answered(squeue_output)

    def _ask_sacct(self, ids: list[str], reports: dict[str, JobReport]) -> bool:
        sacct_output = ask("sacct", "-X", "--noheader", "--parsable2", f"--jobs={','.join(ids)}",
                     "--format=JobID,State,ExitCode", timeout_s=self._timeout_s)  # fmt: skip
        if sacct_output.ok:
            self._add_reports((line.split("|") for line in sacct_output.lines), ids, reports, "sacct")
        return sacct_output.ok

    def _ask_scontrol(self, ids: list[str], reports: dict[str, JobReport]) -> bool:
        has_answered = True
        for job_id in ids:
            scontrol_output = ask("scontrol", "--oneliner", "show", "job", job_id, timeout_s=self._timeout_s)
            rows = [
                [job_id, fields["JobState"], fields.get("Reason", "")]
                for fields in scontrol_output.records
                if "JobState" in fields
            ]
            self._add_reports(rows, ids, reports, "scontrol")
            has_answered = has_answered and _has_answered(scontrol_output)
        return has_answered

    @staticmethod
    def _add_reports(
        rows: Iterable[list[str]], ids: list[str], reports: dict[str, JobReport], source_name: str
    ) -> None:
        """Adds reports by job id. A het job gets the report of a live component or, if all have ended, of the worst end.

        When one component fails, Slurm cancels the others, so a job counts as cancelled only if no component failed.
        """
        reports_by_leader: dict[str, list[JobReport]] = {}
        for row in rows:
            if len(row) < 2 or _leader(row[0]) not in ids:
                continue
            job_state = JobState.parse(row[1])
            if job_state is not JobState.UNKNOWN:
                reason = row[2].strip() if len(row) > 2 and row[2].strip() not in ("None", "0:0") else ""
                reports_by_leader.setdefault(_leader(row[0]), []).append(JobReport(job_state, reason, source_name))
        for job_id, reports_of_job in reports_by_leader.items():
            reports_of_job.sort(key=lambda r: (r.state.is_terminal, r.state.is_success, r.state is JobState.CANCELLED))
            reports[job_id] = reports_of_job[0]
