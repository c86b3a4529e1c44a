"""`rlhpc status`: what the files of a run say about its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.status import render_status
from rlhpc.runtime.registry import DEPARTED, MEMBERS, GenerationFolder


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "arm")
    paths.root.mkdir()
    status = {"state": "running", "pid": 78, "host": "gpu1", "started": 3.0, "updated": time.time(), "step": 1}
    paths.driver_state.write_text(json.dumps(status))
    return paths


def state_of(paths: RunPaths, rank: int) -> str:
    [line] = [line for line in render_status(paths).splitlines() if line.split()[:2] == ["env", str(rank)]]
    return line.split()[-1]


def test_a_rank_that_the_driver_goes_on_without_has_left(run: RunPaths) -> None:
    """It was cut off, and cannot say so in its own file. One that comes back has another incarnation."""
    registry = GenerationFolder.create(run.registry, "27-0")
    for rank in range(4):
        row = {"group": "env", "rank": rank, "node": "cpu1", "pid": 8620 + rank, "state": "running", "host": "cpu1/b"}
        registry.put(MEMBERS, f"env-{rank}", {**row, "incarnation": f"first-{rank}"})
    assert [state_of(run, rank) for rank in range(4)] == ["running"] * 4
    for rank in (1, 2):
        registry.put(DEPARTED, f"env-{rank}", {"incarnation": f"first-{rank}", "why": "gave no sign of life for 60 s"})
    assert [state_of(run, rank) for rank in range(4)] == ["running", "left", "left", "running"]
    row = {"group": "env", "rank": 2, "node": "cpu2", "pid": 9000, "state": "running", "host": "cpu2/b"}
    registry.put(MEMBERS, "env-2", {**row, "incarnation": "second-2"})
    assert [state_of(run, rank) for rank in range(4)] == ["running", "left", "running", "running"]
