"""Waiting for what other threads and processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def busyness() -> float:
    """Returns how many times as long as on a free machine a process may take now: 1 to 8."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 8.0)


class Patience:
    """Time limit of a wait, in seconds of a machine with a free processor: on a busy machine, they pass more slowly.

    What is waited for takes longer there, and only a test that fails waits to the end.

    Args:
        seconds: The limit.
    """

    def __init__(self, seconds: float) -> None:
        self.remaining_s, self._looked_at = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Returns whether the time has passed."""
        now = time.monotonic()
        self.remaining_s -= (now - self._looked_at) / busyness()
        self._looked_at = now
        return self.remaining_s < 0


def wait_until(true: Callable[[], bool], timeout: float) -> None:
    """Returns once the condition holds; fails after `timeout` seconds."""
    patience = Patience(timeout)
    while not true():
        assert not patience.is_over(), "it did not come true"
        time.sleep(0.001)


def has_ended(pid: int, timeout_s: float = 5.0) -> bool:
    """Waits for the end of a process; returns whether it came in time."""
    patience = Patience(timeout_s)
    while is_there(pid):
        if patience.is_over():
            return False
        time.sleep(0.02)
    return True


def is_there(pid: int) -> bool:
    """Returns at once whether a process has not ended."""
    import psutil  # the system's Python, which runs the test cluster, does not have it

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
