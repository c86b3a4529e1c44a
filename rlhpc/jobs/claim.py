"""Which job owns a segment.

Two guards against two races. `SubmitLock` lets one process at a time check and submit. `Claim` is taken by the job itself
when it starts: claims are numbered files created with O_EXCL semantics, the next number may only be taken once the
holder of the last one is dead, and the highest number owns the segment. So even two jobs submitted without knowledge of
each other (a submitter killed between two system calls, a job both requeued and resubmitted) never train at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.probes import JobProbe, ProcessId
from rlhpc.runtime.durable import replace_durably

#: A holder on another host that has not renewed its file for this long is considered dead.
LEASE_S = 30.0
#: How often a live holder renews its file.
RENEW_S = 5.0


def look_again(folder: Path) -> int:
    """When an entry of the folder was last added, removed or renamed, in ns; -1 if there is no folder.

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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that others replace atomically; None if it is missing or not (yet) readable."""
    look_again(path.parent)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file atomically with a JSON object, which is on disk when this returns."""
    replace_durably(path, json.dumps(value, indent=1).encode() + b"\n", mode=0o600, parents=False)


@dataclass(frozen=True)
class SegmentFiles:
    """Paths of the files that a segment keeps under `submit/`, and of its logs."""

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
        """Says how the driver ended, if it did so without finishing the segment."""
        return self.paths.submit / f"{self._name}.exit.json"

    @property
    def attempts(self) -> Path:
        """Record of every start of the job's driver (`Attempts`)."""
        return self.paths.submit / f"{self._name}.attempts.json"

    @property
    def cancel(self) -> Path:
        """Marks a job that somebody ended for good; without it, the end would look like a preemption."""
        return self.paths.submit / f"{self._name}.cancel.json"

    def cancelled(self, token: str) -> bool:
        """Whether somebody has cancelled the submission with this token."""
        return (read_json(self.cancel) or {}).get("token") == token

    def mark_cancelled(self, token: str) -> None:
        """Records that somebody has cancelled the submission with this token."""
        write_json(self.cancel, {"token": token, "time": time.time()})

    @property
    def lock(self) -> Path:
        return self.paths.submit / f"{self._name}.lock"

    @property
    def lease(self) -> Path:
        """Stands in for the lock on filesystems without locks."""
        return self.paths.submit / f"{self._name}.lease"

    def claim(self, number: int) -> Path:
        return self.paths.submit / f"{self._name}.claim.{number}.json"

    def claim_numbers(self) -> list[int]:
        """Numbers of all existing claims, ascending."""
        pattern = re.compile(rf"^{self._name}\.claim\.(\d+)\.json$")
        try:
            names = [path.name for path in self.paths.submit.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(m.group(1)) for name in names if (m := pattern.match(name)))

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
    """Watches a file for up to `seconds`: True as soon as its owner renews it, False if nobody does or it is gone.

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
        """The claim with the highest number; None if no job has ever started."""
        for number in reversed(files.claim_numbers()):
            for _ in range(3):  # without hard links, a half-written claim may be seen
                value = read_json(files.claim(number))
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
        """Claims the segment for this process; None if another live job has it."""
        before = cls.newest(files)
        # a requeued Slurm job finds the claim of its own earlier attempt, which is over
        own_earlier = before is not None and executor == "slurm" and before.job_id == job_id
        if before is not None and not own_earlier and before.alive(probe):
            return None
        numbers = files.claim_numbers()
        mine = cls(
            files=files,
            number=(numbers[-1] if numbers else 0) + 1,
            token=token,
            job_id=job_id,
            executor=executor,
            job=ProcessId.of(os.getpid()),
            started=time.time(),
            err_offset=files.driver_err.stat().st_size if files.driver_err.exists() else 0,
        )
        if before is not None and mine.number != before.number + 1:
            return None  # somebody else got in first
        if not mine._create():
            return None
        if files.claim_numbers()[-1] != mine.number:  # this process was slow, and its number is already outdated
            mine.path.unlink(missing_ok=True)
            return None
        for number in files.claim_numbers():
            if number < mine.number:
                files.claim(number).unlink(missing_ok=True)
        return mine

    def alive(self, probe: JobProbe | None = None) -> bool:
        """Whether the job or its driver is alive: judged by pid on this host, by scheduler or renewals elsewhere."""
        here = self.alive_here()
        if here is not None:
            return here
        if probe is not None and self.executor == "slurm":
            report = probe.query_one(self.job_id)
            if report.state.is_terminal:
                return False
        return renewed_within(self.path, LEASE_S)

    def alive_here(self) -> bool | None:
        """Like `alive`, judged by the pids alone; None if they belong to another host."""
        if self.released:
            return False
        seen = [p.alive() for p in (self.job, self.driver) if p is not None]
        return True if True in seen else None if None in seen else False

    def owns(self) -> bool:
        """Whether no later job has taken over."""
        numbers = self.files.claim_numbers()
        return bool(numbers) and numbers[-1] == self.number

    def renew(self) -> None:
        """Shows other hosts that the job is alive; a full or stalled disk is no reason to end the job."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def update(self, **changes: Any) -> Claim:
        """Changes fields of the claim, and writes it to its file."""
        changed = replace(self, **changes)
        if changed.owns():
            write_json(changed.path, changed._to_json())
        return changed

    def _create(self) -> bool:
        handle, name = tempfile.mkstemp(prefix=".claim.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self._to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(name, self.path)  # exclusive, and complete at once
            except FileExistsError:
                return False
            except OSError:  # no hard links here
                return self._create_exclusive(Path(name).read_text(encoding="utf-8"))
            return True
        finally:
            Path(name).unlink()

    def _create_exclusive(self, text: str) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        return True

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
