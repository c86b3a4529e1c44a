"""Export of traces: Chrome trace events as JSON, and Perfetto's protobuf format. Both open in https://ui.perfetto.dev.

Perfetto's format is a sequence of `TracePacket` messages in protobuf's wire format, written by hand. Field numbers are those
of `protos/perfetto/trace/trace_packet.proto` and of the messages it contains (Perfetto v52). Names, categories and names of
arguments are interned: a packet defines each string once, and later packets refer to its number.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import replace_durably
from rlhpc.tracing.model import Counter, RankTrack, Span, Trace

#: Ids of the flows that leave from, and arrive in, each span of a track, by the span's index.
FlowEnds = dict[int, tuple[list[int], list[int]]]


def export_trace(trace: Trace, path: Path) -> None:
    """Writes a trace to a file, in the format of the file's ending: `.json`, `.json.gz` or `.pftrace`.

    Raises:
        ConfigError: The file has another ending, or its folder does not exist.
        StorageError: The file cannot be written.
    """
    write = format_of(path)
    buffer = io.BytesIO()
    write(trace, buffer)
    try:
        replace_durably(path, buffer.getvalue(), mode=0o644, parents=False)
    except OSError as error:
        raise unwritten_page_error(error, path) from error


def format_of(path: Path) -> Callable[[Trace, BinaryIO], None]:
    """Returns the function that writes the format of a file's ending.

    Raises:
        ConfigError: There is no such format, or the file's folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    for suffix, write in _FORMATS.items():
        if path.name.endswith(suffix) and path.name != suffix:
            return write
    raise ConfigError(f"{path}: a trace's file ends with {', '.join(_FORMATS)}")


def flow_ends(trace: Trace) -> dict[str, FlowEnds]:
    """Returns the flows' ends by track. An end belongs to the innermost span at its time; ends outside spans are left out."""
    flow_points: dict[str, list[tuple[int, int, bool]]] = {track.name: [] for track in trace.tracks}
    for flow_id, flow in enumerate(trace.flows, 1):
        for (name, time_ns), is_target in ((flow.source, False), (flow.target, True)):
            if name in flow_points:
                flow_points[name].append((time_ns, flow_id, is_target))
    return {track.name: _group_ends(track, sorted(flow_points[track.name])) for track in trace.tracks}


def _group_ends(track: RankTrack, flow_points: Sequence[tuple[int, int, bool]]) -> FlowEnds:
    ends_by_span: FlowEnds = collections.defaultdict(lambda: ([], []))
    open_spans: list[int] = []
    next_span = 0
    for time_ns, flow_id, is_target in flow_points:
        while next_span < len(track.spans) and track.spans[next_span].start_ns <= time_ns:
            open_spans.append(next_span)
            next_span += 1
        open_spans = [index for index in open_spans if track.spans[index].end_ns >= time_ns]
        if open_spans:
            ends_by_span[open_spans[-1]][is_target].append(flow_id)
    return ends_by_span


def _write_json(trace: Trace, file: BinaryIO) -> None:
    """Writes Chrome trace events; times are microseconds since the start of the trace."""
    start_ns = first_ns(trace)
    metadata = {
        "run": trace.run, "start_ns": start_ns,
        "clocks": [{"host": clock.host, "offset_ns": clock.offset_ns, "error_ns": clock.error_ns, "drift": clock.drift,
                    "at_ns": clock.at_ns} for clock in trace.clocks],
        "dropped": {track.name: track.dropped for track in trace.tracks if track.dropped},
    }  # fmt: skip
    file.write(b'{"displayTimeUnit":"ms","otherData":' + _encode(metadata) + b',"traceEvents":[\n')
    separator = b""
    for event in _iter_json_events(trace, start_ns):
        file.write(separator + _encode(event))
        separator = b",\n"
    file.write(b"\n]}\n")


def _write_gzip(trace: Trace, file: BinaryIO) -> None:
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0) as gzip_file:
        _write_json(trace, gzip_file)  # type: ignore[arg-type]


def _iter_json_events(trace: Trace, start_ns: int) -> Iterator[dict[str, Any]]:
    ends_by_track = flow_ends(trace)
    for pid, track in enumerate(trace.tracks, 1):
        yield _metadata("process_name", pid, 0, name=f"{track.name} on {track.host}")
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        threads = {
            name: thread_number
            for thread_number, name in enumerate(dict.fromkeys(span.thread for span in track.spans), 1)
        }
        for name, tid in threads.items():
            yield _metadata("thread_name", pid, tid, name=name)
        for index, span in enumerate(track.spans):
            tid = threads[span.thread]
            yield {
                "ph": "X", "name": span.name, "cat": span.category, "pid": pid, "tid": tid,
                "ts": _to_microseconds(span.start_ns - start_ns), "dur": _to_microseconds(span.end_ns - span.start_ns),
                "args": finite_args(span),
            }  # fmt: skip
            for is_target, flow_ids in enumerate(ends_by_track[track.name].get(index, ())):
                for flow_id in flow_ids:
                    flow = trace.flows[flow_id - 1]
                    time_ns = (flow.target if is_target else flow.source)[1]
                    event = {"ph": "f" if is_target else "s", "id": flow_id, "name": flow.name, "cat": "flow", "pid": pid,
                             "tid": tid, "ts": _to_microseconds(time_ns - start_ns)}  # fmt: skip
                    yield {**event, "bp": "e"} if is_target else event
        for counter in track.counters:
            name = f"{counter.name} [{counter.unit}]" if counter.unit else counter.name
            for time_ns, counter_value in counter.samples:
                if math.isfinite(counter_value):
                    yield {
                        "ph": "C",
                        "name": name,
                        "pid": pid,
                        "ts": _to_microseconds(time_ns - start_ns),
                        "args": {"value": counter_value},
                    }


def _metadata(metadata_kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": metadata_kind, "pid": pid, "tid": tid, "args": args}


def _to_microseconds(time_ns: int) -> float:
    return time_ns / 1000


def _encode(event_value: Any) -> bytes:
    return json.dumps(event_value, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def first_ns(trace: Trace) -> int:
    """Returns the time of the trace's first span or sample; 0 for an empty trace."""
    first_starts_ns = [track.spans[0].start_ns for track in trace.tracks if track.spans]
    samples = [counter.samples[0][0] for track in trace.tracks for counter in track.counters if counter.samples]
    return min([*first_starts_ns, *samples], default=0)


def finite_args(span: Span) -> dict[str, Any]:
    """Returns a span's arguments as JSON values; numbers that are not finite, and nested values, become text."""
    return {
        key: arg_value
        if isinstance(arg_value, (str, bool, int)) or (isinstance(arg_value, float) and math.isfinite(arg_value))
        else str(arg_value)
        for key, arg_value in span.args.items()
    }


def _write_perfetto(trace: Trace, file: BinaryIO) -> None:
    write_perfetto(trace, file, flow_ends(trace), finite_args)


_FORMATS: dict[str, Callable[[Trace, BinaryIO], None]] = {
    ".json": _write_json,
    ".json.gz": _write_gzip,
    ".pftrace": _write_perfetto,
}


#: Values of `TrackEvent.Type`.
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
#: Values of `CounterDescriptor.Unit`.
_UNITS = {"ns": 1, "": 2, "B": 3}
#: Sequence flags: the interned strings start anew; the packet needs them.
_CLEARED, _NEEDED = 1, 2
#: Clock ids of `ClockSnapshot`: wall time, and the clock of all timestamps.
_REALTIME, _BOOTTIME = 1, 6
_SEQUENCE = 1


def _encode_varint(integer: int) -> bytes:
    integer &= (1 << 64) - 1
    varint_bytes = bytearray()
    while integer > 0x7F:
        varint_bytes.append(integer & 0x7F | 0x80)
        integer >>= 7
    varint_bytes.append(integer)
    return bytes(varint_bytes)


def _encode_integer(field: int, integer: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(integer)


def _encode_bytes(field: int, field_content: bytes | str) -> bytes:
    field_bytes = field_content.encode(errors="replace") if isinstance(field_content, str) else field_content
    return _encode_varint(field << 3 | 2) + _encode_varint(len(field_bytes)) + field_bytes


def _encode_fixed64(field: int, integer: int) -> bytes:
    return _encode_varint(field << 3 | 1) + struct.pack("<Q", integer)


def _encode_double(field: int, float_value: float) -> bytes:
    return _encode_varint(field << 3 | 1) + struct.pack("<d", float_value)


class _Strings:
    """Interned strings of one kind.

    Args:
        field: Field of `InternedData` that defines them.
    """

    def __init__(self, field: int) -> None:
        self._field = field
        self._numbers: dict[str, int] = {}
        self.definitions = b""

    def number(self, text: str) -> int:
        """Returns the number of a string; adds the definition of a new one to `definitions`."""
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers) + 1
            self.definitions += _encode_bytes(
                self._field, _encode_integer(1, self._numbers[text]) + _encode_bytes(2, text)
            )
        return self._numbers[text]

    def pop_definitions(self) -> bytes:
        """Returns the definitions since the last call."""
        pending_definitions, self.definitions = self.definitions, b""
        return pending_definitions


class _Writer:
    """Writer of packets, with the interned strings of the trace."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.categories, self.names, self.argument_names = (_Strings(field) for field in (1, 2, 3))

    def packet(self, packet_content: bytes) -> None:
        """Writes a packet that needs no interned strings."""
        self._file.write(_encode_bytes(1, packet_content + _encode_integer(10, _SEQUENCE)))

    def event(self, at_ns: int, event: bytes) -> None:
        """Writes a `TrackEvent`, with the definitions of the strings that it is the first to use."""
        event_definitions = b"".join(
            strings.pop_definitions() for strings in (self.categories, self.names, self.argument_names)
        )
        interned_data = _encode_bytes(12, event_definitions) if event_definitions else b""
        self.packet(_encode_integer(8, at_ns) + interned_data + _encode_integer(13, _NEEDED) + _encode_bytes(11, event))

    def arguments(self, arguments: Mapping[str, Any]) -> bytes:
        """Encodes arguments as debug annotations."""
        return b"".join(
            _encode_bytes(4, _encode_integer(1, self.argument_names.number(name)) + _encode_argument(argument_value))
            for name, argument_value in arguments.items()
        )


def _encode_argument(argument_value: Any) -> bytes:
    if isinstance(argument_value, bool):
        return _encode_integer(2, argument_value)
    if isinstance(argument_value, int) and -(1 << 63) <= argument_value < 1 << 63:
        return _encode_integer(4, argument_value)
    if isinstance(argument_value, float):
        return _encode_double(5, argument_value)
    return _encode_bytes(6, str(argument_value))


def write_perfetto(
    trace: Trace,
    file: BinaryIO,
    flow_ends: Mapping[str, Mapping[int, tuple[list[int], list[int]]]],
    get_arguments: Callable[[Span], Mapping[str, Any]],
) -> None:
    """Writes a trace in Perfetto's format.

    Args:
        trace: The trace.
        file: The file.
        flow_ends: Track → index of a span → ids of the flows that leave from it and that arrive in it.
        get_arguments: Returns the arguments of a span as numbers and strings.
    """
    writer = _Writer(file)
    writer.packet(_encode_integer(13, _CLEARED) + _encode_integer(87, 1))
    start_ns = min((track.spans[0].start_ns for track in trace.tracks if track.spans), default=0)
    clocks = b"".join(
        _encode_bytes(1, _encode_integer(1, clock) + _encode_integer(2, start_ns)) for clock in (_REALTIME, _BOOTTIME)
    )
    writer.packet(_encode_bytes(6, clocks))
    uuids = iter(range(1, 1 << 62))
    process_uuids: dict[str, int] = {}
    for pid, track in enumerate(trace.tracks, 1):
        process_uuids.setdefault(track.host, uuid := next(uuids))
        name = f"{track.name} on {track.host}"
        writer.packet(
            _encode_bytes(
                60, _encode_integer(1, uuid) + _encode_bytes(3, _encode_integer(1, pid) + _encode_bytes(6, name))
            )
        )
        _write_spans(writer, pid, track, uuid, uuids, flow_ends.get(track.name, {}), get_arguments)
        for counter in track.counters:
            _write_counter(writer, counter, next(uuids), uuid)
    for clock in trace.clocks:
        if clock.host in process_uuids:
            argument_values = {
                "offset_ns": clock.offset_ns,
                "error_ns": clock.error_ns,
                "drift": clock.drift,
                "at_ns": clock.at_ns,
            }
            name_number = writer.names.number(f"clock of {clock.host}")
            event = (
                _encode_integer(9, _INSTANT)
                + _encode_integer(10, name_number)
                + _encode_integer(11, process_uuids[clock.host])
            )
            writer.event(start_ns, event + writer.arguments(argument_values))


def _write_spans(
    writer: _Writer,
    pid: int,
    track: RankTrack,
    process_uuid: int,
    uuids: Iterator[int],
    flow_ends: Mapping[int, tuple[list[int], list[int]]],
    get_arguments: Callable[[Span], Mapping[str, Any]],
) -> None:
    lanes: dict[str, list[int]] = {}
    for index, span in enumerate(track.spans):
        lanes.setdefault(span.thread, []).append(index)
    for tid, (thread, indices) in enumerate(lanes.items(), 1):
        uuid = next(uuids)
        thread_descriptor = _encode_integer(1, pid) + _encode_integer(2, pid * 10_000 + tid) + _encode_bytes(5, thread)
        writer.packet(
            _encode_bytes(
                60, _encode_integer(1, uuid) + _encode_integer(5, process_uuid) + _encode_bytes(4, thread_descriptor)
            )
        )
        open_ends: list[int] = []
        for index in indices:
            span = track.spans[index]
            while open_ends and open_ends[-1] <= span.start_ns:
                writer.event(open_ends.pop(), _encode_integer(9, _END) + _encode_integer(11, uuid))
            # the spans of a lane nest in this format; where they overlap otherwise, the inner one is cut
            open_ends.append(min([span.end_ns, *open_ends[-1:]]))
            departures, arrivals = flow_ends.get(index, ((), ()))
            event = (
                _encode_integer(3, writer.categories.number(span.category))
                + writer.arguments(get_arguments(span))
                + _encode_integer(9, _BEGIN)
                + _encode_integer(10, writer.names.number(span.name))
                + _encode_integer(11, uuid)
                + b"".join(_encode_fixed64(47, flow_id) for flow_id in departures)
                + b"".join(_encode_fixed64(48, flow_id) for flow_id in arrivals)
            )
            writer.event(span.start_ns, event)
        while open_ends:
            writer.event(open_ends.pop(), _encode_integer(9, _END) + _encode_integer(11, uuid))


def _write_counter(writer: _Writer, counter: Counter, uuid: int, process_uuid: int) -> None:
    unit_field = _encode_integer(3, _UNITS[counter.unit]) if counter.unit in _UNITS else _encode_bytes(6, counter.unit)
    descriptor = (
        _encode_integer(1, uuid)
        + _encode_bytes(2, counter.name)
        + _encode_integer(5, process_uuid)
        + _encode_bytes(8, unit_field)
    )
    writer.packet(_encode_bytes(60, descriptor))
    for time_ns, counter_value in counter.samples:
        if math.isfinite(counter_value):
            writer.event(
                time_ns, _encode_integer(9, _COUNTER) + _encode_integer(11, uuid) + _encode_double(44, counter_value)
            )
