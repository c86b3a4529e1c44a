"""A Slurm that never answers while the driver looks after its helpers: each question has a deadline, and nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhpc.jobs import slurm
from rlhpc.jobs.elastic import record, submitting
from rlhpc.jobs.elastic.plan import helper_plans
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.helpers import Helpers
from rlhpc.runtime.slurm import ask

#: How long a command may take here.
PATIENCE_S = 2.0
#: What the commands say that answer; each is a shell script that does not replace itself, as sites' wrappers are.
ANSWERS = {"squeue": "", "sbatch": "sbatch: Job 7 to start at 2020-01-01T00:00:00 using 1 processors", "scancel": "", "sacct": "", "scontrol": ""}
HANGS = "sleep 1000; true"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts Slurm's commands on PATH, some of which hang; returns the file in which their calls are noted."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def hurried(*argv: str, **more: Any) -> Any:
        return ask(*argv, **{**more, "timeout_s": PATIENCE_S})

    monkeypatch.setattr(slurm, "ask", hurried)
    monkeypatch.setattr(submitting, "_SUBMIT_S", 8.0)  # a Python starts meanwhile

    def make(**bodies: str) -> Path:
        for name, words in ANSWERS.items():
            path = folder / name
            body = bodies.get(name, f"echo '{words}' >&2" if words else "true")
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{calls}"\n{body}\n')
            path.chmod(0o755)
        return calls

    return make


def helpers_of(tmp_path: Path, present: Mapping[str, int] | None = None, **asked: Any) -> Helpers:
    entry = {"max": 2, "partition": "preempt", "look_s": 0.05, "react_s": 0.0, **asked}
    (plan,) = helper_plans({"elastic": [entry]}, {})
    paths = RunPaths(tmp_path / "run")
    paths.submit.mkdir(parents=True)
    return Helpers(paths, plan, 2, lambda job: None, lambda: present or {})


@pytest.mark.parametrize(
    ("hang", "said"),
    [
        ("squeue", "Slurm does not answer; the run goes on with the ranks that there are"),
        ("sbatch", "no further ranks for now: sbatch did not answer within 2 s"),
    ],
)
def test_a_decision_has_a_deadline(
    commands: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], hang: str, said: str
) -> None:
    """However often it looks, it says so once; and the run's end waits for none of it."""
    calls = commands(**{hang: HANGS})
    helpers = helpers_of(tmp_path)
    helpers.start()
    helpers.saw({"time/step_s": 1.0, "time/rollout_s": 0.9})  # nobody waits here
    end = time.monotonic() + 60
    while calls.read_text().count(hang) < 3:
        assert time.monotonic() < end, calls.read_text()
        time.sleep(0.02)
    helpers.stop(again=False)
    lines = [line for line in capfd.readouterr().err.splitlines() if "cluster.elastic" in line]
    assert lines == [f"rlhpc: cluster.elastic: {said}"]
    assert helpers.jobs == [] and not helpers._thread.is_alive()


def test_a_submission_that_takes_too_long_is_given_up(
    commands: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With all that it has started: a later answer would be a job that nobody has asked for."""
    pytest.importorskip("submitit")
    calls = commands(sbatch=f"echo $$ > {tmp_path}/pid; {HANGS}")
    helpers = helpers_of(tmp_path, min=1)
    looking = threading.Thread(target=helpers._run, daemon=True)
    looking.start()
    end = time.monotonic() + 60
    said = ""
    while "could not be submitted" not in said:
        assert time.monotonic() < end, said + calls.read_text()
        time.sleep(0.05)
        said += capfd.readouterr().err
    pid = int((tmp_path / "pid").read_text())
    helpers._ended.set()
    looking.join(20)
    assert not looking.is_alive()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert record.HelperRecord.read(helpers.paths).jobs == {}


@pytest.mark.parametrize(("present", "vain"), [({"5": 0}, False), ({}, True)])
def test_a_rank_may_come_and_go_between_two_looks(
    commands: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], present: dict[str, int], vain: bool
) -> None:
    """Its job has not been in vain, and the next one need not wait."""
    commands()
    helpers = helpers_of(tmp_path, present)
    now = time.time()
    helpers._record.jobs["5"] = record.HelperJobRecord("5", "rollout", 1, now, started=now)
    helpers.look()
    (job,) = helpers.jobs
    assert job.ended is not None and (job.joined == 0) == vain == bool(helpers._vain)
    assert ("before a rank of it had joined" in capfd.readouterr().err) == vain
