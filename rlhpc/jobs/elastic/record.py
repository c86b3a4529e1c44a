"""The record of a run's jobs of helpers, which outlives its driver: what they have cost, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhpc.jobs.claim import read_json_file, write_json
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.record import job_name
from rlhpc.jobs.slurm import end_named

#: Ended jobs whose record is kept one by one; of older ones only the sum is.
_KEPT = 200


@dataclass
class HelperJobRecord:
    """One job. Times are Unix times; None if it has not happened (yet).

    Attributes:
        counted: What an hour of it counts in the budget.
        state: Slurm's last word.
        why: Why it was told to leave, if it was.
        leaving: When it was told.
        joined: Ranks of it that have ever joined.
    """

    id: str
    group: str
    counted: int
    submitted: float
    started: float | None = None
    ended: float | None = None
    node: str = ""
    state: str = "PENDING"
    reason: str = ""
    why: str = ""
    leaving: float | None = None
    joined: int = 0

    def hours(self, now: float) -> float:
        """Hours of the budget that it has taken."""
        return 0.0 if self.started is None else max(0.0, (self.ended or now) - self.started) / 3600 * self.counted


@dataclass
class HelperRecord:
    """All jobs of a group of a run, or of all of its groups.

    Attributes:
        earlier: Hours of the budget that jobs have taken whose records are not kept.
    """

    jobs: dict[str, HelperJobRecord] = field(default_factory=dict)
    earlier: float = 0.0

    @classmethod
    def read(cls, paths: RunPaths, group: str = "*") -> HelperRecord:
        """What was written last, of a group or of all; empty if there is nothing."""
        found = cls()
        for file in sorted(paths.submit.glob(paths.helper_jobs(group).name)):
            found._add(read_json_file(file) or {})
        return found

    def _add(self, value: Mapping[str, Any]) -> None:
        self.earlier += float(value.get("earlier") or 0.0)
        for row in value.get("jobs") or ():
            known = {name: row[name] for name in HelperJobRecord.__dataclass_fields__ if name in row}
            try:
                self.jobs[str(row["id"])] = HelperJobRecord(**known)
            except (KeyError, TypeError):
                continue

    def write(self, paths: RunPaths, group: str) -> None:
        """Replaces the group's file: each is one thread's."""
        ended = [job for job in self.jobs.values() if job.ended is not None]
        for job in ended[: max(0, len(ended) - _KEPT)]:
            self.earlier += job.hours(job.ended or 0.0)
            del self.jobs[job.id]
        write_json(paths.helper_jobs(group), self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"format": 1, "earlier": self.earlier, "jobs": [asdict(job) for job in self.jobs.values()]}

    def live(self) -> list[HelperJobRecord]:
        """Those that have not ended, oldest first."""
        return [job for job in self.jobs.values() if job.ended is None]

    def spent(self) -> float:
        """Hours of the budget that jobs have taken that have ended."""
        return self.earlier + sum(job.hours(job.ended or 0.0) for job in self.jobs.values() if job.ended is not None)


def helpers_name(paths: RunPaths, group: str) -> str:
    """What all jobs of a run's helpers of a group are called in Slurm."""
    return job_name(paths, f"helpers-{group}")


def end_helpers(paths: RunPaths, *, queued_only: bool = False, softly: bool = False, timeout_s: float = 20.0) -> int:
    """Ends the jobs of a run's helpers; returns how many there were by the record. See `end_named`."""
    record = HelperRecord.read(paths)
    for group in {job.group for job in record.jobs.values()}:
        end_named(helpers_name(paths, group), queued_only=queued_only, softly=softly, timeout_s=timeout_s)
    return len(record.live())
