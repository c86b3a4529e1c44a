"""Timers for the named phases of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhpc.runtime.active_time import active_s


class PhaseTimers:
    """Seconds per named phase; phases may repeat (they add up) and nest (each counts its whole span).

    timers = PhaseTimers()
    with timers("rollout"):
        ...
    timers.pop()   # {"time/rollout_s": 0.12}
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a block, even if it raises."""
        start = active_s()
        try:
            yield
        finally:
            self.add(name, active_s() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds time measured elsewhere, for example in a worker."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def get(self, name: str) -> float:
        """Seconds so far; 0 for a phase that did not run."""
        return self._spent.get(name, 0.0)

    def pop(self) -> dict[str, float]:
        """Returns metric names and seconds since the last call, then starts over."""
        spent, self._spent = self._spent, {}
        return {f"time/{name}_s": seconds for name, seconds in spent.items()}
