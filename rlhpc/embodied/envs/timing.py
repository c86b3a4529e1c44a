"""How well robots keep their time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

#: What an env rank says of a rollout besides its episodes, where it has robots: see `Timing.news`.
_COUNTS = ("late", "dropped", "held", "refused", "stopped", "lost")
TIMED = ("robot_latency_ms", "robot_link_ms", *(f"robot_{name}" for name in _COUNTS))


class Timing:
    """How well a robot's episodes kept their time.

    Attributes:
        latency_s: From each observation to the command that the policy gave for it, by the robot's own clock.
        link_s: To a robot on another machine and back, by the run's own clock.
        late: Commands that came after their step was over.
        dropped: Steps that showed the same observation as the one before.
        held: Times that it held still because no command came.
        refused: Commands that were refused because they were chosen from an observation that was too old.
        stopped: Stops for safety.
        lost: Times that its line was lost.
    """

    def __init__(self) -> None:
        self.latency_s: list[float] = []
        self.link_s: list[float] = []
        self.late = self.dropped = self.held = self.refused = self.stopped = self.lost = 0
        self._told: dict[str, int] = {}

    def __str__(self) -> str:
        if not self.latency_s:
            return "no steps"
        middle, most = np.quantile(self.latency_s, (0.5, 0.99)) * 1000
        counts = f"{self.late} late, {self.dropped} dropped, {self.held} held, {self.refused} refused, {self.stopped} stopped"
        return f"{len(self.latency_s)} steps, latency {middle:.1f} ms (99 %: {most:.1f} ms), {counts}"

    def news(self) -> dict[str, np.ndarray]:
        """What has come since it was last asked, under the names of `TIMED`: latencies `[k]`, counts `[1]`."""
        lists = {"robot_latency_ms": self.latency_s, "robot_link_ms": self.link_s}
        counts = {f"robot_{name}": getattr(self, name) for name in _COUNTS}
        before = self._told
        self._told = counts | {name: len(values) for name, values in lists.items()}
        found = {
            name: np.array(values[before.get(name, 0) : self._told[name]]) * 1000.0 for name, values in lists.items()
        }
        return found | {name: np.array([count - before.get(name, 0)]) for name, count in counts.items()}

    def add(self, news: dict[str, np.ndarray]) -> None:
        """Takes in the `news` of another."""
        self.latency_s += (news["robot_latency_ms"] / 1000.0).tolist()
        self.link_s += (news["robot_link_ms"] / 1000.0).tolist()
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + int(news[f"robot_{name}"].sum()))


def timed(timings: Iterable[Timing | None]) -> dict[str, np.ndarray]:
    """The `news` of several robots together; nothing of each kind where there are none."""
    found = [timing.news() for timing in timings if timing is not None]
    return {name: np.concatenate([each[name] for each in found] or [np.zeros(0)]) for name in TIMED}


def timing_row(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Metrics of a step; none where there is no robot, or it did nothing."""
    row: dict[str, float] = {}
    for name in TIMED:
        values = columns.get(name, np.zeros(0))
        if name.endswith("_ms") and values.size:
            p50, p95 = np.quantile(values, (0.5, 0.95))
            row |= {
                f"env/{name}_p50": float(p50),
                f"env/{name}_p95": float(p95),
                f"env/{name}_max": float(values.max()),
            }
        elif values.size:
            row[f"env/{name}"] = float(values.sum())
    return row
