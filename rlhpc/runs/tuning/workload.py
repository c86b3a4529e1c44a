"""What a step of a run consists of, and what may vary: what `rlhpc tune` asks a kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A part of a step that one group does, its ranks at the same time and with equal shares.

    Attributes:
        name: What it is called in tables.
        group: Who does it.
        metric: The metric with its seconds a step: those of the slowest rank at work.
        turn: One of the phases that answer each other all through the step: policy and simulators.
        streams: Begins with the first pieces that the phase before it has finished.
        on_cores: Computes on cores also where its group has accelerators.
        waits: Its metric is how long the driver waits, which says nothing where steps overlap.
    """

    name: str
    group: str
    metric: str
    turn: bool = False
    streams: bool = False
    on_cores: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Knob:
    """A key whose value may vary.

    Attributes:
        key: The key.
        values: All that are tried, the configured one among them.
    """

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """A step of a run.

    Attributes:
        phases: In the order in which they follow one another.
        samples: What a step makes.
        unit: What these samples are.
        knobs: What may vary besides the placement.
        stages: Key of the number of stages in which phases that take turns overlap; "" if there is none.
        turns: Metric with the seconds a step of the phases that take turns, together; "" if there are none.
        staleness: Key of the number of steps by which those who sample may be ahead of those who train; "" if there is none.
        measured_with: Overrides under which no phase overlaps another.
        smaller: Divisor → overrides under which a step has that part of the work, in as many pieces.
        divides: Group → a number that the number of its ranks must divide; 0 for any.
        several: Groups that may have several ranks on one accelerator.
        pieces: Batches in which a step's samples are made if there is one rank; for phases that stream.
    """

    phases: tuple[Phase, ...]
    samples: int
    unit: str
    knobs: tuple[Knob, ...] = ()
    stages: str = ""
    turns: str = ""
    staleness: str = ""
    measured_with: tuple[str, ...] = ()
    smaller: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    divides: Mapping[str, int] = field(default_factory=dict)
    several: frozenset[str] = frozenset()
    pieces: float = 1.0

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that phases belong to, in the order of the phases."""
        return tuple(dict.fromkeys(phase.group for phase in self.phases))
