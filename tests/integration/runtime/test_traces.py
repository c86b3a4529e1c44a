"""Traces of live ranks: started and ended by the driver, from two hosts whose clocks differ, and of ranks that die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, WorkerGroup
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.trace_control import TraceControl
from rlhpc.runtime.trace_recorder import recorder, span
from rlhpc.tracing.model import RankTrack, Span, Trace
from rlhpc.tracing.read import read_trace
from tests.false_clock import python_with_false_clock
from tests.probes import Probe

ELSEWHERE = {"RLHPC_HOST_ID": "elsewhere"}
OFFSET_S, DRIFT = 90.0, 5e-4


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session.start(
        registry_root=tmp_path / "registry", log_dir=tmp_path / "logs" / "segment_0", tcp_address="127.0.0.1"
    )
    yield made
    made.stop()
    recorder.stop(flush=True)
    recorder.reset()


def control(session: Session, tmp_path: Path, *steps: int) -> TraceControl:
    return TraceControl(tmp_path / "trace", steps, session)


def run_step(trace: TraceControl, step: int, work: Callable[[], Any]) -> None:
    """A step as the runner makes it."""
    trace.begin_step(step)
    with span(f"step {step}", "step", step=step):
        work()


def read_when(condition: Callable[[Trace], bool], tmp_path: Path, seconds: float = 30.0) -> Trace:
    """The trace as soon as it has what is waited for: ranks write what they record about once a second."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            trace = read_trace(tmp_path)
            if condition(trace) or time.monotonic() > deadline:
                return trace
        except RlhpcError:
            assert time.monotonic() < deadline, "nothing was recorded"
        time.sleep(0.1)


def track(trace: Trace, name: str) -> RankTrack:
    return next(found for found in trace.tracks if found.name == name)


def named(found: RankTrack, name: str) -> list[Span]:
    return [one for one in found.spans if one.name == name]


def has(name: str, *spans: str) -> Callable[[Trace], bool]:
    return lambda trace: any(t.name == name and all(named(t, one) for one in spans) for t in trace.tracks)


def test_only_the_asked_steps_are_recorded(session: Session, launch: Callable[..., Any], tmp_path: Path) -> None:
    group, trace = launch(2, "near"), control(session, tmp_path, 2, 3)
    for step in range(1, 6):
        run_step(trace, step, lambda: group.add(1).wait())
    trace.end()
    ranks = ("near-0", "near-1")
    found = read_when(
        lambda t: len(t.tracks) == 3 and all(len(named(track(t, rank), "add")) == 2 for rank in ranks), tmp_path
    )
    assert sorted(found.steps()) == [2, 3]
    for rank in (0, 1):
        calls = named(track(found, f"near-{rank}"), "add")
        assert len(calls) == 2 and {call.category for call in calls} == {"call"}
        for call, (start, end) in zip(calls, found.steps().values(), strict=True):
            assert start <= call.start_ns <= call.end_ns <= end
    assert [wait.category for wait in named(track(found, "driver-0"), "near.add")] == ["wait", "wait"]
    calls_by_flow = [flow.target[0] for flow in found.flows if flow.name == "add" and flow.source[0] == "driver-0"]
    assert sorted(calls_by_flow) == ["near-0", "near-0", "near-1", "near-1"]


@pytest.fixture
def far(session: Session, tmp_path: Path) -> Iterator[WorkerGroup]:
    """A rank on a host of its own, whose clock is 90 s ahead and drifts."""
    python = str(python_with_false_clock(tmp_path, OFFSET_S, DRIFT))
    groups = [{"label": "far", "node_ranks": 0, "python_interpreter": python}]
    cluster = Cluster({"num_nodes": 1, "accelerators_per_node": 0, "node_groups": groups})
    strategy = NodePlacementStrategy([0], node_group="far")
    group = Probe.create_group().launch(cluster, placement_strategy=strategy, name="far", env_vars=ELSEWHERE)
    yield group
    group.shutdown()


def test_sends_precede_receives_although_a_clock_is_wrong(
    session: Session, launch: Callable[..., Any], far: WorkerGroup, tmp_path: Path
) -> None:
    near, trace, channel = launch(1, "near"), control(session, tmp_path, 1), Channel.create("items")

    def work() -> None:
        for _ in range(12):
            handles = [near.send_all([1, 2], "far"), far.recv_all("near", 2)]
            handles += [far.send_all([3], "near"), near.recv_all("far", 1)]
            handles += [far.produce(channel, 3), near.consume(channel, 3)]
            for handle in handles:
                handle.wait()
            time.sleep(0.4)

    run_step(trace, 1, work)
    trace.end()
    found = read_when(lambda t: len(t.tracks) == 3 and bool(named(track(t, "far-0"), "recv_all")), tmp_path)
    (clock,) = [clock for clock in found.clocks if clock.host == "elsewhere"]
    start, end = found.steps()[1]
    assert clock.drift == pytest.approx(DRIFT, abs=2e-4)
    assert 0 < clock.error_ns < 20_000_000, "a thousandth of what the clock is wrong by"
    truth = far_offset(far)
    assert abs(clock.offset_at(truth[0]) - truth[1]) <= clock.error_ns + truth[2]
    pairs = {(flow.source[0], flow.target[0]) for flow in found.flows}
    assert {("near-0", "far-0"), ("far-0", "near-0"), ("driver-0", "far-0"), ("far-0", "driver-0")} <= pairs
    for flow in found.flows:
        assert flow.source[1] - flow.target[1] <= clock.error_ns, flow
    (call,) = named(track(found, "far-0"), "recv_all")[:1]
    assert start - clock.error_ns <= call.start_ns <= call.end_ns <= end + clock.error_ns
    waited = [one for one in track(found, "far-0").spans if one.category == "wait"]
    assert any(one.name == "from near-0" for one in waited)


def far_offset(far: WorkerGroup) -> tuple[int, int, int]:
    """Time on the far rank's clock, how far it is ahead then, and how well this is known: both clocks are this machine's."""
    best = (0, 0, 1 << 62)
    for _ in range(20):
        before = time.time_ns()
        (there,) = far.wall_clock().wait()
        after = time.time_ns()
        if after - before < best[2]:
            best = (there, there - (before + after) // 2, after - before)
    return best


def test_a_killed_rank_leaves_its_trace(session: Session, launch: Callable[..., Any], tmp_path: Path) -> None:
    group, trace = launch(1, "near"), control(session, tmp_path, 1)
    (facts,) = group.identity().wait()
    trace.begin_step(1)
    with span("step 1", "step", step=1):
        group.add(1).wait()
        read_when(has("near-0", "add"), tmp_path)
        os.kill(facts["pid"], signal.SIGKILL)
        with pytest.raises(RlhpcError):
            group.nap(30).wait()
    trace.end()
    assert has("near-0", "add")(read_trace(tmp_path))


def test_a_trace_ends_no_run(session: Session, launch: Callable[..., Any], tmp_path: Path) -> None:
    """The folder cannot be made, and a rank is stopped: the calls go on as if nothing were recorded."""
    group, trace = launch(2, "near"), control(session, tmp_path, 1, 2)
    (tmp_path / "trace").write_text("in the way")
    for step in (1, 2, 3):
        run_step(trace, step, lambda: group.add(1).wait())
    assert group.add(1).wait() == [1, 2]
    (tmp_path / "trace").unlink()
    facts = group.identity().wait()
    os.kill(facts[1]["pid"], signal.SIGSTOP)
    try:
        stopped = control(session, tmp_path, 1)
        run_step(stopped, 1, lambda: group.execute_on(0).add(1).wait())
    finally:
        os.kill(facts[1]["pid"], signal.SIGCONT)
    stopped.end()
    assert has("near-0", "add")(read_when(has("near-0", "add"), tmp_path))


def test_a_request_is_found_by_the_watch_of_the_registry(
    session: Session, launch: Callable[..., Any], tmp_path: Path
) -> None:
    group, trace = launch(1, "near"), control(session, tmp_path)
    session.registry.request_trace(2)
    deadline, step = time.monotonic() + 30, 0
    while time.monotonic() < deadline and not (session.trace_request or recorder.is_on):
        step += 1
        run_step(trace, step, lambda: group.nap(0.1).wait())
    for _ in range(4):
        step += 1
        run_step(trace, step, lambda: group.nap(0.1).wait())
    trace.end()
    found = read_when(lambda t: has("near-0", "nap")(t) and len(named(track(t, "near-0"), "nap")) == 2, tmp_path)
    assert len(found.steps()) == 2
    assert not (session.registry.root / "trace.json").exists()


@pytest.mark.parametrize("content", ["", "[", "[3]", '{"steps": "3"}', '{"steps": -1}', '{"steps": true}'])
def test_a_malformed_request_is_no_request(content: str, session: Session) -> None:
    (session.registry.root / "trace.json").write_text(content)
    assert session.registry.take_trace_request() == 0
    session.registry.request_trace(5)
    assert json.loads((session.registry.root / "trace.json").read_text()) == {"steps": 5}
    assert session.registry.take_trace_request() == 5 and session.registry.take_trace_request() == 0
