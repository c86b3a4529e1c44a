"""Start phases of ranks, from the launch of their processes to the end of the run's first step.

A rank sends each phase to the driver, as a note over its control connection. The driver keeps the phases of its ranks and
publishes them as one record of the registry, which `rlhpc status` and the report read. Until the first step is done, the name
of each call is a phase of the ranks that execute it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.files import read_file, read_json

#: Phases of a rank, in order: name, and Unix time at which the phase began.
Phases = list[tuple[str, float]]
#: Phases of a rank's process before it takes calls, in this order.
ENVIRONMENT, RENDEZVOUS, IMPORTS = "environment", "rendezvous", "imports"
#: Phase of a rank that executes no call.
WAITING = "waiting"
#: Kind and name of the registry's record.
_RECORD = ("start", "ranks")


class _PhaseReporter:
    """Reporter of this process's phases to the driver.

    Attributes:
        send: Sends phases to the driver; None in a process that is not a rank.
        phase: Current phase; "" before the first.
    """

    def __init__(self) -> None:
        self.send: Callable[[Phases], None] | None = None
        self.phase = ""

    def connect(self, send: Callable[[Phases], None], phases: Phases) -> None:
        """Starts to report with `send`; `phases` are the phases before the connection to the driver."""
        self.send, self.phase = send, phases[-1][0]
        send(phases)

    def enter(self, phase: str) -> None:
        """Ends the current phase and enters another one; does nothing in a process that is not a rank."""
        if self.send is not None and phase != self.phase:
            self.phase = phase
            self.send([(phase, time.time())])


_reporter = _PhaseReporter()
#: Starts to report the phases of this process; called once in each rank.
connect_reporter = _reporter.connect
#: Enters a phase; libraries and workers call it for the parts of a long call.
enter_phase = _reporter.enter


@contextmanager
def phases_within() -> Iterator[None]:
    """Returns to the phase before the block when the block ends."""
    phase = _reporter.phase
    try:
        yield
    finally:
        if phase:
            enter_phase(phase)


@dataclass(frozen=True)
class RankPhases:
    """Phases of a rank.

    Attributes:
        group: Worker group.
        rank: Rank in the group.
        phases: Phases so far; the last one has not ended.
    """

    group: str
    rank: int
    phases: Sequence[tuple[str, float]]

    def durations(self) -> dict[str, float]:
        """Returns the seconds of each phase that has ended; a phase that was entered repeatedly has the sum."""
        seconds_by_phase: dict[str, float] = {}
        for (phase, start_time), (_, end_time) in zip(self.phases, self.phases[1:], strict=False):
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + max(0.0, end_time - start_time)
        return seconds_by_phase

    def truncate_at(self, end: float) -> RankPhases:
        """Returns the phases that began before the Unix time `end`; the last of them ends then."""
        phases = [(phase, start_time) for phase, start_time in self.phases if start_time < end]
        return RankPhases(self.group, self.rank, [*phases, (WAITING, end)] if phases else [])

    def describe(self, now: float) -> str:
        """Returns the current phase with its duration and the ended phases as text; "" while the rank waits for calls."""
        if not self.phases or self.phases[-1][0] == WAITING:
            return ""
        phase, start_time = self.phases[-1]
        durations_text = format_durations(self.durations())
        return f"in phase {phase!r} for {max(0.0, now - start_time):.1f} s" + (
            f", after {durations_text}" if durations_text else ""
        )


def format_durations(seconds_by_phase: Mapping[str, float]) -> str:
    """Returns durations as text, such as `environment 0.3 s, imports 9.8 s`, without the time of waiting for calls."""
    return ", ".join(f"{phase} {duration:.1f} s" for phase, duration in seconds_by_phase.items() if phase != WAITING)


def phase_record(ranks: Iterable[RankPhases]) -> tuple[str, str, dict[str, Any]]:
    """Returns kind, name and content of the registry's record with the phases of all ranks (`GenerationFolder.put`)."""
    rows = [{"group": rank.group, "rank": rank.rank, "phases": [*map(list, rank.phases)]} for rank in ranks]
    return *_RECORD, {"ranks": rows}


def read_phases(generation: Path) -> list[RankPhases]:
    """Returns the phases in a generation's record, by group and rank; [] if the record is missing or of a wrong form."""
    try:
        record = read_json(read_file(generation / _RECORD[0] / f"{_RECORD[1]}.json"))
        ranks = [
            RankPhases(
                str(row["group"]),
                int(row["rank"]),
                [(str(name), float(start_time)) for name, start_time in row["phases"]],
            )
            for row in record["ranks"]
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return []
    finite = [rank for rank in ranks if all(math.isfinite(phase_time) for _, phase_time in rank.phases)]
    return sorted(finite, key=lambda rank: (rank.group, rank.rank))
