"""Shared Slurm query: one question for all commands that wait on a host."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import shared_probe
from rlhpc.jobs.probes import JobReport, JobState, QueueSnapshot
from rlhpc.jobs.shared_probe import PATIENCE_S, SharedAnswer, SharedProbe, remove_unused_folders, wait_folder
from rlhpc.jobs.slurm import QueuedJob


class Asked:
    """A probe that answers from a table, and records what it was asked."""

    def __init__(self, **states: str) -> None:
        self.states, self.questions = states, list[list[str]]()
        self.answers, self.num_commands = True, 1

    def snapshot(self, job_ids: Iterable[str]) -> QueueSnapshot:
        reports = self.query(job_ids)
        if not self.answers:
            return QueueSnapshot(None, reports)
        rows = [QueuedJob(name[1:], state, "why", "n1", None, "mine") for name, state in self.states.items()]
        return QueueSnapshot(rows, {job.id: self._report(job.id) for job in rows} | reports, self.num_commands)

    def _report(self, job: str) -> JobReport:
        return JobReport(JobState.parse(self.states[f"j{job}"]), "why", "squeue", True)

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        self.questions.append(ids)
        if not self.answers:
            return {job: JobReport(JobState.UNKNOWN, conclusive=False) for job in ids}
        return {job: self._report(job) for job in ids}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5e8 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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
    assert states(second, "2") == ["PENDING"], "the first answer has all jobs of the user"
    slurm.states["j3"] = "RUNNING"
    assert states(second, "3") == ["UNKNOWN"]  # submitted since; the answers are too young to ask again
    clock.now += shared_probe.INTERVAL_S + 1
    assert states(second, "3") == ["RUNNING"]
    assert states(first, "1") == ["RUNNING"]
    assert slurm.questions == [["1"], ["1", "2", "3"]]


def test_a_command_that_prints_a_state_once_waits_for_the_next_query(tmp_path: Path, clock: Clock) -> None:
    """Also where all answers are old; but not for an ended job, and not for ever."""
    slurm: Any = Asked(j1="RUNNING")
    place = tmp_path / "meet"
    states(SharedProbe(slurm, place), "1")
    slurm.states |= {"j1": "COMPLETED", "j2": "PENDING"}
    began = clock.now
    assert states(SharedProbe(slurm, place, patience_s=PATIENCE_S), "1", "2") == ["COMPLETED", "PENDING"]
    assert 0 < clock.now - began <= shared_probe.INTERVAL_S + 1 and len(slurm.questions) == 2
    clock.now += 3600
    began = clock.now
    with SharedProbe(slurm, place)._lock():  # somebody is asking, and gets no answer
        assert states(SharedProbe(slurm, place, patience_s=PATIENCE_S), "1") == ["COMPLETED"] and clock.now == began
        assert states(SharedProbe(slurm, place, patience_s=PATIENCE_S), "2") == ["PENDING"]
    assert PATIENCE_S <= clock.now - began < PATIENCE_S + 1
    SharedProbe(slurm, place).leave(["1"])
    assert not place.exists(), "whoever printed a state does not keep the folder"


def test_all_commands_together_ask_six_times_a_minute(tmp_path: Path, clock: Clock) -> None:
    """Waiters, loops of status, drivers with helpers; also where each query needs further commands."""
    slurm: Any = Asked(j1="RUNNING", j2="PENDING", j3="RUNNING")
    place = tmp_path / "meet"
    waiters = [SharedProbe(slurm, place) for _ in range(3)]
    for num_commands in (1, 3):
        slurm.num_commands, slurm.questions = num_commands, []
        end = clock.now + 180
        while clock.now < end:
            for waiter in waiters:
                waiter.query(["1"])
            SharedProbe(slurm, place, patience_s=PATIENCE_S).query(["2"])
            jobs, asked_at = SharedProbe(slurm, place).jobs_named("mine")
            assert jobs is not None and clock.time() - asked_at <= shared_probe.INTERVAL_S * num_commands
            clock.now += 1
        assert 15 / num_commands <= len(slurm.questions) <= 18 / num_commands + 1


def test_jobs_by_name_have_the_time_of_the_question(tmp_path: Path, clock: Clock) -> None:
    slurm: Any = Asked(j1="RUNNING", j2="COMPLETED")
    (tmp_path / "meet").mkdir(mode=0o700)
    probe = SharedProbe(slurm, tmp_path / "meet")
    with probe._lock():
        assert probe.jobs_named("mine") == ([], float("-inf")), "somebody is asking for the first time"
    jobs, asked_at = probe.jobs_named("mine")
    assert jobs is not None and [job.id for job in jobs] == ["1"] and asked_at == clock.time()
    clock.now += 5
    assert probe.jobs_named("theirs") == ([], asked_at) and len(slurm.questions) == 1
    clock.now += 5
    slurm.answers = False
    assert probe.jobs_named("mine") == (None, clock.time())


def test_folders_that_no_command_uses_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_probe.tempfile, "gettempdir", lambda: str(tmp_path))
    slurm: Any = Asked(j1="RUNNING")
    states(SharedProbe(slurm, patience_s=1.0), "1")
    assert remove_unused_folders() == [] and remove_unused_folders(unused_s=-1.0) == [wait_folder()]
    assert not list(tmp_path.iterdir())
    states(SharedProbe(slurm), "1")
    # a wait server lives, and a process looks for all
    look = SharedAnswer("the run", lambda: "answer", 5.0)
    for lock_of_process in ("watcher.lock", look._lock_path.name):
        (wait_folder() / "watcher").touch()
        with open(wait_folder() / lock_of_process, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert remove_unused_folders(unused_s=-1.0) == [] and (wait_folder() / "answers.json").exists()
    # both were killed, and so was a process that replaced a file
    assert look.answer() == "answer"
    assert look._fd is not None
    os.close(look._fd)
    (wait_folder() / ".answers.json.0.tmp").touch()
    assert remove_unused_folders() == [] and remove_unused_folders(unused_s=-1.0) == [wait_folder()]
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("answers", [{"wanted": {"1": 1e12}}, {}])
def test_who_leaves_touches_no_file_in_a_folder_that_is_open_to_others(
    tmp_path: Path, clock: Clock, answers: dict[str, Any]
) -> None:
    """Another user could have put links into it, with the names of files that a leaving process writes or removes."""
    place, own_file = tmp_path / "meet", tmp_path / "own"
    own_file.write_text("kept")
    place.mkdir()
    place.chmod(0o777)
    (place / "answers.json").write_text(json.dumps(answers))
    for name in ("answers.new", "lock"):
        (place / name).symlink_to(own_file)
    before = sorted(path.name for path in place.iterdir())
    SharedProbe(Asked(j1="RUNNING"), place).leave(["2"])  # type: ignore[arg-type]
    assert own_file.read_text() == "kept" and sorted(path.name for path in place.iterdir()) == before


def test_a_command_that_was_stopped_while_it_asked_loses_the_lock(tmp_path: Path, clock: Clock) -> None:
    """Ctrl-Z during a query: the others would see its last answer for as long as it stays stopped."""
    place = tmp_path / "meet"
    slurm: Any = Asked(j1="RUNNING")
    stopped, other = SharedProbe(slurm, place), SharedProbe(slurm, place)
    states(stopped, "1")
    slurm.states["j1"] = "COMPLETED"
    clock.now += 20
    with stopped._lock():
        clock.now += shared_probe.MAX_INTERVAL_S
        assert states(other, "1") == ["RUNNING"], "a query may take long"
        clock.now += 1
        assert states(other, "1") == ["RUNNING"] and states(other, "1") == ["COMPLETED"]
        with other._lock() as has_lock:
            assert has_lock
            with stopped._lock() as has_lock_too:
                assert not has_lock_too
    assert len(slurm.questions) == 2


def test_on_a_full_disk_each_command_asks_at_the_pace_of_its_own_probe(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer is kept there, so the shared query would be due at each call."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_probe, "replace_durably", fail)
    slurm: Any = Asked(j1="RUNNING")
    monkeypatch.setattr(slurm, "snapshot", lambda job_ids: pytest.fail("it asked without a place for the answer"))
    assert states(SharedProbe(slurm, tmp_path / "meet"), "1") == ["RUNNING"] and slurm.questions == [["1"]]


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


def test_one_process_looks_for_all(tmp_path: Path, clock: Clock) -> None:
    """Whoever releases the look, or has stopped, is followed by another process."""
    looked: list[str] = []

    def look_of(name: str) -> SharedAnswer:
        def look() -> list[Any]:
            looked.append(name)
            return [name, clock.now]

        return SharedAnswer("the run", look, 5.0, tmp_path / "meet")

    first, second, other = look_of("first"), look_of("second"), SharedAnswer("b", lambda: "b", 5.0, tmp_path / "meet")
    assert first.answer() == second.answer() == ["first", 1000.0] and other.answer() == "b"
    clock.now += 4
    assert first.answer() == second.answer() == ["first", 1000.0]
    clock.now += 2
    assert second.answer() == ["first", 1000.0], "it does not look while another process does"
    assert first.answer() == second.answer() == ["first", 1006.0] and looked == ["first", "first"]
    clock.now += 16
    assert second.answer() == ["second", 1022.0], "the other process has stopped"
    first.release()
    other.release()
    assert second.answer() == ["second", 1022.0] and second.answer() == look_of("third").answer()
    second.release()
    assert not (tmp_path / "meet").exists()


def test_a_look_needs_no_folder(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "meet").touch()
    looked: list[float] = []
    look = SharedAnswer("the run", lambda: looked.append(clock.now), 5.0, tmp_path / "meet")
    for _ in range(11):
        assert look.answer() is None
        clock.now += 1
    look.release()
    assert looked == [1000.0, 1005.0, 1010.0]


def test_the_lock_of_a_process_that_has_ended_gives_no_right_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was removed after this process had opened it; whoever comes next makes another one."""
    late, flock = SharedAnswer("the run", lambda: "late", 5.0, tmp_path / "meet"), fcntl.flock

    def lock(fd: int, operation: int) -> None:
        flock(fd, operation)
        late._lock_path.unlink()

    monkeypatch.setattr(fcntl, "flock", lock)
    assert not late._try_to_lead()
    monkeypatch.undo()
    assert late._try_to_lead()
    late.release()


def test_who_releases_a_look_leaves_that_of_its_successor(tmp_path: Path, clock: Clock) -> None:
    """Its lock was removed, as a cleanup of the temporary folder does, and another process looks for all now."""
    first, second, third = (SharedAnswer("the run", lambda name=name: name, 5.0, tmp_path / "meet") for name in "123")
    assert first.answer() == "1"
    first._lock_path.unlink()
    assert second.answer() == "2"
    first.release()
    assert third.answer() == "2"
    second.release()
    assert third.answer() == "3"
    third.release()
    assert not (tmp_path / "meet").exists()
