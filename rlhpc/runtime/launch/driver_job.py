"""The job that submitit runs: it starts the driver, hands signals on, has it save, and asks for a requeue."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rlhpc.runtime.launch.claim import RENEW_S, Claim, SegmentFiles, read_json, write_json
from rlhpc.runtime.launch.jobs import ProcessId, SlurmProbe
from rlhpc.runtime.launch.signals import EXIT_REQUEUE
from rlhpc.runtime.paths import RunPaths

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
#: The command line prints every error for the user behind this.
ERROR_PREFIX = "rlhpc: error:"


def first_failure(err_file: Path, offset: int = 0, *, lines: int = 40) -> str:
    """What the driver said before it ended: from its first error message on, or else its last lines."""
    try:
        with err_file.open("rb") as file:
            file.seek(offset)
            text = file.read(8 << 20).decode("utf-8", "replace").replace("\r", "\n")
    except OSError:
        return ""
    found = text.find(ERROR_PREFIX)
    if found >= 0:
        return "\n".join(text[found + len(ERROR_PREFIX) :].strip().splitlines()[:lines])
    return "\n".join(text.strip().splitlines()[-lines // 2 :])


def _driver_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our environment without what submitit added for its own use."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SUBMITIT_")}
    return {**kept, **extra, "PYTHONUNBUFFERED": "1"}


@dataclass
class DriverJob:
    """Callable for submitit with its checkpoint protocol (`checkpoint()` returns what to run after the requeue).

    Args:
        run_root: The run folder.
        segment: Which segment the driver trains.
        command: argv of the driver; it writes `segments/<k>.json` last, and exits with `EXIT_REQUEUE` when it saved and
            stopped for a signal.
        token: Of the submission, so that a waiter recognises its own job.
        executor: "local" or "slurm".
        environment: Variables to set for the driver.
        save_grace_s: How long the driver may take to save and stop before it is killed.
        max_stalled: So many attempts in a row without a new checkpoint end the job instead of a requeue.
    """

    run_root: str
    segment: int
    command: list[str]
    token: str
    executor: str
    environment: dict[str, str] = field(default_factory=dict)
    save_grace_s: float = 600.0
    max_stalled: int = 2
    restarts: int = 0
    stalled: int = 0
    best_step: int = -1
    _claim: Claim | None = field(default=None, init=False, repr=False)
    _pid: int | None = field(default=None, init=False, repr=False)
    _terminated: bool = field(default=False, init=False, repr=False)
    _renewed: float = field(default=0.0, init=False, repr=False)

    @property
    def files(self) -> SegmentFiles:
        return SegmentFiles(RunPaths(Path(self.run_root)), self.segment)

    def __call__(self) -> dict[str, Any]:
        """Run the driver to its end; the result is for submitit's log only, the marker file is what counts."""
        from submitit import JobEnvironment

        files = self.files
        if read_json(files.marker) is not None:
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
            code = self._run_driver(files)
            if read_json(files.marker) is not None:
                return {"exit_code": 0}
            if code == EXIT_REQUEUE and not self._terminated:
                # the driver stopped for the job's end by itself: take the same road as the signal
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(1.0)
            return self._record_exit(code)
        finally:
            self._kill_driver(0.0)
            self._release()

    def checkpoint(self) -> Any:
        """submitit calls this at the job's end signal: have the driver save, wait for it, and say how to go on."""
        from submitit.helpers import DelayedSubmission

        self._signal_driver(signal.SIGUSR2)
        self._kill_driver(self.save_grace_s)
        if read_json(self.files.marker) is not None:
            raise SystemExit(0)  # the step that it was in finished the segment
        if self._terminated:
            self._record_exit(128 + signal.SIGTERM)
            raise SystemExit(128 + signal.SIGTERM)
        steps = [step for step, path in self.files.paths.checkpoint_steps() if (path / "COMPLETE").exists()]
        newest = max(steps, default=-1)
        stalled = 0 if newest > self.best_step else self.stalled + 1
        if stalled >= self.max_stalled:
            self._record_exit(
                1,
                f"segment {self.segment} made no progress in {stalled} attempts (newest checkpoint: "
                f"{'none' if newest < 0 else f'global_step_{newest}'}), so it is not requeued again; "
                "give the job more time, or save more often (runner.save_interval)",
            )
            raise SystemExit(1)
        return DelayedSubmission(replace(self, restarts=self.restarts + 1, stalled=stalled, best_step=newest))

    def _run_driver(self, files: SegmentFiles) -> int:
        """Exit code of the driver, 128 + n when signal n ended it."""
        assert self._claim is not None
        parent = os.getpid()
        # the checkpoint signal must not arrive between fork and the moment we know whom to ask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
        try:
            with files.driver_out.open("ab") as out, files.driver_err.open("ab") as err:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=_driver_environment(self.environment),
                    preexec_fn=lambda: _in_driver(parent),
                )
            self._pid = process.pid
            self._claim = self._claim.update(driver=ProcessId.of(process.pid))
        except OSError as error:
            with files.driver_err.open("ab") as err:
                err.write(f"{ERROR_PREFIX} cannot start {self.command[0]}: {error.strerror or error}\n".encode())
            return 127
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})
        while not self._driver_gone():
            self._renew()
            time.sleep(_POLL_S)
        code = process.wait()
        return 128 - code if code < 0 else code

    def _driver_gone(self) -> bool:
        """Without reaping it: the signal handler asks, too, and Popen's lock is not reentrant."""
        if self._pid is None:
            return True
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _signal_driver(self, signum: int) -> None:
        if self._pid is not None and not self._driver_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signum)

    def _kill_driver(self, grace_s: float) -> None:
        """Wait until the driver is gone, and kill it when the grace is over."""
        end = time.monotonic() + grace_s
        while not self._driver_gone() and time.monotonic() < end:
            self._renew()
            time.sleep(_POLL_S)
        self._signal_driver(signal.SIGKILL)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """scancel, `rlhpc cancel` or the local controller: the driver saves and ends, and there is no requeue."""
        self._terminated = True
        self._signal_driver(signal.SIGTERM)

    def _renew(self) -> None:
        if self._claim is None or time.monotonic() - self._renewed < RENEW_S:
            return
        self._renewed = time.monotonic()
        self._claim.renew()
        with contextlib.suppress(OSError):
            if not self._claim.owns():
                print("a later job has taken this segment over; the driver is ended", file=sys.stderr, flush=True)
                self._signal_driver(signal.SIGKILL)

    def _release(self) -> None:
        if self._claim is not None:
            with contextlib.suppress(OSError):
                self._claim = self._claim.update(released=True)

    def _record_exit(self, code: int, message: str = "") -> dict[str, Any]:
        """Write down how the driver ended, for whoever waits now or asks later."""
        assert self._claim is not None
        if not self._claim.owns():
            return {"superseded": True}
        signame = signal.Signals(code - 128).name if 128 < code < 128 + 64 and code - 128 in set(signal.Signals) else ""
        if not message:
            message = first_failure(self.files.driver_err, self._claim.err_offset)
        if code == 0:
            code = 1
            message = f"the driver ended with exit code 0 but left no {self.files.marker}" + (
                f"; its last words:\n{message}" if message else ""
            )
        value = {
            "token": self.token,
            "job_id": self._claim.job_id,
            "attempt": self.restarts,
            "exit_code": code,
            "signal": signame,
            "cancelled": self._terminated,
            "message": message,
            "ended": time.time(),
        }
        self._release()  # first: whoever reads the exit record may start the next job at once
        write_json(self.files.exit, value)
        return value


def _in_driver(parent: int) -> None:
    """In the child, before exec: the driver saves and ends when its job is killed, and hears the signals again."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
