"""Data of a step's timeline: spans of all ranks in a size that a browser draws at once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rlhpc.runtime.text import printable
from rlhpc.tracing.analysis import StepAnalysis
from rlhpc.tracing.model import Counter, Span, Trace

#: Maximum number of spans of a timeline; beyond it, short neighbours of a category are drawn as one.
MAX_SPANS = 20_000
#: Maximum number of nested spans that are drawn, of tracks, of points of a counter, and of characters of a text.
_MAX_DEPTH, _MAX_TRACKS, _MAX_POINTS, _MAX_CHARACTERS = 6, 1024, 400, 120


class _Texts:
    """Texts that spans refer to by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(printable(text)[:_MAX_CHARACTERS], len(self._numbers))

    def list(self) -> list[str]:
        return list(self._numbers)


def timeline(trace: Trace, step: StepAnalysis) -> dict[str, Any]:
    """Returns the timeline of a step as JSON values.

    Args:
        trace: The trace.
        step: Analysis of the step.

    Returns:
        `length`: length of the step. `texts`: names of spans and categories, and arguments as text. `tracks`: one for each
        rank (`name`, `host`, `rows` of threads with `thread`, `depth` and `spans`, and `counters`); a span is
        `[start, end, depth, category, name, arguments]`. `path`: the critical path, as `[start, end, track, category, name]`.
        `omitted`: number of tracks that are not drawn. Times are microseconds after the step's start; categories, names and
        arguments are numbers of texts, -1 for none; tracks are numbers of `tracks`, -1 for none.
    """
    text_table = _Texts()
    num_spans = sum(len(spans) for spans in step.spans.values())
    # Spans shorter than this are merged with their neighbours, so that the sum stays near MAX_SPANS.
    shortest_ns = step.length_ns * len(step.spans) // MAX_SPANS if num_spans > MAX_SPANS else 0
    tracks = sorted(trace.tracks, key=lambda track: (track.group != "driver", track.group, track.rank))
    drawn_tracks = [track for track in tracks if step.spans.get(track.name) or track.group == "driver"][:_MAX_TRACKS]
    indices = {track.name: index for index, track in enumerate(drawn_tracks)}
    return {
        "length": _to_microseconds(step.length_ns),
        "tracks": [
            {
                "name": printable(track.name),
                "host": printable(track.host),
                "rows": _make_rows(step, step.spans.get(track.name, ()), text_table, shortest_ns),
                "counters": [
                    counter_data for counter in track.counters if (counter_data := _thin_counter(step, counter)) is not None
                ],
            }
            for track in drawn_tracks
        ],
        "path": [
            [
                _to_microseconds(path_span.start_ns - step.start_ns), _to_microseconds(path_span.end_ns - step.start_ns),
                indices.get(path_span.track, -1),
                text_table.number(path_span.category), text_table.number(path_span.name),
            ]
            for path_span in _merge_path(step, shortest_ns)
        ],
        "omitted": len(tracks) - len(drawn_tracks),
        "texts": text_table.list(),
    }  # fmt: skip


def _make_rows(step: StepAnalysis, spans: Iterable[Span], text_table: _Texts, shortest_ns: int) -> list[dict[str, Any]]:
    threads: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    rows = []
    for thread in sorted(threads, key=_thread_sort_key):
        span_rows, depth = _layout_thread_spans(step, threads[thread], text_table, shortest_ns)
        rows.append({"thread": printable(thread), "depth": depth, "spans": span_rows})
    return rows


def _thread_sort_key(name: str) -> tuple[bool, str]:
    """Returns the sort key of a thread: the main thread first, and task 2 before task 10."""
    return name != "main", re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _layout_thread_spans(
    step: StepAnalysis, spans: Sequence[Span], text_table: _Texts, shortest_ns: int
) -> tuple[list[list[float]], int]:
    """Returns the spans of a thread in order of start, and the number of levels in which they nest."""
    span_rows: list[list[float]] = []
    open_ends: list[int] = []
    merged_by_depth: dict[
        int, tuple[int, int, dict[str, float]]
    ] = {}  # by depth: index in `drawn`, count, time by category
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        start_ns, end_ns = max(span.start_ns, step.start_ns), min(span.end_ns, step.end_ns)
        while open_ends and open_ends[-1] <= start_ns:
            open_ends.pop()
        depth = len(open_ends)
        open_ends.append(end_ns)
        if depth >= _MAX_DEPTH:
            continue
        start_us, end_us = _to_microseconds(start_ns - step.start_ns), _to_microseconds(end_ns - step.start_ns)
        if end_ns - start_ns < shortest_ns:
            index, num_merged, times = merged_by_depth.get(depth, (-1, 0, {}))
            if index < 0 or end_us - span_rows[index][0] > shortest_ns / 1e3:
                index, num_merged, times = len(span_rows), 0, {}
                span_rows.append(
                    [start_us, end_us, depth, text_table.number(span.category), text_table.number(span.name), -1]
                )
            times[span.category] = times.get(span.category, 0.0) + end_us - start_us
            merged_by_depth[depth] = index, num_merged + 1, times
            if num_merged:
                longest_category = max(times, key=lambda category: times[category])
                span_rows[index][1] = max(span_rows[index][1], end_us)
                span_rows[index][3:] = [
                    text_table.number(longest_category),
                    text_table.number(f"{num_merged + 1} short spans"),
                    -1,
                ]
            continue
        details_text = ", ".join(f"{key} {arg_value}" for key, arg_value in span.args.items())
        span_rows.append(
            [start_us, end_us, depth, text_table.number(span.category),
             text_table.number(span.name), text_table.number(details_text) if details_text else -1]
        )  # fmt: skip
    return span_rows, 1 + max((int(span[2]) for span in span_rows), default=0)


def _merge_path(step: StepAnalysis, shortest_ns: int) -> list[Any]:
    """Returns the parts of the critical path; merges consecutive short parts of a track, and gives them the category of
    the longest part.
    """
    merged_spans: list[Any] = []
    for path_span in step.path:
        last_part = merged_spans[-1] if merged_spans else None
        if (
            last_part is not None
            and last_part.track == path_span.track
            and min(last_part.length_ns, path_span.length_ns) < shortest_ns
        ):
            longest_part = max(last_part, path_span, key=lambda candidate: candidate.length_ns)
            merged_spans[-1] = dataclasses.replace(longest_part, start_ns=last_part.start_ns, end_ns=path_span.end_ns)
        else:
            merged_spans.append(path_span)
    return merged_spans


def _thin_counter(step: StepAnalysis, counter: Counter) -> dict[str, Any] | None:
    """Returns a counter's values within the step, thinned; None if it has none or only zeros."""
    counter_points = [
        (time_ns, counter_value)
        for time_ns, counter_value in counter.samples
        if step.start_ns <= time_ns <= step.end_ns and math.isfinite(counter_value)
    ]
    if not any(counter_value for _, counter_value in counter_points):
        return None
    stride = -(-len(counter_points) // _MAX_POINTS)
    return {
        "name": printable(counter.name),
        "unit": printable(counter.unit),
        "points": [
            [_to_microseconds(time_ns - step.start_ns), counter_value]
            for time_ns, counter_value in counter_points[::stride]
        ],
    }


def _to_microseconds(duration_ns: int) -> float:
    return round(duration_ns / 1e3, 1)
