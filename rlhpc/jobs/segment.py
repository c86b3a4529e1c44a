"""Ownership of a segment by a job.

Two guards prevent two races. `SubmitLock` lets one process at a time check and submit. `Claim` is taken by the job itself
when it starts: claims are numbered files that are created exclusively and never removed, the next number may only be taken
once the holder of the last one is dead, and the highest number owns the segment. So even two jobs submitted without
knowledge of each other (a submitter killed between two system calls, a job both requeued and resubmitted) never train at
once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.probes import JobProbe, ProcessId
from rlhpc.runtime import files as plain
from rlhpc.runtime.files import create_exclusively, replace_durably

#: A holder on another host that has not renewed its file for this long is considered dead.
LEASE_S = 30.0
#: Interval at which a live holder renews its file.
RENEW_S = 5.0


def look_again(folder: Path) -> int:
    """Returns the time at which an entry of the folder was last added, removed or renamed, in ns; -1 if the folder is missing.

    Opening it makes NFS ask the server (close-to-open consistency) instead of answering from its cache of names.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def read_json_file(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file that others replace atomically; None if it is missing or not (yet) readable."""
    look_again(path.parent)
    try:
        value = plain.read_json(plain.read_file(path).decode())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file atomically with a JSON object, which is on disk when this returns."""
    replace_durably(path, json.dumps(value, indent=1).encode() + b"\n", mode=0o600, parents=False)


@dataclass(frozen=True)
class SegmentFiles:
    """Paths of a segment's files under `submit/`, and of its logs."""

    paths: RunPaths
    segment: int

    @property
    def _name(self) -> str:
        return segment_name(self.segment)

    @property
    def record(self) -> Path:
        """The submitted job: id, process, command, log paths."""
        return self.paths.submit / f"{self._name}.json"

    @property
    def config(self) -> Path:
        """The configuration that the job reads."""
        return self.paths.submit / f"{self._name}.yaml"

    @property
    def exit(self) -> Path:
        """Record of how the driver ended, if it did so without finishing the segment."""
        return self.paths.submit / f"{self._name}.exit.json"

    @property
    def attempts(self) -> Path:
        """Record of every start of the job's driver (`Attempts`)."""
        return self.paths.submit / f"{self._name}.attempts.json"

    @property
    def cancel(self) -> Path:
        """Marker of a job that was ended for good; without it, the end would look like a preemption."""
        return self.paths.submit / f"{self._name}.cancel.json"

    def cancelled(self, token: str) -> bool:
        """Returns whether the submission with this token was cancelled."""
        return (read_json_file(self.cancel) or {}).get("token") == token

    def mark_cancelled(self, token: str) -> None:
        """Marks the submission with this token as cancelled."""
        write_json(self.cancel, {"token": token, "time": time.time()})

    @property
    def lease(self) -> Path:
        """Lease of the process that is submitting the segment."""
        return self.paths.submit / f"{self._name}.lease"

    def claim(self, number: int) -> Path:
        return self.paths.submit / f"{self._name}.claim.{number}.json"

    def newest_claim(self) -> int:
        """Returns the number of the newest claim; 0 without one.

        Claims are never removed and have no gaps. The listing may be outdated, so it only determines where the search by name
        starts.
        """
        pattern = re.compile(rf"^{self._name}\.claim\.(\d+)\.json$")
        try:
            names = os.listdir(self.paths.submit)
        except FileNotFoundError:
            return 0
        number = max((int(match[1]) for name in names if (match := pattern.match(name))), default=0)
        while self.claim(number + 1).exists():
            number += 1
        return number

    @property
    def driver_out(self) -> Path:
        return self.paths.segment_logs(self.segment) / "driver.out"

    @property
    def driver_err(self) -> Path:
        return self.paths.segment_logs(self.segment) / "driver.err"

    @property
    def marker(self) -> Path:
        return self.paths.segment_done(self.segment)


def renewed_within(path: Path, seconds: float, alive_again: Callable[[], bool] = lambda: False) -> bool:
    """Watches a file for up to `seconds`; returns True as soon as its owner renews it, False if it is not renewed or is
    removed.

    Only changes count, never the file's age: the clocks of two hosts need not agree.
    """
    try:
        first = path.stat().st_mtime_ns
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(0.5, seconds / 4))
            if path.stat().st_mtime_ns != first or alive_again():
                return True
    except FileNotFoundError:
        pass
    return False


@dataclass(frozen=True)
class Claim:
    """A job's ownership of a segment, kept in a file that only this job writes.

    Attributes:
        number: Number of the claim; the highest one owns the segment.
        token: Token of the submission that started the job.
        job_id: submitit's job id (Slurm's, or the pid of the local controller).
        executor: "local" or "slurm".
        job: The process that runs the driver and renews this claim.
        driver: The driver, once started.
        started: Unix time, for display.
        err_offset: Size of driver.err when this attempt started; everything before it belongs to earlier attempts.
        released: Whether the job ended in an orderly way.
    """

    files: SegmentFiles = field(repr=False)
    number: int
    token: str
    job_id: str
    executor: str
    job: ProcessId
    driver: ProcessId | None = None
    started: float = 0.0
    err_offset: int = 0
    released: bool = False

    @property
    def path(self) -> Path:
        return self.files.claim(self.number)

    @classmethod
    def newest(cls, files: SegmentFiles) -> Claim | None:
        """Returns the claim with the highest number; None if no job has ever started."""
        look_again(files.paths.submit)
        for number in range(files.newest_claim(), 0, -1):
            for _ in range(3):  # without hard links, a half-written claim may be seen
                value = read_json_file(files.claim(number))
                job = ProcessId.from_json((value or {}).get("job"))
                if value is not None and job is not None:
                    return cls(
                        files=files,
                        number=number,
                        token=str(value.get("token", "")),
                        job_id=str(value.get("job_id", "")),
                        executor=str(value.get("executor", "")),
                        job=job,
                        driver=ProcessId.from_json(value.get("driver")),
                        started=float(value.get("started") or 0.0),
                        err_offset=int(value.get("err_offset") or 0),
                        released=bool(value.get("released")),
                    )
                time.sleep(0.1)
        return None

    @classmethod
    def take(
        cls, files: SegmentFiles, *, token: str, job_id: str, executor: str, probe: JobProbe | None = None
    ) -> Claim | None:
        """Claims the segment for this process; returns None if another live job has it."""
        latest = files.newest_claim()
        before = cls.newest(files)
        if before is not None and before.number > latest:
            return None  # another job was faster
        # a requeued Slurm job finds the claim of its own earlier attempt, which is over
        own_earlier = before is not None and executor == "slurm" and before.job_id == job_id
        if before is not None and not own_earlier and before.alive(probe):
            return None
        claim = cls(
            files=files,
            number=latest + 1,
            token=token,
            job_id=job_id,
            executor=executor,
            job=ProcessId.of(os.getpid()),
            started=time.time(),
            err_offset=files.driver_err.stat().st_size if files.driver_err.exists() else 0,
        )
        created = create_exclusively(claim.path, json.dumps(claim._to_json()).encode(), mode=0o600)
        return claim if created else None  # otherwise another job was faster

    def alive(self, probe: JobProbe | None = None) -> bool:
        """Returns whether the job or its driver is alive: by pid on this host, by scheduler or renewals elsewhere."""
        here = self.alive_here()
        if here is not None:
            return here
        if probe is not None and self.executor == "slurm":
            report = probe.query_one(self.job_id)
            if report.state.is_terminal:
                return False
            if report.conclusive and report.state.has_processes:
                return True  # its node may be cut off from the filesystem for longer than a lease lasts
        return renewed_within(self.path, LEASE_S)

    def alive_here(self) -> bool | None:
        """Returns the same as `alive`, by the pids alone; None if they belong to another host."""
        if self.released:
            return False
        liveness = [p.alive() for p in (self.job, self.driver) if p is not None]
        return True if True in liveness else None if None in liveness else False

    def owns(self) -> bool:
        """Returns whether no later job has taken over."""
        look_again(self.path.parent)
        return self.path.exists() and not self.files.claim(self.number + 1).exists()

    def renew(self) -> None:
        """Renews the claim for other hosts; a full or stalled disk does not end the job."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def update(self, **changes: Any) -> Claim:
        """Changes fields of the claim, and writes it to its file."""
        changed = replace(self, **changes)
        if changed.owns():
            write_json(changed.path, changed._to_json())
        return changed

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


_MAX_ATTEMPTS = 100


class Attempts:
    """Attempts of one submission; a new submission starts counting afresh.

    Args:
        files: The segment's files.
        token: The submission's token.
    """

    def __init__(self, files: SegmentFiles, token: str) -> None:
        self._path, self._token = files.attempts, token
        content = read_json_file(self._path) or {}
        rows = content.get("attempts")
        self._rows: list[dict[str, Any]] = (
            list(rows) if content.get("token") == token and isinstance(rows, list) else []
        )

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def last_end(self) -> str:
        """Description of how the last attempt ended; "" while it is running, or without one."""
        return str(self._rows[-1].get("how") or "") if self._rows and "ended" in self._rows[-1] else ""

    def begin(self, step: int, job_id: str) -> None:
        """Adds an attempt: the driver starts from checkpoint `step` (-1: none)."""
        self._rows.append(
            {"number": self.count, "step": step, "job_id": job_id, "began": time.time(), "how": "running"}
        )
        self._write()

    def end(self, how: str) -> None:
        """Records how the last attempt ended."""
        if self._rows:
            self._rows[-1].update(how=how, ended=time.time())
            self._write()

    def note(self, node: str) -> None:
        """Records the node on which the last attempt failed."""
        if self._rows and node:
            self._rows[-1]["node"] = node
            self._write()

    def idle(self, newest: int) -> int:
        """Returns the number of attempts in a row that began at checkpoint `newest` and so have added no checkpoint."""
        count = 0
        for row in reversed(self._rows):
            if row.get("step") != newest:
                break
            count += 1
        return count

    def blames(self, node: str) -> bool:
        """Returns whether the attempt before the last one also failed on this node."""
        return len(self._rows) > 1 and self._rows[-2].get("node") == node

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop training
            write_json(self._path, {"token": self._token, "attempts": self._rows[-_MAX_ATTEMPTS:]})
