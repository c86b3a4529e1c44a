"""Records of helper jobs and of their ranks' attendance."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.elastic.records import Attendance, HelperJobRecord, HelperRecord, read_stays
from rlhpc.jobs.paths import RunPaths


def test_who_was_there_when(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first = Attendance(paths.attendance)
    place = {"event": "joined", "group": "rollout", "node": "n1", "job": "7", "accelerators": 1}
    first.note({**place, "incarnation": "a", "rank": 3})
    first.note({"event": "works", "incarnation": "a"})
    first.note({**place, "incarnation": "b", "rank": 4, "job": ""})
    first.note({"event": "left", "incarnation": "b", "why": "it was told to leave"})
    first.note({"event": "left", "incarnation": "b", "why": "twice"})
    assert [(stay.rank, stay.job, stay.left_at is None, stay.leave_reason) for stay in read_stays(paths)] == [
        (3, "7", True, ""), (4, "", False, "it was told to leave"),
    ]  # fmt: skip
    with paths.attendance.open("a") as file:
        file.write('{"event": "jo')  # the disk was full
        file.write("\n")
    again = Attendance(paths.attendance)
    again.note({**place, "incarnation": "c", "rank": 3})
    again.close("the run ended")
    whole = read_stays(paths)
    assert [stay.leave_reason for stay in whole] == ["its driver was gone", "it was told to leave", "the run ended"]
    assert (
        all(stay.left_at is not None and stay.left_at >= stay.joined for stay in whole) and whole[0].works is not None
    )


def test_what_the_jobs_have_cost_outlives_the_driver(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.submit.mkdir()
    record = HelperRecord()
    for number in range(250):
        job = HelperJobRecord(str(number), "rollout", 2, 0.0, started=0.0, finished=1800.0)
        record.jobs[job.id] = job
    record.jobs["x"] = HelperJobRecord("x", "rollout", 2, 0.0, started=0.0)
    assert record.spent() == pytest.approx(250)
    record.write(paths, "rollout")
    other = HelperRecord({"y": HelperJobRecord("y", "env", 1, 0.0, started=0.0, finished=3600.0)})
    other.write(paths, "env")  # by another thread, at any time
    assert HelperRecord.read(paths).spent() == pytest.approx(251) and len(HelperRecord.read(paths).jobs) == 202
    again = HelperRecord.read(paths, "rollout")
    assert again.spent() == pytest.approx(250) and len(again.jobs) == 201
    assert [job.id for job in again.live()] == ["x"] and again.jobs["x"].hours(3600.0) == 2.0
    assert HelperRecord.read(RunPaths(tmp_path / "none")).jobs == {}
