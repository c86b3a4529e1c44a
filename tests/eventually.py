"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], bool], timeout: float) -> None:
    """Returns once the condition holds; fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)
