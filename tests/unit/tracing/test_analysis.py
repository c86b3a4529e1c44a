"""Analysis of steps: loads of ranks and groups, generation, and sums."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rlhpc.tracing.analysis import analyze, analyze_step
from rlhpc.tracing.model import Trace
from tests.unit.tracing.test_critical_path import traces, two_ranks
from tests.unit.tracing.traces import driver, ns, span, trace, track


def test_steps_of_a_trace() -> None:
    found = analyze(trace(driver(10), track("env", 0, span("play", "simulator", 0, 4)), driver(10, step=1)))
    assert list(found) == [1]
    assert found[1].length_ns == 10_000_000


def test_a_step_lasts_until_the_end_of_its_checkpoint() -> None:
    spans = (
        span("step", "step", 0, 10, step=1), span("save", "save", 11, 15),
        span("step", "step", 16, 20, step=2), span("save", "save", 30, 32),
    )  # fmt: skip
    found = analyze(trace(track("driver", 0, *spans)))
    assert {step: (one.start_ns, one.end_ns) for step, one in found.items()} == {
        1: (ns(0), ns(15)),
        2: (ns(16), ns(32)),
    }
    assert found[1].path_ns("save") == 4_000_000


def test_what_a_step_was_spent_on() -> None:
    step = analyze(two_ranks())[1]
    milliseconds = {category: part / 1e6 for category, part in step.path_categories().items()}
    assert milliseconds == {
        "train": 44, "engine": 33, "receive": 7, "phase": 5, "step": 5, "call": 3, "wait": 2, "send": 1
    }  # fmt: skip
    assert step.path_groups()["rollout", "engine"] == 33_000_000
    assert step.path_ns("train", "engine") == 77_000_000
    assert step.path_ns("engine", group="actor") == 0


def test_the_slowest_rank_of_a_group_and_idle_shares() -> None:
    found = trace(
        driver(10),
        track("env", 0, span("play", "simulator", 0, 2), span("actions", "wait", 2, 10)),
        track("env", 1, span("play", "simulator", 0, 3)),
        track("env", 2, span("play", "simulator", 0, 9)),
    )
    (group,) = analyze(found)[1].groups
    assert (group.slowest.track, group.excess_ns) == ("env-2", 6_000_000)
    assert [load.idle_share for load in group.ranks] == pytest.approx([0.8, 0.7, 0.1])
    assert group.idle_share == pytest.approx(1.6 / 3)


def test_the_long_tail_of_an_engine() -> None:
    batches = [8, 8, 8, 6, 2, 1, 1]
    steps = [
        span("decode", "engine", 10 * index, 10 * index + 10, batch=batch, capacity=16, finished=int(index > 2))
        for index, batch in enumerate(batches)
    ]
    (generation,) = analyze(trace(driver(100), track("rollout", 0, *steps)))[1].generation
    assert (generation.largest_batch, generation.capacity, generation.full_ns) == (8, 16, 0)
    assert (generation.num_tokens, generation.num_steps, generation.num_finished) == (34, 7, 4)
    assert generation.tail_ns == 30_000_000
    assert generation.fixed_ns == pytest.approx(10_000_000)  # a step takes as long with one sequence


def test_the_cost_of_an_engine_step_apart_from_its_sequences() -> None:
    def fixed_ms(*steps: tuple[int, float]) -> float | None:
        spans, time = [], 0.0
        for batch, milliseconds in steps:
            spans.append(span("decode", "engine", time, time + milliseconds, batch=batch))
            time += milliseconds
        (generation,) = analyze(trace(driver(1000), track("rollout", 0, *spans)))[1].generation
        return None if generation.fixed_ns is None else generation.fixed_ns / 1e6

    assert fixed_ms((10, 12), (10, 12), (2, 4), (2, 4)) == pytest.approx(2)
    assert fixed_ms((8, 12), (8, 12)) is None  # the batch did not vary


@settings(max_examples=200, deadline=None)
@given(traces())
def test_work_and_idleness_of_each_rank_sum_to_the_length_of_the_step(found: Trace) -> None:
    step = analyze_step(found, 3, ns(0), ns(100))
    loads = [load for group in step.groups for load in group.ranks] + ([step.driver] if step.driver else [])
    assert len(loads) == len(found.tracks)
    for load in loads:
        assert load.busy_ns + load.idle_ns == step.length_ns
        assert sum(load.categories.values()) == load.busy_ns
        assert 0 <= load.idle_share <= 1
    assert sum(step.path_categories().values()) == step.length_ns
