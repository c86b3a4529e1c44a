"""Shared Slurm query: one command queries Slurm for all commands of a user on this host.

Waiting commands, `rlhpc status`, `rlhpc logs --follow`, the screens of runs, joined ranks and drivers with helper jobs share a
small folder below the temporary folder. A file in that folder has Slurm's last answer about all jobs of the user, and the jobs
that commands have asked about. No command is the leader: the first command to see an outdated answer makes the query, and the
other commands read the new answer. A killed command leaves no state for which other commands would wait, and a stopped one
loses its lock. Where the folder is open to others, or its disk is full, each command asks by itself.

All commands together run at most one query in `INTERVAL_S`, so an answer is up to `INTERVAL_S` old, and older while Slurm
does not answer. A query is one `squeue`. If it also needs `sacct` or `scontrol` for further jobs, the next query is due after
`INTERVAL_S` for each of these commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhpc.jobs.probes import JobProbe, JobReport, JobState, QueueSnapshot, SlurmProbe
from rlhpc.jobs.slurm import QueuedJob
from rlhpc.runtime.errors import OwnershipError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.host import process_space
from rlhpc.runtime.ownership import require_private

#: Minimum time between two queries, and the maximum while Slurm does not answer.
INTERVAL_S, MAX_INTERVAL_S = 10.0, 120.0
#: A job that no command has asked about for this long is dropped from the query.
_RETENTION_S = 60.0
_RENEW_INTERVAL_S = 15.0
#: Maximum seconds that a command that prints a state once waits for the next query, and seconds between two looks meanwhile.
PATIENCE_S, _POLL_S = 25.0, 0.2
_PREFIX, _ANSWERS, _LOCK = "rlhpc.waits", "answers.json", "lock"


def wait_folder() -> Path:
    """Returns the folder that this user's commands share; each host, installation and cluster has its own folder."""
    key_fields = (process_space(), str(Path(__file__).resolve()), os.environ.get("SLURM_CONF", ""),
             os.environ.get("SLURM_CLUSTERS", ""), shutil.which("squeue") or "")  # fmt: skip
    key = hashlib.sha256("\0".join(key_fields).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"{_PREFIX}-{os.getuid()}-{key}"


class SharedProbe(JobProbe):
    """Probe that returns the answers of the last query by any command, and makes the next query when it is due.

    Args:
        probe: Slurm probe; queried directly if the folder is not usable.
        folder: Folder that the commands share.
        interval_s: Minimum time between two queries.
        patience_s: Maximum seconds that `query` waits for the next query if the last answer lacks a requested job. Commands
            that query repeatedly do not wait.
    """

    def __init__(
        self,
        probe: SlurmProbe,
        folder: Path | None = None,
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = 0.0,
    ) -> None:
        self._probe = probe
        self._folder = folder or wait_folder()
        self._interval_s, self._patience_s = interval_s, patience_s
        self._renewal_times: dict[str, float] = {}

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        if make_wait_folder(self._folder):
            with contextlib.suppress(OSError):  # a full disk, or a concurrent cleanup
                return self._query(ids)
        return self._probe.query(ids)

    def jobs_named(self, name: str) -> tuple[list[QueuedJob] | None, float]:
        """Returns this user's jobs with a name that have not ended, and the Unix time at which Slurm was asked.

        The list is None if Slurm does not answer. It lacks jobs that were submitted after that time.
        """
        if make_wait_folder(self._folder):
            with contextlib.suppress(OSError):
                answers = self._refresh([], is_forced=True)
                asked_at = time.time() - (time.monotonic() - answers["began"])
                was_asked = answers["began"] != float("-inf")  # otherwise another command is making the first query
                return _find_unfinished(_jobs(answers["queue"]) if was_asked else [], name), asked_at
        asked_at = time.time()
        return _find_unfinished(self._probe.snapshot([]).jobs, name), asked_at

    def _query(self, ids: list[str]) -> dict[str, JobReport]:
        deadline = time.monotonic() + self._patience_s
        while True:
            answers = self._refresh(ids)
            reports = {job: _report(answers["reports"].get(job)) for job in ids}
            now = time.monotonic()
            if now >= deadline or self._is_current(answers, reports, now):
                return reports
            time.sleep(_POLL_S)

    def _is_current(self, answers: dict[str, Any], reports: dict[str, JobReport], now: float) -> bool:
        """Returns whether the answers have all requested jobs and are not outdated; the report of an ended job stays valid."""
        if all(report.state.is_terminal for report in reports.values()):
            return True
        return not self._is_due(answers, now) and all(job in answers["reports"] for job in reports)

    def _refresh(self, ids: list[str], *, is_forced: bool = False) -> dict[str, Any]:
        """Returns the last answers, after a query if one is due and needed.

        Args:
            ids: Jobs that this process asks about.
            is_forced: Whether the list of the user's jobs is needed; otherwise a query is needed only for jobs that have not
                ended.
        """
        now = time.monotonic()
        answers = self._read()
        jobs_to_renew = [job for job in ids if now - self._renewal_times.get(job, -_RETENTION_S) > _RENEW_INTERVAL_S]
        if jobs_to_renew or self._is_due(answers, now):
            with self._lock() as has_lock:
                if has_lock:  # otherwise another command is querying Slurm, and the next call reads its answer
                    answers = self._renew_and_query(self._read(), ids, now, is_forced)
        return answers

    def leave(self, job_ids: Iterable[str]) -> None:
        """Removes jobs that this process no longer waits for; the last waiting command to leave removes the folder."""
        if not _is_private(self._folder):
            return
        with contextlib.suppress(OSError), self._lock() as has_lock:
            answers = self._read()
            for job in job_ids:
                answers["wanted"].pop(job, None)
                self._renewal_times.pop(job, None)
            now = time.monotonic()
            if has_lock and any(now - renewed_at < _RETENTION_S for renewed_at in answers["wanted"].values()):
                self._write(answers)
            elif has_lock:
                _remove(self._folder)

    def _renew_and_query(self, answers: dict[str, Any], ids: list[str], now: float, is_forced: bool) -> dict[str, Any]:
        """Adds the jobs of this process, and queries Slurm if a query is due. The caller must hold the lock.

        The jobs of a process that queries only once are stored under `once`: that process does not remove them when it ends.
        """
        waiting_ids, once = (
            {
                job: renewed_at
                for job, renewed_at in answers[request_kind].items()
                if 0 <= now - renewed_at < _RETENTION_S
            }
            for request_kind in ("wanted", "once")
        )
        for job in ids:
            (once if self._patience_s else waiting_ids)[job] = self._renewal_times[job] = now
        answers = {**answers, "wanted": waiting_ids, "once": once}
        # ended jobs are not queried again
        reports = answers["reports"]
        open_jobs = [job for job in sorted({*waiting_ids, *once}) if not _report(reports.get(job)).state.is_terminal]
        self._write(answers)  # before the query: where a full disk refuses it, this process asks at its own pace
        if (open_jobs or is_forced) and self._is_due(answers, now):
            answers = self._with_snapshot(answers, self._probe.snapshot(open_jobs), now)
            self._write(answers)
        return answers

    def _with_snapshot(self, answers: dict[str, Any], snapshot: QueueSnapshot, now: float) -> dict[str, Any]:
        is_silent = snapshot.jobs is None and not any(report.conclusive for report in snapshot.reports.values())
        pause_s = self._interval_s * snapshot.num_commands
        if is_silent and answers["reports"]:
            pause_s = min(max(pause_s, 2 * answers["pause"]), MAX_INTERVAL_S)
        reports = {job: row for job, row in answers["reports"].items() if job in answers["wanted"]}
        reports |= {job: [r.state.value, r.reason, r.source, r.conclusive] for job, r in snapshot.reports.items()}
        queue = None if snapshot.jobs is None else [list(asdict(job).values()) for job in snapshot.jobs]
        times = {"began": now, "asked": time.monotonic(), "pause": pause_s}  # the pause begins at the end of the query
        return {**answers, **times, "reports": reports, "queue": queue}

    def _is_due(self, answers: dict[str, Any], now: float) -> bool:
        # a time that was written before the last reboot lies in the future
        return not 0 <= now - float(answers["asked"]) < float(answers["pause"])

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Yields whether this process has the lock. Removes the lock of a process that was stopped while it had the lock."""
        fd = _open_lock(self._folder / _LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.time() - os.fstat(fd).st_mtime > MAX_INTERVAL_S:  # no query takes as long
                (self._folder / _LOCK).unlink(missing_ok=True)
            yield False
        else:
            os.utime(fd, (time.time(), time.time()))
            yield True
        finally:
            os.close(fd)

    def _read(self) -> dict[str, Any]:
        past = float("-inf")
        empty_answers: dict[str, Any] = {"asked": past, "began": past, "pause": self._interval_s, "wanted": {}, "once": {},
                                 "reports": {}, "queue": None}  # fmt: skip
        try:
            answers_content = json.loads((self._folder / _ANSWERS).read_text())
            return {**empty_answers, **answers_content}
        except (OSError, ValueError, TypeError):
            return empty_answers

    def _write(self, answers: dict[str, Any]) -> None:
        _replace(self._folder / _ANSWERS, answers)


def make_wait_folder(folder: Path) -> bool:
    """Returns whether the folder exists, after an attempt to create it, and belongs to this user alone."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    return _is_private(folder)


def _is_private(folder: Path) -> bool:
    """Returns whether a folder exists, is no link, and is closed to other users, who could put files or links into it."""
    with contextlib.suppress(OSError, OwnershipError):
        require_private(folder)
        return True
    return False


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _replace(path: Path, content: dict[str, Any]) -> None:
    replace_durably(path, json.dumps(content).encode(), mode=0o600, sync=False, parents=False)


def _report(row: list[Any] | None) -> JobReport:
    """Returns the report on a job from the file's row; UNKNOWN if Slurm was not queried for the job yet."""
    if row is None:
        return JobReport(JobState.UNKNOWN, conclusive=False)
    return JobReport(JobState.parse(row[0]), str(row[1]), str(row[2]), bool(row[3]))


def _jobs(rows: list[list[Any]] | None) -> list[QueuedJob] | None:
    return None if rows is None else [QueuedJob(*row) for row in rows]


def _find_unfinished(jobs: list[QueuedJob] | None, name: str) -> list[QueuedJob] | None:
    """Returns the jobs with a name that have not ended; None if Slurm does not answer."""
    if jobs is None:
        return None
    return [job for job in jobs if job.name == name and not JobState.parse(job.state).is_terminal]


def _remove(folder: Path) -> None:
    for name in (_ANSWERS, _LOCK):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def remove_unused_folders(unused_s: float = 2 * MAX_INTERVAL_S) -> list[Path]:
    """Removes this user's folders of shared queries on this host that no process uses, with what killed processes have left.

    The wait server and the process that looks for all hold a lock while they live. All others renew a file of the folder, or
    ask only once.

    Args:
        unused_s: Minimum seconds since the last change of a file in the folder.
    """
    removed_folders = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:  # another user's, or in use
            paths = list(folder.iterdir())
            changed_at = max((path.lstat().st_mtime for path in paths), default=folder.lstat().st_mtime)
            if not _is_private(folder) or time.time() - changed_at <= unused_s:
                continue
            for path in paths:
                if path.name.endswith(_LOCK):
                    fd = _open_lock(path)
                    locks.callback(os.close, fd)
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in paths:
                path.unlink(missing_ok=True)
            folder.rmdir()
            removed_folders.append(folder)
    return removed_folders


#: Number of intervals after which an answer is outdated, because the process that should look has stopped.
_MAX_INTERVALS = 3


class SharedAnswer:
    """Answer that one process of this user looks up for all processes of this host that need it.

    The first process to need the answer looks it up every `interval_s` seconds and writes it into the shared folder. The other
    processes read it there. When the first process releases the look or ends, another process takes over.

    Args:
        subject: Name of the answer, the same in all processes.
        read_answer: Looks up the answer, a JSON value.
        interval_s: Seconds between two looks.
        folder: Folder that the processes share.
    """

    def __init__(
        self, subject: str, read_answer: Callable[[], Any], interval_s: float, folder: Path | None = None
    ) -> None:
        self._read_answer, self._interval_s = read_answer, interval_s
        self._path = (folder or wait_folder()) / f"look-{hashlib.sha256(subject.encode()).hexdigest()[:12]}.json"
        self._fd: int | None = None
        self._last_read, self._answer = float("-inf"), None

    def answer(self) -> Any:
        """Returns the answer, which is up to `interval_s` seconds old, or three times as old if a process has stopped."""
        if not self._try_to_lead() and (shared_answers := self._read()) is not None:
            return shared_answers[0]
        now = time.monotonic()
        if now - self._last_read >= self._interval_s:
            self._last_read, self._answer = now, self._read_answer()
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    _replace(self._path, {"at": now, "answer": self._answer})
        return self._answer

    def release(self) -> None:
        """Passes the lookups on to another process; the last process removes the folder."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(
                os.fstat(self._fd), self._lock_path.stat()
            ):  # else it was removed, and another one leads
                self._path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
            self._path.parent.rmdir()
        os.close(self._fd)
        self._fd, self._last_read = None, float("-inf")

    @property
    def _lock_path(self) -> Path:
        return self._path.with_suffix(".lock")

    def _try_to_lead(self) -> bool:
        """Returns whether this process does the lookups for all processes; it tries to take this role."""
        if self._fd is not None:
            return True
        if not make_wait_folder(self._path.parent):
            return False
        with contextlib.suppress(OSError):
            fd = _open_lock(self._lock_path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_current = os.path.samestat(os.fstat(fd), self._lock_path.stat())
            except OSError:
                is_current = False
            if not is_current:  # another process looks, or it has just ended and removed the lock
                os.close(fd)
                return False
            self._fd, self._last_read = fd, float("-inf")  # the other processes have no answer yet
            return True
        return False

    def _read(self) -> tuple[Any] | None:
        """Returns the answer of another process; None if there is no recent answer."""
        try:
            answer_content = json.loads(self._path.read_text())
            is_recent = 0 <= time.monotonic() - answer_content["at"] < _MAX_INTERVALS * self._interval_s
            return (answer_content["answer"],) if is_recent else None
        except (OSError, ValueError, TypeError, KeyError):
            return None
