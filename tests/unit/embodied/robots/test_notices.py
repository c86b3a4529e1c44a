"""Notices of robots that must not move: who posts them, who heeds them, and who takes them back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlhpc.embodied.robots import notices
from rlhpc.embodied.robots.notices import Notice, notices_folder, resume, robot_name, stopped_robots
from rlhpc.runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's notices."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return notices_folder()


def test_a_robots_name_follows_from_its_class_and_arguments() -> None:
    name = robot_name("my.robots:Arm", {"a": 1, "b": 2})
    assert name == robot_name("my.robots:Arm", {"b": 2, "a": 1}) and name.startswith("my-robots-Arm-")
    assert name != robot_name("my.robots:Arm", {"a": 1, "b": 3})


def test_a_stopped_robot_stays_still_until_a_person_takes_it_back() -> None:
    notice = Notice("arm")
    assert notice.earlier_reason() == "" and stopped_robots() == []
    notice.post(lambda: "it moved too fast")
    assert [record["robot"] for record in stopped_robots()] == ["arm"]
    assert not notice.resumed()
    successor = Notice("arm")
    assert successor.earlier_reason() == "it moved too fast"
    assert resume("arm") == "it moved too fast"
    assert notice.resumed() and successor.earlier_reason() == ""


def test_another_stop_needs_another_word() -> None:
    notice = Notice("arm")
    notice.post(lambda: "first")
    resume("arm")
    notice.post(lambda: "first")  # the same stop
    assert notice.resumed()
    notice.post(lambda: "second")
    assert not notice.resumed() and Notice("arm").earlier_reason() == "second"


def test_a_process_that_ended_without_closing_its_robot_is_named(folder: Path) -> None:
    notice = Notice("arm")
    notice.post(lambda: "")
    assert Notice("arm").earlier_reason() == "" and stopped_robots() == []  # this process still runs
    path = folder / "arm.json"
    record = json.loads(path.read_text())
    assert record["pid"] == os.getpid()
    for changed in ({"began": "1"}, {"node": "another"}, {"pid": 2**22 + 1}):
        path.write_text(json.dumps({**record, **changed}))
        assert "ended without closing it" in Notice("arm").earlier_reason()
    notice.remove()
    assert not path.exists() and Notice("arm").earlier_reason() == ""


def test_a_notice_that_another_process_has_posted_since_stays(folder: Path) -> None:
    first, second = Notice("arm-a"), Notice("arm-a")
    first.post(lambda: "it ran into the table")
    second.post(lambda: "it fell")
    resume("arm-a")
    first.remove()
    assert sorted(path.name for path in folder.iterdir()) == ["arm-a.json", "arm-a.resume"]
    second.remove()
    assert not list(folder.iterdir())


def test_only_who_posted_a_notice_takes_it_down(folder: Path) -> None:
    Notice("arm").post(lambda: "stop")
    Notice("arm").remove()
    assert (folder / "arm.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"reason": "", "node": "n", "pid": "x", "id": 1}'])
def test_a_notice_that_cannot_be_read_counts(folder: Path, content: str) -> None:
    notice = Notice("arm")
    (folder / "arm.json").write_text(content)
    assert notice.earlier_reason() == "the notice of the process before cannot be read"
    assert stopped_robots() == []


def test_no_robot_of_that_name_is_stopped() -> None:
    Notice("arm").post(lambda: "stop")
    with pytest.raises(ConfigError, match="no robot 'leg' is stopped on this machine; stopped are: arm"):
        resume("leg")


def test_the_beginning_of_a_process() -> None:
    began = notices._process_start_time(os.getpid())
    assert began is not None and began.isdecimal()
    assert notices._process_start_time(2**22 + 1) is None
