"""Who waits for a run's next driver learns in time that there will be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.jobs import shared_probe
from rlhpc.jobs import state as ending
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.state import RunEndCheck, SharedRunFiles, run_state


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def looks(monkeypatch: pytest.MonkeyPatch, paths: RunPaths, *found: tuple[str, bool]) -> list[bool]:
    """What it says when the run looks like this, one look after the other; the second says whether somebody submitted it."""
    answers = iter(found)

    def states(_: Sequence[RunPaths], probe: object) -> list[tuple[Any, Any]]:
        state, submitted = next(answers)
        return [(SimpleNamespace(record=object() if submitted else None, slurm_job=None), SimpleNamespace(state=state))]

    monkeypatch.setattr(ending, "states", states)
    over = RunEndCheck(paths, interval_s=0.0)
    return [over() for _ in found]


@pytest.mark.parametrize(
    ("state", "submitted"),
    [("stopped", False), ("dead", False), ("dead", True), ("failed", True), ("cancelled", True), ("finished", True)],
)
def test_nobody_takes_it_up(monkeypatch: pytest.MonkeyPatch, paths: RunPaths, state: str, submitted: bool) -> None:
    assert looks(monkeypatch, paths, *[(state, submitted)] * 2) == [False, True], "one look may be between two attempts"


@pytest.mark.parametrize("state", ["pending", "starting", "running", "stopped", "unknown"])
def test_another_driver_may_come(monkeypatch: pytest.MonkeyPatch, paths: RunPaths, state: str) -> None:
    """A run that was submitted and is stopped is on its way back into the queue."""
    assert looks(monkeypatch, paths, *[(state, True)] * 4) == [False] * 4


def test_it_looks_dead_for_a_moment(monkeypatch: pytest.MonkeyPatch, paths: RunPaths) -> None:
    assert not any(looks(monkeypatch, paths, ("dead", True), ("starting", True), ("dead", True), ("running", True)))


def test_a_run_that_has_finished_is_over_at_once(paths: RunPaths) -> None:
    paths.driver_state.parent.mkdir(parents=True)
    paths.driver_state.write_text(json.dumps({"state": "finished"}))
    assert RunEndCheck(paths)()


def test_a_run_whose_driver_has_begun_and_written_no_status_is_starting(paths: RunPaths) -> None:
    """Also a run that goes on: the status is of the driver before."""
    code = (
        "import sys; from pathlib import Path; from rlhpc.jobs.paths import RunPaths\n"
        "from rlhpc.jobs.driver_lock import sole_driver\n"
        "with sole_driver(RunPaths(Path(sys.argv[1]))): print(flush=True); sys.stdin.read()"
    )
    assert run_state(paths)[0] == "unknown"
    command = [sys.executable, "-c", code, str(paths.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None and driver.stdout.readline()
        state, reason = run_state(paths)
        assert state == "starting" and reason.startswith("for ") and f"pid {driver.pid} on " in reason
        paths.driver_state.write_text(json.dumps({"state": "finished", "pid": driver.pid + 1}))
        assert run_state(paths)[0] == "starting"
        paths.driver_state.write_text(json.dumps({"state": "finished", "pid": driver.pid}))
        assert run_state(paths)[0] == "finished"
        paths.driver_state.unlink()
        driver.kill()
    assert paths.driver_record.is_file() and run_state(paths)[0] == "unknown"


def test_a_driver_on_another_host_is_starting_while_it_renews_its_lock(paths: RunPaths) -> None:
    paths.root.mkdir()
    process = {"pid": 7, "start": 1, "host": "elsewhere/boot/1"}
    paths.driver_record.write_text(json.dumps({"started": time.time() - 90, "process": process}))
    state, reason = run_state(paths)
    assert state == "starting" and reason.startswith("for 1m3") and reason.endswith(", pid 7 on elsewhere")
    os.utime(paths.driver_record, (time.time() - 3600,) * 2)
    assert run_state(paths)[0] == "unknown"
    paths.driver_record.write_text(json.dumps({"started": "soon", "process": [1]}))
    assert run_state(paths)[0] == "unknown"


def test_a_run_that_looks_unchanged_is_not_read_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a file is written, or for two minutes; and without Slurm's word on a job, nothing else changes."""
    asked: list[float] = []
    now = 1000.0
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))

    def states(_: Sequence[RunPaths], probe: object) -> list[tuple[Any, Any]]:
        asked.append(now)
        return [(SimpleNamespace(record=None, slurm_job=None), SimpleNamespace(state="running"))]

    monkeypatch.setattr(ending, "states", states)
    paths.submit.mkdir(parents=True)
    over = RunEndCheck(paths)
    for _ in range(22):
        assert not over()
        now += 5.0
    assert asked == [1000.0]
    (paths.submit / "segment_0.exit.json").touch()
    over()
    assert len(asked) == 2
    now += 119.0
    over()
    assert len(asked) == 2
    now += 11.0
    over()
    assert len(asked) == 3


def test_a_host_reads_a_run_for_all_of_its_ranks(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_probe.tempfile, "gettempdir", lambda: str(tmp_path))
    first, second = SharedRunFiles(paths), SharedRunFiles(paths)
    assert (first.generation(), first.is_over()) == ("", False)
    paths.registry.mkdir(parents=True)
    (paths.registry / "current").write_text("7-0")
    assert second.generation() == "", "the first one looks"
    first.release()
    assert second.generation() == "7-0" and not second.is_over()
    second.release()
    assert not list(tmp_path.glob("rlhpc.waits-*"))
