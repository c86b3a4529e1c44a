"""Files of ranks, read while they are written, cut, foreign or hostile."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trace_recorder import ClockSample
from rlhpc.tracing.read import align, read_trace

T0 = 1_790_000_000_000_000_000
Lines = list[dict[str, Any]]


def header(group: str, rank: int = 0, host: str = "gpu1", **fields: Any) -> dict[str, Any]:
    return {"rlhpc_trace": 1, "group": group, "rank": rank, "host": host, "host_id": host, "pid": 5, **fields}


def row(name: str, category: str, start: int, end: int, thread: str = "main", **args: Any) -> list[Any]:
    return [name, category, T0 + start, T0 + end, thread, args]


DRIVER: Lines = [
    header("driver"),
    {"spans": [row("step 3", "step", 0, 1000, step=3), row("step 4", "step", 1000, 2000, step=4)]},
    {"flows": [[77, 0, T0 + 100, "generate"]]},
]


def write(root: Path, name: str, lines: Lines, tail: bytes = b"") -> Path:
    folder = root / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + tail)
    return path


def test_ranks_are_merged_with_the_driver_first(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    counters = [["memory", "B", T0 + 30, 2.0], ["memory", "B", T0 + 10, 1]]
    spans = [row("b", "wait", 300, 400), row("a", "call", 300, 900)]
    write(tmp_path, "actor-0", [
        header("actor"), {"spans": spans, "flows": [[77, 1, T0 + 310, "message"]], "counters": counters, "dropped": 2},
    ])  # fmt: skip
    trace = read_trace(tmp_path)
    assert [track.name for track in trace.tracks] == ["driver-0", "actor-0"]
    actor = trace.tracks[1]
    assert [span.name for span in actor.spans] == ["a", "b"] and actor.dropped == 2
    assert actor.counters[0].samples == [(T0 + 10, 1.0), (T0 + 30, 2.0)]
    (flow,) = trace.flows
    assert (flow.name, flow.source, flow.target) == ("generate", ("driver-0", T0 + 100), ("actor-0", T0 + 310))
    assert trace.steps() == {3: (T0, T0 + 1000), 4: (T0 + 1000, T0 + 2000)}


def packed(*rows: list[Any], base: int = T0) -> dict[str, Any]:
    return {"base_ns": base, "kinds": list(rows)}


def test_packed_spans_and_messages(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    write(tmp_path, "env-0", [header("env")])
    spans = packed(["a", "call", "main", {"n": 1}, [300, 600, 1500, 50]], ["b", "wait", "main", None, [310, 90]])
    messages = packed(["array", "env-0", [100, 20, 1400, 30]], ["array", "gone-0", [1, 2]])
    write(tmp_path, "actor-0", [header("actor"), {"packed": spans, "messages": messages}])
    trace = read_trace(tmp_path)
    actor = trace.tracks[1]
    assert [(one.name, one.start_ns - T0, one.end_ns - T0, one.args) for one in actor.spans] == [
        ("a", 300, 900, {"n": 1}), ("b", 310, 400, {}), ("a", 1500, 1550, {"n": 1}),
    ]  # fmt: skip
    assert [(flow.source, flow.target) for flow in trace.flows] == [
        (("env-0", T0 + 100), ("actor-0", T0 + 120)), (("env-0", T0 + 1400), ("actor-0", T0 + 1430)),
    ]  # fmt: skip
    assert [flow.target[1] - T0 for flow in read_trace(tmp_path, {4}).flows] == [1430]


def test_only_some_steps(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    spans = [row("early", "call", 100, 900), row("over", "call", 900, 1100), row("late", "call", 1500, 1600)]
    write(
        tmp_path,
        "actor-0",
        [header("actor"), {"spans": spans, "counters": [["m", "B", T0 + 5, 1], ["m", "B", T0 + 1005, 2]]}],
    )
    actor = read_trace(tmp_path, {4}).tracks[1]
    assert [span.name for span in actor.spans] == ["over", "late"]
    assert [value for _, value in actor.counters[0].samples] == [2.0]
    with pytest.raises(ConfigError, match="no trace of step 5,9; recorded steps: 3-4"):
        read_trace(tmp_path, {9, 5})


def test_a_killed_ranks_last_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    line = json.dumps({"spans": [row("lost", "call", 1, 2)]}).encode()
    for cut in range(0, len(line), 7):
        write(tmp_path, "actor-0", [header("actor"), {"spans": [row("kept", "call", 5, 6)]}], line[:cut])
        assert [span.name for span in read_trace(tmp_path).tracks[1].spans] == ["kept"]


@pytest.mark.parametrize(
    "line",
    [
        [1], {"spans": [["a", "call", "x", 2, "main", {}]]}, {"spans": [["a"]]}, {"spans": 3},
        {"spans": [["a", "b", -1, 2, "m", 5]]},
        {"flows": [[1, 2]]}, {"counters": [["a", "B", 1, "x"]]}, {"clock": [[1, 2, 3]]}, {"dropped": -1},
        {"spans": [["a", "b", 1 << 70, 2, "m", {}]]}, {"rlhpc_trace": 1},
        {"packed": 3}, {"packed": {"base_ns": 1}}, {"packed": packed(["a", "call", "m", None, [1]])}, {"packed": packed([])},
        {"packed": packed(["a", "call", "m", None, [-5, 1]], base=0)}, {"packed": packed(["a", "call", "m", None, 7])},
        {"packed": packed(["a", "call", "m", None, ["x", "y"]])}, {"packed": packed(["a", [1, 2]])},
        {"messages": packed(["a", "b", [1 << 70, 1]])}, {"messages": [[1]]}, {"packed": packed("abc", 5)},
    ],
)  # fmt: skip
def test_lines_of_another_form_are_left_out(line: Any, tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    write(tmp_path, "actor-0", [header("actor"), line, {"spans": [row("kept", "call", 5, 6)]}], b"\xff\xfe[[[[\n")
    assert "kept" in [span.name for span in read_trace(tmp_path).tracks[1].spans]


def test_planted_files_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    folder = tmp_path / "trace"
    os.mkfifo(folder / "pipe-0.jsonl")
    (folder / "folder-0.jsonl").mkdir()
    (folder / "dangling-0.jsonl").symlink_to(tmp_path / "nothing")
    (folder / "empty-0.jsonl").touch()
    (folder / "deep-0.jsonl").write_text("[" * 100_000)
    assert [track.name for track in read_trace(tmp_path).tracks] == ["driver-0"]


def test_without_a_trace_the_way_to_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no recorded trace: train with runner\.trace\.steps=10-12.* --steps 3"):
        read_trace(tmp_path)


def test_files_without_a_span_lead_to_the_logs(tmp_path: Path) -> None:
    """What a disk that was full from the beginning leaves of each rank: its first line, and a part of the second."""
    for name in ("driver-0", "actor-0"):
        write(tmp_path, name, [header(name.partition("-")[0])], b'{"packed":{"base_ns":5,"kinds":[["a","call"')
    with pytest.raises(ConfigError, match=r"none of the 2 files in .*/trace has a complete span.*: rlhpc logs "):
        read_trace(tmp_path)


def test_a_rank_that_was_started_again_is_one_track(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    lines = [
        header("env"),
        {"spans": [row("a", "call", 5, 6)]},
        header("env", pid=6),
        {"spans": [row("b", "call", 7, 8)]},
    ]
    write(tmp_path, "env-0", lines)
    env = read_trace(tmp_path).tracks[1]
    assert [span.name for span in env.spans] == ["a", "b"] and env.pid == 6


def test_tasks_share_lanes_in_which_they_do_not_overlap(tmp_path: Path) -> None:
    write(tmp_path, "driver-0", DRIVER)
    spans = [
        row("one", "turn", 0, 100, "main/Task-1"), row("inner", "tool", 10, 20, "main/Task-1"),
        row("two", "turn", 50, 150, "main/Task-2"), row("three", "turn", 100, 200, "main/Task-3"), row("main", "call", 0, 300),
    ]  # fmt: skip
    write(tmp_path, "rollout-0", [header("rollout"), {"spans": spans}])
    lanes = {span.name: span.thread for span in read_trace(tmp_path).tracks[1].spans}
    assert lanes == {
        "main": "main", "one": "main task 1", "inner": "main task 1", "two": "main task 2", "three": "main task 1",
    }  # fmt: skip


def test_times_of_another_host_are_put_on_the_drivers_clock(tmp_path: Path) -> None:
    """The clock of cpu1 is 90 s ahead; the samples come from either rank of the host."""
    write(tmp_path, "driver-0", DRIVER)
    ahead = 90_000_000_000
    clock = [[T0 + ahead + t, T0 + t + 400, T0 + t + 400, T0 + ahead + t + 800] for t in (0, 5_000)]
    counters = [["memory", "B", T0 + ahead + 5, 1]]
    flows = [[77, 1, T0 + ahead + 310, "message"]]
    write(tmp_path, "env-0", [header("env", 0, "cpu1"), {"clock": clock}])
    spans = [row("a", "call", ahead + 300, ahead + 900)]
    write(tmp_path, "env-1", [header("env", 1, "cpu1"), {"spans": spans, "counters": counters, "flows": flows}])
    trace = read_trace(tmp_path)
    (span,) = trace.tracks[2].spans
    (host,) = [clock for clock in trace.clocks if clock.host == "cpu1"]
    assert host.offset_ns == ahead and host.error_ns >= 400
    assert (span.start_ns, span.end_ns) == (T0 + 300, T0 + 900)
    assert trace.tracks[2].counters[0].samples == [(T0 + 5, 1.0)]
    assert trace.flows[0].target == ("env-1", T0 + 310)


SECOND = 1_000_000_000


def test_ranks_of_a_host_share_the_time_that_each_read_at_its_start(tmp_path: Path) -> None:
    """The wall clock was put an hour back between the starts of the driver and of a rank, which began 100 ns later."""
    hour = 3600 * SECOND
    write(tmp_path, "driver-0", [header("driver", anchor_ns=T0 - 50), *DRIVER[1:]])
    for name, rank in (("actor-0", 0), ("actor-1", 1)):
        lines = [
            {"spans": [row("a", "call", 100 - hour, 200 - hour)], "flows": [[77, 1, T0 + 150 - hour, "generate"]]},
            {"packed": packed(["b", "call", "main", None, [10, 5]], base=T0 + 200 - hour)},
            {
                "messages": packed(["array", "driver-0", [3, 4]], base=T0 - hour),
                "counters": [["memory", "B", T0 - hour, 1]],
            },
        ]
        write(tmp_path, name, [header("actor", rank, anchor_ns=T0 - 50 - hour), *lines])
    trace = read_trace(tmp_path)
    for track in trace.tracks[1:]:
        assert [(span.start_ns - T0, span.end_ns - T0) for span in track.spans] == [(100, 200), (210, 215)]
        assert track.counters[0].samples == [(T0, 1.0)]
    arrivals = [(flow.source[1] - T0, flow.target[1] - T0) for flow in trace.flows]
    assert arrivals == [(3, 7), (3, 7), (100, 150), (100, 150)]
    assert trace.steps() == {3: (T0, T0 + 1000), 4: (T0 + 1000, T0 + 2000)}


def test_the_clock_of_another_host_is_named_until_it_is_set(tmp_path: Path) -> None:
    """Its times are 90 s ahead and do not drift; its wall clock drifts, and is set in the tenth second."""
    write(tmp_path, "driver-0", [DRIVER[0], {"spans": [row("step 3", "step", 0, 20 * SECOND, step=3)]}])
    ahead, drift = 90 * SECOND, 2e-4
    seconds = range(20)
    clock = [[T0 + ahead + n * SECOND, *[T0 + n * SECOND + 400] * 2, T0 + ahead + n * SECOND + 800] for n in seconds]
    wall = [
        [T0 + ahead + n * SECOND, T0 + ahead + n * SECOND + round(drift * n * SECOND) - (3600 * SECOND if n > 9 else 0)]
        for n in seconds
    ]
    spans = [row("a", "call", ahead + 300, ahead + 15 * SECOND)]
    write(tmp_path, "env-0", [header("env", 0, "cpu1", anchor_ns=7), {"clock": clock, "wall": wall, "spans": spans}])
    trace = read_trace(tmp_path)
    (host,) = [clock for clock in trace.clocks if clock.host == "cpu1"]
    assert host.drift == pytest.approx(drift, rel=1e-2)
    for at in (0, 9 * SECOND):
        assert abs(host.offset_at(T0 + ahead + at) - (ahead + drift * at)) <= host.error_ns
    assert host.error_ns < 1_000_000
    (span,) = trace.tracks[1].spans
    assert (span.start_ns, span.end_ns) == (T0 + 300, T0 + 15 * SECOND)


def true_offset(at: int, offset: int, drift: float) -> float:
    """How far the host's clock is ahead at a time on that clock."""
    return offset + drift * (at - T0)


def sample(at: int, offset: int, drift: float, out: int, back: int) -> ClockSample:
    """A request sent at `at` on the host's clock, with these delays."""

    def driver(host: int) -> int:
        return host - round(true_offset(host, offset, drift))

    there = driver(at) + out
    received = at + out + back
    return at, there, there, received


@pytest.mark.parametrize("drift", [0.0, 5e-4, -2e-4, 1e-6])
@pytest.mark.parametrize("offset", [0, 90 * SECOND, -3_600 * SECOND])
@pytest.mark.parametrize("seed", range(5))
def test_the_true_offset_lies_within_the_error(offset: int, drift: float, seed: int) -> None:
    draw = random.Random(seed)

    def delay() -> int:
        return round(100_000 + draw.expovariate(1 / 200_000) + (draw.random() < 0.1) * 50_000_000)

    times = [T0 + round(2 * SECOND * i) + draw.randrange(SECOND) for i in range(60)]
    samples = [sample(at, offset, drift, delay(), delay()) for at in times]
    clock = align("cpu1", samples)
    assert clock is not None and clock.host == "cpu1"
    for at in range(times[0], times[-1], SECOND):
        assert abs(clock.offset_at(at) - true_offset(at, offset, drift)) <= clock.error_ns
    assert clock.error_ns < 1_000_000, "the samples with long delays do not count"


@pytest.mark.parametrize("number", [2, 3, 4, 6, 10])
@pytest.mark.parametrize("seed", range(20))
def test_the_error_holds_between_few_samples_of_a_short_trace(number: int, seed: int) -> None:
    """One short round trip bounds the error at its own time only: the line's drift is not known well."""
    draw = random.Random(seed)

    def delay() -> int:
        return 50_000 + round(draw.lognormvariate(10.5, 1.2))

    drift = draw.uniform(-5e-4, 5e-4)
    times = [T0 + round(i * 0.4 * SECOND) + draw.randrange(SECOND // 10) for i in range(number)]
    clock = align("h", [sample(at, 90 * SECOND, drift, delay(), delay()) for at in times])
    assert clock is not None
    for at in range(times[0], times[-1], SECOND // 20):
        assert abs(clock.offset_at(at) - true_offset(at, 90 * SECOND, drift)) <= clock.error_ns + 2


def test_one_side_of_the_way_takes_all_the_time() -> None:
    """The worst case: the estimate is wrong by half the round trip, as stated."""
    clock = align("h", [sample(T0 + i * SECOND, 7_000_000, 0.0, 2_000_000, 0) for i in range(5)])
    assert clock is not None
    assert abs(clock.offset_ns - 7_000_000) == pytest.approx(1_000_000, abs=2)
    assert abs(clock.offset_ns - 7_000_000) <= clock.error_ns


def test_the_drift_is_found() -> None:
    clock = align("h", [sample(T0 + i * SECOND, 0, 5e-4, 50_000, 50_000) for i in range(20)])
    assert clock is not None and clock.drift == pytest.approx(5e-4, rel=1e-3)


def test_a_single_burst_has_no_drift() -> None:
    clock = align("h", [sample(T0 + i * 300_000, 1_000, 0.0, 50_000, 90_000) for i in range(8)])
    assert clock is not None and clock.drift == 0.0 and abs(clock.offset_ns - 1_000) <= clock.error_ns


@pytest.mark.parametrize("seed", range(20))
def test_the_error_holds_before_the_first_and_after_the_last_sample(seed: int) -> None:
    draw = random.Random(seed)
    drift = draw.uniform(-5e-4, 5e-4)
    times = [T0 + round(i * 0.7 * SECOND) for i in range(draw.choice([1, 2, 4]))]
    samples = [sample(at, 3 * SECOND, drift, draw.randrange(1_000_000), draw.randrange(1_000_000)) for at in times]
    used = times[0] - 3 * SECOND, times[-1] + 5 * SECOND
    clock = align("h", samples, used)
    assert clock is not None
    for at in range(*used, SECOND // 10):
        assert abs(clock.offset_at(at) - true_offset(at, 3 * SECOND, drift)) <= clock.error_ns


def test_without_samples_nothing_is_known() -> None:
    assert align("h", []) is None
    assert align("h", [(10, 5, 5, 3)]) is None  # the host's clock was set back in between
