"""Workload of a step: its phases and the keys that may vary, as each task type describes them for `rlhpc tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """Phase of a step: work of one group, whose ranks work at the same time and with equal shares.

    Attributes:
        name: Name in tables.
        group: Group that does the work.
        metric: Metric with its seconds per step: those of the slowest working rank.
        turn: True for phases that alternate throughout the step: policy and simulators.
        streams: True if it starts with the first pieces that the preceding phase has finished.
        on_cores: True if it computes on cores even where its group has accelerators.
        waits: True if its metric is the driver's wait, which measures no work where steps overlap.
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
    """Key whose value may vary.

    Attributes:
        key: The key.
        values: Candidate values, including the configured one.
    """

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """Workload of a step of a run.

    Attributes:
        phases: Phases in their order.
        samples: Number of samples of a step.
        unit: Unit of these samples.
        knobs: Keys that may vary besides the placement.
        stages: Key of the number of stages in which alternating phases overlap; "" without one.
        turns: Metric with the seconds per step of all alternating phases; "" without one.
        staleness: Key of the maximum staleness in steps of rollout relative to training; "" without one.
        measured_with: Overrides under which no phase overlaps another.
        smaller: Divisor → overrides under which a step has that share of the work, in as many pieces.
        divides: Group → a number that the number of its ranks must divide; 0 for any.
        several: Groups that may have several ranks on one accelerator.
        pieces: Number of batches in which one rank makes a step's samples; for phases that stream.
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
        """Groups that phases belong to, in the order of the phases."""
        return tuple(dict.fromkeys(phase.group for phase in self.phases))
