"""Reader of a run's recorded trace: merges the ranks' files and puts all times on the driver's clock.

A file may be in use, or its rank may have been killed: a half last line, and any line that is no JSON object of the expected
form, is left out.

Ranks record times of the monotonic clock, which all processes of a host share, plus a number that each process read once from
its wall clock. The reader replaces that number by one for all ranks of the host, so that their times agree even if the wall
clock was set while the trace was recorded.

Clocks of hosts are aligned by the times of requests and replies: each sample (t1, t2, t3, t4) has the times at which a request
was sent here, received there, answered there, and its reply received here. As in NTP (RFC 5905, section 8), the offset of the
other clock is ((t2 - t1) + (t3 - t4)) / 2, with an error of at most half the delay (t4 - t1) - (t3 - t2). Of the samples of an
interval, the one with the smallest delay is used. A line through these samples gives offset and drift. The offset of a host's
wall clock, which the trace names, follows from that and from the ranks' pairs of both clocks.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.config.constraints import format_steps
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, open_file, read_json
from rlhpc.runtime.trace_recorder import ClockSample
from rlhpc.tracing.model import Counter, HostClock, MessageFlow, RankTrack, Span, Trace

log = logging.getLogger(__name__)
#: Maximum bytes of a line; longer lines are left out.
_MAX_LINE = 1 << 26


@dataclass
class _RankFile:
    """Content of a rank's file, with times on the rank's clock.

    Attributes:
        header: The newest header.
        spans: Rows of name, category, start, end, thread and arguments.
        messages: Rows of name, source's track name, departure and arrival, of messages between ranks of this host.
        flows: Rows of id, 0 for the source or 1 for the target, time and name.
        counters: Name and unit of a counter → its samples.
        clock: Samples of the driver's clock.
        wall: Pairs of the rank's clock and of the host's wall clock.
        dropped: Number of spans and flows that the recorder dropped.
        anchors: Host id → wall clock minus monotonic clock, which all ranks of the host share; the first one read.
    """

    header: dict[str, Any] = field(default_factory=dict)
    spans: list[list[Any]] = field(default_factory=list)
    messages: list[list[Any]] = field(default_factory=list)
    flows: list[list[Any]] = field(default_factory=list)
    counters: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)
    clock: list[ClockSample] = field(default_factory=list)
    wall: list[tuple[int, int]] = field(default_factory=list)
    dropped: int = 0
    anchors: dict[str, int] = field(default_factory=dict)
    _correction_ns: int = 0

    @property
    def name(self) -> str:
        return f"{self.header['group']}-{self.header['rank']}"

    def _time(self, json_value: Any) -> int:
        """Returns a time of the file with the host's anchor in place of the process's."""
        return _read_count(json_value) + self._correction_ns

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of the file.

        Raises:
            ValueError, TypeError, KeyError, IndexError: The line has a different form.
        """
        if "rlhpc_trace" in line:
            header = {name: str(line[name]) for name in ("group", "host", "host_id")}
            self.header = {**header, "rank": _read_count(line["rank"]), "pid": _read_count(line["pid"])}
            anchor_ns = _read_count(line.get("anchor_ns", 0))
            self._correction_ns = self.anchors.setdefault(header["host_id"], anchor_ns) - anchor_ns
            return
        for name, category, start_ns, end_ns, thread, args in line.get("spans", ()):
            span_details = {str(key): arg_value for key, arg_value in (args or {}).items()}
            self.spans.append(
                [str(name), str(category), self._time(start_ns), self._time(end_ns), str(thread), span_details]
            )
        for (name, category, thread, args), start_ns, duration_ns in _unpack(line.get("packed")):
            span_details = {str(key): arg_value for key, arg_value in (args or {}).items()}
            start, end = self._time(start_ns), self._time(start_ns + duration_ns)
            self.spans.append([str(name), str(category), start, end, str(thread), span_details])
        for (name, source_rank), sent_ns, duration_ns in _unpack(line.get("messages")):
            self.messages.append([str(name), str(source_rank), self._time(sent_ns), self._time(sent_ns + duration_ns)])
        self.flows += [
            [_read_count(i), _read_count(end_index), self._time(time_ns), str(name)]
            for i, end_index, time_ns, name in line.get("flows", ())
        ]
        for name, counter_unit, at_ns, counter_value in line.get("counters", ()):
            self.counters.setdefault((str(name), str(counter_unit)), []).append(
                (self._time(at_ns), float(counter_value))
            )
        for t1, t2, t3, t4 in line.get("clock", ()):
            self.clock.append((self._time(t1), _read_count(t2), _read_count(t3), self._time(t4)))
        self.wall += [(self._time(clock_ns), _read_count(wall_ns)) for clock_ns, wall_ns in line.get("wall", ())]
        self.dropped += _read_count(line.get("dropped", 0))


def _unpack(table: Any) -> Iterator[tuple[Any, int, int]]:
    """Returns the kind, start and length of each row of a packed table (`rlhpc.runtime.trace_recorder`).

    Raises:
        ValueError, TypeError, KeyError, IndexError: The table has a different form.
    """
    if table is None:
        return
    base_ns = _read_count(table["base_ns"])
    for *kind_fields, times in table["kinds"]:
        for start_ns, duration_ns in zip(times[::2], times[1::2], strict=True):
            yield kind_fields, base_ns + int(start_ns), int(duration_ns)


def _read_count(json_value: Any) -> int:
    if not is_count(json_value):
        raise ValueError(f"{json_value!r} is no count")
    return int(json_value)


def trace_files(run_folder: str | Path) -> list[Path]:
    """Returns the files of a run's recorded trace."""
    return sorted(RunPaths(Path(run_folder)).trace.glob("*.jsonl"))


def read_trace(run_folder: str | Path, steps: Collection[int] | None = None) -> Trace:
    """Reads and merges the recorded trace of a run.

    Args:
        run_folder: Folder of the run.
        steps: Steps to read; None reads everything.

    Returns:
        The trace; spans, flows and samples that overlap none of `steps` are left out.

    Raises:
        ConfigError: The run has no recorded trace, or none of these steps.
    """
    root = Path(run_folder)
    # The driver's files come first: the samples of other hosts are of the driver's clock with its own anchor.
    files, anchors = sorted(trace_files(root), key=lambda path: not path.name.startswith("driver-")), dict[str, int]()
    ranks = [rank for path in files if (rank := _read_file(path, anchors)).header]
    if files and not any(rank.spans for rank in ranks):
        raise ConfigError(
            f"{root} has no recorded trace: none of the {len(files)} files in {RunPaths(root).trace} has a complete span. The "
            f"recording has just begun, or the ranks could not write, which each says in its log: rlhpc logs {root}"
        )
    if not files:
        raise ConfigError(
            f"{root} has no recorded trace: train with runner.trace.steps=10-12, or, while the run goes on, record its next "
            f"steps with rlhpc trace {root} --steps 3"
        )
    clocks = _estimate_clocks(ranks)
    wall_clocks = [_wall_clock(clock, host_id, ranks) for host_id, clock in clocks.items()]
    for rank in ranks:
        if (clock := clocks.get(rank.header["host_id"])) is not None:
            _shift(rank, clock)
    if steps is not None:
        _select(ranks, _find_intervals(ranks, steps, root))
    tracks = [_track(rank) for rank in ranks]
    return Trace(root.name, sorted(tracks, key=_order), _flows(ranks), wall_clocks)


def _order(track: RankTrack) -> tuple[bool, str, int]:
    return track.group != "driver", track.group, track.rank


def _read_file(path: Path, anchors: dict[str, int]) -> _RankFile:
    rank, num_bad_lines = _RankFile(anchors=anchors), 0
    for line in _lines(path):
        try:
            line_content = read_json(line)
            if not isinstance(line_content, dict):
                raise ValueError("no object")
            rank.add(line_content)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            num_bad_lines += bool(line.strip())
    if num_bad_lines:
        log.debug("%s: %d lines are incomplete", path, num_bad_lines)
    return rank


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_file(path) as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError as error:
        log.warning("%s: cannot be read: %s", path, error.strerror)


def _estimate_clocks(ranks: Collection[_RankFile]) -> dict[str, HostClock]:
    """Returns the clock of each host by its host id; the driver's host has no offset."""
    samples: dict[str, list[ClockSample]] = {}
    clock_names: dict[str, str] = {}
    times: dict[str, list[int]] = {}
    for rank in ranks:
        samples.setdefault(rank.header["host_id"], []).extend(rank.clock)
        clock_names.setdefault(rank.header["host_id"], rank.header["host"])
        times.setdefault(rank.header["host_id"], []).extend(time_ns for row in rank.spans for time_ns in row[2:4])
    driver_hosts = {rank.header["host_id"] for rank in ranks if rank.header["group"] == "driver"}
    name_counts = collections.Counter(clock_names.values())
    clocks = {}
    for host_id, name in clock_names.items():
        unique_name = name if name_counts[name] == 1 else host_id
        used_range = (min(times[host_id]), max(times[host_id])) if times[host_id] else None
        is_drivers = host_id in driver_hosts
        clock = HostClock(unique_name, 0, 0) if is_drivers else align(unique_name, samples[host_id], used_range)
        if clock is not None:
            clocks[host_id] = clock
    return clocks


#: Nanoseconds that a wall clock may gain on the monotonic clock between two readings; it was set if it gains more.
_MAX_GAIN_NS = 20_000_000


def _wall_clock(clock: HostClock, host_id: str, ranks: Collection[_RankFile]) -> HostClock:
    """Returns the offset of a host's wall clock from the driver's time, until someone set that clock.

    Args:
        clock: Offset of the host's recorded times.
        host_id: Id of the host.
        ranks: Files of all ranks, before their times are put on the driver's clock.
    """
    if not (clock.offset_ns or clock.error_ns):  # the driver's host
        return clock
    pairs = sorted(pair for rank in ranks if rank.header["host_id"] == host_id for pair in rank.wall)
    for index, ((time_ns, wall_ns), (next_ns, next_wall_ns)) in enumerate(itertools.pairwise(pairs), 1):
        if abs(next_wall_ns - wall_ns - (next_ns - time_ns)) > _MAX_GAIN_NS + 2 * _MAX_DRIFT * (next_ns - time_ns):
            del pairs[index:]
            break
    driver_times = [time_ns - clock.offset_at(time_ns) for time_ns, _ in pairs]
    samples = [
        (wall_ns, driver_ns, driver_ns, wall_ns) for (_, wall_ns), driver_ns in zip(pairs, driver_times, strict=True)
    ]
    wall_clock = align(clock.host, samples)
    return clock if wall_clock is None else replace(wall_clock, error_ns=wall_clock.error_ns + clock.error_ns)


def _shift(rank: _RankFile, clock: HostClock) -> None:
    """Puts all times of a rank on the driver's clock."""
    rank.header["host"] = clock.host
    if not clock.offset_ns and not clock.drift:
        return

    def to_driver_ns(host_ns: int) -> int:
        return host_ns - clock.offset_at(host_ns)

    for row in rank.spans:
        row[2], row[3] = to_driver_ns(row[2]), to_driver_ns(row[3])
    for row in rank.flows:
        row[2] = to_driver_ns(row[2])
    for row in rank.messages:
        row[2], row[3] = to_driver_ns(row[2]), to_driver_ns(row[3])
    for key, samples in rank.counters.items():
        rank.counters[key] = [(to_driver_ns(time_ns), counter_value) for time_ns, counter_value in samples]


def _find_intervals(ranks: Collection[_RankFile], steps: Collection[int], root: Path) -> list[tuple[int, int]]:
    """Returns start and end of each of the steps; a repeated step has several intervals.

    Raises:
        ConfigError: None of the steps was recorded.
    """
    recorded_intervals = [
        (int(row[5]["step"]), (row[2], row[3]))
        for rank in ranks
        if rank.header["group"] == "driver"
        for row in rank.spans
        if row[1] == "step" and is_count(row[5].get("step"))
    ]
    intervals = [step_interval for step, step_interval in recorded_intervals if step in steps]
    if not intervals:
        available_steps = format_steps({step for step, _ in recorded_intervals}) or "none"
        raise ConfigError(f"{root}: no trace of step {format_steps(steps)}; recorded steps: {available_steps}")
    return intervals


def _select(ranks: Collection[_RankFile], intervals: Collection[tuple[int, int]]) -> None:
    """Drops the spans, messages and samples that overlap none of the intervals."""

    def overlaps_interval(start: int, end: int) -> bool:
        return any(start < interval_end and end > interval_start for interval_start, interval_end in intervals)

    for rank in ranks:
        rank.spans = [row for row in rank.spans if overlaps_interval(row[2], row[3])]
        rank.flows = [row for row in rank.flows if overlaps_interval(row[2], row[2])]
        rank.messages = [
            row for row in rank.messages if overlaps_interval(row[2], row[2]) or overlaps_interval(row[3], row[3])
        ]
        rank.counters = {
            key: [(time_ns, counter_value) for time_ns, counter_value in samples if overlaps_interval(time_ns, time_ns)]
            for key, samples in rank.counters.items()
        }


def _track(rank: _RankFile) -> RankTrack:
    header = rank.header
    lanes = _assign_lanes(rank.spans)
    spans = [Span(row[0], row[1], row[2], max(row[2], row[3]), lanes(row[4]), row[5]) for row in rank.spans]
    spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    counters = [
        Counter(name, counter_unit, sorted(samples))
        for (name, counter_unit), samples in rank.counters.items()
        if samples
    ]
    return RankTrack(header["group"], header["rank"], header["host"], header["pid"], spans, counters, rank.dropped)


def _assign_lanes(spans: Collection[list[Any]]) -> Callable[[str], str]:
    """Returns the function from the recorded name of a thread or asyncio task to the name of its lane.

    Tasks, of which a rank may have thousands, share lanes: two tasks of a lane do not overlap.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for row in spans:
        if "/" in row[4]:
            task_start, task_end = bounds.get(row[4], (row[2], row[3]))
            bounds[row[4]] = (min(task_start, row[2]), max(task_end, row[3]))
    free_at: dict[str, list[int]] = {}
    lane_names: dict[str, str] = {}
    for task, (task_start, task_end) in sorted(bounds.items(), key=lambda task_bounds: task_bounds[1]):
        thread = task.partition("/")[0]
        lanes = free_at.setdefault(thread, [])
        index = next((index for index, free_ns in enumerate(lanes) if free_ns <= task_start), len(lanes))
        lanes[index:] = [task_end, *lanes[index + 1 :]]
        lane_names[task] = f"{thread} task {index + 1}"
    return lambda thread: lane_names.get(thread, thread)


def _flows(ranks: Collection[_RankFile]) -> list[MessageFlow]:
    """Returns the messages whose two ends are known."""
    track_names = {rank.name for rank in ranks}
    flow_sources = {row[0]: (rank.name, row[2], row[3]) for rank in ranks for row in rank.flows if row[1] == 0}
    complete_flows = [
        MessageFlow(flow_source[2], flow_source[:2], (rank.name, row[2]))
        for rank in ranks
        for row in rank.flows
        if row[1] == 1 and (flow_source := flow_sources.get(row[0])) is not None
    ]
    complete_flows += [
        MessageFlow(name, (source_name, sent_ns), (rank.name, arrived_ns))
        for rank in ranks
        for name, source_name, sent_ns, arrived_ns in rank.messages
        if source_name in track_names
    ]
    return sorted(complete_flows, key=lambda flow: flow.source[1])


#: Maximum number of intervals of which the best sample is used.
_INTERVALS = 32
#: Bound of the rate at which a clock departs from the line: a quartz's changes with its temperature, by about 1e-6.
_WANDER = 1e-5
#: Bound of the drift of a clock of which only one moment is known: twice as much as NTP corrects.
_MAX_DRIFT = 1e-3
#: Shortest time between the first and the last sample from which a drift is computed.
_MIN_SPAN_NS = 1_000_000_000


def align(host: str, samples: Sequence[ClockSample], used_range: tuple[int, int] | None = None) -> HostClock | None:
    """Returns the offset of a host's clock from the driver's; None if there is no sample.

    Args:
        host: Name of the host.
        samples: Samples of all processes of the host: of the driver's clock, taken on the host.
        used_range: First and last time on the host's clock for which the offset is used; by default those of the samples.
    """
    clock_points = [
        (t1 + (t4 - t1) // 2, ((t1 - t2) + (t4 - t3)) / 2, max(0, (t4 - t1) - (t3 - t2)) / 2)
        for t1, t2, t3, t4 in sorted(samples)
        if t4 >= t1 and t3 >= t2
    ]
    if not clock_points:
        return None
    best_points = _select_best_of_intervals(clock_points)
    time_ns, offset, drift = _fit(best_points)

    def measure_departure(point: tuple[int, float, float]) -> float:
        time, measured_time, half_delay = point
        return abs(measured_time - (offset + drift * (time - time_ns))) + half_delay

    bounds = [(clock_point[0], measure_departure(clock_point)) for clock_point in best_points]
    first_ns, last_ns = used_range or (best_points[0][0], best_points[-1][0])
    rate = _bound_departure_rate(bounds)
    error = _find_largest_error(bounds, rate) + rate * max(
        0, best_points[0][0] - first_ns, last_ns - best_points[-1][0]
    )
    return HostClock(host, round(offset), round(error) + 1, drift, time_ns)


def _bound_departure_rate(bounds: Sequence[tuple[int, float]]) -> float:
    """Returns a bound of the rate at which the clock departs from the line: the error of the line's drift, and the wander.

    Between two times, the clock departs by no more than the sum of the errors' bounds at both.
    """
    rates = [
        (error + other_error) / (other_time - time)
        for (time, error), (other_time, other_error) in itertools.combinations(bounds, 2)
        if other_time - time >= _MIN_SPAN_NS
    ]
    return min([_MAX_DRIFT, *rates]) + _WANDER


def _find_largest_error(bounds: Sequence[tuple[int, float]], rate: float) -> float:
    """Returns the largest error at any time, given bounds of it at some times.

    The bound of a sample with a short delay also bounds the error at other times, plus the clock's departure until then.
    """
    errors = [error for _, error in bounds]
    for index_order in (range(1, len(bounds)), range(len(bounds) - 2, -1, -1)):
        neighbour = -1 if index_order.step > 0 else 1
        for index in index_order:
            rate_error_ns = rate * abs(bounds[index][0] - bounds[index + neighbour][0])
            errors[index] = min(errors[index], errors[index + neighbour] + rate_error_ns)
    messages_between = [
        (errors[index] + errors[index + 1] + rate * (bounds[index + 1][0] - bounds[index][0])) / 2
        for index in range(len(bounds) - 1)
    ]
    return max(errors + messages_between)


def _select_best_of_intervals(clock_points: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Returns the point with the smallest delay of each interval of time."""
    first_ns, last_ns = clock_points[0][0], clock_points[-1][0]
    width = max(1, -(-(last_ns - first_ns + 1) // _INTERVALS))
    best_by_interval: dict[int, tuple[int, float, float]] = {}
    for clock_point in clock_points:
        index = (clock_point[0] - first_ns) // width
        if index not in best_by_interval or clock_point[2] < best_by_interval[index][2]:
            best_by_interval[index] = clock_point
    return list(best_by_interval.values())


def _fit(clock_points: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Returns a time, the offset at that time, and the drift, by least squares with the inverse squared errors as weights."""
    weights = [1 / max(1_000.0, half_delay) ** 2 for _, _, half_delay in clock_points]
    total_weight = sum(weights)
    time_ns = clock_points[0][0] + round(
        sum(w * (t - clock_points[0][0]) for w, (t, _, _) in zip(weights, clock_points, strict=True)) / total_weight
    )
    offset = (
        clock_points[0][1]
        + sum(w * (o - clock_points[0][1]) for w, (_, o, _) in zip(weights, clock_points, strict=True)) / total_weight
    )
    if clock_points[-1][0] - clock_points[0][0] < _MIN_SPAN_NS:
        return time_ns, offset, 0.0
    time_spread = sum(w * (t - time_ns) ** 2 for w, (t, _, _) in zip(weights, clock_points, strict=True))
    covariance = sum(w * (t - time_ns) * (o - offset) for w, (t, o, _) in zip(weights, clock_points, strict=True))
    return time_ns, offset, covariance / time_spread if time_spread else 0.0
