"""Shared Slurm query: one question for all commands that wait on a host."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import shared_probe
from rlhpc.jobs.probes import JobReport, JobState
from rlhpc.jobs.shared_probe import SharedProbe, wait_folder


class Asked:
    """A probe that answers from a table, and records what it was asked."""

    def __init__(self, **states: str) -> None:
        self.states, self.questions = states, list[list[str]]()
        self.answers = True

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        self.questions.append(ids)
        if not self.answers:
            return {job: JobReport(JobState.UNKNOWN, conclusive=False) for job in ids}
        return {job: JobReport(JobState.parse(self.states[f"j{job}"]), "why", "squeue", True) for job in ids}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns the clock of all commands."""
    clock = Clock()
    monkeypatch.setattr(shared_probe, "time", clock)
    return clock


def states(probe: SharedProbe, *ids: str) -> list[str]:
    """Returns the states that a command learns."""
    return [report.state.value for report in probe.query(ids).values()]


def test_one_command_asks_for_all(tmp_path: Path, clock: Clock) -> None:
    slurm: Any = Asked(j1="RUNNING", j2="PENDING")
    first, second = (SharedProbe(slurm, tmp_path / "meet") for _ in range(2))
    assert states(first, "1") == ["RUNNING"]
    assert states(second, "2") == ["UNKNOWN"]  # the answers are too young to ask again
    clock.now += shared_probe.INTERVAL_S + 1
    assert states(second, "2") == ["PENDING"]
    assert states(first, "1") == ["RUNNING"]
    assert slurm.questions == [["1"], ["1", "2"]]


def test_jobs_that_ended_or_that_nobody_waits_for_are_not_asked_about(tmp_path: Path, clock: Clock) -> None:
    slurm: Any = Asked(j1="COMPLETED", j2="RUNNING", j3="RUNNING")
    first, second = (SharedProbe(slurm, tmp_path / "meet") for _ in range(2))
    states(first, "1", "2")
    clock.now += 20
    assert states(first, "1", "2") == ["COMPLETED", "RUNNING"]
    assert slurm.questions[-1] == ["2"]
    clock.now += 200  # the first command is gone
    assert states(second, "3") == ["RUNNING"] and slurm.questions[-1] == ["3"]


def test_while_slurm_is_silent_it_is_asked_less_often(tmp_path: Path, clock: Clock) -> None:
    slurm: Any = Asked(j1="RUNNING")
    probe = SharedProbe(slurm, tmp_path / "meet")
    states(probe, "1")
    slurm.answers = False
    asked = []
    for _ in range(60):
        clock.now += 10
        count = len(slurm.questions)
        states(probe, "1")
        if len(slurm.questions) > count:
            asked.append(clock.now)
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses == sorted(pauses) and pauses[0] == 20 and max(pauses) == shared_probe.MAX_INTERVAL_S


def test_a_command_that_is_asking_holds_nobody_up(tmp_path: Path, clock: Clock) -> None:
    slurm: Any = Asked(j1="RUNNING")
    probe = SharedProbe(slurm, tmp_path / "meet")
    states(probe, "1")
    clock.now += 20
    with probe._lock() as has_lock:
        assert has_lock
        assert states(SharedProbe(slurm, tmp_path / "meet"), "1") == ["RUNNING"]  # the earlier answer
    assert len(slurm.questions) == 1


def test_who_leaves_last_cleans_up(tmp_path: Path, clock: Clock) -> None:
    place = tmp_path / "meet"
    slurm: Any = Asked(j1="RUNNING", j2="RUNNING")
    first, second = (SharedProbe(slurm, place) for _ in range(2))
    states(first, "1")
    states(second, "2")
    first.leave(["1"])
    assert list(json.loads((place / "answers.json").read_text())["wanted"]) == ["2"]
    second.leave(["2"])
    assert not place.exists()
    second.leave(["2"])


@pytest.mark.parametrize("damage", ["open to others", "a file", "a link"])
def test_a_folder_that_cannot_be_used_is_left_alone(tmp_path: Path, clock: Clock, damage: str) -> None:
    place = tmp_path / "meet"
    if damage == "a file":
        place.touch()
    elif damage == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir(mode=0o755)
        place.chmod(0o755)
    slurm: Any = Asked(j1="RUNNING")
    probe = SharedProbe(slurm, place)
    assert states(probe, "1") == states(probe, "1") == ["RUNNING"]
    assert len(slurm.questions) == 2  # each time by itself


@pytest.mark.parametrize("content", ["", "[]", "{broken", "7"])
def test_a_file_that_is_damaged_counts_as_none(tmp_path: Path, clock: Clock, content: str) -> None:
    place = tmp_path / "meet"
    place.mkdir(mode=0o700)
    (place / "answers.json").write_text(content)
    assert states(SharedProbe(Asked(j1="RUNNING"), place), "1") == ["RUNNING"]  # type: ignore[arg-type]


def test_each_cluster_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = wait_folder()
    assert here == wait_folder()
    monkeypatch.setenv("SLURM_CLUSTERS", "another")
    assert wait_folder() != here
