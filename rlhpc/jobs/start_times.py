"""Times of a run's start: stages of the driver, and phases of the ranks by worker group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.state import number_of
from rlhpc.runtime.registry import TIMELINE
from rlhpc.runtime.start_phases import RankPhases


def format_ranks(ranks: Sequence[int]) -> str:
    """Formats ascending ranks with ranges, such as `0–3, 5`."""
    rank_stretches: list[list[int]] = []
    for rank in ranks:
        if rank_stretches and rank == rank_stretches[-1][-1] + 1:
            rank_stretches[-1].append(rank)
        else:
            rank_stretches.append([rank])
    return ", ".join(
        f"{rank_stretch[0]}–{rank_stretch[-1]}" if len(rank_stretch) > 1 else str(rank_stretch[0])
        for rank_stretch in rank_stretches
    )


def read_start_marks(generation: Path) -> dict[str, float]:
    """Returns the times of the start's stages (`RunFolder.write_marks`); {} before the end of the first step."""
    start_marks = read_json_file(generation / TIMELINE) or {}
    times = {name: number_of(start_marks, name) for name in start_marks}
    return {name: start_time for name, start_time in times.items() if start_time is not None}


@dataclass(frozen=True)
class OpenPhase:
    """Phase that ranks of a group are in, the longest durations of the ended phases, and the first rank's time of entry."""

    group: str
    phase: str
    ranks: tuple[int, ...]
    start_time: float
    ended_phases: Mapping[str, float]


def open_phases(ranks: Iterable[RankPhases]) -> list[OpenPhase]:
    """Returns the current phases of each group, by the order of the groups and of their first rank in the phase."""
    ranks_by_phase: dict[tuple[str, str], list[RankPhases]] = {}
    for rank in ranks:
        if rank.phases:
            ranks_by_phase.setdefault((rank.group, rank.phases[-1][0]), []).append(rank)
    return [
        OpenPhase(
            group,
            phase,
            tuple(rank_phases.rank for rank_phases in group_phases),
            min(rank_phases.phases[-1][1] for rank_phases in group_phases),
            {phase: max(phase_seconds) for phase, phase_seconds in _collect_seconds_by_phase(group_phases).items()},
        )
        for (group, phase), group_phases in ranks_by_phase.items()
    ]


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of an ended phase over the ranks of a group: the number of ranks, the longest, its rank, and the shortest."""

    group: str
    phase: str
    num_ranks: int
    longest_s: float
    slowest_rank: int
    shortest_s: float


def phase_times(ranks: Iterable[RankPhases]) -> list[PhaseTime]:
    """Returns the times of all ended phases, by group and by the order in which the phases were first entered."""
    groups: dict[str, list[RankPhases]] = {}
    for rank in ranks:
        groups.setdefault(rank.group, []).append(rank)
    times = []
    for group, group_phases in groups.items():
        for phase in _collect_seconds_by_phase(group_phases):
            by_rank = [
                (seconds_by_name[phase], rank_phases.rank)
                for rank_phases in group_phases
                if phase in (seconds_by_name := rank_phases.durations())
            ]
            longest_s, slowest_rank = max(by_rank, key=lambda pair: (pair[0], -pair[1]))
            times.append(PhaseTime(group, phase, len(by_rank), longest_s, slowest_rank, min(by_rank)[0]))
    return times


def _collect_seconds_by_phase(ranks: Sequence[RankPhases]) -> dict[str, list[float]]:
    """Returns the seconds of each ended phase on all ranks that have ended it."""
    seconds_by_phase: dict[str, list[float]] = {}
    for rank in ranks:
        for phase, duration in rank.durations().items():
            seconds_by_phase.setdefault(phase, []).append(duration)
    return seconds_by_phase
