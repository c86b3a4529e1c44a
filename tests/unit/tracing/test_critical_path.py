"""Critical paths against hand-computed ones, and their properties on arbitrary traces."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.tracing.critical_path import critical_path
from rlhpc.tracing.leaves import RankLeaves
from rlhpc.tracing.model import CATEGORIES, HostClock, MessageFlow, Span, Trace
from tests.unit.tracing.traces import START_NS, driver, flow, ns, span, trace, track


def path(found: Trace, end_ms: float) -> list[tuple[str, str, str, float, float]]:
    """The critical path from 0 on, with times in milliseconds."""
    ranks = {one.name: RankLeaves(one, START_NS, ns(end_ms)) for one in found.tracks}
    return [
        (part.track, part.category, part.name, (part.start_ns - START_NS) / 1e6, (part.end_ns - START_NS) / 1e6)
        for part in critical_path(found, ranks, START_NS, ns(end_ms))
    ]


def two_ranks(**changes: Any) -> Trace:
    """A rollout rank generates until 40, an actor rank trains until 90; the driver calls both and waits."""
    flows = (
        flow("generate", "driver-0", 5, "rollout-0", 6),
        flow("train", "driver-0", 5, "actor-0", 6),
        flow("rollouts", "rollout-0", 41, "actor-0", 45),
        flow("reply", "rollout-0", 42, "driver-0", 43),
        flow("reply", "actor-0", 92, "driver-0", 94),
    )
    tracks = (
        driver(100, span("rollout", "phase", 0, 95), span("wait", "wait", 5, 95)),
        track(
            "rollout", 0, span("generate", "call", 6, 42), span("step", "engine", 7, 40), span("put", "send", 40, 41.5)
        ),
        track(
            "actor",
            0,
            span("train", "call", 6, 92),
            span("rollouts", "wait", 7, 46),
            span("optimizer", "train", 47, 91),
        ),
    )
    return trace(*tracks, **{"flows": flows, **changes})


def test_two_ranks_against_a_path_computed_by_hand() -> None:
    assert path(two_ranks(), 100) == [
        ("driver-0", "phase", "rollout", 0, 5),
        ("rollout-0", "receive", "generate", 5, 6),
        ("rollout-0", "call", "generate", 6, 7),
        ("rollout-0", "engine", "step", 7, 40),
        ("rollout-0", "send", "put", 40, 41),
        ("actor-0", "receive", "rollouts", 41, 45),
        ("actor-0", "wait", "rollouts", 45, 46),
        ("actor-0", "call", "train", 46, 47),
        ("actor-0", "train", "optimizer", 47, 91),
        ("actor-0", "call", "train", 91, 92),
        ("driver-0", "receive", "reply", 92, 94),
        ("driver-0", "wait", "wait", 94, 95),
        ("driver-0", "step", "step", 95, 100),
    ]


def test_without_messages_the_path_goes_on_where_work_ended_last() -> None:
    assert path(two_ranks(flows=()), 100) == [
        ("driver-0", "phase", "rollout", 0, 5),
        ("rollout-0", "none", "", 5, 6),
        ("rollout-0", "call", "generate", 6, 7),
        ("rollout-0", "engine", "step", 7, 40),
        ("rollout-0", "send", "put", 40, 41.5),
        ("rollout-0", "call", "generate", 41.5, 42),
        ("actor-0", "wait", "rollouts", 42, 46),
        ("actor-0", "call", "train", 46, 47),
        ("actor-0", "train", "optimizer", 47, 91),
        ("actor-0", "call", "train", 91, 92),
        ("driver-0", "wait", "wait", 92, 95),
        ("driver-0", "step", "step", 95, 100),
    ]


def test_a_wait_for_a_group_ignores_other_groups() -> None:
    found = trace(
        driver(20, span("wait", "wait", 0, 20, group="actor")),
        track("actor", 0, span("train", "train", 0, 10)),
        track("env", 0, span("simulate", "simulator", 0, 19)),
    )
    assert path(found, 20) == [("actor-0", "train", "train", 0, 10), ("driver-0", "wait", "wait", 10, 20)]


def test_a_rank_that_works_on_is_not_what_others_wait_for() -> None:
    found = trace(
        driver(20, span("wait", "wait", 0, 20)),
        track("actor", 0, span("train", "train", 0, 10)),
        track("env", 0, *(span("simulate", "simulator", time - 0.5, time + 0.5) for time in range(30))),
    )
    assert path(found, 20) == [("actor-0", "train", "train", 0, 10), ("driver-0", "wait", "wait", 10, 20)]


def test_a_message_that_lay_ready_before_the_wait_does_not_lead_away() -> None:
    found = trace(
        driver(20, span("own", "save", 0, 12), span("wait", "wait", 12, 20)),
        track("actor", 0, span("train", "train", 0, 5)),
        flows=(flow("reply", "actor-0", 5, "driver-0", 18),),
    )
    assert path(found, 20) == [
        ("driver-0", "save", "own", 0, 12),
        ("driver-0", "receive", "reply", 12, 18),
        ("driver-0", "wait", "wait", 18, 20),
    ]


def test_another_thread_counts_only_while_the_waited_for_thread_did_not_work() -> None:
    found = trace(
        driver(20, span("wait", "wait", 0, 20)),
        track(
            "rollout", 0, span("generate", "call", 0, 18), span("step", "engine", 0, 6), span("step", "engine", 8, 18),
            span("reward", "judge", 2, 16, thread="pool"),
        ),
    )  # fmt: skip
    assert path(found, 20) == [
        ("rollout-0", "engine", "step", 0, 6),
        ("rollout-0", "judge", "reward", 6, 8),
        ("rollout-0", "engine", "step", 8, 18),
        ("driver-0", "wait", "wait", 18, 20),
    ]


def test_a_message_whose_arrival_is_recorded_as_it_is_unpacked() -> None:
    found = trace(
        driver(20, span("from actor", "wait", 2, 18), span("from actor", "receive", 18.02, 19)),
        track("actor", 0, span("send weights", "weights", 3, 17)),
        flows=(flow("broadcast", "actor-0", 16, "driver-0", 18.5), flow("call", "actor-0", 1, "driver-0", 19.02)),
    )
    assert path(found, 20) == [
        ("driver-0", "step", "step", 0, 2),
        ("actor-0", "none", "", 2, 3),
        ("actor-0", "weights", "send weights", 3, 16),
        ("driver-0", "receive", "broadcast", 16, 18.5),
        ("driver-0", "receive", "from actor", 18.5, 19),
        ("driver-0", "step", "step", 19, 20),
    ]


def test_a_killed_rank_is_followed_to_its_end() -> None:
    found = trace(
        driver(30, span("wait", "wait", 1, 30)), track("env", 0, span("simulate", "simulator", 1, 9)), flows=()
    )
    assert path(found, 30) == [
        ("driver-0", "step", "step", 0, 1),
        ("env-0", "simulator", "simulate", 1, 9),
        ("driver-0", "wait", "wait", 9, 30),
    ]


def test_a_message_of_a_missing_rank_counts_as_on_its_way() -> None:
    found = trace(driver(30, span("wait", "wait", 1, 30)), flows=(flow("reply", "gone-3", 10, "driver-0", 20),))
    assert path(found, 30) == [
        ("driver-0", "step", "step", 0, 1),
        ("driver-0", "wait", "wait", 1, 10),
        ("driver-0", "receive", "reply", 10, 20),
        ("driver-0", "wait", "wait", 20, 30),
    ]


def test_without_a_driver_the_path_starts_where_work_ended_last() -> None:
    found = trace(track("actor", 0, span("train", "train", 0, 9)), track("env", 0, span("simulate", "simulator", 0, 5)))
    assert path(found, 10) == [("actor-0", "train", "train", 0, 9), ("actor-0", "none", "", 9, 10)]
    assert path(trace(), 10) == [("", "none", "", 0, 10)]


TIMES = st.integers(min_value=-20, max_value=120)
NAMES = ("driver-0", "env-0", "env-1", "missing-7")


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, length = draw(TIMES), draw(st.integers(min_value=0, max_value=60))
    args = draw(st.sampled_from([{}, {"group": "env"}, {"group": "missing"}]))
    return span(
        "work", draw(st.sampled_from(CATEGORIES)), start, start + length,
        thread=draw(st.sampled_from(["main", "task"])), **args,
    )  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    tracks = [
        track(group, rank, *draw(st.lists(spans(), max_size=12)))
        for group, rank in draw(st.lists(st.sampled_from([("driver", 0), ("env", 0), ("env", 1)]), unique=True))
    ]
    ends = st.tuples(st.sampled_from(NAMES), TIMES, st.sampled_from(NAMES), TIMES)
    flows = [MessageFlow("message", (a, ns(x)), (b, ns(y))) for a, x, b, y in draw(st.lists(ends, max_size=15))]
    return Trace("run", tracks, flows, [HostClock("n1", 0, draw(st.integers(min_value=0, max_value=10_000_000)))])


@settings(max_examples=400, deadline=None)
@given(traces())
def test_parts_follow_one_another_and_sum_to_the_length_of_the_step(found: Trace) -> None:
    start_ns, end_ns = ns(0), ns(100)
    ranks = {one.name: RankLeaves(one, start_ns, end_ns) for one in found.tracks}
    parts = critical_path(found, ranks, start_ns, end_ns)
    assert [parts[0].start_ns, *(part.end_ns for part in parts)] == [*(part.start_ns for part in parts), end_ns]
    assert parts[0].start_ns == start_ns
    assert all(part.length_ns > 0 for part in parts)
    assert sum(part.length_ns for part in parts) == end_ns - start_ns
    for part in parts:
        assert part.track in ranks or not part.track
