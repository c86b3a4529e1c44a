"""Signals of a job: the driver records a signal and stops between two steps; the workers ignore the signals."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from rlhpc.jobs.slurm import end_of
from rlhpc.runtime.errors import Stopped
from rlhpc.runtime.interrupts import restore_handlers

#: Exit code of a driver that saved and stopped before the end of its segment, because its job had to end (walltime,
#: preemption). Another start continues the segment. sysexits.h calls this code EX_TEMPFAIL.
EXIT_REQUEUE = 75
#: Environment variable with the number of consecutive failures from which a driver may recover by itself.
MAX_RESTARTS = "RLHPC_MAX_RESTARTS"

_REASONS = {
    signal.SIGUSR2: "the job must end soon (SIGUSR2: walltime or preemption)",
    signal.SIGTERM: "asked to end (SIGTERM)",
    signal.SIGINT: "interrupted (Ctrl-C)",
}


class StopRequest:
    """Stop flag that SIGUSR2, SIGTERM and SIGINT set, and that the runner polls between steps.

    A second SIGINT raises KeyboardInterrupt, so that a user can end the run at once. Use the object as a context manager, or
    call `install()` and `restore()`. Only the main thread can install the handlers.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._reason = ""
        self._num_interrupts = 0
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True if the run has to stop after the current step."""
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """Reason to stop, for `status.json`; "" if there is no request."""
        return self._reason

    @property
    def exit_code(self) -> int:
        """Exit code after the save: `EXIT_REQUEUE` for SIGUSR2 or a request without a signal, 128 + n for another signal n, 0
        without a request.
        """
        if self._signal is None:
            return EXIT_REQUEUE if self._reason else 0
        return EXIT_REQUEUE if self._signal is signal.SIGUSR2 else 128 + self._signal

    def request(self, reason: str) -> None:
        """Requests a stop without a signal, for example if no further step fits into the walltime. Keeps an earlier reason."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raises `Stopped` if a stop was requested. Called in waits during which no state has to be saved.

        Raises:
            Stopped: A stop was requested.
        """
        if self.requested:
            raise Stopped(self.reason, self.exit_code)

    def install(self) -> StopRequest:
        """Installs the handler of the three signals; returns this object.

        Raises:
            ValueError: Called outside the main thread.
        """
        for signum in _REASONS:
            self._previous_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def restore(self) -> None:
        """Restores the previous handlers."""
        restore_handlers(self._previous_handlers)

    def __enter__(self) -> StopRequest:
        return self.install()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        signal_id = signal.Signals(signum)
        if signal_id is signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
        # a request to end the run overrides a request to continue the run later: scancel may follow a walltime signal
        if self._signal is None or (self._signal is signal.SIGUSR2 and signal_id is not signal.SIGUSR2):
            self._signal = signal_id
            self._reason = _REASONS[signal_id]


#: Maximum and minimum seconds between two queries of a job's end; the interval shrinks as the end approaches.
_MAX_QUERY_INTERVAL_S, _MIN_QUERY_INTERVAL_S = 600.0, 30.0


@dataclass
class _JobEnd:
    """Last known end time of a job.

    Attributes:
        job: The job's id, and its end time according to the environment.
        time: Time of the query, by the monotonic clock.
        end_time: End of the job in Unix time; infinite without a limit, None if unknown.
    """

    job: tuple[str, str]
    time: float
    end_time: float | None

    @property
    def is_old(self) -> bool:
        remaining_s = math.inf if self.end_time is None else self.end_time - time.time()
        return time.monotonic() - self.time > min(_MAX_QUERY_INTERVAL_S, max(_MIN_QUERY_INTERVAL_S, remaining_s / 4))


_last_job_end: _JobEnd | None = None


def end_of_job(*, queries_slurm: bool = False) -> float | None:
    """Returns the Unix time at which Slurm ends this job; None if there is no limit or no answer from Slurm.

    The first value comes from `SLURM_JOB_END_TIME`, which Slurm sets at the job's start since 23.02. Later values come from
    squeue, because the limit of a running job can be changed (`scontrol update TimeLimit`); without an answer, the last known
    end is returned.

    Args:
        queries_slurm: Query Slurm now, even if the last answer is recent.
    """
    global _last_job_end
    job, end_text = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_JOB_END_TIME", "")
    if _last_job_end is None or _last_job_end.job != (job, end_text):
        end_time = (float(end_text) or math.inf) if end_text.isdigit() else end_of(job) if job else None
        _last_job_end = _JobEnd((job, end_text), time.monotonic(), end_time)
    elif job and (queries_slurm or _last_job_end.is_old):
        new_end_time = end_of(job)
        _last_job_end = _JobEnd(
            (job, end_text), time.monotonic(), _last_job_end.end_time if new_end_time is None else new_end_time
        )
    return None if _last_job_end.end_time is None or math.isinf(_last_job_end.end_time) else _last_job_end.end_time
