"""Submit back-off for jobs that cannot be submitted now: the site limits their number, or Slurm does not answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rlhpc.runtime.errors import DeadlineExceeded, SubmitError

#: Limits on the number of jobs in the queue: QOSMaxSubmitJobPerUserLimit, AssocMaxSubmitJobLimit, …; a limit on a job's
#: size, by contrast, refuses the job for good.
_LIMIT = re.compile(r"\b(?:QOS|Assoc)\w*Submit\w*\b")
#: MaxJobCount is reached; sbatch itself has already tried for some minutes.
_FULL = re.compile(r"Resource temporarily unavailable|temporarily unable to accept job")
_SILENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|standby mode|Connection refused|"
    r"[Cc]ommunication connection failure|Transport endpoint",
)
#: Seconds between two tries, growing from the first number to the second.
FIRST_S, MOST_S = 10.0, 120.0
#: Maximum wait for a Slurm that does not answer.
SILENT_S = 900.0


class NotNow(SubmitError):
    """Temporary refusal: the job was not submitted, and may be later.

    Attributes:
        reason: The reason, in Slurm's words.
        silent: True if Slurm did not answer at all.
    """

    def __init__(self, message: str, *, reason: str, silent: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.silent = silent


def not_now(segment: int, output: str) -> NotNow | None:
    """Returns sbatch's message as a temporary refusal; None if the refusal is permanent."""
    message = f"segment {segment} could not be submitted (slurm): {output}"
    if match := _LIMIT.search(output):
        return NotNow(message, reason=match.group())
    if match := _FULL.search(output):
        return NotNow(message, reason="the cluster's queue is full (MaxJobCount)")
    if _SILENT.search(output):
        return NotNow(message, reason="Slurm does not answer", silent=True)
    return None


def refusal_text(refusal: NotNow) -> str:
    """Formats the refusal: `QOSMaxSubmitJobPerUserLimit: waits for room` and the like."""
    return f"not submitted yet: {refusal.reason}; " + ("tries again" if refusal.silent else "waits for room")


class Backoff:
    """Pauses between submit attempts.

    Args:
        deadline_s: Maximum total wait.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._began = time.monotonic()
        self._deadline_s = deadline_s
        self._pause = FIRST_S
        self._silent_since: float | None = None

    def wait(self, refusal: NotNow, check: Callable[[], None]) -> None:
        """Sleeps until the next attempt; `check` is called once a second and may raise.

        Raises:
            DeadlineExceeded: The wait was longer than `deadline_s`.
            SubmitError: Slurm has not answered for too long.
        """
        now = time.monotonic()
        self._silent_since = (self._silent_since or now) if refusal.silent else None
        if self._silent_since is not None and now - self._silent_since > SILENT_S:
            raise SubmitError(f"{refusal}\n  tried for {SILENT_S:.0f} s; see `scontrol ping`")
        deadline = now + self._pause
        self._pause = min(2 * self._pause, MOST_S)
        while (now := time.monotonic()) < deadline:
            if self._deadline_s is not None and now - self._began > self._deadline_s:
                raise DeadlineExceeded(f"{refusal}\n  waited {self._deadline_s:g} s for room; nothing was submitted")
            check()
            time.sleep(min(1.0, deadline - now))
