"""One driver per run: a second one is refused before it can do harm, with a message that names the first."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

from rlhpc.jobs.claim import read_json, write_json
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobState, ProcessId, SlurmProbe
from rlhpc.runtime.errors import UserError


@contextlib.contextmanager
def sole_driver(paths: RunPaths) -> Iterator[None]:
    """Holds the run for this process until the block or the process ends.

    A lock says that somebody is training the run; a file beside it says who. If locks outlive their holder (a failed
    node, on NFS) or do not exist, the file decides: an earlier start of this very job, or a process or job that has
    ended, gives way.

    Raises:
        UserError: Another driver trains this run.
    """
    holder = paths.driver_record
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(paths.driver_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # the code that opens the run's folder reports what is wrong with it
        yield
        return
    try:
        locked, found = _locked(fd), read_json(holder)
        _require_dead(paths, found, locked)
        mine = {"job": os.environ.get("SLURM_JOB_ID", ""), "process": ProcessId.of(os.getpid()).to_json()}
        with contextlib.suppress(OSError):  # a full disk is reported by the code that has something to lose
            write_json(holder, mine)
        try:
            yield
        finally:
            if read_json(holder) == mine:
                holder.unlink(missing_ok=True)
    finally:
        os.close(fd)


def require_no_driver(paths: RunPaths) -> None:
    """Refuses a second driver before it looks at anything, and writes nothing.

    Looking for a checkpoint removes what killed saves left behind, and would take the live driver's save for one.

    Raises:
        UserError: Another driver trains this run.
    """
    try:
        fd = os.open(paths.driver_lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # it was never trained, or the code that opens the run's folder reports what is wrong with it
    try:
        _require_dead(paths, read_json(paths.driver_record), _locked(fd))
    finally:
        os.close(fd)


def _require_dead(paths: RunPaths, found: dict[str, Any] | None, locked: bool) -> None:
    if found is not None and (who := _living(found, locked)):
        raise UserError(
            f"{paths.root} is being trained by {who}: one run, one driver. Wait for it, end it "
            f"({_ending(paths, found)}), or give this one a name of its own (runner.name=…)"
        )


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else has it, or there are no locks here
        return False
    return True


def _living(found: dict[str, Any], locked: bool) -> str:
    """Who holds the run; "" if the holder is gone, or was an earlier start of this very job."""
    job, process = str(found.get("job") or ""), ProcessId.from_json(found.get("process"))
    alive = None if process is None else process.alive()
    if process is None or alive is False:
        return ""
    where = f"process {process.pid} on {process.host.split('/')[0]}"
    if alive is None and not job:
        return "" if locked else where  # on another host, where only its lock tells
    if alive is None:
        if job == os.environ.get("SLURM_JOB_ID"):
            return ""
        report = SlurmProbe().query_one(job)
        if report.state.is_terminal or (report.state is JobState.UNKNOWN and (report.conclusive or locked)):
            return ""
    return f"Slurm job {job} ({where})" if job else where


def _ending(paths: RunPaths, found: dict[str, Any]) -> str:
    job = str(found.get("job") or "")
    submitted = paths.submit.is_dir()
    return (
        f"rlhpc cancel {paths.root}" if submitted else f"scancel --batch --signal=TERM {job}" if job else "Ctrl-C there"
    )
