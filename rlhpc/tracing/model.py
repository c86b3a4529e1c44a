"""Typed form of a trace, from the ranks' files to exports, the timeline and the analysis of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.runtime.files import is_count

#: Categories of spans. `step` and `phase` are the driver's; spans of `wait` are the only ones in which a rank is idle.
CATEGORIES = (
    "step", "phase", "call", "wait", "send", "receive", "weights", "engine", "simulator", "train", "judge", "turn", "tool",
    "save",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Named interval of one thread; spans of a thread nest.

    Attributes:
        name: Name of the work, e.g. a method's name, or the channel's name of a `wait`.
        category: One of `CATEGORIES`.
        start_ns, end_ns: Nanoseconds since the epoch, on the driver's clock.
        thread: Name of the thread or asyncio task.
        args: Details, e.g. `step`, `tokens`, `batch`, `bytes`, `channel`, `group`.
    """

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: str = "main"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter:
    """Values of a quantity over time, e.g. `queue depth/rollouts`, `GPU utilisation`, `memory`."""

    name: str
    unit: str
    samples: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RankTrack:
    """Spans and counters of one rank's process; the driver is group `driver`, rank 0. Spans stand in order of start.

    `dropped` is the number of spans and messages that the recorder could not keep.
    """

    group: str
    rank: int
    host: str
    pid: int
    spans: Sequence[Span]
    counters: Sequence[Counter] = ()
    dropped: int = 0

    @property
    def name(self) -> str:
        return f"{self.group}-{self.rank}"


@dataclass(frozen=True, slots=True)
class MessageFlow:
    """Message from a span of one rank to a span of another: `(track name, nanoseconds)` of its start and of its end."""

    name: str
    source: tuple[str, int]
    target: tuple[str, int]


@dataclass(frozen=True, slots=True)
class HostClock:
    """Offset of a host's clock from the driver's, in nanoseconds: a positive one means that the host's clock is ahead.

    Attributes:
        host: Name of the host.
        offset_ns: Offset at `at_ns`.
        error_ns: Bound of the error: while the trace was recorded, the true offset was within `error_ns` of `offset_at`.
        drift: Change of the offset per nanosecond of the host's clock.
        at_ns: Time on the host's clock.
    """

    host: str
    offset_ns: int
    error_ns: int
    drift: float = 0.0
    at_ns: int = 0

    def offset_at(self, host_ns: int) -> int:
        """Returns the offset at a time on the host's clock."""
        return self.offset_ns + round(self.drift * (host_ns - self.at_ns))


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of a run: the recorded steps of all ranks, with times on the driver's clock."""

    run: str
    tracks: Sequence[RankTrack]
    flows: Sequence[MessageFlow] = ()
    clocks: Sequence[HostClock] = ()

    def steps(self) -> dict[int, tuple[int, int]]:
        """Returns the start and end of each traced step, in nanoseconds, by step: the driver's spans of category `step`."""
        return {
            int(span.args["step"]): (span.start_ns, span.end_ns)
            for track in self.tracks
            if track.group == "driver"
            for span in track.spans
            if span.category == "step" and is_count(span.args.get("step"))
        }
