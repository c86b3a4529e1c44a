"""`rlhpc status`: what the files of a run say about its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.status import render_status, usage_of_ranks
from rlhpc.runtime.launchers import USAGE
from rlhpc.runtime.registry import DEPARTED, MEMBERS, RANKS, GenerationFolder


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


def test_it_says_how_the_weights_travel(run: RunPaths) -> None:
    assert "weight sync" not in render_status(run)
    status = json.loads(run.driver_state.read_text())
    run.driver_state.write_text(json.dumps({**status, "weights_by": {"ipc": 1.0}, "weights_gb_per_s": 12.345}))
    assert "weight sync  ipc, 12.3 GB/s" in render_status(run)
    run.driver_state.write_text(json.dumps({**status, "weights_by": {"host": 0.02, "ipc": 0.98}}))
    assert "weight sync  ipc 98%, host 2%" in render_status(run)
    for unreadable in (3, None, {}, {"ipc": "all"}):
        run.driver_state.write_text(json.dumps({**status, "weights_by": unreadable, "weights_gb_per_s": 2.0}))
        assert "weight sync" not in render_status(run)


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


def test_the_drivers_table_stands_for_the_files_of_the_ranks(run: RunPaths) -> None:
    """It has ranks that have not come yet, too. A run of an earlier version has no table, or it is damaged."""
    registry = GenerationFolder.create(run.registry, "27-0")
    row = {"group": "env", "rank": 0, "node": "cpu1", "pid": 8620, "state": "running", "host": "cpu1/b"}
    registry.put(MEMBERS, "env-0", {**row, "incarnation": "first"})
    assert state_of(run, 0) == "running"
    table = [{**row, "state": "left"}, {**row, "rank": 1, "state": "starting"}, {"rank": 7}, "x", {**row, "rank": -1}]
    registry.put(RANKS, RANKS, {"ranks": table})
    assert [state_of(run, rank) for rank in range(2)] == ["left", "starting"]
    for damaged in ({"ranks": 7}, {"rows": table}):
        registry.put(RANKS, RANKS, damaged)
        assert state_of(run, 0) == "running"
    (registry.root / RANKS / f"{RANKS}.json").write_text("{")
    assert state_of(run, 0) == "running"


def test_the_start_shows_the_phases_of_each_group(run: RunPaths) -> None:
    """Until the first step is done; then how long it took."""
    registry, now = GenerationFolder.create(run.registry, "27-0"), time.time()
    registry.put(MEMBERS, "driver", {"group": "driver", "rank": 0, "node": "cpu1", "state": "running"})
    assert "environment" not in render_status(run)
    before = [["environment", now - 50], ["imports", now - 45]]
    ranks = [
        {"group": "actor", "rank": 0, "phases": [*before, ["waiting", now - 40]]},
        *(
            {"group": "rollout", "rank": rank, "phases": [*before, ["vLLM: load weights", now - 30]]}
            for rank in (0, 1, 3)
        ),
        {"group": "rollout", "rank": 2, "phases": before},
    ]
    registry.put("start", "ranks", {"ranks": ranks})
    lines = render_status(run).splitlines()
    [weights] = [line for line in lines if "load weights" in line]
    assert " ".join(weights.split()) == "rollout 0–1, 3 vLLM: load weights 30s environment 5.0 s, imports 15.0 s"
    assert [line.split() for line in lines if line.startswith("rollout      2 ")] == [
        ["rollout", "2", "imports", "45s", "environment", "5.0", "s"]
    ]
    (registry.root / "timeline.json").write_text(json.dumps({"driver": 100.0, "ready": 120.0, "first_step": 143.21}))
    text = render_status(run)
    assert "start        43.2 s to the end of the first step" in text and "load weights" not in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"usage": {"env-0": [0.5, 4096, null, 97], "env-1": [1, 2], "env-2": 3, "env-3": ["\\u001b", NaN, 1, null]}}',
         {"env-0": (0.5, 4096, None, 97), "env-3": (None, None, 1, None)}),
        ('{"usage": [1]}', {}), ("[]", {}), ("{", {}), (None, {}),
    ],
)  # fmt: skip
def test_what_ranks_use_as_far_as_it_can_be_read(
    run: RunPaths, content: str | None, expected: dict[str, object]
) -> None:
    folder = GenerationFolder.create_next(run.registry, "local", 0).root / RANKS
    folder.mkdir()
    if content is not None:
        (folder / f"{USAGE}.json").write_text(content)
    assert usage_of_ranks(run) == expected
