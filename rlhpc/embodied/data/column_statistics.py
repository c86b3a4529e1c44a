"""Statistics of a dataset's columns, computed in one pass within bounded memory.

Means and standard deviations are sums in float64, merged by Chan et al. (1979). Quantiles are exact up to `EXACT_ROWS` rows.
With more rows, they come from a histogram of each component with `BINS` bins of equal width, a power of two. A value outside
the histogram doubles the width, which merges pairs of bins without loss. A quantile's error is at most the width of a bin,
below 1/4000 of the component's range. (openpi's own statistics have 5000 bins, which it redistributes when the range grows.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: Quantiles of a column, as in LeRobot's `stats.json`.
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
#: Number of rows up to which quantiles are exact, and number of bins of a component's histogram.
EXACT_ROWS, BINS = 1 << 16, 1 << 14
Statistics = dict[str, np.ndarray]


def number_statistics(column: np.ndarray) -> Statistics:
    """Returns the statistics of each component of a column `[T]` or `[T, D]`, by statistic, `[D]`."""
    rows = np.asarray(column, np.float64).reshape(len(column), -1)
    statistics = {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        "count": np.array([len(rows)]),
    }
    quantiles = np.quantile(rows, QUANTILES, axis=0)
    return {
        **statistics,
        **{
            _format_quantile_name(quantile_level): quantile
            for quantile_level, quantile in zip(QUANTILES, quantiles, strict=True)
        },
    }


def _format_quantile_name(quantile: float) -> str:
    return f"q{round(quantile * 100):02d}"


class _Histogram:
    """Histogram of one component, whose bins widen with the range of the values.

    Args:
        lowest_value, highest_value: Range of the first values.
    """

    def __init__(self, lowest_value: float, highest_value: float) -> None:
        span = max(highest_value - lowest_value, 1e-9 * max(abs(lowest_value), abs(highest_value)), 1e-30)
        #: Exponent of the width of a bin, number of the first bin on the grid of that width, and counts.
        self._exponent = math.ceil(math.log2(span / (BINS // 2 - 2)))
        self._first_bin = math.floor(lowest_value / 2.0**self._exponent) - BINS // 4
        self._counts = np.zeros(BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Adds values `[T]`."""
        while True:
            bin_numbers = np.floor(values / 2.0**self._exponent)
            if bin_numbers.min() >= self._first_bin and bin_numbers.max() < self._first_bin + BINS:
                break
            self._double_bin_width(float(bin_numbers.min()), float(bin_numbers.max()))
        self._counts += np.bincount(bin_numbers.astype(np.int64) - self._first_bin, minlength=BINS)

    def _double_bin_width(self, lowest_value: float, highest_value: float) -> None:
        """Doubles the width of the bins, and centres the used ones and the range `lowest_value` to `highest_value` (in
        bins).
        """
        used_bins = np.flatnonzero(self._counts)
        bin_numbers = (used_bins + self._first_bin) >> 1
        end_bins = [
            math.floor(lowest_value / 2),
            math.floor(highest_value / 2),
            *(bin_numbers[[0, -1]].tolist() if len(used_bins) else []),
        ]
        middle = (min(end_bins) + max(end_bins)) // 2
        new_counts = np.zeros(BINS, np.int64)
        first_bin = middle - BINS // 2
        if (len(used_bins) and bin_numbers[0] - first_bin < 0) or (
            len(used_bins) and bin_numbers[-1] - first_bin >= BINS
        ):
            first_bin = int(bin_numbers[0]) - BINS // 4  # the new values are still out of reach
        np.add.at(new_counts, bin_numbers - first_bin, self._counts[used_bins])
        self._exponent, self._first_bin, self._counts = self._exponent + 1, first_bin, new_counts

    def quantile(self, quantile_level: float) -> float:
        """Returns a quantile, interpolated within its bin."""
        cumulative = np.cumsum(self._counts)
        rank = quantile_level * (cumulative[-1] - 1)
        bin_number = int(np.searchsorted(cumulative, rank, side="right"))
        num_below = cumulative[bin_number] - self._counts[bin_number]
        fraction = (rank - num_below + 0.5) / self._counts[bin_number]
        return float((self._first_bin + bin_number + fraction) * 2.0**self._exponent)


class RunningStatistics:
    """Statistics of a column's components over all rows that were added."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._min = self._max = np.zeros(0)
        self._rows: list[np.ndarray] = []
        self._histograms: list[_Histogram] = []

    def add(self, column: np.ndarray) -> None:
        """Adds rows `[T]` or `[T, D]`."""
        rows = np.asarray(column, np.float64).reshape(len(column), -1)
        if not len(rows):
            return
        mean, num_rows = rows.mean(0), len(rows)
        squares = ((rows - mean) ** 2).sum(0)
        if not self._count:
            self._mean, self._squares = mean, squares
            self._min, self._max = rows.min(0), rows.max(0)
        else:
            total_rows, delta = self._count + num_rows, mean - self._mean
            self._squares = self._squares + squares + delta**2 * (self._count * num_rows / total_rows)
            self._mean = self._mean + delta * (num_rows / total_rows)
            self._min, self._max = np.minimum(self._min, rows.min(0)), np.maximum(self._max, rows.max(0))
        self._count += num_rows
        if self._histograms:
            self._add_to_histograms(rows)
            return
        self._rows.append(np.array(column))
        if self._count > EXACT_ROWS:
            self._histograms = [
                _Histogram(lowest_value, highest_value)
                for lowest_value, highest_value in zip(self._min, self._max, strict=True)
            ]
            for row_block in self._rows:
                self._add_to_histograms(np.asarray(row_block, np.float64).reshape(len(row_block), -1))
            self._rows = []

    def _add_to_histograms(self, rows: np.ndarray) -> None:
        for histogram, column_values in zip(self._histograms, rows.T, strict=True):
            histogram.add(column_values)

    def all(self) -> Statistics:
        """Returns the statistics of each component, by statistic, `[D]`.

        Raises:
            ValueError: No row was added.
        """
        if not self._count:
            raise ValueError("statistics of no rows")
        if not self._histograms:
            return number_statistics(np.concatenate(self._rows))
        quantiles = {
            _format_quantile_name(quantile_level): np.clip(
                [histogram.quantile(quantile_level) for histogram in self._histograms], self._min, self._max
            )
            for quantile_level in QUANTILES
        }
        std = np.sqrt(self._squares / self._count)
        moment_values = {"min": self._min, "max": self._max, "mean": self._mean, "std": std}
        return {**moment_values, "count": np.array([self._count]), **quantiles}


def histogram(pictures: np.ndarray) -> np.ndarray:
    """Returns a histogram of each channel, `[C, 256]`, of uint8 images `[T, H, W, C]`."""
    return np.stack(
        [np.bincount(pictures[..., channel].reshape(-1), minlength=256) for channel in range(pictures.shape[-1])]
    )


def picture_statistics(level_counts: np.ndarray, num_frames: int) -> Statistics:
    """Returns statistics `[C, 1, 1]` of images, with values from 0 to 1, from the histograms `[C, 256]` of all frames."""
    levels, num_pixels = np.arange(256) / 255, level_counts.sum(1)
    mean = level_counts @ levels / num_pixels
    std = np.sqrt(np.maximum(level_counts @ levels**2 / num_pixels - mean**2, 0))
    cumulative_counts = np.cumsum(level_counts, 1)
    statistics = {
        "min": _find_first_level(cumulative_counts > 0),
        "max": _find_first_level(cumulative_counts == num_pixels[:, None]),
        "mean": mean,
        "std": std,
    }
    statistics |= {
        _format_quantile_name(quantile_level): _find_first_level(
            cumulative_counts >= quantile_level * num_pixels[:, None]
        )
        for quantile_level in QUANTILES
    }
    return {
        **{name: statistic.reshape(-1, 1, 1) for name, statistic in statistics.items()},
        "count": np.array([num_frames]),
    }


def _find_first_level(mask: np.ndarray) -> np.ndarray:
    level_values: np.ndarray = mask.argmax(1) / 255
    return level_values


class DatasetStatistics:
    """Statistics of all columns over all episodes, from running statistics of numbers and histograms of images."""

    def __init__(self) -> None:
        self._numbers: dict[str, RunningStatistics] = {}
        self._pictures: dict[str, tuple[np.ndarray, int]] = {}

    def add(self, name: str, column: np.ndarray, pictures: bool) -> Statistics:
        """Adds a column of an episode and returns the episode's statistics. `pictures` is True for a camera's images."""
        if not pictures:
            self._numbers.setdefault(name, RunningStatistics()).add(column)
            return number_statistics(column)
        level_counts, num_frames = histogram(column), len(column)
        previous_totals = self._pictures.get(name, (0, 0))
        self._pictures[name] = (previous_totals[0] + level_counts, previous_totals[1] + num_frames)
        return picture_statistics(level_counts, num_frames)

    def all(self) -> dict[str, Any]:
        """Returns the statistics over all episodes as JSON values, by column."""
        statistics = {name: running_statistics.all() for name, running_statistics in self._numbers.items()}
        statistics |= {name: picture_statistics(*picture_counts) for name, picture_counts in self._pictures.items()}
        return {
            name: {key: statistic.tolist() for key, statistic in column_statistics.items()}
            for name, column_statistics in statistics.items()
        }
