"""Workload of a step: its phases and variable keys, which each task type describes for `rlhpc tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """Phase of a step: work of one group. The group's ranks work at the same time with equal shares.

    Attributes:
        name: Name in tables.
        group: Group that does the work.
        metric: Metric with the phase's seconds per step on the slowest rank.
        turn: True for phases that alternate throughout the step: policy and simulators.
        streams: True if the phase starts with the first results of the preceding phase.
        on_cores: True if the phase computes on CPU cores even if the group has accelerators.
        waits: True if the metric is the driver's wait, which does not measure work if steps overlap.
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
    """Variable key of the configuration.

    Attributes:
        key: Dotted path of the key.
        values: Candidate values, including the configured value.
    """

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """Workload of a step of a run.

    Attributes:
        phases: Phases in the order of the step.
        samples: Number of samples of a step.
        unit: Unit of `samples`.
        knobs: Variable keys in addition to the placement.
        stages: Key of the number of stages in which alternating phases overlap; "" if there is no such key.
        turns: Metric with the seconds per step of all alternating phases; "" if there is no such metric.
        staleness: Key of the maximum staleness in steps of rollout relative to training; "" without one.
        measured_with: Overrides under which no phase overlaps another.
        smaller: Divisor → overrides under which a step has this fraction of the work, in the same number of pieces.
        divides: Group → number that must be divisible by the group's number of ranks; 0 for any number of ranks.
        several: Groups that may have several ranks on one accelerator.
        pieces: Number of batches in which one rank makes a step's samples, for phases that stream.
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
        """Groups of the phases, in the order of the phases."""
        return tuple(dict.fromkeys(phase.group for phase in self.phases))
