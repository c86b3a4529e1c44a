"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(true: Callable[[], bool], timeout: float) -> None:
    """Returns once the condition holds; fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def has_ended(pid: int, timeout_s: float = 5.0) -> bool:
    """Waits for the end of a process; returns whether it came in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
