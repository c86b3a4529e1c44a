"""Timelines: all that a browser draws, in a bounded size."""

from __future__ import annotations

import json
import math

from rlhpc.tracing.analysis import analyze
from rlhpc.tracing.model import Counter, RankTrack
from rlhpc.tracing.timeline import MAX_SPANS, timeline
from tests.unit.tracing.test_critical_path import two_ranks
from tests.unit.tracing.traces import driver, ns, span, trace, track


def test_the_timeline_of_a_step() -> None:
    found = two_ranks()
    data = timeline(found, analyze(found)[1])
    assert data["length"] == 100_000
    assert [one["name"] for one in data["tracks"]] == ["driver-0", "actor-0", "rollout-0"]
    texts = data["texts"]
    (row,) = data["tracks"][1]["rows"]
    assert (row["thread"], row["depth"]) == ("main", 2)
    assert [(*one[:3], texts[one[3]], texts[one[4]]) for one in row["spans"]] == [
        (6000, 92000, 0, "call", "train"), (7000, 46000, 1, "wait", "rollouts"), (47000, 91000, 1, "train", "optimizer"),
    ]  # fmt: skip
    step = data["tracks"][0]["rows"][0]["spans"][0]
    assert texts[step[5]] == "step 1"
    assert data["path"][0][:2] == [0, 5000]
    assert [data["tracks"][part[2]]["name"] for part in data["path"]][:2] == ["driver-0", "rollout-0"]
    assert sum(end - start for start, end, *_ in data["path"]) == 100_000


def test_many_short_spans_are_drawn_as_few() -> None:
    spans = [span("act", "engine", index / 100, index / 100 + 0.005) for index in range(10 * MAX_SPANS)]
    found = trace(driver(10 * MAX_SPANS / 100), track("rollout", 0, *spans))
    data = timeline(found, analyze(found)[1])
    (row,) = data["tracks"][1]["rows"]
    assert len(row["spans"]) < 2 * MAX_SPANS
    assert "short spans" in "".join(data["texts"])
    assert max(one[1] for one in row["spans"]) == 10 * MAX_SPANS * 10 - 5
    assert len(json.dumps(data)) < 4e6


def test_spans_are_cut_at_the_ends_of_the_step_and_text_is_bounded() -> None:
    found = trace(driver(10), track("env", 0, span("x" * 10_000 + "\x1b\u202e", "simulator", -5, 30)))
    data = timeline(found, analyze(found)[1])
    assert data["tracks"][1]["rows"][0]["spans"][0][:2] == [0, 10_000]
    assert max(map(len, data["texts"])) <= 120
    assert "\u202e" not in "".join(data["texts"])


def test_counters_of_the_step_without_values_that_are_no_numbers() -> None:
    samples = [(ns(-1), 9.0), (ns(1), 1.0), (ns(2), math.nan), (ns(3), 3.0), (ns(99), 4.0)]
    counters = [Counter("queue", "items", samples), Counter("idle", "B", [(ns(1), 0.0)])]
    rank = RankTrack("env", 0, "n1", 1, [span("play", "simulator", 0, 9)], counters)
    found = trace(driver(10), rank)
    (counter,) = timeline(found, analyze(found)[1])["tracks"][1]["counters"]
    assert counter == {"name": "queue", "unit": "items", "points": [[1000, 1.0], [3000, 3.0]]}


def test_ranks_without_spans_are_counted() -> None:
    found = trace(driver(10), track("env", 0), track("env", 1, span("play", "simulator", 50, 60)))
    data = timeline(found, analyze(found)[1])
    assert (len(data["tracks"]), data["omitted"]) == (1, 2)


def test_threads_stand_in_order_of_their_numbers() -> None:
    names = ["rewards task 10", "main", "rewards task 2"]
    rank = track("rollout", 0, *(span("work", "judge", 0, 5, thread=name) for name in names))
    found = trace(driver(10), rank)
    rows = timeline(found, analyze(found)[1])["tracks"][1]["rows"]
    assert [row["thread"] for row in rows] == ["main", "rewards task 2", "rewards task 10"]
