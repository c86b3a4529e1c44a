"""Submit a segment's driver through submitit, wait for it, find it again after being killed, cancel it.

The job and the waiter share nothing but the run folder: `submit/segment_<k>.json` says which job was started,
`submit/segment_<k>.claim.<n>.json` which job owns the segment, `submit/segment_<k>.exit.json` how a driver failed and
`segments/<k>.json`, written last by the driver, that the segment is finished. A waiter can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rlhpc.runtime.errors import RlhpcError, SubmitError
from rlhpc.runtime.import_paths import run_module
from rlhpc.runtime.launch.claim import Claim, SegmentFiles, SubmitLock, read_json, write_json
from rlhpc.runtime.launch.driver_job import DriverJob
from rlhpc.runtime.launch.jobs import JobState, ProcessId
from rlhpc.runtime.launch.local import make_local_executor, python_path
from rlhpc.runtime.launch.record import JobRecord, find_job, job_words, owner_of, probe_for
from rlhpc.runtime.launch.waiter import DriverFailed, DriverRejected, JobLost, Waiter, say
from rlhpc.runtime.paths import RunPaths

__all__ = [
    "DriverFailed",
    "DriverRejected",
    "JobLost",
    "JobRecord",
    "WaitInterrupted",
    "cancel",
    "choose_executor",
    "driver_command",
    "submit_segment",
]

EXECUTORS = ("auto", "local", "slurm")
#: Minutes; submitit's local controller wants a limit, and a local run has none.
_NO_LIMIT_MIN = 10 * 365 * 24 * 60
#: submitit counts timeouts and gives up; here the progress between attempts decides (`DriverJob.max_stalled`).
_NO_COUNT = 10**6
#: A job that is lost this soon after it was found was on its way out already.
_DYING_S = 10.0


class WaitInterrupted(RlhpcError):
    """Ctrl-C ended the waiting; the job goes on."""

    exit_code = 130


def driver_command(config_path: str | Path, overrides: Sequence[str] = (), *, segment: int = 0) -> list[str]:
    """argv of the driver: the same as a user would type without submission."""
    config = str(Path(config_path).expanduser().absolute())
    return run_module("rlhpc.cli", "train", config, "--segment", str(segment), *overrides)


def submit_segment(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_root: Path,
    segment: int = 0,
    executor: str = "auto",
    wait: bool = True,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    slurm: Mapping[str, Any] | None = None,
    poll_s: float = 0.5,
    progress_s: float = 5.0,
    deadline_s: float | None = None,
    save_grace_s: float = 600.0,
    max_restarts: int = 0,
    on_found: Callable[[bool], None] = lambda live: None,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Start the driver of a segment as a job, or find the one that runs, and wait for it.

    Calling this again is always right: a finished segment returns at once, a live job is waited for, a dead one is
    followed by a new one, which resumes. Two callers at once start one job.

    Args:
        config_path: The run's configuration.
        overrides: `key=value`, handed to the driver.
        run_root: The run folder.
        segment: Number of the segment, from 0.
        executor: "local", "slurm", or "auto": Slurm where sbatch is and this is not inside a job already.
        wait: False returns as soon as the job is submitted.
        command: argv of another driver.
        environment: Variables to set for the driver.
        slurm: submitit's Slurm parameters (`partition`, `time`, `setup`, `additional_parameters`, …) from the plan.
        poll_s: How often the marker file is looked for.
        progress_s: How often a line of progress is written.
        deadline_s: Waiting longer than this is an error; the job goes on.
        save_grace_s: How long the driver may take to save when its job must end.
        max_restarts: How often in a row a driver that was killed is started again without a new checkpoint in between.
        on_found: Called under the submission's lock, with whether there is a live job, before one is submitted or attached
            to; what it raises ends the submission.
        stream: Where progress goes; stderr by default.

    Returns:
        `{"state": "finished" | "submitted" | "attached", "segment", "executor", "job_id", "result"}`; `result` is what
        the driver wrote to `segments/<k>.json`, None while it has not finished.

    Raises:
        SubmitError: The job could not be submitted.
        DriverRejected: The driver found the configuration wrong.
        DriverFailed: The driver failed, with its first error; JobLost when it was killed.
        WaitInterrupted: Ctrl-C.
        DeadlineExceeded: `deadline_s` is over.
    """
    files = SegmentFiles(RunPaths(Path(run_root).expanduser().absolute()), segment)
    done = read_json(files.marker)
    if done is not None:
        return _answer("finished", JobRecord.read(files), segment, done)
    kind = choose_executor(executor)
    out = stream or sys.stderr
    argv = list(command) if command is not None else driver_command(config_path, overrides, segment=segment)
    _make_folders(files)
    while True:
        _await_orphan(files, save_grace_s, out)
        with SubmitLock(files):
            done = read_json(files.marker)
            if done is not None:
                return _answer("finished", JobRecord.read(files), segment, done)
            record, state = find_job(files), "attached"
            on_found(record is not None)
            if record is None:
                record, state = (
                    _submit(files, argv, kind, dict(environment or {}), slurm or {}, save_grace_s, max_restarts),
                    "submitted",
                )
        if not wait:
            return _answer(state, record, segment, None)
        verb = "waiting for" if state == "attached" else "submitted"
        say(out, f"segment {segment}: {verb} {job_words(record)}; logs in {files.driver_err.parent}")
        attached = time.monotonic() if state == "attached" else None
        try:
            done = Waiter(files, record, out, poll_s, progress_s, deadline_s).wait()
        except JobLost:
            # it was dying when we found it, as when somebody kills a run and starts it again
            if attached is None or time.monotonic() - attached > _DYING_S:
                raise
            continue
        except KeyboardInterrupt:
            owner = owner_of(files, record)
            raise WaitInterrupted(
                f"stopped waiting; {job_words(owner)} goes on with segment {segment} of {files.paths.root}\n"
                "  wait for it again: run the same command\n"
                f"  stop it:           rlhpc cancel {shlex.quote(str(files.paths.root))}"
            ) from None
        return _answer("finished", owner_of(files, record), segment, done)


def cancel(paths: RunPaths, segment: int | None = None, *, grace_s: float = 60.0) -> list[str]:
    """End the jobs of a run: they save and stop; what is left after the grace is killed.

    Args:
        paths: The run.
        segment: Only this one; all by default.
        grace_s: How long the driver may take to save.

    Returns:
        A sentence for every job that was ended; empty when none ran.

    Raises:
        RlhpcError: A job runs on another host, or scancel failed.
    """
    told = []
    for files in _segments_of(paths) if segment is None else [SegmentFiles(paths, segment)]:
        if files.marker.exists() and _ends_by_itself(files):
            continue
        record = find_job(files)
        if record is None:
            continue
        if record.executor == "slurm":
            _end_slurm(files, record, grace_s)
        else:
            _end_local(files, record, grace_s)
        told.append(f"segment {files.segment}: {job_words(record)} was cancelled")
    return told


def _ends_by_itself(files: SegmentFiles) -> bool:
    """Whether the job of a finished segment is gone; it takes a moment after the marker."""
    end = time.monotonic() + 3.0
    while (claim := Claim.newest(files)) is not None and claim.alive():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def choose_executor(name: str) -> str:
    """`local` or `slurm`; `auto` is Slurm where sbatch is and this is not inside a job already."""
    if name not in EXECUTORS:
        raise SubmitError(f"executor: found {name!r}, allowed are {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    return "slurm" if shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ else "local"


def _make_folders(files: SegmentFiles) -> None:
    try:
        files.paths.submit.mkdir(parents=True, exist_ok=True)
        files.paths.submit.chmod(0o700)  # job pickles: nobody else reads or replaces them
        files.driver_err.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SubmitError(
            f"cannot write to the run folder {files.paths.root}: {error.strerror or error} ({error.filename}); "
            "choose another with runner.run_dir=…"
        ) from error


def _segments_of(paths: RunPaths) -> list[SegmentFiles]:
    names = sorted(paths.submit.glob("segment_*.json")) if paths.submit.is_dir() else []
    numbers = sorted({int(p.name.split("_")[1].split(".")[0]) for p in names if p.name.split("_")[1][0].isdigit()})
    return [SegmentFiles(paths, number) for number in numbers]


def _answer(state: str, record: JobRecord | None, segment: int, result: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "state": state,
        "segment": segment,
        "executor": record.executor if record else "",
        "job_id": record.job_id if record else "",
        "result": result,
    }


def _job_name(files: SegmentFiles) -> str:
    """Unique to the run folder and segment, so that a job whose id was never written down can be found by name."""
    digest = hashlib.sha256(str(files.paths.root.resolve()).encode()).hexdigest()[:8]
    return f"rlhpc-{files.paths.root.name}-{files.segment}-{digest}"


def _await_orphan(files: SegmentFiles, grace_s: float, out: TextIO) -> None:
    """A driver whose job was killed saves and ends by itself; the next one must not start beside it."""
    end = time.monotonic() + grace_s
    said = False
    while (claim := Claim.newest(files)) is not None and claim.driver is not None:
        if claim.job.alive() is not False or not claim.driver.alive():
            return
        if not said:
            said = True
            say(out, f"segment {files.segment}: the job was killed; its driver (pid {claim.driver.pid}) saves and ends")
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(claim.driver.pid, signal.SIGKILL)
            end += 10.0
        time.sleep(0.2)


def _submit(
    files: SegmentFiles,
    argv: list[str],
    kind: str,
    environment: dict[str, str],
    slurm: Mapping[str, Any],
    save_grace_s: float,
    max_restarts: int = 0,
) -> JobRecord:
    """Hand a `DriverJob` to submitit; the caller holds the lock."""
    before = JobRecord.read(files)
    record = JobRecord(
        segment=files.segment,
        attempt=before.attempt + 1 if before else 1,
        token=secrets.token_hex(8),
        executor=kind,
        command=argv,
        job_name=_job_name(files),
        submitted=time.time(),
        logs={"out": str(files.driver_out), "err": str(files.driver_err)},
    )
    job = DriverJob(
        run_root=str(files.paths.root),
        segment=files.segment,
        command=argv,
        token=record.token,
        executor=kind,
        environment=environment,
        save_grace_s=save_grace_s,
        max_restarts=max_restarts,
    )
    try:
        record.write(files)
        submitted = _executor(kind, files, record.job_name, slurm).submit(job)
        job_id = str(submitted.job_id)
        record = replace(
            record,
            job_id=job_id,
            phase="submitted",
            process=ProcessId.of(int(job_id)) if kind == "local" else None,
            job_log=str(submitted.paths.stderr),
        )
        record.write(files)
    except Exception as error:  # submitit raises RuntimeError, CalledProcessError's text, OSError, ValueError, …
        if isinstance(error, RlhpcError):
            raise
        raise SubmitError(f"segment {files.segment} could not be submitted ({kind}): {error}") from error
    return record


def _executor(kind: str, files: SegmentFiles, job_name: str, slurm: Mapping[str, Any]) -> Any:
    folder = str(files.paths.submit)
    if kind == "local":
        return make_local_executor(folder, timeout_min=_NO_LIMIT_MIN, max_num_timeout=_NO_COUNT)
    import submitit

    class SlurmExecutor(submitit.SlurmExecutor):
        """submitit asks for five minutes where nobody gave a walltime; here the partition's own limit holds then."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text = str(super()._make_submission_file_text(command, uid))
            return text.replace(f"#SBATCH --time={_NO_LIMIT_MIN}\n", "")

    # "exec": the batch shell becomes our process, so that a signal for the batch shell (B:) reaches it
    python = f"exec {shlex.quote(sys.executable)} -P"
    executor = SlurmExecutor(folder=folder, max_num_timeout=_NO_COUNT, python=python)
    given = dict(slurm)
    setup = list(given.pop("setup", None) or [])  # may begin with the #SBATCH lines of further components
    if python_path():
        setup.append(f"export PYTHONPATH={shlex.quote(python_path())}")
    additional = {"signal": "B:USR2@120", "requeue": True, **given.pop("additional_parameters", {})}
    executor.update_parameters(
        **{
            "job_name": job_name,
            "nodes": 1,
            "ntasks_per_node": 1,
            "use_srun": False,
            "time": _NO_LIMIT_MIN,
            **given,
            "setup": setup or None,
            "additional_parameters": additional,
        }
    )
    return executor


def _end_slurm(files: SegmentFiles, record: JobRecord, grace_s: float) -> None:
    """Asks the driver alone to save and end, as plain scancel would kill the ranks at once; then the job."""
    probe = probe_for(record, files)
    if probe.query_one(record.job_id).state is JobState.RUNNING:
        write_json(files.cancel, {"token": record.token, "time": time.time()})
        _scancel(record, "--batch", "--signal=TERM")
        end = time.monotonic() + grace_s
        while time.monotonic() < end:
            ended = read_json(files.exit)
            if files.marker.exists() or (ended is not None and ended.get("token") == record.token):
                break
            time.sleep(0.5)
    _scancel(record)


def _scancel(record: JobRecord, *options: str) -> None:
    try:
        done = subprocess.run(["scancel", *options, record.job_id], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RlhpcError(f"scancel {record.job_id} failed: {error}") from error
    if done.returncode != 0 and "already completing or completed" not in done.stderr:
        raise RlhpcError(f"scancel {record.job_id} failed: {done.stderr.strip()}")


def _end_local(files: SegmentFiles, record: JobRecord, grace_s: float) -> None:
    """SIGTERM to the job (it hands it to the driver, which saves), SIGKILL to what is left."""
    end = time.monotonic() + grace_s
    asked: set[int] = set()
    while time.monotonic() < end + 10.0:
        claim = Claim.newest(files)
        known = [claim.job, claim.driver] if claim is not None else []
        processes = [p for p in [*known, record.process] if p is not None]
        foreign = [p for p in processes if p.alive() is None]
        if foreign:
            raise RlhpcError(f"{job_words(record)} runs on {foreign[0].host.split('/')[0]}; cancel it from there")
        living = [p for p in processes if p.alive()]
        if not living:
            return
        over = time.monotonic() > end
        # the job before its controller: a controller told to end kills its task after a second
        for process in living if over else living[:1]:
            if over or process.pid not in asked:
                asked.add(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL if over else signal.SIGTERM)
        time.sleep(0.1)
