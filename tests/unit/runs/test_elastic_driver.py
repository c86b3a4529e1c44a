"""A Slurm that never answers while the driver looks after its helpers: each question has a deadline, and nobody waits."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlhpc.jobs import slurm
from rlhpc.jobs.elastic import helper_job, records
from rlhpc.jobs.elastic.helper_plan import helper_plans
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobReport, JobState, SlurmProbe
from rlhpc.jobs.shared_probe import SharedProbe
from rlhpc.jobs.slurm import QueuedJob
from rlhpc.runs import elastic_driver as helpers_module
from rlhpc.runs.elastic_driver import HelperJobs
from rlhpc.runtime.errors import SubmitError
from rlhpc.runtime.slurm import ask

#: How long a command may take here.
PATIENCE_S = 2.0
#: What the commands say that answer; each is a shell script that does not replace itself, as sites' wrappers are.
ANSWERS = {
    "squeue": "",
    "sbatch": "sbatch: Job 7 to start at 2020-01-01T00:00:00 using 1 processors",
    "scancel": "",
    "sacct": "",
    "scontrol": "",
}
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
    monkeypatch.setattr(helper_job, "_SUBMIT_S", 8.0)  # a Python starts meanwhile

    def make(**bodies: str) -> Path:
        for name, words in ANSWERS.items():
            path = folder / name
            body = bodies.get(name, f"echo '{words}' >&2" if words else "true")
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{calls}"\n{body}\n')
            path.chmod(0o755)
        return calls

    return make


def helpers_of(tmp_path: Path, present: Mapping[str, int] | None = None, **asked: Any) -> HelperJobs:
    entry = {"max": 2, "partition": "preempt", "look_s": 0.05, "react_s": 0.0, **asked}
    (plan,) = helper_plans({"elastic": [entry]}, {})
    paths = RunPaths(tmp_path / "run")
    paths.submit.mkdir(parents=True)
    helpers = HelperJobs(paths, plan, 2, lambda job: None, lambda: present or {})
    helpers._probe = SharedProbe(SlurmProbe(command_timeout_s=PATIENCE_S), tmp_path / "meet", interval_s=0.0)
    return helpers


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
    helpers.record_step({"time/step_s": 1.0, "time/rollout_s": 0.9})  # nobody waits here
    end = time.monotonic() + 60
    while calls.read_text().count(hang) < 3:
        assert time.monotonic() < end, calls.read_text()
        time.sleep(0.02)
    helpers.stop(is_restarting=False)
    lines = [line for line in capfd.readouterr().err.splitlines() if "cluster.elastic" in line]
    assert lines == [f"rlhpc: cluster.elastic: {said}"]
    assert helpers.jobs == [] and not helpers._thread.is_alive()


def test_a_submission_that_takes_too_long_is_given_up(
    commands: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With all that it has started: a later answer would be a job that nobody has asked for."""
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
    helpers._stop_event.set()
    looking.join(20)
    assert not looking.is_alive()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert records.HelperRecord.read(helpers.paths).jobs == {}


@pytest.mark.parametrize(("present", "vain"), [({"5": 0}, False), ({}, True)])
def test_a_rank_may_come_and_go_between_two_looks(
    commands: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    present: dict[str, int],
    vain: bool,
) -> None:
    """Its job has not been in vain, and the next one need not wait."""
    commands()
    helpers = helpers_of(tmp_path, present)
    now = time.time()
    helpers._record.jobs["5"] = records.HelperJobRecord("5", "rollout", 1, now, started=now)
    helpers.update()
    (job,) = helpers.jobs
    assert job.finished is not None and (job.joined == 0) == vain == bool(helpers._num_failed)
    assert ("before a rank of it had joined" in capfd.readouterr().err) == vain


def test_an_error_of_a_rank_makes_it_wait(commands: Callable[..., Path], tmp_path: Path) -> None:
    """As where a card computes nonsense: the next job may get the same one."""
    commands()
    helpers = helpers_of(tmp_path, {"5": 0})
    now = time.time()
    helpers._record.jobs["5"] = records.HelperJobRecord("5", "rollout", 1, now, started=now)
    helpers._faulty_jobs = {"5"}
    helpers.update()
    assert helpers._num_failed == 1 and helpers.jobs[0].finished is not None


class Cluster:
    """A Slurm with a clock of its own, in which jobs start, are preempted and end whenever they like, seen or not.

    Args:
        draw: Where its choices come from.
        walltime: Of a job, in seconds.
    """

    def __init__(self, draw: random.Random, walltime: float) -> None:
        self.draw, self.walltime, self.now, self.answers = draw, walltime, 1e9, True
        self.jobs: dict[str, tuple[float | None, float | None]] = {}
        self.ends: dict[str, float] = {}
        self.most = 0

    def pass_time(self, seconds: float) -> None:
        for job, (started, ended) in list(self.jobs.items()):
            if started is None and ended is None and self.draw.random() < 0.6:
                started = self.now + self.draw.random() * seconds
                self.ends[job] = started + self.draw.random() * self.draw.choice([10.0, 1000.0, 1e9])
                self.ends[job] = min(self.ends[job], started + self.walltime)
                self.jobs[job] = started, None
            if started is not None and ended is None and self.ends[job] <= self.now + seconds:
                self.jobs[job] = started, self.ends[job]
        self.now += seconds

    def hours(self) -> float:
        """What has really been used."""
        return sum((ended or self.now) - started for started, ended in self.jobs.values() if started is not None) / 3600

    def jobs_named(self, name: str) -> tuple[list[QueuedJob] | None, float]:
        live = [(job, started) for job, (started, ended) in self.jobs.items() if ended is None]
        self.most = max(self.most, len(live))
        if not self.answers:
            return None, self.now
        return [
            QueuedJob(job, "PENDING" if started is None else "RUNNING", "", "" if started is None else "n1", started)
            for job, started in live
        ], self.now

    def submit(self, *_: Any) -> str:
        if self.draw.random() < 0.1:
            raise SubmitError("the controller is busy")
        self.jobs[str(len(self.jobs) + 1)] = None, None
        return str(len(self.jobs))

    def scancel(self, job: str, *signal: str, name: str) -> None:
        started, ended = self.jobs[job]
        if ended is None and (started is None or not signal):
            self.jobs[job] = started, self.now
        elif ended is None:  # it leaves when it comes to it
            self.ends[job] = min(self.ends[job], self.now + self.draw.random() * 100)

    def query(self, jobs: Iterable[str]) -> dict[str, JobReport]:
        return {job: JobReport(JobState.CANCELLED if self.jobs[job][0] is None else JobState.COMPLETED) for job in jobs}


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_never_exceeded(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the queue, the users and the drivers do, and although nobody sees all of it."""
    draw, budget = random.Random(seed), 2.0
    cluster = Cluster(draw, walltime=1200.0)
    for name in ("submit", "scancel"):
        monkeypatch.setattr(helpers_module, name, getattr(cluster, name))
    monkeypatch.setattr(
        helpers_module, "seconds_to_start", lambda options: (draw.choice([0.0, 1e6, None]), "so it says")
    )
    monkeypatch.setattr(helpers_module, "SharedProbe", lambda probe: cluster)
    monkeypatch.setattr(helpers_module, "time", SimpleNamespace(time=lambda: cluster.now))
    entry = {"max": 8, "partition": "preempt", "react_s": 20.0, "time": "00:20:00", "max_gpu_hours": budget}
    (plan,) = helper_plans({"elastic": [entry]}, {})
    paths = RunPaths(tmp_path / "run")
    paths.submit.mkdir(parents=True)

    def present() -> dict[str, int]:
        return {
            job: int(end is None) for job, (start, end) in cluster.jobs.items() if start is not None and int(job) % 3
        }

    helpers = HelperJobs(paths, plan, 8, lambda job: None, present)
    for _ in range(200):
        cluster.pass_time(draw.choice([1.0, 15.0, 15.0, 200.0]))
        if draw.random() < 0.02:  # another driver, after a while
            cluster.pass_time(draw.random() * 3000)
            helpers = HelperJobs(paths, plan, 8, lambda job: None, present)
        if draw.random() < 0.05:
            paths.requested_ranks.write_text(json.dumps({"rollout": draw.choice([0, 2, 8, None])}))
        cluster.answers = draw.random() < 0.9
        helpers.record_step({"time/step_s": 1.0, "time/rollout_s": draw.random()})
        with contextlib.suppress(SubmitError):
            helpers.update()
        assert cluster.hours() <= budget
    cluster.pass_time(1e5)
    assert cluster.hours() <= budget and cluster.most > 1, "and it was made use of"
    cluster.answers = True
    helpers.update()
    for job in helpers.jobs:
        started, ended = cluster.jobs[job.id]
        used = 0.0 if started is None or ended is None else (ended - started) / 3600
        assert job.hours(cluster.now) >= used - 1e-6, "what nobody has seen counts as used"


def test_jobs_that_nobody_has_seen_at_work_are_not_submitted_again_and_again(
    commands: Callable[..., Path], tmp_path: Path
) -> None:
    """A setup that fails ends a job at once, before anybody looks."""
    commands()
    helpers = helpers_of(tmp_path)
    helpers._record.jobs["5"] = records.HelperJobRecord("5", "rollout", 1, time.time() - 10)
    helpers.update()
    (job,) = helpers.jobs
    assert (
        helpers._num_failed == 1 and job.started is not None and job.finished - job.started == pytest.approx(10, abs=5)
    )
