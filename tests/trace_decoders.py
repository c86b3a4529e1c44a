"""Decoders of exported traces that share nothing with the encoders: Chrome trace events, and Perfetto's protobuf."""

from __future__ import annotations

import gzip
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Slice:
    """A span as a viewer shows it; times in nanoseconds."""

    process: str
    thread: str
    name: str
    category: str
    start_ns: int
    end_ns: int = -1
    args: dict[str, Any] = field(default_factory=dict)
    departures: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)


@dataclass
class Decoded:
    """Content of a trace file.

    Attributes:
        slices: All spans, in the file's order.
        counters: (process, counter, unit) → samples.
        clocks: Host → offset, error, drift and time of the offset.
    """

    slices: list[Slice] = field(default_factory=list)
    counters: dict[tuple[str, str, str], list[tuple[int, float]]] = field(default_factory=dict)
    clocks: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, process: str, category: str = "") -> list[Slice]:
        """Returns the spans of a process whose name begins with `process` and, if it is given, of a category."""
        return [s for s in self.slices if s.process.startswith(process) and category in ("", s.category)]

    def flows(self) -> list[tuple[Slice, Slice]]:
        """Returns the spans at both ends of each message."""
        sources = {number: s for s in self.slices for number in s.departures}
        return [(sources[number], s) for s in self.slices for number in s.arrivals]


def decode(path: Path) -> Decoded:
    """Decodes a file by its ending."""
    if path.name.endswith(".pftrace"):
        return _decode_perfetto(path.read_bytes())
    content = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    return _decode_json(json.loads(content))


def _decode_json(content: dict[str, Any]) -> Decoded:
    decoded, start = Decoded(), content["otherData"]["start_ns"]
    events = content["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}

    def ns(us: float) -> int:
        return start + round(us * 1000)

    for event in events:
        process = processes[event["pid"]]
        if event["ph"] == "X":
            begin = ns(event["ts"])
            decoded.slices.append(
                Slice(process, threads[event["pid"], event["tid"]], event["name"], event["cat"], begin,
                      begin + round(event["dur"] * 1000), event["args"])
            )  # fmt: skip
        elif event["ph"] == "C":
            name, _, unit = event["name"].partition(" [")
            samples = decoded.counters.setdefault((process, name, unit.rstrip("]")), [])
            samples.append((ns(event["ts"]), event["args"]["value"]))
    for event in events:
        if event["ph"] in "sf":
            at, thread = ns(event["ts"]), threads[event["pid"], event["tid"]]
            around = [
                s for s in decoded.slices
                if (s.process, s.thread) == (processes[event["pid"]], thread) and s.start_ns <= at <= s.end_ns
            ]  # fmt: skip
            innermost = max(around, key=lambda s: (s.start_ns, -s.end_ns))
            (innermost.departures if event["ph"] == "s" else innermost.arrivals).append(event["id"])
    decoded.clocks = {clock.pop("host"): clock for clock in content["otherData"]["clocks"]}
    return decoded


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field number and value of a protobuf message: an integer, or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
        elif kind == 1:
            yield key >> 3, data[position : position + 8]
            position += 8
        elif kind == 2:
            size = varint()
            assert position + size <= len(data), "a message is longer than what contains it"
            yield key >> 3, data[position : position + size]
            position += size
        else:
            raise AssertionError(f"wire type {kind}")


def _decode_perfetto(data: bytes) -> Decoded:
    decoded = Decoded()
    strings: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    counters: dict[int, tuple[str, str, str]] = {}
    open_slices: dict[int, list[Slice]] = {}
    last: dict[int, int] = {}
    for number, packet in _fields(data):
        assert number == 1
        content = dict(_fields(packet))
        assert content[10] == 1, "no sequence"
        for kind, entry in _fields(content.get(12, b"")):
            named = dict(_fields(entry))
            strings[kind, named[1]] = named[2].decode()
        if 60 in content:
            track = dict(_fields(content[60]))
            if 3 in track:
                process = dict(_fields(track[3]))
                processes[track[1]] = process[6].decode()
                tracks[track[1]] = (processes[track[1]], "")
            elif 4 in track:
                tracks[track[1]] = (processes[track[5]], dict(_fields(track[4]))[5].decode())
            elif 8 in track:
                unit = dict(_fields(track[8]))
                words = unit[6].decode() if 6 in unit else {1: "ns", 2: "", 3: "B"}[unit[3]]
                counters[track[1]] = (processes[track[5]], track[2].decode(), words)
        if 11 in content:
            assert content[13] & 2, "an event with interned strings says that it needs them"
            _add_event(decoded, content[8], list(_fields(content[11])), strings, tracks, counters, open_slices, last)
    assert not any(open_slices.values()), "spans that never end"
    return decoded


def _add_event(
    decoded: Decoded,
    at: int,
    event: list[tuple[int, Any]],
    strings: dict[tuple[int, int], str],
    tracks: dict[int, tuple[str, str]],
    counters: dict[int, tuple[str, str, str]],
    open_slices: dict[int, list[Slice]],
    last: dict[int, int],
) -> None:
    values = dict(event)
    uuid, kind = values[11], values[9]
    if kind == 4:
        decoded.counters.setdefault(counters[uuid], []).append((at, struct.unpack("<d", values[44])[0]))
        return
    args = {}
    for number, annotation in event:
        if number == 4:
            entry = dict(_fields(annotation))
            value: Any = entry.get(4, entry.get(2))
            if 4 in entry and entry[4] >= 1 << 63:
                value = entry[4] - (1 << 64)
            if 5 in entry:
                value = struct.unpack("<d", entry[5])[0]
            if 6 in entry:
                value = entry[6].decode()
            args[strings[3, entry[1]]] = value
    if kind == 3:
        decoded.clocks[strings[2, values[10]].removeprefix("clock of ")] = args
        return
    assert at >= last.get(uuid, 0), "events of a track are not in order"
    last[uuid] = at
    if kind == 2:
        open_slices[uuid].pop().end_ns = at
        return
    process, thread = tracks[uuid]
    begun = Slice(process, thread, strings[2, values[10]], strings[1, values[3]], at, args=args)
    begun.departures = [struct.unpack("<Q", value)[0] for number, value in event if number == 47]
    begun.arrivals = [struct.unpack("<Q", value)[0] for number, value in event if number == 48]
    open_slices.setdefault(uuid, []).append(begun)
    decoded.slices.append(begun)


def steps(trace: Decoded) -> dict[int, tuple[int, int]]:
    """Returns start and end of each step."""
    return {one.args["step"]: (one.start_ns, one.end_ns) for one in trace.of("driver-0", "step")}


def within(spans: Iterable[Slice], interval: tuple[int, int]) -> list[Slice]:
    """Returns the spans that begin in an interval."""
    return [one for one in spans if interval[0] <= one.start_ns < interval[1]]


def union_s(spans: Iterable[Slice]) -> float:
    """Returns the seconds in which at least one of the spans was open."""
    total, end = 0, 0
    for start, stop in sorted((one.start_ns, one.end_ns) for one in spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9


def seconds(trace: Decoded, rank: str, chosen: Callable[[Slice], bool], step: int) -> float:
    """Returns the seconds of a step in which a rank was in one of the chosen spans."""
    return union_s(within((one for one in trace.of(rank) if chosen(one)), steps(trace)[step]))


def check_metrics(
    trace: Decoded, rows: Mapping[int, Mapping[str, float]], *, is_embodied: bool, tolerance_s: float
) -> None:
    """Asserts that the spans of the traced steps last as long as their metrics say.

    Each metric must agree in one of the steps, or several: on a busy machine, a process that is not run between a span and its
    call makes a single step differ, and a span or a metric that counts something else differs in all of them.

    Args:
        trace: Trace of a run of PPO in simulators, or of GRPO.
        rows: Metrics of the run's steps.
        is_embodied: Whether the run is one in simulators.
        tolerance_s: Seconds by which they may differ, besides 2 %: a call's arguments and answer take some time, too.
    """

    def check(metric: str, traced_s: Callable[[int], float]) -> None:
        pairs = {step: (traced_s(step), rows[step][metric]) for step in steps(trace)}
        assert any(math.isclose(*pair, rel_tol=0.02, abs_tol=tolerance_s) for pair in pairs.values()), (
            f"seconds of {metric} by step, by the trace and by the metrics: {pairs}"
        )

    check("time/step_s", lambda step: (steps(trace)[step][1] - steps(trace)[step][0]) / 1e9)
    if is_embodied:
        check("time/simulate_s", lambda step: busy_s(trace, "env-0", "interact", step, ["actions"]))
        waits = ["observations", "outcomes"]
        check("time/act_s", lambda step: busy_s(trace, "rollout-0", "generate", step, waits))
        check("time/train_s", lambda step: seconds(trace, "actor-0", lambda one: one.category == "train", step))
    else:
        check("time/generate_s", lambda step: seconds(trace, "rollout-0", lambda one: one.name == "generation", step))
        check("time/train_s", lambda step: seconds(trace, "actor-0", lambda one: one.name == "update", step))


def busy_s(trace: Decoded, rank: str, call: str, step: int, waits_for: Iterable[str]) -> float:
    """Returns the seconds of a call of a step in which the rank did not wait for these; the call's end is not counted."""
    (called,) = [one for one in within(trace.of(rank, "call"), steps(trace)[step]) if one.name == call]
    names = {*waits_for, "confirmation of messages"}
    waits = [
        one
        for one in trace.of(rank, "wait")
        if called.start_ns <= one.start_ns < called.end_ns and one.thread == called.thread and one.name in names
    ]
    return (called.end_ns - called.start_ns) / 1e9 - union_s(waits)
