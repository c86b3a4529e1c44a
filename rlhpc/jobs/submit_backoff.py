"""Submit back-off: repeated attempts while the site admits no more jobs or Slurm does not answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rlhpc.runtime.errors import DeadlineExceeded, SubmitError

#: Limits on the number of jobs in the queue: QOSMaxSubmitJobPerUserLimit, AssocMaxSubmitJobLimit, … A limit on the size of a
#: job is permanent and does not match.
_LIMIT = re.compile(r"\b(?:QOS|Assoc)\w*Submit\w*\b")
#: Messages for a full queue (MaxJobCount). sbatch has already tried for some minutes.
_FULL = re.compile(r"Resource temporarily unavailable|temporarily unable to accept job")
_SILENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|standby mode|Connection refused|"
    r"[Cc]ommunication connection failure|Transport endpoint",
)
#: Minimum and maximum seconds between two attempts; the pause doubles.
MIN_PAUSE_S, MAX_PAUSE_S = 10.0, 120.0
#: Maximum seconds to wait while Slurm does not answer.
MAX_SILENCE_S = 900.0


class TemporaryRefusal(SubmitError):
    """Error: Slurm refused the job for now, and a later attempt may succeed.

    Attributes:
        reason: Name of the limit, or another short reason.
        silent: True if Slurm did not answer at all.
    """

    def __init__(self, message: str, *, reason: str, silent: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_silent = silent


def find_temporary_refusal(segment: int, output: str) -> TemporaryRefusal | None:
    """Builds the error for a temporary refusal from sbatch's output; returns None if the refusal is permanent."""
    message = f"segment {segment} could not be submitted (slurm): {output}"
    if limit_match := _LIMIT.search(output):
        return TemporaryRefusal(message, reason=limit_match.group())
    if limit_match := _FULL.search(output):
        return TemporaryRefusal(message, reason="the cluster's queue is full (MaxJobCount)")
    if _SILENT.search(output):
        return TemporaryRefusal(message, reason="Slurm does not answer", silent=True)
    return None


def refusal_text(refusal: TemporaryRefusal) -> str:
    """Formats a refusal, such as `not submitted yet: QOSMaxSubmitJobPerUserLimit; waits for room`."""
    return f"not submitted yet: {refusal.reason}; " + ("tries again" if refusal.is_silent else "waits for room")


class Backoff:
    """Pauses between submit attempts.

    Args:
        deadline_s: Maximum total seconds of waiting; None for no limit.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._started_at = time.monotonic()
        self._deadline_s = deadline_s
        self._pause_s = MIN_PAUSE_S
        self._silent_since: float | None = None

    def wait(self, refusal: TemporaryRefusal, check: Callable[[], None]) -> None:
        """Sleeps until the next attempt. Calls `check` once a second; `check` may raise.

        Raises:
            DeadlineExceeded: The wait was longer than `deadline_s`.
            SubmitError: Slurm has not answered for too long.
        """
        now = time.monotonic()
        self._silent_since = (self._silent_since or now) if refusal.is_silent else None
        if self._silent_since is not None and now - self._silent_since > MAX_SILENCE_S:
            raise SubmitError(f"{refusal}\n  tried for {MAX_SILENCE_S:.0f} s; see `scontrol ping`")
        deadline = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        while (now := time.monotonic()) < deadline:
            if self._deadline_s is not None and now - self._started_at > self._deadline_s:
                raise DeadlineExceeded(f"{refusal}\n  waited {self._deadline_s:g} s for room; nothing was submitted")
            check()
            time.sleep(min(1.0, deadline - now))
