"""A finished run that is made longer, shorter, or cut otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.jobs.job_record import reopen, segment_to_reopen, wait_for_end
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.runtime.errors import ConfigError, SubmitError


def finished(folder: Path, *ends: int, reason: str = "segment_end") -> RunPaths:
    paths = RunPaths(folder)
    paths.segments.mkdir()
    for segment, step in enumerate(ends):
        last = "max_steps" if segment == len(ends) - 1 and reason == "segment_end" else reason
        paths.segment_done(segment).write_text(json.dumps({"global_step": step, "stop_reason": last}))
    return paths


def test_as_planned(tmp_path: Path) -> None:
    paths = finished(tmp_path, 10, 20)
    assert segment_to_reopen(paths, [10, 20]) is None
    assert segment_to_reopen(paths, [10, 20, 30]) is None  # a further segment is not finished yet
    assert segment_to_reopen(RunPaths(tmp_path / "none"), [10]) is None


def test_longer(tmp_path: Path) -> None:
    paths = finished(tmp_path, 10, 20)
    assert segment_to_reopen(paths, [10, 25]) == 1
    aside = reopen(paths, 1)
    assert not paths.segment_done(1).exists() and json.loads(aside.read_text())["global_step"] == 20
    assert segment_to_reopen(paths, [10, 25]) is None


@pytest.mark.parametrize("ends", [[5, 20], [15, 30], [10, 15], [20]])
def test_what_cannot_be(tmp_path: Path, ends: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"choose .*runner\.(max_steps|name)"):
        segment_to_reopen(finished(tmp_path, 10, 20), ends)


def test_a_goal_that_was_reached(tmp_path: Path) -> None:
    paths = finished(tmp_path, 7, reason="stop_return")
    assert segment_to_reopen(paths, [20]) is None
    assert segment_to_reopen(paths, [20], goal_moved=True) == 0


def test_the_job_that_finished_it_ends_first(tmp_path: Path) -> None:
    """Its claim is given back before its process ends."""
    paths = finished(tmp_path, 10)
    files = SegmentJournal(paths, 0)
    paths.submit.mkdir()
    job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    JobRecord(
        segment=0, attempt=1, token="t", executor="local", command=[], job_name="j", job_id="1", phase="submitted",
        process=ProcessId.from_pid(job.pid),
    ).write(files)  # fmt: skip
    with pytest.raises(SubmitError, match=r"has not ended 0\.1 s later.*rlhpc cancel"):
        wait_for_end(paths, 0, within_s=0.1)
    job.communicate(b"\n")
    wait_for_end(paths, 0)
