"""Exported traces, read back by decoders that share nothing with the encoders."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from rlhpc.runtime.errors import ConfigError, StorageError
from rlhpc.tracing.export import export_trace, format_of, write_perfetto
from rlhpc.tracing.model import Counter, HostClock, MessageFlow, RankTrack, Span, Trace
from tests.trace_decoders import decode

T0 = 1_790_000_000_000_000_000
ENDINGS = (".json", ".json.gz", ".pftrace")


def span(name: str, category: str, start: int, end: int, thread: str = "main", **args: object) -> Span:
    return Span(name, category, T0 + start, T0 + end, thread, args)


DRIVER = RankTrack("driver", 0, "gpu1", 7, [
    span("step 1", "step", 0, 1_000_000, step=1), span("rollout", "phase", 10, 600_000),
    span("update", "phase", 600_000, 900_000),
], dropped=3)  # fmt: skip
ROLLOUT = RankTrack("rollout", 0, "cpu1", 9, [
    span("generate", "call", 100_000, 500_000), span("step", "engine", 100_000, 200_000, tokens=5, batch=2),
    span("grüße \"π\" \\ \n", "wait", 200_000, 300_000, ratio=0.25, on=True, none=float("nan"), deep={"a": [1]}, huge=1 << 70),
    span("turn", "turn", 150_000, 400_000, "main task 1"), span("empty", "wait", 300_000, 300_000),
], [Counter("queue depth/rollouts", "items", [(T0, 0.0), (T0 + 5, 2.0)]), Counter("memory", "B", [(T0 + 1, 4096.0)]),
    Counter("odd", "", [(T0 + 2, float("nan")), (T0 + 3, -1.5)])])  # fmt: skip
TRACE = Trace(
    "run", [DRIVER, ROLLOUT],
    [MessageFlow("generate", ("driver-0", T0 + 50), ("rollout-0", T0 + 100_001)),
     MessageFlow("generate", ("rollout-0", T0 + 499_999), ("driver-0", T0 + 500_100)),
     MessageFlow("lost", ("rollout-0", T0 + 450_000), ("nobody-0", T0 + 500_200))],
    [HostClock("cpu1", 90_000_000_123, 250_000, -5e-4, T0), HostClock("gpu1", 0, 0)],
)  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_of_a_trace_is_read_back(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{ending}"
    export_trace(TRACE, path)
    decoded = decode(path)
    for track in TRACE.tracks:
        process = f"{track.name} on {track.host}"
        found = {(s.thread, s.name, s.category, s.start_ns, s.end_ns) for s in decoded.of(process)}
        assert found == {(s.thread, s.name, s.category, s.start_ns, s.end_ns) for s in track.spans}
    (odd,) = [s for s in decoded.slices if s.name.startswith("grüße")]
    assert odd.args == {"ratio": 0.25, "on": True, "none": "nan", "deep": "{'a': [1]}", "huge": odd.args["huge"]}
    assert int(odd.args["huge"]) == 1 << 70
    (step,) = decoded.of("rollout-0", "engine")
    assert step.args == {"tokens": 5, "batch": 2}
    assert decoded.counters["rollout-0 on cpu1", "queue depth/rollouts", "items"] == [(T0, 0.0), (T0 + 5, 2.0)]
    assert decoded.counters["rollout-0 on cpu1", "memory", "B"] == [(T0 + 1, 4096.0)]
    assert decoded.counters["rollout-0 on cpu1", "odd", ""] == [(T0 + 3, -1.5)]
    assert decoded.clocks["cpu1"] == {"offset_ns": 90_000_000_123, "error_ns": 250_000, "drift": -5e-4, "at_ns": T0}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_message_connects_the_innermost_spans_at_its_ends(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{ending}"
    export_trace(TRACE, path)
    ends = {(source.name, target.name) for source, target in decode(path).flows()}
    assert ends == {("rollout", "step"), ("generate", "rollout")}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_trace_is_a_valid_file(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{ending}"
    export_trace(Trace("run", []), path)
    assert decode(path).slices == []


@pytest.mark.parametrize("name", ["t.txt", "t", ".json", "t.gz", "no/t.json"])
def test_other_files_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.json, \.json\.gz, \.pftrace|does not exist"):
        format_of(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_a_folder_of_the_files_name_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(StorageError, match=r"t\.json"):
        export_trace(TRACE, tmp_path / "t.json")
    assert os.listdir(tmp_path) == ["t.json"]


def span_of_perfetto(name: str, start: int, end: int, thread: str = "main", **args: object) -> Span:
    return Span(name, "call", T0 + start, T0 + end, thread, args)


def encoded(trace: Trace) -> bytes:
    file = io.BytesIO()
    write_perfetto(trace, file, {}, lambda one: one.args)
    return file.getvalue()


def test_the_bytes_of_a_trace_are_those_of_the_protobuf() -> None:
    """By hand, from the field numbers in protos/perfetto/trace."""
    trace = Trace("r", [RankTrack("a", 0, "h", 5, [Span("n", "call", 300, 301)])])
    packets = [
        "6801 b80501 5001",  # sequence_flags 13 = cleared, first_packet_on_sequence 87, trusted_packet_sequence_id 10
        "320e 0a05 0801 10ac02 0a05 0806 10ac02 5001",  # clock_snapshot 6: clocks 1 and 6 are both 300
        "e20310 0801 1a0c 0801 3208 612d30206f6e2068 5001",  # track_descriptor 60: uuid 1, process 3: pid 1, "a-0 on h"
        "e20311 0802 2801 220b 0801 10914e 2a04 6d61696e 5001",  # uuid 2, parent 1, thread 4: pid 1, tid 10001, "main"
        # timestamp 8 = 300, interned_data 12: category 1 "call", name 1 "n"; flags 2; category 1, begin, name 1, track 2
        "40ac02 6211 0a08 0801 1204 63616c6c 1205 0801 1201 6e 6802 5a08 1801 4801 5001 5802 5001",
        "40ad02 6802 5a04 4802 5802 5001",  # 301: end, track 2
    ]
    expected = b"".join(b"\x0a" + bytes([len(content)]) + content for content in map(bytes.fromhex, packets))
    assert encoded(trace) == expected


def test_spans_that_do_not_nest_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    export_trace(
        Trace("r", [RankTrack("a", 0, "h", 5, [span_of_perfetto("a", 0, 100), span_of_perfetto("b", 50, 150)])]), path
    )
    assert {(one.name, one.end_ns - T0) for one in decode(path).slices} == {("a", 100), ("b", 100)}


def test_a_name_is_written_once() -> None:
    spans = [span_of_perfetto("a long name of a method", i, i + 1, count=i) for i in range(0, 1000, 2)]
    data = encoded(Trace("r", [RankTrack("a", 0, "h", 5, spans)]))
    assert data.count(b"a long name of a method") == data.count(b"count") == 1
    assert len(data) < 80 * len(spans)


@pytest.mark.parametrize("value", [0, 1, -1, 127, 128, (1 << 63) - 1, -(1 << 63), 0.5, -1e300, True, "x", "\udc80", ""])
def test_arguments_keep_their_values(value: object, tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    export_trace(Trace("r", [RankTrack("a", 0, "h", 5, [span_of_perfetto("a", 0, 1, value=value)])]), path)
    (found,) = decode(path).slices
    assert found.args["value"] == ("?" if value == "\udc80" else value)


def test_units_and_message_ids_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    tracks = [
        RankTrack("a", 0, "h", 5, [span_of_perfetto("put", 0, 10)],
                  [Counter("x", "tokens/s", [(T0, 1e-3)]), Counter("y", "B", [(T0, 7.0)])]),
        RankTrack("b", 0, "g", 6, [span_of_perfetto("get", 5, 20)]),
    ]  # fmt: skip
    flows = [MessageFlow("m", ("a-0", T0 + 1), ("b-0", T0 + 6)), MessageFlow("m", ("a-0", T0 + 2), ("b-0", T0 + 7))]
    export_trace(Trace("r", tracks, flows), path)
    decoded = decode(path)
    assert [(s.name, t.name) for s, t in decoded.flows()] == [("put", "get")] * 2
    (put, get) = decoded.slices
    assert put.departures == get.arrivals and len({*put.departures}) == 2
    assert {key[1:] for key in decoded.counters} == {("x", "tokens/s"), ("y", "B")}
