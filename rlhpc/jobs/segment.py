"""Journal of a segment: its submission, its attempts, its end, and the job that owns the segment.

Two guards prevent two races. `SegmentJournal.submit_lock` lets one process at a time check and submit. A job takes a `Claim`
when it starts. Claims are numbered files, created exclusively and never removed. A job may take the next number only after the
holder of the previous number has died. The job with the highest number owns the segment. Two jobs therefore never train at
once, even if two submitters did not know of each other (a submitter was killed between two system calls, or a job was both
requeued and resubmitted).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.jobs.lease import LEASE_S, Lease, lease_lock
from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.probes import JobProbe, ProcessId
from rlhpc.jobs.shared_files import read_json_file, renewed_within, revalidate_folder, write_json
from rlhpc.runtime.files import MISSING_NAME_S, is_count, is_number, server_status


@dataclass(frozen=True)
class SegmentJournal:
    """Journal of a segment: the files under `submit/` in which submitters, jobs and users record its state, and its logs."""

    paths: RunPaths
    segment: int

    @property
    def _name(self) -> str:
        return segment_name(self.segment)

    @property
    def record(self) -> Path:
        """File with the record of the submitted job (`JobRecord`)."""
        return self.paths.submit / f"{self._name}.json"

    @property
    def config(self) -> Path:
        """File with the configuration that the job reads."""
        return self.paths.submit / f"{self._name}.yaml"

    @property
    def exit(self) -> Path:
        """File with the record of a driver that ended without finishing the segment (`ExitRecord`)."""
        return self.paths.submit / f"{self._name}.exit.json"

    @property
    def attempts(self) -> Path:
        """File with the record of every start of the job's driver (`Attempts`)."""
        return self.paths.submit / f"{self._name}.attempts.json"

    @property
    def cancel(self) -> Path:
        """Marker file of a cancelled job; without it, the job's end would look like a preemption."""
        return self.paths.submit / f"{self._name}.cancel.json"

    def result(self) -> dict[str, Any] | None:
        """Returns the result that the driver wrote at the end of the segment; None if the segment has not finished."""
        return read_json_file(self.marker)

    def exit_of(self, token: str) -> ExitRecord | None:
        """Returns the exit record of the submission with this token; None if there is no record of that submission."""
        exit_content = read_json_file(self.exit)
        return (
            ExitRecord.from_json(exit_content)
            if exit_content is not None and exit_content.get("token") == token
            else None
        )

    def write_exit(self, record: ExitRecord) -> None:
        """Records how a driver ended."""
        write_json(self.exit, record.to_json())

    def is_cancelled(self, token: str) -> bool:
        """Returns whether the submission with this token was cancelled."""
        return (read_json_file(self.cancel) or {}).get("token") == token

    def mark_cancelled(self, token: str) -> None:
        """Marks the submission with this token as cancelled."""
        write_json(self.cancel, {"token": token, "time": time.time()})

    def submit_lock(self, timeout_s: float = 120.0) -> AbstractContextManager[None]:
        """Returns the submit lock: its holder checks whether the segment has a job, and submits a job if not. The folder
        `submit/` must exist.
        """
        return lease_lock(self.lease, f"segment {self.segment}", timeout_s)

    @property
    def lease(self) -> Path:
        """Lease file of the process that is submitting the segment."""
        return self.paths.submit / f"{self._name}.lease"

    def claim(self, number: int) -> Path:
        return self.paths.submit / f"{self._name}.claim.{number}.json"

    def newest_claim(self) -> int:
        """Returns the number of the newest claim; 0 if there is no claim.

        Claims are never removed and have no gaps. The folder's listing may be outdated, so the search by name starts at the
        highest number in it.
        """
        pattern = re.compile(rf"^{self._name}\.claim\.(\d+)\.json$")
        try:
            file_names = os.listdir(self.paths.submit)
        except FileNotFoundError:
            return 0
        claim_number = max((int(match[1]) for name in file_names if (match := pattern.match(name))), default=0)
        while self.claim(claim_number + 1).exists():
            claim_number += 1
        return claim_number

    @property
    def driver_out(self) -> Path:
        return self.paths.segment_logs(self.segment) / "driver.out"

    @property
    def driver_err(self) -> Path:
        return self.paths.segment_logs(self.segment) / "driver.err"

    @property
    def marker(self) -> Path:
        return self.paths.segment_done(self.segment)


@dataclass(frozen=True)
class JobRecord:
    """Last submission of a segment: content of `submit/segment_<k>.json`.

    Attributes:
        phase: "submitting" until the job id is known, then "submitted"; "waiting" while the site accepts no more jobs;
            "refused" if the site will never accept this job.
        reason: Why the job is waiting or was refused.
        process: Local controller of the job; None for Slurm.
        attempt: Number of this submission, from 1.
        job_log: File with the output of the job; the driver's output is in `logs/segment_<k>/`.
    """

    segment: int
    attempt: int
    token: str
    executor: str
    command: list[str]
    job_name: str
    job_id: str = ""
    phase: str = "submitting"
    reason: str = ""
    process: ProcessId | None = None
    submitted: float = 0.0
    job_log: str = ""
    logs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, journal: SegmentJournal) -> JobRecord | None:
        """Returns the last submission of a segment; None if there is no submission."""
        record_content = read_json_file(journal.record)
        return None if record_content is None else cls.from_json(record_content)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> JobRecord | None:
        """Reads the value of `to_json`; returns None if the value is not a record."""
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        fields["process"] = ProcessId.from_json(fields.get("process"))
        try:
            return cls(**fields)
        except TypeError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Returns the file's content."""
        return asdict(self)

    def write(self, journal: SegmentJournal) -> None:
        """Replaces the segment's record."""
        write_json(journal.record, self.to_json())


@dataclass(frozen=True)
class ExitRecord:
    """End of a driver that did not finish its segment: content of `submit/segment_<k>.exit.json`.

    Attributes:
        token: Token of the submission.
        attempt: Number of the last attempt.
        signal: Name of the signal that ended the driver; "" if there is no signal.
        cancelled: Whether the job was cancelled.
        message: First error message of the driver.
        end_time: Unix time at which the driver ended.
    """

    token: str
    job_id: str = ""
    attempt: int = 0
    exit_code: int = 1
    signal: str = ""
    cancelled: bool = False
    message: str = ""
    end_time: float = 0.0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ExitRecord:
        """Builds the record from a file's content. Invalid values become defaults: another version may have written them."""
        end_time = value.get("ended", 0.0)
        return cls(
            token=str(value.get("token", "")),
            job_id=str(value.get("job_id", "")),
            attempt=value["attempt"] if is_count(value.get("attempt")) else 0,
            exit_code=value["exit_code"] if is_count(value.get("exit_code")) and value["exit_code"] else 1,
            signal=str(value.get("signal") or ""),
            cancelled=bool(value.get("cancelled")),
            message=str(value.get("message") or "").strip(),
            end_time=float(end_time) if is_number(end_time) else 0.0,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the file's content."""
        fields = asdict(self)
        fields["ended"] = fields.pop("end_time")
        return fields


@dataclass(frozen=True)
class Claim:
    """Ownership of a segment by a job, recorded in a file that only this job writes.

    Attributes:
        number: Number of the claim; the highest one owns the segment.
        token: Token of the submission that started the job.
        job_id: submitit's job id (Slurm's, or the pid of the local controller).
        executor: "local" or "slurm".
        job: The process that runs the driver and renews this claim.
        driver: The driver; None before its start.
        started: Unix time of the job's start, for display.
        err_offset: Size of driver.err when this attempt started. The bytes before belong to earlier attempts.
        released: Whether the job released the claim at its end.
        lease: Lease that renews the file, so that other hosts see that the job is alive; None outside the job's process.
    """

    files: SegmentJournal = field(repr=False)
    number: int
    token: str
    job_id: str
    executor: str
    job: ProcessId
    driver: ProcessId | None = None
    started: float = 0.0
    err_offset: int = 0
    released: bool = False
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def path(self) -> Path:
        return self.files.claim(self.number)

    @classmethod
    def newest(cls, files: SegmentJournal) -> Claim | None:
        """Returns the claim with the highest number; None if no job has ever started.

        Claims are never removed. One that cannot be read is therefore awaited for some seconds: on a filesystem without hard
        links it may be half-written, and this host may remember that its name was missing. An older claim in its place would
        let two jobs own the segment.
        """
        revalidate_folder(files.paths.submit)
        deadline = time.monotonic() + MISSING_NAME_S
        for claim_number in range(files.newest_claim(), 0, -1):
            while True:
                is_last_look = time.monotonic() > deadline  # as in `repeat_look`, with one deadline for all claims
                claim_content = read_json_file(files.claim(claim_number))
                job = ProcessId.from_json((claim_content or {}).get("job"))
                if claim_content is not None and job is not None:
                    return cls(
                        files=files,
                        number=claim_number,
                        token=str(claim_content.get("token", "")),
                        job_id=str(claim_content.get("job_id", "")),
                        executor=str(claim_content.get("executor", "")),
                        job=job,
                        driver=ProcessId.from_json(claim_content.get("driver")),
                        started=float(claim_content.get("started") or 0.0),
                        err_offset=int(claim_content.get("err_offset") or 0),
                        released=bool(claim_content.get("released")),
                    )
                if not _is_missing_or_empty(files.claim(claim_number)) or is_last_look:
                    break
                time.sleep(0.1)
        return None

    @classmethod
    def take(
        cls, files: SegmentJournal, *, token: str, job_id: str, executor: str, probe: JobProbe | None = None
    ) -> Claim | None:
        """Claims the segment for this process; returns None if another live job owns the segment."""
        last_number = files.newest_claim()
        newest_claim = cls.newest(files)
        if newest_claim is not None and newest_claim.number > last_number:
            return None  # another job was faster
        # a requeued Slurm job finds the claim of its earlier start, which has ended
        is_earlier_start = newest_claim is not None and executor == "slurm" and newest_claim.job_id == job_id
        if newest_claim is not None and not is_earlier_start and newest_claim.alive(probe):
            return None
        claim = cls(
            files=files,
            number=last_number + 1,
            token=token,
            job_id=job_id,
            executor=executor,
            job=ProcessId.from_pid(os.getpid()),
            started=time.time(),
            err_offset=files.driver_err.stat().st_size if files.driver_err.exists() else 0,
        )
        lease = Lease(claim.path, claim._to_json())
        return replace(claim, lease=lease) if lease.take() else None  # otherwise another job was faster

    def alive(self, probe: JobProbe | None = None) -> bool:
        """Returns whether the job or its driver is alive: by pid on this host, by the scheduler or renewals on other hosts."""
        alive_here = self.alive_here()
        if alive_here is not None:
            return alive_here
        if probe is not None and self.executor == "slurm":
            report = probe.query_job(self.job_id)
            if report.state.is_terminal:
                return False
            if report.conclusive and report.state.has_processes:
                return True  # the node may have lost the filesystem for longer than a lease lasts
        return renewed_within(self.path, LEASE_S, is_permanent=True)

    def alive_here(self) -> bool | None:
        """Returns whether the job or its driver is alive, judged only by the pid; None if the pids belong to another host."""
        if self.released:
            return False
        liveness = [p.alive() for p in (self.job, self.driver) if p is not None]
        return True if True in liveness else None if None in liveness else False

    def owns(self) -> bool:
        """Returns whether the claim still owns the segment: its file exists, and there is no later claim."""
        revalidate_folder(self.path.parent)
        return self.path.exists() and not self.files.claim(self.number + 1).exists()

    def update(self, **changes: Any) -> Claim:
        """Returns the claim with changed fields, and writes it to its file if it still owns the segment."""
        changed_claim = replace(self, **changes)
        if changed_claim.released and self.lease is not None:
            self.lease.end_renewal()
        if changed_claim.owns():
            write_json(changed_claim.path, changed_claim._to_json())
        return changed_claim

    def _to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "token": self.token,
            "job_id": self.job_id,
            "executor": self.executor,
            "job": self.job.to_json(),
            "driver": self.driver.to_json() if self.driver else None,
            "started": self.started,
            "err_offset": self.err_offset,
            "released": self.released,
        }


def _is_missing_or_empty(path: Path) -> bool:
    try:
        return server_status(path).size == 0
    except FileNotFoundError:
        return True
    except OSError:  # another user's file
        return False


_MAX_ATTEMPTS = 100


class Attempts:
    """Record of a submission's attempts. An attempt is a start of the driver; a new submission counts from 0 again.

    Args:
        files: The segment's journal.
        token: The submission's token.
    """

    def __init__(self, files: SegmentJournal, token: str) -> None:
        self._path, self._token = files.attempts, token
        journal_content = read_json_file(self._path) or {}
        rows = journal_content.get("attempts") if journal_content.get("token") == token else None
        self._rows: list[dict[str, Any]] = rows if isinstance(rows, list) else []

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def last_end(self) -> str:
        """Description of how the last attempt ended; "" if it is still running or if there was no attempt."""
        return str(self._rows[-1].get("how") or "") if self._rows and "ended" in self._rows[-1] else ""

    def begin(self, step: int, job_id: str) -> None:
        """Adds an attempt, whose driver starts from the checkpoint of `step`; -1 stands for no checkpoint."""
        self._rows.append(
            {"number": self.count, "step": step, "job_id": job_id, "began": time.time(), "how": "running"}
        )
        self._write()

    def end(self, outcome: str) -> None:
        """Records how the last attempt ended."""
        if self._rows:
            self._rows[-1].update(how=outcome, ended=time.time())
            self._write()

    def note(self, node: str) -> None:
        """Records the node on which the last attempt failed."""
        if self._rows and node:
            self._rows[-1]["node"] = node
            self._write()

    def num_idle(self, newest_step: int) -> int:
        """Returns the number of last attempts in a row that began at step `newest_step` and added no checkpoint."""
        return sum(1 for _ in itertools.takewhile(lambda row: row.get("step") == newest_step, reversed(self._rows)))

    def blames(self, node: str) -> bool:
        """Returns whether the attempt before the last one also failed on this node."""
        return len(self._rows) > 1 and self._rows[-2].get("node") == node

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop training
            write_json(self._path, {"token": self._token, "attempts": self._rows[-_MAX_ATTEMPTS:]})
