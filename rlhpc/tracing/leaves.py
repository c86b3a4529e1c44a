"""Innermost spans: the activity of each thread of a rank, and of the rank as a whole, at any time."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhpc.tracing.model import RankTrack, Span

#: Category of a time without a span.
NO_SPAN = "none"
#: Categories whose spans only enclose others; time in them without an inner span is the process's own code.
ENCLOSING = frozenset({"step", "phase", "call", "turn"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """Interval in which one span of a thread was the innermost.

    Attributes:
        start_ns, end_ns: Interval, in nanoseconds on the driver's clock.
        span: The innermost span.
    """

    start_ns: int
    end_ns: int
    span: Span

    @property
    def category(self) -> str:
        return self.span.category

    @property
    def is_wait(self) -> bool:
        return self.span.category == "wait"


def thread_leaves(spans: Iterable[Span]) -> list[Leaf]:
    """Returns the innermost span of one thread at each time, in order of time.

    Spans of a thread should nest. If they overlap otherwise, as after a lost record, the one that started last is innermost.
    """
    spans = sorted(
        (span for span in spans if span.end_ns > span.start_ns), key=lambda span: (span.start_ns, -span.end_ns)
    )
    times = sorted({time_ns for span in spans for time_ns in (span.start_ns, span.end_ns)})
    leaves: list[Leaf] = []
    open_spans: list[tuple[int, int, Span]] = []  # the one that started last first
    next_span = 0
    for start_ns, end_ns in itertools.pairwise(times):
        while next_span < len(spans) and spans[next_span].start_ns <= start_ns:
            heapq.heappush(open_spans, (-spans[next_span].start_ns, -next_span, spans[next_span]))
            next_span += 1
        while open_spans and open_spans[0][2].end_ns <= start_ns:
            heapq.heappop(open_spans)
        if not open_spans:
            continue
        span = open_spans[0][2]
        if leaves and leaves[-1].span is span and leaves[-1].end_ns == start_ns:
            leaves[-1] = Leaf(leaves[-1].start_ns, end_ns, span)
        else:
            leaves.append(Leaf(start_ns, end_ns, span))
    return leaves


class RankLeaves:
    """Innermost spans of a rank, by thread.

    Args:
        track: The rank's track.
        start_ns, end_ns: Interval; spans are cut at its ends.
    """

    def __init__(self, track: RankTrack, start_ns: int, end_ns: int) -> None:
        self.track, self.start_ns, self.end_ns = track, start_ns, end_ns
        spans: dict[str, list[Span]] = defaultdict(list)
        for span in track.spans:
            if span.start_ns < end_ns and span.end_ns > start_ns:
                spans[span.thread].append(span)
        self.threads = {
            thread: _cut_leaves(thread_leaves(thread_spans), start_ns, end_ns)
            for thread, thread_spans in sorted(spans.items())
        }
        self._starts = {thread: [leaf.start_ns for leaf in leaves] for thread, leaves in self.threads.items()}

    def find_before(self, thread: str, time_ns: int) -> Leaf | None:
        """Returns the leaf of a thread that covers the moment just before `time_ns`; None if no span does."""
        index = bisect.bisect_left(self._starts.get(thread, []), time_ns) - 1
        if index < 0 or self.threads[thread][index].end_ns < time_ns:
            return None
        return self.threads[thread][index]

    def find_previous(self, thread: str, time_ns: int) -> Leaf | None:
        """Returns the last leaf of a thread that starts before `time_ns`, whether it covers that moment or not."""
        index = bisect.bisect_left(self._starts.get(thread, []), time_ns) - 1
        return self.threads[thread][index] if index >= 0 else None

    def busiest(self, time_ns: int) -> tuple[str, Leaf] | None:
        """Returns the thread and the leaf that describe best the rank's activity just before `time_ns`; None without a
        span.
        """
        candidates = [
            (_rank_leaf(leaf), thread == "main", leaf.start_ns, thread, leaf)
            for thread in self.threads
            if (leaf := self.find_before(thread, time_ns)) is not None
        ]
        if not candidates:
            return None
        *_, thread, leaf = max(candidates, key=lambda candidate: candidate[:4])
        return thread, leaf

    def last_busy_end(self, start_ns: int, end_ns: int) -> tuple[int, str] | None:
        """Returns when the rank last stopped working within an interval, and the thread; None if it never did.

        A span that another one follows at once is no end: a rank that works on is not what others wait for.
        """
        busy_ends = []
        for thread, leaves in self.threads.items():
            index = bisect.bisect_left(self._starts[thread], end_ns) - 1
            while index >= 0 and leaves[index].end_ns > start_ns:
                leaf = leaves[index]
                follower = leaves[index + 1] if index + 1 < len(leaves) else None
                is_followed = follower is not None and follower.start_ns == leaf.end_ns and not follower.is_wait
                goes_on = is_followed or (leaf.end_ns == self.end_ns and leaf.span.end_ns > self.end_ns)
                if not leaf.is_wait and leaf.end_ns <= end_ns and not goes_on:
                    busy_ends.append((leaf.end_ns, thread))
                    break
                index -= 1
        return max(busy_ends, default=None)

    def categories(self) -> dict[str, int]:
        """Returns nanoseconds by category, which sum to the interval's length; of several threads, the busiest one counts."""
        duration_by_category_ns: dict[str, int] = defaultdict(int)
        for leaf in self._iter_busiest_leaves():
            duration_by_category_ns[leaf.category] += leaf.end_ns - leaf.start_ns
        duration_by_category_ns[NO_SPAN] = self.end_ns - self.start_ns - sum(duration_by_category_ns.values())
        return {category: length_ns for category, length_ns in duration_by_category_ns.items() if length_ns}

    def _iter_busiest_leaves(self) -> list[Leaf]:
        """Returns the leaf of the busiest thread at each time."""
        if len(self.threads) == 1:
            return next(iter(self.threads.values()))
        times = sorted(
            {time_ns for leaves in self.threads.values() for leaf in leaves for time_ns in (leaf.start_ns, leaf.end_ns)}
        )
        parts = []
        for start_ns, end_ns in itertools.pairwise(times):
            busiest_thread = self.busiest(end_ns)
            if busiest_thread is not None:
                parts.append(Leaf(start_ns, end_ns, busiest_thread[1].span))
        return parts


def _rank_leaf(leaf: Leaf) -> int:
    """Returns the priority of a leaf as the activity of its rank: work, then enclosing spans, then waits."""
    if leaf.is_wait:
        return 0
    return 1 if leaf.category in ENCLOSING else 2


def _cut_leaves(leaves: Sequence[Leaf], start_ns: int, end_ns: int) -> list[Leaf]:
    return [
        Leaf(max(leaf.start_ns, start_ns), min(leaf.end_ns, end_ns), leaf.span)
        for leaf in leaves
        if leaf.start_ns < end_ns and leaf.end_ns > start_ns
    ]
