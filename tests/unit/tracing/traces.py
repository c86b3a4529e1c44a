"""Synthetic traces: ranks that work and wait as a test says, with times in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.tracing.model import MessageFlow, RankTrack, Span, Trace

#: Start of all synthetic traces, so that times are as large as real ones.
START_NS = 1_750_000_000_000_000_000


def ns(milliseconds: float) -> int:
    return START_NS + round(milliseconds * 1e6)


def span(name: str, category: str, start_ms: float, end_ms: float, *, thread: str = "main", **args: Any) -> Span:
    return Span(name, category, ns(start_ms), ns(end_ms), thread, args)


def track(group: str, rank: int, *spans: Span) -> RankTrack:
    return RankTrack(group, rank, "n1", 100 + rank, sorted(spans, key=lambda one: one.start_ns))


def driver(end_ms: float, *spans: Span, step: int = 1) -> RankTrack:
    return track("driver", 0, span("step", "step", 0, end_ms, step=step), *spans)


def flow(name: str, source: str, sent_ms: float, target: str, arrived_ms: float) -> MessageFlow:
    return MessageFlow(name, (source, ns(sent_ms)), (target, ns(arrived_ms)))


def trace(*tracks: RankTrack, flows: tuple[MessageFlow, ...] = ()) -> Trace:
    return Trace("runs/example", tracks, flows)


def write_trace(run_folder: Path, content: Trace) -> None:
    """Writes a trace below a run folder, as its ranks record it."""
    folder = RunPaths(run_folder).trace
    folder.mkdir(parents=True, exist_ok=True)
    for track_of_rank in content.tracks:
        name = track_of_rank.name
        ends = [[number, 0, *one.source, one.name] for number, one in enumerate(content.flows)]
        ends += [[number, 1, *one.target, one.name] for number, one in enumerate(content.flows)]
        lines: list[dict[str, Any]] = [
            {
                "rlhpc_trace": 1, "group": track_of_rank.group, "rank": track_of_rank.rank, "host": track_of_rank.host,
                "host_id": track_of_rank.host, "pid": track_of_rank.pid,
            },
            {
                "spans": [
                    [one.name, one.category, one.start_ns, one.end_ns, one.thread, dict(one.args)]
                    for one in track_of_rank.spans
                ],
                "flows": [[number, end, at, label] for number, end, track_name, at, label in ends if track_name == name],
                "counters": [
                    [counter.name, counter.unit, *sample] for counter in track_of_rank.counters for sample in counter.samples
                ],
            },
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
