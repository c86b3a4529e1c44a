"""Clock and timers of training phases, and the phase times in a run's metric rows.

The clock does not count time in which the process is stopped, for example by `scontrol suspend`. Training time, rates and
estimates use this clock.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhpc.runtime.trace_recorder import span

#: Seconds between two readings of the clock, and the additional delay of a reading that shows that the process was stopped.
_READING_INTERVAL_S, _MIN_STOP_S = 1.0, 10.0
#: Share of a gap during which a running process computed and blocked all other threads.
_BUSY_SHARE = 0.1


class ActiveClock:
    """Seconds in which this process was not stopped, from an arbitrary moment on.

    The clock omits a gap between two readings if the gap is longer than on a busy machine and the process used almost no CPU
    time within it. The clock does not detect shorter stops.

    Args:
        reading_interval_s: Seconds between two readings of the clock.
        min_stop_s: Seconds by which a gap must exceed `reading_interval_s` to count as a stop.
        read_clock: Clock that includes the stops, in seconds.
        read_cpu_clock: CPU time of this process, in seconds.
    """

    def __init__(
        self,
        reading_interval_s: float = _READING_INTERVAL_S,
        min_stop_s: float = _MIN_STOP_S,
        read_clock: Callable[[], float] = time.perf_counter,
        read_cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._reading_interval_s, self._min_stop_s = reading_interval_s, min_stop_s
        self._source, self._processor = read_clock, read_cpu_clock
        self._lock = threading.Lock()
        self._last_reading, self._last_cpu_s, self._total_stopped_s = read_clock(), read_cpu_clock(), 0.0

    def start(self) -> ActiveClock:
        """Starts a thread that reads the clock until the process ends."""
        threading.Thread(target=self._read_periodically, name="rlhpc-active-time", daemon=True).start()
        return self

    def __call__(self) -> float:
        with self._lock:
            now, cpu_s = self._source(), self._processor()
            gap = now - self._last_reading - self._reading_interval_s
            if gap > self._min_stop_s and cpu_s - self._last_cpu_s < _BUSY_SHARE * gap:
                self._total_stopped_s += gap
            self._last_reading, self._last_cpu_s = now, cpu_s
            return now - self._total_stopped_s

    def _read_periodically(self) -> None:
        while True:
            time.sleep(self._reading_interval_s)
            self()


@functools.cache
def _clock() -> ActiveClock:
    return ActiveClock().start()


os.register_at_fork(after_in_child=_clock.cache_clear)  # a child process does not have its parent's threads


def active_s() -> float:
    """Returns the seconds of this process's `ActiveClock`, which omit the time in which the process was stopped."""
    return _clock()()


Rows = Sequence[Mapping[str, Any]]

# Times that are not phases of a step: totals, saves between steps, transfers of weights, and the stages, which overlap. Rates
# end with `_per_s`.
STAGES = ("generate", "rollout_sync", "score", "train", "simulate", "act")
_NOT_PHASES = {"time/step_s", "time/wall_s", "time/save_s", "time/weights_s", *(f"time/{stage}_s" for stage in STAGES)}
_PHASE_ORDER = ["rollout", "receive", "update", "sync", "eval"]
_MAX_BARS = 48


def phase_columns(rows: Rows) -> dict[str, list[float]]:
    """Returns the seconds of each phase by row; `other` is the remainder of `time/step_s`."""
    phase_names = {key for row in rows for key in row if key.startswith("time/") and key.endswith("_s")} - _NOT_PHASES
    phases = sorted(
        name.removeprefix("time/").removesuffix("_s") for name in phase_names if not name.endswith("_per_s")
    )
    phases.sort(key=lambda name: _PHASE_ORDER.index(name) if name in _PHASE_ORDER else len(_PHASE_ORDER))
    columns = {name: [_finite_or_zero(row.get(f"time/{name}_s")) for row in rows] for name in phases}
    steps = [_finite_or_zero(row.get("time/step_s")) for row in rows]
    unattributed_s = [max(0.0, step - sum(columns[name][i] for name in phases)) for i, step in enumerate(steps)]
    if sum(unattributed_s) > 0.005 * sum(steps):
        columns["other"] = unattributed_s
    return columns


def bin_rows(
    rows: Rows, columns: Mapping[str, Sequence[float]]
) -> tuple[list[tuple[float, float]], list[tuple[str, list[float]]]]:
    """Divides the rows into at most `_MAX_BARS` bars; returns the step interval of each bar, and the means of each column."""
    if not rows or not columns:
        return [], []
    width = math.ceil(len(rows) / _MAX_BARS)
    bin_starts = range(0, len(rows), width)
    spans = [(rows[i]["step"] - 0.5, rows[min(i + width, len(rows)) - 1]["step"] + 0.5) for i in bin_starts]
    means = [
        (name, [sum(bar_values) / len(bar_values) for i in bin_starts if (bar_values := phase_values[i : i + width])])
        for name, phase_values in columns.items()
    ]
    return spans, means


def _finite_or_zero(column_value: Any) -> float:
    return float(column_value) if isinstance(column_value, (int, float)) and math.isfinite(column_value) else 0.0


class PhaseTimers:
    """Timers of named phases, in seconds; phases may repeat (their times add up) and nest (each counts its complete span).

    timers = PhaseTimers()
    with timers("rollout"):
        ...
    timers.pop()   # {"time/rollout_s": 0.12}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the time of a block, even if the block raises an error."""
        start_s = active_s()
        try:
            with span(name, "phase"):
                yield
        finally:
            self.add(name, active_s() - start_s)

    def add(self, name: str, duration_s: float) -> None:
        """Adds time measured elsewhere, for example in a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + duration_s

    def get(self, name: str) -> float:
        """Returns the seconds so far; 0 for a phase that did not run."""
        return self._seconds.get(name, 0.0)

    def pop(self) -> dict[str, float]:
        """Returns metric names and seconds since the last call, then starts over."""
        seconds_by_phase, self._seconds = self._seconds, {}
        return {f"time/{name}_s": phase_s for name, phase_s in seconds_by_phase.items()}
