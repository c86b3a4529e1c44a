"""Phase times of a run's steps, from its metric rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhpc.runtime.active_time import active_s

Rows = Sequence[Mapping[str, Any]]

# Not phases of a step: totals, saves, which come between steps, the work of stages (they overlap), and rates (`…_per_s`).
STAGES = ("generate", "rollout_sync", "score", "train", "simulate", "act")
_NOT_PHASES = {"time/step_s", "time/wall_s", "time/save_s", *(f"time/{stage}_s" for stage in STAGES)}
_PHASE_ORDER = ["rollout", "receive", "update", "sync", "eval"]
_MAX_BARS = 48


def phase_columns(rows: Rows) -> dict[str, list[float]]:
    """Returns the seconds of each phase by row; `other` is the remainder of `time/step_s`."""
    names = {key for row in rows for key in row if key.startswith("time/") and key.endswith("_s")} - _NOT_PHASES
    short = sorted(name.removeprefix("time/").removesuffix("_s") for name in names if not name.endswith("_per_s"))
    short.sort(key=lambda name: _PHASE_ORDER.index(name) if name in _PHASE_ORDER else len(_PHASE_ORDER))
    columns = {name: [_number(row.get(f"time/{name}_s")) for row in rows] for name in short}
    steps = [_number(row.get("time/step_s")) for row in rows]
    other = [max(0.0, step - sum(columns[name][i] for name in short)) for i, step in enumerate(steps)]
    if sum(other) > 0.005 * sum(steps):
        columns["other"] = other
    return columns


def binned(
    rows: Rows, columns: Mapping[str, Sequence[float]]
) -> tuple[list[tuple[float, float]], list[tuple[str, list[float]]]]:
    """Bins the rows into at most `_MAX_BARS` bars, with the mean per bar."""
    if not rows or not columns:
        return [], []
    width = math.ceil(len(rows) / _MAX_BARS)
    starts = range(0, len(rows), width)
    spans = [(rows[i]["step"] - 0.5, rows[min(i + width, len(rows)) - 1]["step"] + 0.5) for i in starts]
    means = [
        (name, [sum(part) / len(part) for i in starts if (part := values[i : i + width])])
        for name, values in columns.items()
    ]
    return spans, means


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


class PhaseTimers:
    """Timers of named phases, in seconds; phases may repeat (their times add up) and nest (each counts its complete span).

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
        """Returns the seconds so far; 0 for a phase that did not run."""
        return self._spent.get(name, 0.0)

    def pop(self) -> dict[str, float]:
        """Returns metric names and seconds since the last call, then starts over."""
        spent, self._spent = self._spent, {}
        return {f"time/{name}_s": seconds for name, seconds in spent.items()}
