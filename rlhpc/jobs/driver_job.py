"""Driver job that submitit runs: starts the driver, forwards signals, waits for its checkpoint and requests a requeue."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rlhpc.jobs.alerts import AlertSender, AlertTargets, ending_name, send_requeued
from rlhpc.jobs.lease import RENEW_S
from rlhpc.jobs.paths import RunPaths, segment_name, step_name
from rlhpc.jobs.probes import ProcessId, SlurmProbe
from rlhpc.jobs.segment import Attempts, Claim, ExitRecord, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS
from rlhpc.jobs.slurm import end_steps, requeue_without
from rlhpc.runtime.files import open_file
from rlhpc.runtime.os_resources import start_bound_to_parent

_POLL_S = 0.1
#: Prefix that the command line puts before every error message.
ERROR_PREFIX = "rlhpc: error:"
#: Bytes at the end of a driver's output that are searched for an error message; longer than any message with log tails.
_TAIL_BYTES = 1 << 18


def first_failure(err_file: Path, offset: int = 0, *, num_lines: int = 40) -> str:
    """Returns the first error message near the end of a driver's output, with the lines that follow it.

    Without an error message, returns the last lines. A driver prints its error last, after any output of libraries.

    Args:
        err_file: The output.
        offset: Start of this attempt's output.
        num_lines: Maximum number of lines.
    """
    text_before, prefix, message = _partition_end(err_file, offset)
    if prefix:
        return "\n".join(message.strip().splitlines()[:num_lines])
    return "\n".join(text_before.strip().splitlines()[-num_lines // 2 :])


def error_line(err_file: Path) -> str:
    """Returns the first line of the first error message near the end of a command's output; "" if there is no message."""
    return _partition_end(err_file)[2].strip().partition("\n")[0]


def _partition_end(err_file: Path, offset: int = 0) -> tuple[str, str, str]:
    """Splits the end of an output at the first error message: text before the message, its prefix, and the text after it.

    Without a message, the last two are empty. If the output cannot be read, all three are empty.
    """
    try:
        with open_file(err_file) as file:
            file.seek(max(offset, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            err_text = file.read().decode("utf-8", "replace").replace("\r", "\n")
    except OSError:
        err_text = ""
    return err_text.partition(ERROR_PREFIX)


def start_driver(
    command: Sequence[str], files: SegmentJournal, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a driver that writes to the segment's log files. When this process or the calling thread ends, the driver saves
    and ends.

    Args:
        command: argv of the driver.
        files: Journal of the segment that the driver trains.
        environment: Environment variables to set for the driver.
        options: Options of `subprocess.Popen`.

    Raises:
        OSError: A log cannot be written, or the command does not exist.
    """
    with files.driver_out.open("ab") as stdout_file, files.driver_err.open("ab") as stderr_file:
        return start_bound_to_parent(
            command, signal.SIGTERM, stdin=subprocess.DEVNULL, stdout=stdout_file, stderr=stderr_file,
            env=_make_driver_environment(environment), **options,
        )  # fmt: skip


def _make_driver_environment(extra_environment: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without the variables that submitit added for its own use."""
    inherited_environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBMITIT_")}
    return {**inherited_environment, **extra_environment, "PYTHONUNBUFFERED": "1"}


@dataclass
class DriverJob:
    """Callable for submitit's checkpoint protocol: `checkpoint()` returns the job to run after the requeue.

    Args:
        run_root: The run folder.
        segment: Number of the segment that the driver trains.
        command: argv of the driver, which writes `segments/<k>.json` last, and exits with `EXIT_REQUEUE` if a signal
            made it save and stop.
        token: Token of the submission, by which a waiter recognises its job.
        executor: "local" or "slurm".
        environment: Variables to set for the driver.
        save_grace_s: Maximum time for the driver to save and stop before it is killed.
        max_restarts: Maximum number of restarts in a row, without a new checkpoint in between, of a driver that did not
            cause its failure (a rank, a step, a node or the driver itself was killed).
        max_stalled: After this many attempts in a row without a new checkpoint, the job ends instead of being requeued.
    """

    run_root: str
    segment: int
    command: list[str]
    token: str
    executor: str
    environment: dict[str, str] = field(default_factory=dict)
    save_grace_s: float = 600.0
    max_restarts: int = 0
    max_stalled: int = 2
    _claim: Claim | None = field(default=None, init=False, repr=False)
    _pid: int | None = field(default=None, init=False, repr=False)
    _is_terminated: bool = field(default=False, init=False, repr=False)
    _checked_at: float = field(default=0.0, init=False, repr=False)
    _alerts: AlertSender | None = field(default=None, init=False, repr=False)

    @property
    def alerts(self) -> AlertSender:
        """Sender of the job's alerts."""
        if self._alerts is None:
            targets = AlertTargets.from_file(self.files.config, {**os.environ, **self.environment})
            self._alerts = AlertSender(self.files.paths, targets, "job")
        return self._alerts

    @property
    def files(self) -> SegmentJournal:
        return SegmentJournal(RunPaths(Path(self.run_root)), self.segment)

    def __call__(self) -> dict[str, Any]:
        """Runs the driver until it ends. The result is only for submitit's log; other processes read the marker file."""
        from submitit import JobEnvironment

        files = self.files
        if files.result() is not None:
            return {"exit_code": 0}
        probe = SlurmProbe() if self.executor == "slurm" else None
        files.driver_err.parent.mkdir(parents=True, exist_ok=True)
        claim = Claim.take(files, token=self.token, job_id=JobEnvironment().job_id, executor=self.executor, probe=probe)
        if claim is None:
            print(f"segment {self.segment} belongs to another job already; this one ends", flush=True)
            return {"superseded": True}
        self._claim = claim
        signal.signal(signal.SIGTERM, self._terminate)
        try:
            return self._run_attempts(files)
        finally:
            self._kill_driver(0.0)
            self._release_claim()
            self.alerts.close()

    def _run_attempts(self, files: SegmentJournal) -> dict[str, Any]:
        """Runs the driver, and restarts it after failures that the driver did not cause."""
        attempts = Attempts(files, self.token)
        while True:
            assert self._claim is not None
            # also counts attempts of an earlier process, which may have died without recording their end
            num_idle = attempts.num_idle(self._find_newest_step())
            if num_idle > max(self.max_restarts, self.max_stalled):
                return self._record_exit(1, self._format_no_progress(num_idle))
            attempts.begin(self._find_newest_step(), self._claim.job_id)
            code = self._run_driver(files)
            if files.result() is not None:
                attempts.end("finished")
                return {"exit_code": 0}
            if code == EXIT_REQUEUE and not self._is_terminated:
                # the driver stopped by itself because the job's end is near: proceed as after the signal
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(1.0)
            message = first_failure(files.driver_err, self._claim.err_offset)
            failure = self._find_restartable_status(code)
            attempts.end(f"failed: {message.splitlines()[0] if message else f'exit code {code}'}")
            num_idle = attempts.num_idle(self._find_newest_step())
            if failure is None or num_idle > self.max_restarts or not self._claim.owns():
                has_restarted = failure is not None and num_idle > 1
                restart_note = f"\n(restarted {num_idle - 1} times without a new checkpoint)" if has_restarted else ""
                return self._record_exit(code, message + restart_note)
            if self.executor == "slurm":
                end_steps()
                node = failure.get("node")
                if node and attempts.blames(node) and requeue_without(self._claim.job_id, node):
                    attempts.end(f"requeued without node {node}: {message.splitlines()[0] if message else ''}")
                    time.sleep(60.0)  # Slurm ends this process while it waits
            attempts.note(str(failure.get("node") or ""))
            self.alerts.send(
                "lost",
                f"lost-driver-{segment_name(self.segment)}-claim_{self._claim.number}-start_{attempts.count}",
                f"the driver failed and is started again: {message.splitlines()[0] if message else f'exit code {code}'}",
                step=max(self._find_newest_step(), 0),
            )
            pause_s = min(2.0 ** (num_idle - 1), 30.0)
            print(f"rlhpc: the driver failed (exit code {code}) and is started again in {pause_s:.0f} s: "
                  f"{message.splitlines()[0] if message else ''}", file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(pause_s)
            self._claim = self._claim.update(err_offset=size_of(files.driver_err))

    def _find_newest_step(self) -> int:
        """Returns the step of the newest complete checkpoint; -1 without one."""
        steps = [step for step, _ in self.files.paths.complete_steps()]
        return max(steps, default=-1)

    def _format_no_progress(self, num_attempts: int) -> str:
        newest_step = self._find_newest_step()
        return (
            f"segment {self.segment} made no progress in {num_attempts} attempts (newest checkpoint: "
            f"{'none' if newest_step < 0 else step_name(newest_step)}), so it is not requeued again; "
            "give the job more time, or save more often (runner.save_interval)"
        )

    def _find_restartable_status(self, exit_code: int) -> dict[str, Any] | None:
        """Returns the status of a failed driver if a restart may succeed; None if the failure would recur."""
        if self._is_terminated or exit_code == EXIT_REQUEUE:
            return None
        if exit_code == 128 + signal.SIGKILL or exit_code in (128 + signal.SIGBUS, 128 + signal.SIGSEGV):
            return {}
        status = read_json_file(RunPaths(Path(self.run_root)).driver_state) or {}
        is_current = self._pid is not None and status.get("pid") == self._pid
        return status if is_current and status.get("restartable") else None

    def checkpoint(self) -> Any:
        """Makes the driver save, waits for its end, and returns the job to run next. submitit calls this on SIGUSR2."""
        self._signal_driver(signal.SIGUSR2)
        self._kill_driver(self.save_grace_s)
        if self.files.result() is not None:
            raise SystemExit(0)  # the step in progress finished the segment
        if self._is_terminated:
            self._record_exit(128 + signal.SIGTERM, "")
            raise SystemExit(128 + signal.SIGTERM)
        return self._requeue_on_preemption()

    def _requeue_on_preemption(self) -> Any:
        """Returns the job to run after a requeue due to preemption or walltime.

        Raises:
            SystemExit: The last attempts made no progress.
        """
        from submitit.helpers import DelayedSubmission

        attempts = Attempts(self.files, self.token)
        attempts.end("requeued: the job had to end")
        num_idle = attempts.num_idle(self._find_newest_step())
        if num_idle >= self.max_stalled:
            self._record_exit(1, self._format_no_progress(num_idle))
            raise SystemExit(1)
        self._report_requeue()
        return DelayedSubmission(replace(self))

    def _report_requeue(self) -> None:
        """Sends the alert of a requeue, and waits for its delivery: the requeue kills all processes."""
        assert self._claim is not None
        send_requeued(
            self.alerts, self.segment, self._claim.number,
            "the job had to end (walltime or preemption) and starts again", max(self._find_newest_step(), 0),
        )  # fmt: skip
        self.alerts.close()

    def _run_driver(self, files: SegmentJournal) -> int:
        """Runs the driver; returns its exit code, or 128 + n if signal n ended it."""
        assert self._claim is not None
        # the checkpoint signal must not arrive between the fork and the moment the driver's pid is known
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
        try:
            process = start_driver(self.command, files, {MAX_RESTARTS: str(self.max_restarts), **self.environment})
            self._pid = process.pid
            self._claim = self._claim.update(driver=ProcessId.from_pid(process.pid))
        except OSError as error:
            with files.driver_err.open("ab") as stderr_file:
                stderr_file.write(
                    f"{ERROR_PREFIX} cannot start {self.command[0]}: {error.strerror or error}\n".encode()
                )
            return 127
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})
        while not self._has_driver_ended():
            self._check_owner()
            time.sleep(_POLL_S)
        exit_code = process.wait()
        return 128 - exit_code if exit_code < 0 else exit_code

    def _has_driver_ended(self) -> bool:
        """Returns whether the driver has ended. Does not reap the process, because the signal handler calls this method too
        and Popen's lock is not reentrant.
        """
        if self._pid is None:
            return True
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _signal_driver(self, signum: int) -> None:
        if self._pid is not None and not self._has_driver_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signum)

    def _kill_driver(self, grace_s: float) -> None:
        """Waits for the driver to end, and kills it when the grace period is over."""
        deadline = time.monotonic() + grace_s
        while not self._has_driver_ended() and time.monotonic() < deadline:
            self._check_owner()
            time.sleep(_POLL_S)
        self._signal_driver(signal.SIGKILL)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """Handles SIGTERM from scancel, `rlhpc cancel` or the local controller: the driver saves and ends, no requeue."""
        self._is_terminated = True
        self._signal_driver(signal.SIGTERM)

    def _check_owner(self) -> None:
        """Kills the driver if a later job has taken over the segment; checks at most once per `RENEW_S`."""
        if self._claim is None or time.monotonic() - self._checked_at < RENEW_S:
            return
        self._checked_at = time.monotonic()
        with contextlib.suppress(OSError):
            if not self._claim.owns():
                print("a later job has taken this segment over; the driver is ended", file=sys.stderr, flush=True)
                self._signal_driver(signal.SIGKILL)

    def _release_claim(self) -> None:
        if self._claim is not None:
            with contextlib.suppress(OSError):
                self._claim = self._claim.update(released=True)

    def _record_exit(self, exit_code: int, message: str = "") -> dict[str, Any]:
        """Writes the exit record of the driver, which waiting and later processes read; returns its content."""
        assert self._claim is not None
        if not self._claim.owns():
            return {"superseded": True}
        if self._is_terminated and self.executor == "slurm" and not self.files.is_cancelled(self.token):
            self._report_end("cancelled", "ended by SIGTERM: by scancel, or by a preemption, which starts it again")
            return {"terminated": True}  # by Slurm; only Slurm knows whether it will restart this job
        signame = (
            signal.Signals(exit_code - 128).name
            if 128 < exit_code < 128 + 64 and exit_code - 128 in set(signal.Signals)
            else ""
        )
        if not message and not self._is_terminated:  # a driver that was asked to end has no error to report
            message = first_failure(self.files.driver_err, self._claim.err_offset)
        if exit_code == 0:
            exit_code = 1
            message = f"the driver ended with exit code 0 but left no {self.files.marker}" + (
                f"; its last words:\n{message}" if message else ""
            )
        record = ExitRecord(
            token=self.token,
            job_id=self._claim.job_id,
            attempt=Attempts(self.files, self.token).count,
            exit_code=exit_code,
            signal=signame,
            cancelled=self._is_terminated,
            message=message,
            end_time=time.time(),
        )
        self._release_claim()  # first: a process that reads the exit record may start the next job at once
        self.files.write_exit(record)
        if self._is_terminated:
            self._report_end("cancelled", "the job was cancelled")
        else:
            self._report_end(
                "failed", message.splitlines()[0] if message else f"the driver ended with exit code {exit_code}"
            )
        return record.to_json()

    def _report_end(self, rule: str, reason: str) -> None:
        self.alerts.send(rule, ending_name(self.segment, self.token), reason, step=max(self._find_newest_step(), 0))


def size_of(path: Path) -> int:
    """Returns a file's size in bytes; 0 without the file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
