"""Critical path of a step: the chain of work and messages, over all ranks, that decided when the step ended."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.tracing.leaves import ENCLOSING, NO_SPAN, Leaf, RankLeaves
from rlhpc.tracing.model import MessageFlow, Trace

#: Nanoseconds by which a message's arrival may be recorded after the end of the wait for it, besides the clocks' error.
_SLACK_NS = 50_000
#: Maximum nanoseconds between a wait for a message and its unpacking, in a process that other processes interrupt.
_UNPACK_DELAY_NS = 2_000_000
#: Categories of spans that last until a message has arrived. Only `wait` counts as idle.
_RECEIVING = frozenset({"wait", "receive", "weights"})


@dataclass(frozen=True, slots=True)
class PathPart:
    """Part of a critical path: the activity of one rank in an interval.

    Attributes:
        track, group: Name of the rank's track, and its worker group.
        category: Category of the innermost span; `receive` for a message on its way; `none` where the rank has no span.
        name: Name of the span or message.
        start_ns, end_ns: Interval, in nanoseconds on the driver's clock.
        sender: Name of the sender's track, for a message on its way.
    """

    track: str
    group: str
    category: str
    name: str
    start_ns: int
    end_ns: int
    sender: str = ""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(trace: Trace, ranks: dict[str, RankLeaves], start_ns: int, end_ns: int) -> list[PathPart]:
    """Returns the critical path of an interval, in order of time; its parts sum to the interval's length.

    The path is followed from the end backwards, on the driver first. Where a rank worked, the path stays on it. Where it
    waited for a message that was sent during the wait, the path continues on the sender, at the time of sending. Where no
    message is recorded, it continues on the rank that stopped working last within the wait, of the group waited for if known.

    Args:
        trace: The trace, for its messages and the clocks' errors.
        ranks: Innermost spans of the ranks in the interval, by track name.
        start_ns, end_ns: The interval.
    """
    return _Walk(trace, ranks, start_ns, end_ns).parts()


class _Walk:
    """Walk along the critical path, backwards in time."""

    def __init__(self, trace: Trace, ranks: dict[str, RankLeaves], start_ns: int, end_ns: int) -> None:
        self._ranks, self._start_ns, self._time_ns = ranks, start_ns, end_ns
        self._slack_ns = _SLACK_NS + max((clock.error_ns for clock in trace.clocks), default=0)
        self._flows: dict[str, list[MessageFlow]] = defaultdict(list)
        for flow in trace.flows:
            if start_ns <= flow.target[1] <= end_ns + self._slack_ns:
                self._flows[flow.target[0]].append(flow)
        for rank_flows in self._flows.values():
            rank_flows.sort(key=lambda flow: flow.target[1])
        self._targets = {track: [flow.target[1] for flow in rank_flows] for track, rank_flows in self._flows.items()}
        self._followed_messages: set[tuple[str, int]] = set()  # messages, by receiver and index: none is followed twice
        self._parts: list[PathPart] = []
        self._rank, self._thread = self._find_last_rank(end_ns)

    def _find_last_rank(self, end_ns: int) -> tuple[RankLeaves | None, str]:
        for rank in self._ranks.values():
            if rank.track.group == "driver":
                return rank, "main"
        busy_ends = [
            (busy_end, rank) for rank in self._ranks.values() if (busy_end := rank.last_busy_end(0, end_ns)) is not None
        ]
        if not busy_ends:
            return None, "main"
        (_, thread), rank = max(busy_ends, key=lambda candidate: candidate[0])
        return rank, thread

    def parts(self) -> list[PathPart]:
        while self._time_ns > self._start_ns:
            if self._rank is None:
                self._spend(self._start_ns, NO_SPAN, "")
                break
            self._go_back(self._rank)
        return self._parts[::-1]

    def _go_back(self, rank: RankLeaves) -> None:
        leaf = rank.find_before(self._thread, self._time_ns)
        if leaf is None and self._thread != "main":  # what a thread or task does begins with the main thread's request
            self._thread = "main"
            leaf = rank.find_before("main", self._time_ns)
        if leaf is None or leaf.category in ENCLOSING:
            busiest_thread = rank.busiest(self._time_ns)
            if busiest_thread is not None and (leaf is None or busiest_thread[1].category not in ENCLOSING | {"wait"}):
                # Another thread worked while this one did not; only for as long as that was so.
                own_start_ns = leaf.start_ns if leaf is not None else self._find_gap_start(rank, [self._thread])
                busiest_name = busiest_thread[1]
                if busiest_name.category in _RECEIVING:
                    self._thread, leaf = busiest_thread
                else:
                    self._spend(max(busiest_name.start_ns, own_start_ns), busiest_name.category, busiest_name.span.name)
                    return
        if leaf is not None and leaf.category not in _RECEIVING:
            self._spend(leaf.start_ns, leaf.category, leaf.span.name)
            return
        start_ns = leaf.start_ns if leaf is not None else self._find_gap_start(rank, list(rank.threads))
        if not self._follow_message(rank, leaf, start_ns) and not self._follow_work(rank, leaf, start_ns):
            self._spend(start_ns, *_describe_leaf(leaf))

    def _find_gap_start(self, rank: RankLeaves, threads: Sequence[str]) -> int:
        """Returns the start of the time, which ends now, in which threads had no span."""
        busy_ends = [
            leaf.end_ns
            for thread in threads
            if (leaf := rank.find_previous(thread, self._time_ns)) is not None and leaf.end_ns < self._time_ns
        ]
        return max(busy_ends, default=self._start_ns)

    def _follow_message(self, rank: RankLeaves, leaf: Leaf | None, start_ns: int) -> bool:
        """Continues at the sender of the last message that arrived since `start_ns`; returns False without such a message."""
        track = rank.track.name
        index = self._find_last_arrival(track, start_ns, self._time_ns)
        if index is None:
            index = self._find_last_arrival(track, self._time_ns, self._time_ns + self._slack_ns)
        if index is None:
            return False
        flow = self._flows[track][index]
        self._followed_messages.add((track, index))
        began_ns = self._find_reception_start(rank, leaf, start_ns)
        category = "receive" if leaf is None or leaf.is_wait else leaf.category
        self._spend(min(max(flow.target[1], start_ns), self._time_ns), *_describe_leaf(leaf))
        source_track, source_ns = flow.source
        sender = self._ranks.get(source_track)
        self._spend(min(max(source_ns, began_ns), self._time_ns), category, flow.name, sender=source_track)
        if sender is not None and source_ns >= began_ns:  # else it was on its way, or lay ready, when the wait began
            self._rank, self._thread = sender, self._find_sending_thread(sender)
        return True

    def _find_reception_start(self, rank: RankLeaves, leaf: Leaf | None, start_ns: int) -> int:
        """Returns when the rank began to wait for a message that it received from `start_ns` on.

        A rank first waits for a message and then unpacks it, in two spans of one name; the message's arrival may be recorded
        in the second.
        """
        if leaf is None or leaf.is_wait:
            return start_ns
        wait_leaf = rank.find_before(self._thread, start_ns)
        if (
            wait_leaf is not None
            and wait_leaf.category in ENCLOSING
            and start_ns - wait_leaf.start_ns <= _UNPACK_DELAY_NS
        ):
            wait_leaf = rank.find_before(self._thread, wait_leaf.start_ns)
        is_same = wait_leaf is not None and wait_leaf.is_wait and wait_leaf.span.name == leaf.span.name
        return wait_leaf.start_ns if wait_leaf is not None and is_same else start_ns

    def _find_last_arrival(self, track: str, start_ns: int, end_ns: int) -> int | None:
        """Returns the index of the last message to a rank that arrived after `start_ns`, until `end_ns`."""
        targets = self._targets.get(track, [])
        index = bisect.bisect_right(targets, end_ns) - 1
        while index >= 0 and (track, index) in self._followed_messages:
            index -= 1
        return index if index >= 0 and targets[index] > start_ns else None

    def _find_sending_thread(self, sender: RankLeaves) -> str:
        """Returns the thread that sent a message now: the thread that records sending, or else the busiest thread."""
        for thread in sender.threads:
            leaf = sender.find_before(thread, self._time_ns + 1)
            if leaf is not None and leaf.category == "send":
                return thread
        busiest_thread = sender.busiest(self._time_ns)
        return busiest_thread[0] if busiest_thread is not None else "main"

    def _follow_work(self, rank: RankLeaves, leaf: Leaf | None, start_ns: int) -> bool:
        """Continues at the rank that stopped working last since `start_ns`; returns False if none did."""
        if leaf is not None and not leaf.is_wait:
            return False
        group = self._find_group_waited_for(leaf)
        candidates = []
        for other_rank in self._ranks.values():
            busy_end = (
                other_rank.last_busy_end(start_ns, self._time_ns) if group in (None, other_rank.track.group) else None
            )
            if busy_end is not None and (other_rank is not rank or busy_end[1] != self._thread):
                candidates.append((busy_end[0], other_rank.track.name, busy_end[1]))
        if not candidates:
            return False
        end_ns, track, thread = max(candidates)
        self._spend(end_ns, *_describe_leaf(leaf))
        self._rank, self._thread = self._ranks[track], thread
        return True

    def _find_group_waited_for(self, leaf: Leaf | None) -> str | None:
        """Returns the group that a wait is for: the driver's waits for calls are called `group.method`."""
        if leaf is None:
            return None
        group = str(leaf.span.args.get("group", leaf.span.name.partition(".")[0]))
        return group if any(rank.track.group == group for rank in self._ranks.values()) else None

    def _spend(self, start_ns: int, category: str, name: str, sender: str = "") -> None:
        """Adds the part from `start_ns` until now, and goes back to its start."""
        start_ns = max(start_ns, self._start_ns)
        if start_ns >= self._time_ns:
            return
        track = self._rank.track if self._rank is not None else None
        track_name, group = (track.name, track.group) if track is not None else ("", "")
        last_part = self._parts[-1] if self._parts else None
        end_ns = self._time_ns
        if last_part is not None and (last_part.track, last_part.category, last_part.name, last_part.sender) == (
            track_name,
            category,
            name,
            sender,
        ):
            end_ns = self._parts.pop().end_ns
        self._parts.append(PathPart(track_name, group, category, name, start_ns, end_ns, sender))
        self._time_ns = start_ns


def _describe_leaf(leaf: Leaf | None) -> tuple[str, str]:
    return (NO_SPAN, "") if leaf is None else (leaf.category, leaf.span.name)
