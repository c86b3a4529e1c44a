"""Analysis of traced steps: time per category along the critical path, idle ranks, slow ranks, and the long tail."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.runtime.files import is_number
from rlhpc.tracing.critical_path import PathPart, critical_path
from rlhpc.tracing.leaves import NO_SPAN, RankLeaves
from rlhpc.tracing.model import Span, Trace

#: Fraction of the largest batch of a step below which generation is in its tail.
TAIL_BATCH = 0.25
_IDLE = frozenset({"wait", NO_SPAN})


@dataclass(frozen=True)
class RankLoad:
    """Work of one rank in a step.

    Attributes:
        track, group, host: Name of the rank's track, its worker group and its host.
        rank: Number of the rank in its group.
        categories: Nanoseconds of work by category.
        busy_ns, idle_ns: Time in which the rank worked, and in which it waited or had nothing to do: together the step.
    """

    track: str
    group: str
    host: str
    rank: int
    categories: Mapping[str, int]
    busy_ns: int
    idle_ns: int

    @property
    def idle_share(self) -> float:
        return self.idle_ns / max(1, self.idle_ns + self.busy_ns)


@dataclass(frozen=True)
class GroupLoad:
    """Work of a worker group in a step.

    Attributes:
        group: Name of the group.
        ranks: Loads of its ranks, in order of rank.
        slowest: The rank that worked longest.
        excess_ns: Time by which it worked longer than the median rank of the group.
    """

    group: str
    ranks: Sequence[RankLoad]
    slowest: RankLoad
    excess_ns: int

    @property
    def idle_share(self) -> float:
        return statistics.fmean(rank_load.idle_share for rank_load in self.ranks)


@dataclass(frozen=True)
class Generation:
    """Generation of one engine in a step.

    Attributes:
        track: Name of the engine's track.
        busy_ns: Time of the engine's steps.
        num_steps: Number of the engine's steps.
        num_tokens: Number of generated tokens, one per sequence and engine step.
        num_finished: Number of sequences that ended in the step.
        largest_batch: Largest number of sequences that were generated at once.
        capacity: Number of sequences that the engine may generate at once; 0 if unknown.
        full_ns: Time of the engine's steps with as many sequences as it may generate at once.
        tail_start_ns: Time from which on less than `TAIL_BATCH` of the largest batch was generated, until the end.
        end_ns: End of the engine's last step.
        fixed_ns: Estimated time of an engine step apart from its sequences, by a linear fit; None if the batch hardly varied.
    """

    track: str
    busy_ns: int
    num_steps: int
    num_tokens: int
    num_finished: int
    largest_batch: int
    capacity: int
    full_ns: int
    tail_start_ns: int
    end_ns: int
    fixed_ns: float | None

    @property
    def mean_batch(self) -> float:
        return self.num_tokens / max(1, self.num_steps)

    @property
    def tail_ns(self) -> int:
        return self.end_ns - self.tail_start_ns


@dataclass(frozen=True)
class StepAnalysis:
    """Analysis of one traced step.

    Attributes:
        step: Number of the step.
        start_ns, end_ns: Interval of the step, on the driver's clock.
        path: Critical path, in order of time.
        groups: Loads of the worker groups, without the driver.
        driver: Load of the driver; None if its track is missing.
        generation: Generation of each engine.
        spans, hosts: Spans that overlap with the step, and the host, by track name.
    """

    step: int
    start_ns: int
    end_ns: int
    path: Sequence[PathPart]
    groups: Sequence[GroupLoad]
    driver: RankLoad | None
    generation: Sequence[Generation]
    spans: Mapping[str, Sequence[Span]]
    hosts: Mapping[str, str]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def driver_name(self) -> str:
        return self.driver.track if self.driver is not None else ""

    def path_categories(self) -> dict[str, int]:
        """Returns nanoseconds along the critical path by category, the largest first; they sum to the step's length."""
        return self._sum_path(lambda path_part: path_part.category)

    def path_groups(self) -> dict[tuple[str, str], int]:
        """Returns nanoseconds along the critical path by group and category, the largest first."""
        return self._sum_path(lambda path_part: (path_part.group, path_part.category))

    def path_ns(self, *categories: str, group: str | None = None) -> int:
        """Returns the nanoseconds that categories have on the critical path, of all groups or of one."""
        return sum(
            path_span.length_ns
            for path_span in self.path
            if path_span.category in categories and group in (None, path_span.group)
        )

    def _sum_path(self, key: Callable[[PathPart], Any]) -> dict[Any, int]:
        duration_by_key_ns: dict[Any, int] = defaultdict(int)
        for path_span in self.path:
            duration_by_key_ns[key(path_span)] += path_span.length_ns
        return dict(sorted(duration_by_key_ns.items(), key=lambda duration_item: -duration_item[1]))


def analyze(trace: Trace) -> dict[int, StepAnalysis]:
    """Returns the analysis of each traced step, by step; a step lasts until the end of the checkpoint that follows it."""
    steps = sorted(trace.steps().items())
    step_starts_ns = [start_ns for _, (start_ns, _) in steps]
    saves = [
        span for track in trace.tracks if track.group == "driver" for span in track.spans if span.category == "save"
    ]
    analyses = {}
    for step, (start_ns, end_ns) in steps:
        next_ns = min((other_ns for other_ns in step_starts_ns if other_ns >= end_ns), default=None)
        own_saves = [
            span.end_ns for span in saves if span.start_ns >= end_ns and (next_ns is None or span.end_ns <= next_ns)
        ]
        if (last_ns := max([end_ns, *own_saves])) > start_ns:
            analyses[step] = analyze_step(trace, step, start_ns, last_ns)
    return analyses


def analyze_step(trace: Trace, step: int, start_ns: int, end_ns: int) -> StepAnalysis:
    """Returns the analysis of one interval of a trace, which is called a step.

    Args:
        trace: The trace; ranks may be missing, and ranks that were killed have no spans after their end.
        step: Number of the step.
        start_ns, end_ns: Interval of the step.
    """
    ranks = {track.name: RankLeaves(track, start_ns, end_ns) for track in trace.tracks}
    loads: dict[str, list[RankLoad]] = defaultdict(list)
    for rank in ranks.values():
        loads[rank.track.group].append(_load_of(rank))
    spans = {
        track.name: [span for span in track.spans if span.start_ns < end_ns and span.end_ns > start_ns]
        for track in trace.tracks
    }
    driver = next(iter(loads.pop("driver", [])), None)
    return StepAnalysis(
        step, start_ns, end_ns, critical_path(trace, ranks, start_ns, end_ns),
        [_make_group_load(group, ranks_of_group) for group, ranks_of_group in loads.items()], driver,
        [
            generation
            for name, rank_spans in spans.items()
            if (generation := _measure_generation(name, rank_spans, start_ns, end_ns)) is not None
        ],
        spans, {track.name: track.host for track in trace.tracks},
    )  # fmt: skip


def _load_of(rank: RankLeaves) -> RankLoad:
    categories = rank.categories()
    idle_ns = sum(categories.pop(category, 0) for category in _IDLE)
    track = rank.track
    return RankLoad(
        track.name, track.group, track.host, track.rank, categories, rank.end_ns - rank.start_ns - idle_ns, idle_ns
    )


def _make_group_load(group: str, loads: Sequence[RankLoad]) -> GroupLoad:
    loads = sorted(loads, key=lambda rank_load: rank_load.rank)
    slowest = max(loads, key=lambda rank_load: rank_load.busy_ns)
    return GroupLoad(
        group, loads, slowest, slowest.busy_ns - statistics.median_low(rank_load.busy_ns for rank_load in loads)
    )


def _measure_generation(track: str, spans: Sequence[Span], start_ns: int, end_ns: int) -> Generation | None:
    """Returns the generation of a rank from its engine's steps; None if it recorded none."""
    engine_spans = [span for span in spans if span.category == "engine" and start_ns <= span.start_ns < end_ns]
    steps = [(span, int(span.args["batch"])) for span in engine_spans if is_number(span.args.get("batch"))]
    if not steps:
        return None
    largest_batch = max(batch for _, batch in steps)
    capacity = max(
        (int(span.args["capacity"]) for span in engine_spans if is_number(span.args.get("capacity"))), default=0
    )
    tail_start_ns = last_end_ns = min(steps[-1][0].end_ns, end_ns)
    for span, batch in reversed(steps):
        if batch > TAIL_BATCH * largest_batch:
            break
        tail_start_ns = span.start_ns
    step_durations_ns = [span.end_ns - span.start_ns for span, _ in steps]
    batches = [batch for _, batch in steps]
    return Generation(
        track,
        sum(step_durations_ns),
        len(steps),
        sum(batches),
        sum(int(span.args["finished"]) for span in engine_spans if is_number(span.args.get("finished"))),
        largest_batch,
        capacity,
        sum(span.end_ns - span.start_ns for span, batch in steps if capacity and batch >= capacity),
        tail_start_ns,
        last_end_ns,
        _estimate_fixed_cost(batches, step_durations_ns),
    )


def _estimate_fixed_cost(batches: Sequence[int], step_durations_ns: Sequence[int]) -> float | None:
    """Returns the time of an engine step without sequences, by the medians of small and of large batches."""
    middle_batch = (min(batches) + max(batches)) / 2
    small_batches = [(batch, ns) for batch, ns in zip(batches, step_durations_ns, strict=True) if batch <= middle_batch]
    large_batches = [(batch, ns) for batch, ns in zip(batches, step_durations_ns, strict=True) if batch > middle_batch]
    if not small_batches or not large_batches or max(batches) < 1.5 * min(batches):
        return None
    (small_batch, small_ns), (large_batch, large_ns) = (
        (statistics.median(batch for batch, _ in batch_half), statistics.median(ns for _, ns in batch_half))
        for batch_half in (small_batches, large_batches)
    )
    slope = max(0.0, (large_ns - small_ns) / (large_batch - small_batch))
    return max(0.0, min(small_ns, large_ns - slope * large_batch))
