"""One Slurm query for all of a user's commands that wait on this host, whichever of them makes it.

The commands meet in a small folder below the temporary folder: a file says which jobs are waited for and what Slurm
said last. There is no leader: the first command to find the answers too old asks on behalf of all, and the others read.
A command that is killed leaves nothing behind that others would wait for.
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

#: Least time between two queries, and the longest while Slurm does not answer.
INTERVAL_S, MOST_S = 10.0, 120.0
#: A job that nobody has asked about for this long is dropped from the query.
_KEPT_S = 60.0
_RENEWED_S = 15.0


def meeting_place() -> Path:
    """The folder where this user's waiting commands meet: one for each host, installation and cluster."""
    parts = (process_space(), str(Path(__file__).resolve()), os.environ.get("SLURM_CONF", ""),
             os.environ.get("SLURM_CLUSTERS", ""), shutil.which("squeue") or "")  # fmt: skip
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rlhpc.waits-{os.getuid()}-{key}"


class SharedProbe(JobProbe):
    """Answers from the last query that any waiting command made, and makes the next query when it is due.

    Args:
        probe: Asks Slurm; if the folder cannot be used, it answers on its own.
        place: The folder where the commands meet.
        interval_s: Least time between two queries.
    """

    def __init__(self, probe: SlurmProbe, place: Path | None = None, *, interval_s: float = INTERVAL_S) -> None:
        self._probe = probe
        self._place = place or meeting_place()
        self._interval_s = interval_s
        self._renewed: dict[str, float] = {}

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        if self._usable():
            with contextlib.suppress(OSError):  # a full disk, or somebody is cleaning up
                return self._query(ids)
        return self._probe.query(ids)

    def _query(self, ids: list[str]) -> dict[str, JobReport]:
        now = time.monotonic()
        known = self._read()
        renew = [job for job in ids if now - self._renewed.get(job, -_KEPT_S) > _RENEWED_S]
        if renew or self._due(known, now):
            with self._lock() as mine:
                if mine:  # else another command is asking right now, and the next look will see the answer
                    known = self._meet(self._read(), ids, now)
        return {job: _report(known["reports"].get(job)) for job in ids}

    def leave(self, job_ids: Iterable[str]) -> None:
        """Records that nobody here waits for these jobs any more; the last command to leave cleans up."""
        with contextlib.suppress(OSError), self._lock() as mine:
            known = self._read()
            for job in job_ids:
                known["wanted"].pop(job, None)
                self._renewed.pop(job, None)
            now = time.monotonic()
            if mine and any(now - seen < _KEPT_S for seen in known["wanted"].values()):
                self._write(known)
            elif mine:
                for name in ("answers.json", "lock"):
                    (self._place / name).unlink(missing_ok=True)
                self._place.rmdir()

    def _meet(self, known: dict[str, Any], ids: list[str], now: float) -> dict[str, Any]:
        """Adds the jobs waited for here, and asks Slurm if a query is due; the caller holds the lock."""
        wanted = {job: seen for job, seen in known["wanted"].items() if now - seen < _KEPT_S}
        for job in ids:
            wanted[job] = self._renewed[job] = now
        reports = {job: row for job, row in known["reports"].items() if job in wanted}
        known = {**known, "wanted": wanted, "reports": reports}
        # jobs known to have ended are not asked about again
        left = [job for job in sorted(wanted) if not _report(reports.get(job)).state.is_terminal]
        if left and self._due(known, now):
            found = self._probe.query(left)
            silent = not any(report.conclusive for report in found.values())
            pause = min(2 * known["pause"], MOST_S) if silent and known["reports"] else self._interval_s
            rows = {job: [r.state.value, r.reason, r.source, r.conclusive] for job, r in found.items()}
            known = {**known, "asked": time.monotonic(), "pause": pause, "reports": {**reports, **rows}}
        self._write(known)
        return known

    def _due(self, known: dict[str, Any], now: float) -> bool:
        # a time from before the last boot lies in the future
        return not 0 <= now - float(known["asked"]) < float(known["pause"])

    def _usable(self) -> bool:
        """Whether the folder exists and belongs to this user alone."""
        try:
            with contextlib.suppress(FileExistsError):
                self._place.mkdir(mode=0o700)
            made = self._place.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(made.st_mode) and made.st_uid == os.geteuid() and not made.st_mode & 0o077

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Yields whether this process has the lock."""
        fd = os.open(self._place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            found = json.loads((self._place / "answers.json").read_text())
            return {**empty, **found}
        except (OSError, ValueError, TypeError):
            return empty

    def _write(self, known: dict[str, Any]) -> None:
        new = self._place / "answers.new"
        new.write_text(json.dumps(known))
        new.replace(self._place / "answers.json")


def _report(row: list[Any] | None) -> JobReport:
    """The report in the file on a job; unknown if Slurm has not been asked about it yet."""
    if row is None:
        return JobReport(JobState.UNKNOWN, conclusive=False)
    return JobReport(JobState.parse(row[0]), str(row[1]), str(row[2]), bool(row[3]))
