"""Records of a run's helper jobs and joined ranks, kept in files that outlive the driver."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.jobs.job_record import job_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobState
from rlhpc.jobs.shared_files import read_json_file, write_json
from rlhpc.jobs.slurm import QueuedJob, end_named
from rlhpc.runtime.files import is_count, is_number, read_file, read_json

#: Maximum number of ended jobs with a separate record; the hours of older jobs are summed.
_MAX_ENDED_JOBS = 200
#: Key of a job in the file → name of the field, where the two differ.
_FIELD_NAMES = {"ended": "finished", "why": "leave_reason"}


@dataclass(frozen=True)
class HelperJobRecord:
    """Record of one helper job. Times are Unix times; None for events that have not happened.

    Attributes:
        counted: Weight of one hour of the job in the budget.
        state: Slurm's last state of the job.
        leave_reason: Reason of the request to leave; "" if there is no request.
        leaving: Time of the request to leave.
        joined: Maximum number of the job's ranks that were present at the same time.
    """

    id: str
    group: str
    counted: int
    submitted: float
    started: float | None = None
    finished: float | None = None
    node: str = ""
    state: str = "PENDING"
    reason: str = ""
    leave_reason: str = ""
    leaving: float | None = None
    joined: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a dict with the keys of the file."""
        keys_by_field = {field: key for key, field in _FIELD_NAMES.items()}
        return {keys_by_field.get(name, name): field_value for name, field_value in asdict(self).items()}

    def hours(self, now: float) -> float:
        """Returns the hours of the budget that the job has used until `now`."""
        return 0.0 if self.started is None else max(0.0, (self.finished or now) - self.started) / 3600 * self.counted

    def observe(self, job: QueuedJob, num_ranks: int) -> HelperJobRecord:
        """Returns the record updated with the job's state in the queue and the number of the job's ranks that are present."""
        return replace(
            self,
            state=job.state,
            reason=job.reason,
            started=job.started or self.started,
            finished=None,
            node=job.node or self.node,
            joined=max(self.joined, num_ranks),
        )

    def leave(self, now: float, reason: str = "") -> HelperJobRecord:
        """Returns the record with a request to leave; keeps the time and reason of an earlier request."""
        return replace(self, leaving=self.leaving or now, leave_reason=self.leave_reason or reason)

    def finish(self, state: str, num_ranks: int, *, now: float, last_seen: float, walltime_s: float) -> HelperJobRecord:
        """Returns the record of a job that is no longer in the queue. Assumes the longest possible run for unobserved time.

        Args:
            state: Slurm's last state of the job.
            num_ranks: Number of the job's ranks that were present at the same time.
            now: Current time.
            last_seen: Time at which the job was last seen in the queue.
            walltime_s: Time limit of the job.
        """
        num_joined, start_time = max(self.joined, num_ranks), self.started
        was_cancelled = self.leaving is not None and state == JobState.CANCELLED.value
        if start_time is None and (num_joined or not was_cancelled):
            start_time = max(last_seen, now - walltime_s)
        end_time = now if start_time is None else min(now, max(last_seen, start_time + walltime_s))
        return replace(self, state=state, joined=num_joined, started=start_time, finished=end_time)


@dataclass
class HelperRecord:
    """Record of all helper jobs of one group of a run, or of all groups.

    Attributes:
        earlier: Hours of the budget that jobs without a separate record used.
    """

    jobs: dict[str, HelperJobRecord] = field(default_factory=dict)
    earlier: float = 0.0

    @classmethod
    def read(cls, paths: RunPaths, group: str = "*") -> HelperRecord:
        """Returns the last written record of one group or of all groups; an empty record without a file."""
        record = cls()
        for file in sorted(paths.submit.glob(paths.helper_jobs(group).name)):
            record._add_rows(read_json_file(file) or {})
        return record

    def _add_rows(self, stored_records: Mapping[str, Any]) -> None:
        self.earlier += float(stored_records.get("earlier") or 0.0)
        for row in stored_records.get("jobs") or ():
            fields_by_name = {_FIELD_NAMES.get(key, key): field_value for key, field_value in row.items()}
            fields = {
                name: fields_by_name[name] for name in HelperJobRecord.__dataclass_fields__ if name in fields_by_name
            }
            try:
                self.jobs[str(row["id"])] = HelperJobRecord(**fields)
            except (KeyError, TypeError):
                continue

    def write(self, paths: RunPaths, group: str) -> None:
        """Replaces the group's file. Only one thread writes each file."""
        ended_jobs = [job for job in self.jobs.values() if job.finished is not None]
        for job in ended_jobs[: max(0, len(ended_jobs) - _MAX_ENDED_JOBS)]:
            self.earlier += job.hours(job.finished or 0.0)
            del self.jobs[job.id]
        write_json(paths.helper_jobs(group), self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns the file's content."""
        return {"format": 1, "earlier": self.earlier, "jobs": [job.to_json() for job in self.jobs.values()]}

    def live(self) -> list[HelperJobRecord]:
        """Returns the jobs that have not ended, oldest first."""
        return [job for job in self.jobs.values() if job.finished is None]

    def spent(self) -> float:
        """Returns the hours of the budget that ended jobs have used."""
        return self.earlier + sum(
            job.hours(job.finished or 0.0) for job in self.jobs.values() if job.finished is not None
        )


def helpers_name(paths: RunPaths, group: str) -> str:
    """Returns the Slurm name that all helper jobs of a run's group have."""
    return job_name(paths, f"helpers-{group}")


def end_helpers(paths: RunPaths, *, queued_only: bool = False, graceful: bool = False, timeout_s: float = 20.0) -> int:
    """Ends the helper jobs of a run; returns the number of live jobs in the record. See `end_named`."""
    record = HelperRecord.read(paths)
    for group in {job.group for job in record.jobs.values()}:
        end_named(helpers_name(paths, group), queued_only=queued_only, graceful=graceful, timeout_s=timeout_s)
    return len(record.live())


#: Events in the attendance log: the driver admitted the rank, the rank started its work, the rank left.
JOINED, WORKS, DEPARTED = "joined", "works", "left"


@dataclass
class Stay:
    """Period in which a joined rank took part in the run. Times are Unix times; None for events that have not happened.

    Attributes:
        job: Slurm's id of the job; "" outside of a job.
        accelerators: Number of the rank's accelerators.
        works: Time at which the rank started its work.
        leave_reason: Reason for leaving.
    """

    group: str
    rank: int
    node: str
    job: str
    accelerators: int
    joined: float
    works: float | None = None
    left_at: float | None = None
    leave_reason: str = ""

    def hours(self, now: float | None = None) -> float:
        """Returns the hours from the join until the rank left, or until `now`."""
        return max(0.0, (self.left_at or now or time.time()) - self.joined) / 3600


class Attendance:
    """Attendance log, as the driver writes it: a line for each rank that joins, starts its work or leaves.

    Args:
        path: File of the log.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._present_ranks = dict.fromkeys(
            key for key, rank_stay in _parse_stays(path).items() if rank_stay.left_at is None
        )
        self.close("its driver was gone")  # for ranks of a driver that was killed

    def note(self, event: Mapping[str, Any]) -> None:
        """Appends a line for an event. Ignores a full disk, which must not stop training."""
        with self._lock:
            key = str(event.get("incarnation"))
            if event["event"] == JOINED:
                self._present_ranks[key] = None
            elif key not in self._present_ranks:
                return
            elif event["event"] == DEPARTED:
                del self._present_ranks[key]
            line = json.dumps({"time": time.time(), **event}).encode() + b"\n"
            try:
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except OSError:
                return
            try:
                os.write(fd, line)
            except OSError:
                return
            finally:
                os.close(fd)

    def close(self, reason: str) -> None:
        """Appends a line for each present rank, which leaves for this reason."""
        for key in list(self._present_ranks):
            self.note({"event": DEPARTED, "incarnation": key, "why": reason})


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = read_file(path).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = read_json(line)
        except ValueError:
            continue  # the disk was full, or the line is being written
        if isinstance(event, dict) and "event" in event and "incarnation" in event and _has_finite_numbers(event):
            yield event


def _has_finite_numbers(event: Mapping[str, Any]) -> bool:
    return is_number(event.get("time") or 0.0) and all(is_count(event.get(k) or 0) for k in ("rank", "accelerators"))


def read_stays(paths: RunPaths) -> list[Stay]:
    """Returns the period of each rank that has joined a run, in order of joining."""
    return list(_parse_stays(paths.attendance).values())


def _parse_stays(path: Path) -> dict[str, Stay]:
    """Returns the periods of ranks, by incarnation."""
    stays_by_incarnation: dict[str, Stay] = {}
    for event in _events(path):
        key, event_time = str(event["incarnation"]), float(event.get("time") or 0.0)
        if event["event"] == JOINED:
            stays_by_incarnation[key] = Stay(
                str(event.get("group")), int(event.get("rank") or 0), str(event.get("node") or "?"),
                str(event.get("job") or ""), int(event.get("accelerators") or 0), event_time,
            )  # fmt: skip
        elif key in stays_by_incarnation and event["event"] == WORKS:
            stays_by_incarnation[key].works = event_time
        elif key in stays_by_incarnation:
            stays_by_incarnation[key].left_at = event_time
            stays_by_incarnation[key].leave_reason = str(event.get("why") or "")
    return stays_by_incarnation
