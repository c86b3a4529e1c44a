"""Metric columns of a run that is being written, and curves of several runs that are small enough for a page."""

from __future__ import annotations

import bisect
import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhpc.metrics.charts import running_mean
from rlhpc.metrics.logger import read_last_metrics, rows_in
from rlhpc.metrics.statistics import mean_interval
from rlhpc.runs.compare import interpolate_seeds
from rlhpc.runtime.files import open_file

Floats = npt.NDArray[np.float64]
#: Maximum number of points of a curve; a wider curve keeps the minimum and the maximum of each of half as many intervals.
MAX_POINTS = 1600
#: Maximum size of a metrics.jsonl that is shown, and of a line in a sample of it.
_MAX_BYTES, _MAX_LINE_BYTES = 2 << 30, 1 << 16
#: Significant digits of the numbers of a page.
_DIGITS = 7
#: Number of rows of a sample, and bytes at the end of a file in which its last row is looked for.
SAMPLE_ROWS, _TAIL_BYTES = 128, 1 << 14
#: Numbers from this size on are not drawn.
_MAX_VALUE = 1e300


@dataclass(frozen=True)
class MetricCurve:
    """Curve of a chart.

    Attributes:
        x, y: Points; x ascends.
        low, high: Ends of the 95 % interval of the mean over seeds at each point; None for a single run.
    """

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the curve as lists of numbers that JSON can represent."""
        arrays = {"x": self.x, "y": self.y, "low": self.low, "high": self.high}
        return {name: _to_list(values) for name, values in arrays.items() if values is not None}


def _to_list(values: Floats) -> list[float | None]:
    """Returns numbers with the digits that a chart can show; None for NaN and infinity."""
    is_finite = np.isfinite(values)
    numbers = np.where(is_finite, values, 0.0)
    sizes = np.abs(numbers)
    exponents = np.floor(np.log10(np.where(sizes > 0, sizes, 1.0))).astype(np.int64)
    # Of numbers beyond these the powers of ten are not exact; their digits are all kept.
    is_shortened = (exponents > _DIGITS - 22) & (exponents < 15)
    powers = np.where(is_shortened, _DIGITS - 1 - exponents, 0)
    up, down = 10.0 ** np.maximum(powers, 0), 10.0 ** np.maximum(-powers, 0)
    shortened_numbers: list[float | None] = np.where(
        is_shortened, np.rint(numbers * up / down) / up * down, numbers
    ).tolist()
    if is_finite.all():
        return shortened_numbers
    return [
        number if is_known else None for number, is_known in zip(shortened_numbers, is_finite.tolist(), strict=True)
    ]


class MetricTable:
    """Columns of a metrics.jsonl; `update` reads only what was added since the last call.

    Args:
        path: The file.

    Attributes:
        is_sample: Whether the table has only some rows of the file.
    """

    def __init__(self, path: Path) -> None:
        self.is_sample = False
        self._path = path
        self._steps: list[int] = []
        self._columns: dict[str, Floats] = {}
        self._offset = self._inode = self._size = self._mtime_ns = -1

    @classmethod
    def sample(cls, path: Path) -> MetricTable:
        """Returns a table with a fixed number of rows of a file, at equal distances in it."""
        table = cls(path)
        table.is_sample = True
        lines = []
        with contextlib.suppress(OSError), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            for number in range(SAMPLE_ROWS):
                file.seek(size * number // SAMPLE_ROWS)
                if number:
                    file.readline(_MAX_LINE_BYTES)  # the rest of a row
                lines.append(file.readline(_MAX_LINE_BYTES).rstrip(b"\n"))
        rows = {row["step"]: row for row in [*rows_in(b"\n".join(lines)), *read_last_metrics(path, _TAIL_BYTES)[-1:]]}
        table._append([rows[step] for step in sorted(rows)])
        return table

    def update(self) -> None:
        """Reads the rows that were added. A file that was replaced or has become shorter, as on resume, is read anew."""
        try:
            status = self._path.stat()
        except OSError:
            self._keep_row(0)
            self._inode = -1
            return
        if (status.st_ino, status.st_size, status.st_mtime_ns) == (self._inode, self._size, self._mtime_ns):
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._keep_row(0)
            self._offset = 0
        try:
            with open_file(self._path) as file:
                file.seek(self._offset)
                added_bytes = file.read(_MAX_BYTES)
        except OSError:
            return
        complete_bytes = added_bytes[: added_bytes.rfind(b"\n") + 1]
        rows = rows_in(complete_bytes)
        if rows:
            self._keep_row(bisect.bisect_left(self._steps, rows[0]["step"]))  # a resumed run writes later rows again
            self._append(rows)
            # The last row may still grow in place, so that it is read again.
            self._offset += complete_bytes.rfind(b"\n", 0, -1) + 1
        self._inode, self._size, self._mtime_ns = status.st_ino, status.st_size, status.st_mtime_ns

    def _keep_row(self, number: int) -> None:
        """Drops all but the first rows, and the metrics of which nothing is left."""
        del self._steps[number:]
        kept_columns = {name: column[:number] for name, column in self._columns.items()}
        self._columns = {name: column for name, column in kept_columns.items() if np.isfinite(column).any()}

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        earlier = np.full(len(self._steps), math.nan)
        self._steps += [row["step"] for row in rows]
        missing_values = np.full(len(rows), math.nan)
        new_columns = {
            name: _to_floats([row.get(name) for row in rows]) for name in {name for row in rows for name in row}
        }
        self._columns = {
            name: np.concatenate([self._columns.get(name, earlier), new_columns.get(name, missing_values)])
            for name in {**self._columns, **new_columns}
        }

    @property
    def nbytes(self) -> int:
        """Memory of the columns in bytes."""
        return sum(column.nbytes for column in self._columns.values())

    def names(self) -> list[str]:
        """Returns the names of all metrics, sorted."""
        return sorted(self._columns.keys() - {"step"})

    def column(self, name: str) -> Floats:
        """Returns a metric, or `step`, for each row; NaN where a row does not have it as a number."""
        column = self._columns.get(name)
        return np.full(len(self._steps), math.nan) if column is None else column

    def curve(self, name: str, against: str = "step") -> MetricCurve:
        """Returns the curve of a metric over another metric, from the rows that have both."""
        x, y = self.column(against), self.column(name)
        has_both = np.isfinite(x) & np.isfinite(y)
        x, y = x[has_both], y[has_both]
        if np.any(np.diff(x) < 0):
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return MetricCurve(x, y)


def _to_floats(values: Sequence[Any]) -> Floats:
    """Returns values as floats; NaN for other values, and for numbers that a chart cannot show."""
    if {*map(type, values)} <= {float, int, type(None)}:
        with contextlib.suppress(OverflowError):  # of an integer
            floats = np.array(values, dtype=np.float64)
            floats[np.abs(floats) >= _MAX_VALUE] = math.nan
            return floats
    return np.array([_to_float(value) for value in values], dtype=np.float64)


def _to_float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_VALUE else math.nan


def smooth(curve: MetricCurve, share: float) -> MetricCurve:
    """Returns the centred running mean over a share of the points, from 0 (unchanged) to 1."""
    return MetricCurve(curve.x, np.array(running_mean(curve.y, share), np.float64)) if share and len(curve.y) else curve


def cut_range(curve: MetricCurve, low: float, high: float) -> MetricCurve:
    """Returns the points with low ≤ x ≤ high, and the nearest point on each side, so that lines reach the chart's edge."""
    start = max(int(np.searchsorted(curve.x, low, "left")) - 1, 0)
    end = int(np.searchsorted(curve.x, high, "right")) + 1
    return MetricCurve(curve.x[start:end], curve.y[start:end])


def thin(curve: MetricCurve, max_points: int = MAX_POINTS) -> MetricCurve:
    """Returns at most about `max_points` points; each interval keeps its lowest and its highest point, so that spikes stay."""
    count = len(curve.x)
    if count <= max_points:
        return curve
    # The intervals differ in length by one point at most; each is a row.
    bounds = np.linspace(0, count, max_points // 2 + 1).astype(int)
    offsets = np.arange(np.diff(bounds).max())
    indices = bounds[:-1, None] + offsets
    is_inside = indices < bounds[1:, None]
    values = curve.y[np.minimum(indices, count - 1)]
    lowest = np.where(is_inside, values, math.inf).argmin(1)
    highest = np.where(is_inside, values, -math.inf).argmax(1)
    point_indices = np.unique(np.concatenate([[0, count - 1], bounds[:-1] + lowest, bounds[:-1] + highest]))
    return MetricCurve(curve.x[point_indices], curve.y[point_indices])


def combine_seeds(curves: Sequence[MetricCurve]) -> MetricCurve:
    """Returns the mean of several seeds with its 95 % interval by Student's t, as the tables of `rlhpc compare` have it."""
    pairs = [(curve.x.tolist(), curve.y.tolist()) for curve in curves if len(curve.x)]
    if not pairs:
        return MetricCurve(np.array([]), np.array([]))
    x, values = interpolate_seeds(pairs)
    means = values.mean(0)
    if len(values) == 1:
        return MetricCurve(x, means)
    ends = np.array([mean_interval(column) for column in values.T])
    return MetricCurve(x, means, ends[:, 0], ends[:, 1])
