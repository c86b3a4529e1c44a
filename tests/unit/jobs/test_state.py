"""Who waits for a run's next driver learns in time that there will be none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.jobs import state as ending
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.state import RunEndCheck


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def looks(monkeypatch: pytest.MonkeyPatch, paths: RunPaths, *found: tuple[str, bool]) -> list[bool]:
    """What it says when the run looks like this, one look after the other; the second says whether somebody submitted it."""
    answers = iter(found)

    def states(_: Sequence[RunPaths]) -> list[tuple[Any, Any]]:
        state, submitted = next(answers)
        return [(SimpleNamespace(record=object() if submitted else None), SimpleNamespace(state=state))]

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
