"""Makes a finished run longer: its last segment is opened again, up to the new end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rlhpc.jobs.claim import SegmentFiles, read_json_file
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.record import find_job, job_words
from rlhpc.runtime.errors import ConfigError, SubmitError

#: Seconds between two looks for a job that is ending: of this host, and of Slurm.
_LOOKS_S = (0.05, 2.0)
#: Stop reasons of a segment that ended where it was planned to.
_AS_PLANNED = ("max_steps", "segment_end")


def segment_to_reopen(paths: RunPaths, ends: Sequence[int], *, goal_moved: bool = False) -> int | None:
    """The finished segment that the run's new length opens again; None if all finished segments end as planned.

    Args:
        paths: The run.
        ends: The step at which each segment is to end now.
        goal_moved: The goal of a segment that ended by reaching it (`runner.stop_return`) is a different one now.

    Raises:
        ConfigError: A finished segment is to end at another step now, and not just because the last one grows.
    """
    done = {k: found for k in range(len(ends)) if (found := read_json_file(paths.segment_done(k))) is not None}
    later = [k for k in _finished(paths) if k >= len(ends)]
    for segment, record in done.items():
        step = int(record.get("global_step", ends[segment]))
        if step == ends[segment] or (str(record.get("stop_reason")) not in _AS_PLANNED and not goal_moved):
            continue
        if step < ends[segment] and segment == max([*done, *later]):
            return segment
        raise ConfigError(
            f"{paths.root}: segment {segment} ended at step {step}, and with this runner.max_steps and runner.segments it "
            f"would end at {ends[segment]}. A run can only be made longer, and segments that later ones follow keep their "
            "ends: choose runner.max_steps and runner.segments so, or another runner.name"
        )
    if later:
        raise ConfigError(
            f"{paths.root}: segment {later[-1]} is finished, but runner.segments is {len(ends)} now; keep "
            f"runner.segments at {later[-1] + 1} or more, or choose another runner.name"
        )
    return None


def wait_for_end(paths: RunPaths, segment: int, *, within_s: float = 60.0) -> None:
    """Waits for the job that finished a segment, which ends a moment after that.

    Opened again earlier, the segment would seem to have a live job, and that job to have left no marker.

    Raises:
        SubmitError: It has not ended `within_s` seconds later.
    """
    files, deadline = SegmentFiles(paths, segment), time.monotonic() + within_s
    while (job := find_job(files)) is not None:
        if time.monotonic() > deadline:
            raise SubmitError(
                f"segment {segment} of {paths.root} is finished, but {job_words(job)} has not ended {within_s:g} s later; "
                f"end it first: rlhpc cancel {paths.root}"
            )
        time.sleep(_LOOKS_S[job.executor == "slurm"])


def reopen(paths: RunPaths, segment: int) -> Path:
    """Moves the marker of a finished segment aside, so that training goes on; returns its new name.

    The new name still ends in .json, so that the step at which the segment ended before keeps its checkpoint.
    """
    marker = paths.segment_done(segment)
    record = read_json_file(marker) or {}
    return marker.replace(marker.with_name(f"{segment}.until_{record.get('global_step', 0)}.json"))


def _finished(paths: RunPaths) -> list[int]:
    return sorted(int(p.stem) for p in paths.segments.glob("*.json") if p.stem.isdigit())
