"""The statistics that a LeRobot dataset has of each column: of every episode, and of all."""

from __future__ import annotations

from typing import Any

import numpy as np

_QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
Statistics = dict[str, np.ndarray]


def of_numbers(column: np.ndarray) -> Statistics:
    """Of numbers `[T]` or `[T, D]`, by component."""
    rows = np.asarray(column, np.float64).reshape(len(column), -1)
    found = {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        "count": np.array([len(rows)]),
    }
    quantiles = np.quantile(rows, _QUANTILES, axis=0)
    return {**found, **{_name(q): value for q, value in zip(_QUANTILES, quantiles, strict=True)}}


def histogram(pictures: np.ndarray) -> np.ndarray:
    """How often each value is in each channel `[C, 256]` of pictures `[T, H, W, C]` uint8."""
    return np.stack([np.bincount(pictures[..., c].reshape(-1), minlength=256) for c in range(pictures.shape[-1])])


def of_pictures(counts: np.ndarray, frames: int) -> Statistics:
    """From histograms: by channel `[C, 1, 1]`, between 0 and 1."""
    values, total = np.arange(256) / 255, counts.sum(1)
    mean = counts @ values / total
    std = np.sqrt(np.maximum(counts @ values**2 / total - mean**2, 0))
    below = np.cumsum(counts, 1)
    found = {"min": _first(below > 0), "max": _first(below == total[:, None]), "mean": mean, "std": std}
    found |= {_name(q): _first(below >= q * total[:, None]) for q in _QUANTILES}
    return {**{name: value.reshape(-1, 1, 1) for name, value in found.items()}, "count": np.array([frames])}


def _first(where: np.ndarray) -> np.ndarray:
    found: np.ndarray = where.argmax(1) / 255
    return found


def _name(quantile: float) -> str:
    return f"q{round(quantile * 100):02d}"


class Totals:
    """Statistics of all episodes, exactly.

    Numbers are kept; of pictures, only how often each value is there.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, list[np.ndarray]] = {}
        self._pictures: dict[str, tuple[np.ndarray, int]] = {}

    def add(self, name: str, column: np.ndarray, pictures: bool) -> Statistics:
        """Takes in an episode's column; returns the statistics of that alone."""
        if not pictures:
            self._numbers.setdefault(name, []).append(column)
            return of_numbers(column)
        counts, frames = histogram(column), len(column)
        before = self._pictures.get(name, (0, 0))
        self._pictures[name] = (before[0] + counts, before[1] + frames)
        return of_pictures(counts, frames)

    def all(self) -> dict[str, Any]:
        """As JSON values, by column."""
        found = {name: of_numbers(np.concatenate(parts)) for name, parts in self._numbers.items()}
        found |= {name: of_pictures(*held) for name, held in self._pictures.items()}
        return {name: {key: value.tolist() for key, value in each.items()} for name, each in found.items()}
