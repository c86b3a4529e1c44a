"""Shared Slurm query: one waiting command queries Slurm for all waiting commands of a user on this host.

The commands share a small folder below the temporary folder. A file in that folder lists the jobs that the commands wait for
and Slurm's last answers. No command is the leader: the first command to see outdated answers makes the query, and the other
commands read the new answers. A killed command leaves no state for which other commands would wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhpc.jobs.probes import JobProbe, JobReport, JobState, SlurmProbe
from rlhpc.runtime.host import process_space

#: Minimum time between two queries, and the maximum while Slurm does not answer.
INTERVAL_S, MAX_INTERVAL_S = 10.0, 120.0
#: A job that no command has asked about for this long is dropped from the query.
_RETENTION_S = 60.0
_RENEW_INTERVAL_S = 15.0


def wait_folder() -> Path:
    """Returns the folder that this user's waiting commands share; each host, installation and cluster has its own folder."""
    key_fields = (process_space(), str(Path(__file__).resolve()), os.environ.get("SLURM_CONF", ""),
             os.environ.get("SLURM_CLUSTERS", ""), shutil.which("squeue") or "")  # fmt: skip
    key = hashlib.sha256("\0".join(key_fields).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rlhpc.waits-{os.getuid()}-{key}"


class SharedProbe(JobProbe):
    """Probe that returns the answers of the last query by any waiting command, and makes the next query when it is due.

    Args:
        probe: Slurm probe; queried directly if the folder is not usable.
        folder: Folder that the commands share.
        interval_s: Minimum time between two queries.
    """

    def __init__(self, probe: SlurmProbe, folder: Path | None = None, *, interval_s: float = INTERVAL_S) -> None:
        self._probe = probe
        self._folder = folder or wait_folder()
        self._interval_s = interval_s
        self._renewal_times: dict[str, float] = {}

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        if self._is_usable():
            with contextlib.suppress(OSError):  # a full disk, or a concurrent cleanup
                return self._query(ids)
        return self._probe.query(ids)

    def _query(self, ids: list[str]) -> dict[str, JobReport]:
        now = time.monotonic()
        answers = self._read()
        jobs_to_renew = [job for job in ids if now - self._renewal_times.get(job, -_RETENTION_S) > _RENEW_INTERVAL_S]
        if jobs_to_renew or self._is_due(answers, now):
            with self._lock() as has_lock:
                if has_lock:  # otherwise another command is querying Slurm, and the next call reads its answer
                    answers = self._renew_and_query(self._read(), ids, now)
        return {job: _report(answers["reports"].get(job)) for job in ids}

    def leave(self, job_ids: Iterable[str]) -> None:
        """Removes jobs that this process no longer waits for; the last command to leave removes the folder."""
        with contextlib.suppress(OSError), self._lock() as has_lock:
            answers = self._read()
            for job in job_ids:
                answers["wanted"].pop(job, None)
                self._renewal_times.pop(job, None)
            now = time.monotonic()
            if has_lock and any(now - renewed < _RETENTION_S for renewed in answers["wanted"].values()):
                self._write(answers)
            elif has_lock:
                for name in ("answers.json", "lock"):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()

    def _renew_and_query(self, answers: dict[str, Any], ids: list[str], now: float) -> dict[str, Any]:
        """Adds the jobs of this process, and queries Slurm if a query is due. The caller must hold the lock."""
        renewal_times = {job: renewed for job, renewed in answers["wanted"].items() if now - renewed < _RETENTION_S}
        for job in ids:
            renewal_times[job] = self._renewal_times[job] = now
        reports = {job: row for job, row in answers["reports"].items() if job in renewal_times}
        answers = {**answers, "wanted": renewal_times, "reports": reports}
        # ended jobs are not queried again
        open_jobs = [job for job in sorted(renewal_times) if not _report(reports.get(job)).state.is_terminal]
        if open_jobs and self._is_due(answers, now):
            new_reports = self._probe.query(open_jobs)
            is_silent = not any(report.conclusive for report in new_reports.values())
            pause_s = (
                min(2 * answers["pause"], MAX_INTERVAL_S) if is_silent and answers["reports"] else self._interval_s
            )
            rows = {job: [r.state.value, r.reason, r.source, r.conclusive] for job, r in new_reports.items()}
            answers = {**answers, "asked": time.monotonic(), "pause": pause_s, "reports": {**reports, **rows}}
        self._write(answers)
        return answers

    def _is_due(self, answers: dict[str, Any], now: float) -> bool:
        # a time that was written before the last reboot lies in the future
        return not 0 <= now - float(answers["asked"]) < float(answers["pause"])

    def _is_usable(self) -> bool:
        """Returns whether the folder exists and belongs to this user alone."""
        try:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            status = self._folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Yields whether this process has the lock."""
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(fd)

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"asked": float("-inf"), "pause": self._interval_s, "wanted": {}, "reports": {}}
        try:
            content = json.loads((self._folder / "answers.json").read_text())
            return {**empty, **content}
        except (OSError, ValueError, TypeError):
            return empty

    def _write(self, answers: dict[str, Any]) -> None:
        new_file = self._folder / "answers.new"
        new_file.write_text(json.dumps(answers))
        new_file.replace(self._folder / "answers.json")


def _report(row: list[Any] | None) -> JobReport:
    """Returns the report on a job from the file's row; UNKNOWN if Slurm was not queried for the job yet."""
    if row is None:
        return JobReport(JobState.UNKNOWN, conclusive=False)
    return JobReport(JobState.parse(row[0]), str(row[1]), str(row[2]), bool(row[3]))
