"""Measured costs of the phases of a step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Seconds per step of a rank as a function of its share of the step's work: linear interpolation of the measured points.

    Outside the points, the curve extrapolates the line through the two outermost points, but not below 0 seconds.

    Attributes:
        points: Pairs (share, seconds), sorted by share; at least one.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def through(cls, samples: Sequence[tuple[float, float]]) -> Curve:
        """Returns the curve through the medians of the measurements at each share. The curve is monotone: a larger share never
        takes less time.
        """
        fractions = sorted({fraction for fraction, _ in samples})
        curve_points: list[tuple[float, float]] = []
        for fraction in fractions:
            median_s = statistics.median(
                sample_s for sample_fraction, sample_s in samples if sample_fraction == fraction
            )
            curve_points.append((fraction, max(median_s, curve_points[-1][1] if curve_points else 0.0)))
        return cls(tuple(curve_points))

    def seconds_at(self, share: float) -> float:
        """Returns the seconds for a share of the work."""
        if len(self.points) == 1:  # with one measured share, the time is assumed to be proportional to the share
            return self.points[0][1] * share / self.points[0][0]
        upper_point = next(
            (i for i, (point_share, _) in enumerate(self.points) if point_share >= share), len(self.points) - 1
        )
        (x0, y0), (x1, y1) = self.points[max(upper_point, 1) - 1], self.points[max(upper_point, 1)]
        return max(0.0, y0 + (y1 - y0) * (share - x0) / (x1 - x0))


@dataclass(frozen=True)
class Costs:
    """Measured costs of a workload.

    Attributes:
        curves: Phase → seconds as a function of the share of the work.
        overhead_s: Seconds of a step outside all phases, in the driver.
        hop_s: Seconds of a step for the messages between alternating phases.
        together_s: Phase → extra seconds of two ranks, compared with one rank that has half of the work.
        threads: Threads of a rank during the measurement, by group.
        scaling: Phase → exponent of the speed-up with threads: 0 for none, 1 for linear.
        factors: `key=value` → phase → ratio of the phase's time with this value to its time with the configured value.
        extra_s: `key=value` → additional seconds of the step, which no phase explains; negative for a shorter step.
        memory: Group → bytes of host memory of a rank.
        device_memory: Group → bytes of accelerator memory of a rank.
        spread: Difference of two medians of equal runs, relative to their mean.
    """

    curves: Mapping[str, Curve]
    overhead_s: float = 0.0
    hop_s: float = 0.0
    together_s: Mapping[str, float] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    extra_s: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    device_memory: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0

    def times(self, ratio: float) -> Costs:
        """Returns the costs on a machine that takes `ratio` times as long."""

        def scale_seconds(seconds_by_metric: Mapping[str, float]) -> dict[str, float]:
            return {name: metric_s * ratio for name, metric_s in seconds_by_metric.items()}

        curves = {
            name: Curve(tuple((point_share, point_s * ratio) for point_share, point_s in curve.points))
            for name, curve in self.curves.items()
        }
        return replace(
            self, curves=curves, overhead_s=self.overhead_s * ratio, hop_s=self.hop_s * ratio,
            together_s=scale_seconds(self.together_s), extra_s=scale_seconds(self.extra_s),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as JSON values."""
        return {
            **asdict(self),
            "curves": {name: [list(p) for p in curve.points] for name, curve in self.curves.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Costs:
        """Restores costs from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: The content has a different form.
        """
        curves = {
            str(name): Curve(tuple((float(point_share), float(point_s)) for point_share, point_s in raw_points))
            for name, raw_points in content["curves"].items()
        }
        return cls(**{**content, "curves": curves})


def word_of(key: str, setting_value: Any) -> str:
    """Formats a key with its value as an override."""
    return f"{key}={json.dumps(setting_value)}"
