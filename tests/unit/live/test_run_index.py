"""The table of runs: what it shows of them, and how seldom it asks the filesystem."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.live.run_index import RunIndex
from rlhpc.runtime.errors import UserError


def write_run(folder: Path, **status: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("runner: {task_type: embodied}\n")
    if status:
        (folder / "status.json").write_text(json.dumps({"updated": time.time(), **status}))
    return folder


def rows(index: RunIndex, done: Callable[[list[dict[str, Any]]], bool] = lambda rows: True) -> list[dict[str, Any]]:
    """Rows once the jobs were looked up, which happens beside the answers."""
    deadline = time.monotonic() + 20
    while True:
        found = index.rows()
        if done(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_runs_and_their_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "a", state="finished", step=7, max_steps=7, **{"return": 12.5}, stop_reason="max_steps")
    write_run(
        tmp_path / "deep/b",
        state="running",
        step=3,
        max_steps=9,
        reward=float("nan"),
        pid=os.getpid(),
        host="elsewhere",
    )
    write_run(tmp_path / "c")
    first, deep, without = sorted(
        rows(RunIndex(tmp_path), lambda rows: rows[0]["reason"] == "all steps are done"),
        key=lambda row: row["name"][-1],
    )
    assert (first["name"], first["state"], first["return"], first["is_live"]) == ("a", "finished", 12.5, False)
    assert (deep["name"], deep["step"], deep["is_live"], "reward" in deep) == ("deep/b", 3, True, False)
    assert without["state"] == "unknown"


def test_a_driver_that_is_gone_is_not_shown_as_running(tmp_path: Path) -> None:
    from rlhpc.runtime.host import node_name

    gone = 2**22 + 1  # larger than any pid
    write_run(tmp_path / "a", state="running", step=1, pid=gone, host=node_name())
    [row] = rows(RunIndex(tmp_path), lambda rows: rows[0]["state"] == "dead")
    assert row["state"] == "dead"
    assert str(gone) in row["reason"]


def test_a_changed_status_is_seen_and_a_run_that_disappears_too(tmp_path: Path) -> None:
    clock = Clock()
    index = RunIndex(tmp_path, clock)
    write_run(tmp_path / "a", state="running", step=1, host="elsewhere")
    assert [row["step"] for row in index.rows()] == [1]
    write_run(tmp_path / "a", state="finished", step=2, host="elsewhere")
    os.utime(tmp_path / "a/status.json", ns=(1, 1))
    clock.now += 5
    assert [row["step"] for row in index.rows()] == [2]
    shutil.rmtree(tmp_path / "a")
    write_run(tmp_path / "b", state="running", step=4, host="elsewhere")
    clock.now += 60
    assert [row["name"] for row in index.rows()] == ["b"]
    assert index.paths("a") is None


def test_a_run_whose_state_cannot_be_found_is_not_asked_for_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", state="running", step=1, host="elsewhere")
    queries = []

    def fails(runs: Sequence[RunPaths]) -> None:
        if runs[0].root.parent == tmp_path:  # else it is the query of another test's index, which has not ended
            queries.append(runs)
        raise PermissionError

    monkeypatch.setattr("rlhpc.live.run_index.states", fails)
    clock = Clock()
    index = RunIndex(tmp_path, clock)
    for _ in range(10):
        clock.now += 3
        index.rows()
        if index._query is not None:
            index._query.join()
    assert len(queries) == 1
    clock.now += 30
    index.rows()
    assert index._query is not None
    index._query.join()
    assert len(queries) == 2


def test_runs_of_a_sweep_have_its_labels(tmp_path: Path) -> None:
    write_run(tmp_path / "lr/one", state="finished", step=1)
    (tmp_path / "lr/sweep.json").write_text(
        json.dumps({"runs": [{"name": "one", "label": "lr 1e-3", "seed": 4}, "planted"]})
    )
    index = RunIndex(tmp_path)
    [row] = index.rows()
    assert (row["sweep"], row["label"], row["seed"]) == ("lr", "lr 1e-3", 4)
    assert index.label("lr/one") == "lr: lr 1e-3"


def test_the_folder_of_one_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", state="finished", step=1)
    assert [row["name"] for row in RunIndex(tmp_path / "a").rows()] == ["a"]
    with pytest.raises(UserError, match="there is no folder"):
        RunIndex(tmp_path / "missing")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_is_closed_to_the_user_hides_no_other(tmp_path: Path) -> None:
    """A folder of several people has runs of mode 0700 among those that all may read."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    for name in ("open", "closed", "last"):
        write_run(tmp_path / name, state="finished", step=1)
    (tmp_path / "closed").chmod(0o700)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:  # a new process could not read this interpreter's own files
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            names = [row["name"] for row in RunIndex(tmp_path).rows()]
            os.write(writer, json.dumps(names).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        assert answer.read() == json.dumps(["last", "open"])


@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_watched_folder_costs_few_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Fifty runs, a page that asks every three seconds, ten minutes: at most five operations a second."""
    for number in range(50):
        write_run(tmp_path / f"run{number}", state=state, step=1, host="elsewhere", updated=time.time() + 3600)
    clock, counted = Clock(), [0]
    is_counting = False
    stat = os.stat

    def counting_stat(*args: Any, **kwargs: Any) -> os.stat_result:
        counted[0] += is_counting
        return stat(*args, **kwargs)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir", "os.open") and is_counting:
            counted[0] += 1

    monkeypatch.setattr(os, "stat", counting_stat)
    sys.addaudithook(hook)
    index = RunIndex(tmp_path, clock)
    rows(index, lambda found: len(found) == 50)
    time.sleep(0.5)  # the first look at the jobs
    is_counting = True
    for _ in range(200):
        clock.now += 3
        index.rows()
        while index._query is not None and index._query.is_alive():
            time.sleep(0.001)
    is_counting = False
    assert counted[0] <= 5 * 600, f"{counted[0] / 600:.1f} operations a second"
    assert counted[0] > 0
