"""Innermost spans of threads and ranks."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.tracing.leaves import RankLeaves, thread_leaves
from rlhpc.tracing.model import Span
from tests.unit.tracing.test_critical_path import spans
from tests.unit.tracing.traces import START_NS, ns, span, track


def leaves(*found: Span) -> list[tuple[str, float, float]]:
    return [
        (leaf.span.name, (leaf.start_ns - START_NS) / 1e6, (leaf.end_ns - START_NS) / 1e6)
        for leaf in thread_leaves(found)
    ]


def test_the_innermost_of_nested_spans() -> None:
    found = (span("a", "call", 0, 10), span("b", "engine", 2, 8), span("c", "send", 4, 5), span("d", "train", 8, 9))
    assert leaves(*found) == [("a", 0, 2), ("b", 2, 4), ("c", 4, 5), ("b", 5, 8), ("d", 8, 9), ("a", 9, 10)]


def test_of_spans_that_overlap_without_nesting_the_later_one() -> None:
    assert leaves(span("a", "call", 0, 6), span("b", "engine", 4, 9)) == [("a", 0, 4), ("b", 4, 9)]
    assert leaves(span("a", "call", 0, 6), span("b", "engine", 0, 6)) == [("b", 0, 6)]
    assert leaves(span("empty", "call", 3, 3)) == []


def test_a_rank_counts_as_its_busiest_thread() -> None:
    rank = RankLeaves(
        track(
            "actor", 0, span("call", "call", 0, 10), span("item", "wait", 2, 9),
            span("write", "save", 1, 5, thread="writer"), span("later", "train", 20, 30),
        ),
        START_NS, ns(12),
    )  # fmt: skip
    categories = {category: nanoseconds / 1e6 for category, nanoseconds in rank.categories().items()}
    assert categories == {"call": 2, "save": 4, "wait": 4, "none": 2}


@settings(max_examples=200, deadline=None)
@given(st.lists(spans(), max_size=15))
def test_categories_sum_to_the_length(found: list[Span]) -> None:
    rank = RankLeaves(track("env", 0, *found), ns(0), ns(100))
    assert sum(rank.categories().values()) == 100_000_000
    for thread_of_rank in rank.threads.values():
        for left, right in itertools.pairwise(thread_of_rank):
            assert left.end_ns <= right.start_ns
