"""Training from Python: a run in a separate process, and its handle for scripts and notebooks."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Any

from rlhpc.config import total_steps
from rlhpc.config.files import ConfigSource, source_name
from rlhpc.config.sections import RunConfig
from rlhpc.config.sweep import override
from rlhpc.config.yaml_files import plain_value
from rlhpc.jobs.driver_job import first_failure, size_of, start_driver
from rlhpc.jobs.driver_lock import require_no_driver
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import SegmentJournal
from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS
from rlhpc.jobs.submit import driver_command
from rlhpc.jobs.waiter import DriverFailed, DriverRejected
from rlhpc.metrics import ProgressBar, read_metrics
from rlhpc.metrics.logger import read_last_metrics
from rlhpc.runs.checks import check_planned
from rlhpc.runs.conditional_keys import warn_of_unused
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import refuse_overfull
from rlhpc.runs.run_folder import note, resolve_resume
from rlhpc.runs.run_identity import write_config
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded, UserError
from rlhpc.runtime.imports import python_path

#: Exit codes of a driver after a request to end: before it could save (the first), and after it has saved.
_STOP_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT, EXIT_REQUEUE)
_POLL_S = 0.5
_GRACE_S = 600.0
#: Runs of this process that have not ended.
_live_runs: list[TrainingRun] = []


def load_for_training(config: ConfigSource, overrides: Sequence[str] = (), *, segment: int | None = None) -> RunConfig:
    """Reads the configuration for training on this machine, and warns of keys without effect.

    Args:
        config, overrides: See `load_config`.
        segment: Number of a segment; None for the complete run.

    Raises:
        ConfigError: The configuration is invalid, has no such segment, or needs more memory than available.
    """
    cfg = load_config(config, overrides)
    if segment is not None and not 0 <= segment < cfg.runner.segments:
        raise ConfigError(f"--segment is {segment}; the run has segments 0 to {cfg.runner.segments - 1}")
    refuse_overfull(cfg, source_name(config), "local")
    if MAX_RESTARTS not in os.environ:  # in a job, the submission has already warned the user
        warn_of_unused(config, overrides)
    return cfg


def train(config: ConfigSource, /, **overrides: Any) -> TrainingRun:
    """Starts a run in a separate process, like `rlhpc train`, and returns the run's handle at once.

    When this Python process ends, the run saves and ends too, as after Ctrl-C.

    Args:
        config: YAML file, a mapping of sections, or the result of `load_config`.
        overrides: Keys with their values: `**{"runner.max_steps": 10}`, or a section at a time, `runner={"max_steps": 10}`.

    Raises:
        ConfigError: A key or value is wrong, or the run has checkpoints already (pass `runner.resume_dir="auto"`).
        UserError: Another process trains this run.
    """
    override_words = [override(key, plain_value(override_value, key)) for key, override_value in overrides.items()]
    cfg = load_for_training(config, override_words)
    check_planned(cfg)
    require_no_driver(RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name))
    resolve_resume(cfg)
    return TrainingRun(cfg, source_name(config))


class TrainingRun:
    """Run that a separate process trains.

    As a context manager, the object ends the run at the end of the block; the run saves first.

    Args:
        cfg: Configuration from `load_for_training`.
        source: Name of the configuration.
    """

    def __init__(self, cfg: RunConfig, source: str) -> None:
        self.name, self.paths = cfg.runner.name, RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
        self._total_steps = total_steps(cfg)
        self._files = SegmentJournal(self.paths, 0)
        self._created_folders = _make_folders(self._files.driver_err.parent)
        self._err_offset = size_of(self._files.driver_err)
        self._old_metrics = None if cfg.runner.resume_dir is not None else _read_file_identity(self.paths.metrics)
        self._config = self._files.driver_err.with_suffix(".yaml")
        self._process: Popen[bytes] | None = None
        self._finish_event, self._is_cancelled, self._failure = threading.Event(), False, ""
        try:
            write_config(self._config, cfg, f"As started from {source}")
            self._start(driver_command(self._config, segment=None))
        except BaseException:
            self._remove_traces()
            raise
        _live_runs.append(self)

    def _start(self, command: list[str]) -> None:
        """Starts the driver from a thread that runs as long as the driver.

        The kernel ends the driver together with the thread that started it, and the caller's thread may end at any time.
        """
        environment = {MAX_RESTARTS: "0", "PYTHONPATH": python_path()}
        start_attempted, errors = threading.Event(), list[BaseException]()

        def run_driver() -> None:
            try:
                # Starts a new session, so that an interrupt of this process or of a notebook cell does not reach the run.
                self._process = start_driver(command, self._files, environment, start_new_session=True)
            except BaseException as error:
                errors.append(error)
                return
            finally:
                start_attempted.set()
            exit_code = self._process.wait()
            if exit_code == UserError.exit_code:
                self._remove_traces()
            with contextlib.suppress(ValueError):
                _live_runs.remove(self)
            self._finish_event.set()

        threading.Thread(target=run_driver, name=f"rlhpc {self.name}", daemon=True).start()
        start_attempted.wait()
        if errors:
            raise errors[0]

    def _remove_traces(self) -> None:
        """Removes the files of a driver that rejected the request; stores its error message in `_failure`."""
        self._failure = first_failure(self._files.driver_err, self._err_offset)
        if self.paths.config.exists():  # the run has started; a full disk is a UserError, too
            return
        for path in (self._config, self._files.driver_out, self._files.driver_err):
            if path.parent in self._created_folders:
                path.unlink(missing_ok=True)
        for folder in reversed(self._created_folders):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def __repr__(self) -> str:
        return f"TrainingRun({str(self.folder)!r}, {self.state}, step {self.step} of {self._total_steps})"

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Run folder."""
        return self.paths.root

    @property
    def state(self) -> str:
        """State of the run: `running`, `finished`, `stopped` (ended on request before the last step) or `failed`."""
        exit_code = None if self._process is None or not self._finish_event.is_set() else self._process.returncode
        if exit_code is None:
            return "running"
        return "finished" if exit_code == 0 else "stopped" if exit_code in _STOP_CODES else "failed"

    @property
    def step(self) -> int:
        """Number of completed steps, from the metrics."""
        row = self._last_row()
        return int(row["step"]) if row else 0

    @property
    def checkpoint(self) -> Path | None:
        """Best checkpoint of a run with `runner.keep_best`, otherwise the newest complete checkpoint, or None."""
        step = self.paths.chosen_step()
        return None if step is None else self.paths.checkpoint(step)

    def done(self) -> bool:
        """Returns whether the run has ended, in any state."""
        return self._finish_event.is_set()

    def metrics(self) -> list[dict[str, Any]]:
        """Returns a row of metrics for each step so far, with the step's number as `step`. Non-finite values are None;
        `pandas.DataFrame` accepts the rows.
        """
        return [] if self._is_old() else read_metrics(self.paths.metrics)

    def _is_old(self) -> bool:
        """Returns whether the metrics file is still the file of an earlier start that saved nothing."""
        return self._old_metrics is not None and _read_file_identity(self.paths.metrics) == self._old_metrics

    def _last_row(self) -> dict[str, Any] | None:
        """Returns the newest row of metrics. Reads only the end of the file, because it is called twice a second."""
        rows = [] if self._is_old() else read_last_metrics(self.paths.metrics)
        return rows[-1] if rows else None

    def report(self) -> Path:
        """Writes the report of the run so far, and returns the path of its page.

        Raises:
            RlhpcError: The run folder does not exist yet, or the page cannot be written.
        """
        from rlhpc.runs.report import write_report

        return write_report(self.paths)

    # -- end ------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> TrainingRun:
        """Waits for the end of the run, and shows its progress on stderr.

        After Ctrl-C or a notebook's interrupt, the run saves and ends. A second interrupt ends the run at once.

        Args:
            timeout_s: Maximum seconds to wait; None waits without a limit.

        Returns:
            The run.

        Raises:
            DriverRejected: The driver rejected the configuration; nothing was trained.
            DriverFailed: The run failed (the message has the first error), or another process ended the run.
            DeadlineExceeded: `timeout_s` has passed; the run continues.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            with contextlib.ExitStack() as exit_stack:
                bar = None
                while not self._finish_event.wait(max(0.0, min(_POLL_S, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        raise DeadlineExceeded(
                            f"run {self.folder} has not ended within {timeout_s:g} s; it goes on (step {self.step} of "
                            f"{self._total_steps}): wait again, or end it with cancel()"
                        )
                    if row := self._last_row():
                        step = int(row["step"])
                        bar = bar or exit_stack.enter_context(ProgressBar(self._total_steps, step - 1, name=self.name))
                        bar.update(step, _select_number_fields(row))
                if bar is not None and (row := self._last_row()):
                    bar.update(int(row["step"]), _select_number_fields(row))
        except KeyboardInterrupt:
            note(f"interrupted: {self.folder} saves and ends; Ctrl-C again ends it at once")
            self.cancel()
            raise
        self._raise_failure()
        return self

    def _raise_failure(self) -> None:
        """Raises the first error of a failed run; does nothing for a run that finished or was cancelled by this object."""
        assert self._process is not None
        exit_code, log = self._process.returncode, self._files.driver_err
        if exit_code == 0 or (self._is_cancelled and exit_code in (*_STOP_CODES, -signal.SIGKILL)):
            return
        if exit_code == UserError.exit_code:
            raise DriverRejected(self._failure)
        saved_text = f"saved in {self.checkpoint}" if self.checkpoint else "nothing is saved"
        if exit_code in _STOP_CODES:
            raise DriverFailed(
                f"run {self.folder} was asked to end from elsewhere at step {self.step} of {self._total_steps}; {saved_text}; "
                'to go on: runner.resume_dir="auto"', exit_code=abs(exit_code), log_path=str(log),
            )  # fmt: skip
        message = first_failure(log, self._err_offset) or f"its process ended with code {exit_code} and no message"
        raise DriverFailed(
            f"run {self.folder} failed: {message}\n(log: {log})", exit_code=abs(exit_code), log_path=str(log)
        )

    def cancel(self, grace_s: float = _GRACE_S) -> None:
        """Ends the run, which saves first; returns after its end. Has no effect on a run that has already ended.

        Args:
            grace_s: Maximum seconds for the run to save, after which the run is killed.
        """
        self._is_cancelled = self._is_cancelled or not self.done()
        self._send_signal(signal.SIGTERM)
        try:
            if not self._finish_event.wait(grace_s):
                self._kill()
        except KeyboardInterrupt:
            self._kill()
            raise

    def _kill(self) -> None:
        """Kills the driver and waits for its end; the kernel ends the ranks too."""
        self._send_signal(signal.SIGKILL)
        self._finish_event.wait()

    def _send_signal(self, signum: signal.Signals) -> None:
        if self._process is not None and not self.done():
            self._process.send_signal(signum)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _select_number_fields(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: field_value for name, field_value in row.items() if isinstance(field_value, (int, float))}


def _read_file_identity(path: Path) -> tuple[int, int, int] | None:
    """Returns inode, modification time and size of a file, which identify its content; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _make_folders(folder: Path) -> list[Path]:
    """Creates a folder and its parents; returns the created folders, outermost first.

    Raises:
        ConfigError: The folder cannot be created.
    """
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"runner.run_dir: {error.filename or folder} cannot be written: {error.strerror}; choose another"
        ) from error
    return missing_folders


def _end_all(owner_pid: int = os.getpid()) -> None:
    """Ends the runs of this process at its exit; the runs save first."""
    if os.getpid() != owner_pid:  # a forked process
        return
    for run in (living_runs := list(_live_runs)):
        note(f"{run.folder} saves and ends with the program that started it; wait() for it to train to its end")
        run._send_signal(signal.SIGTERM)  # all at once
    for run in living_runs:
        run.cancel()


atexit.register(_end_all)
