"""Commands that wait: what they cost the scheduler, and what ends a run for good."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.waiting import program, proportional_kib, resident_kib, watchers

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

COUNT = 12
WRAPPER = """#!/bin/sh
echo "$(date +%s.%N) $*" >> {calls}
exec {squeue} "$@"
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def test_many_wait_for_the_price_of_one(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One process and one query of Slurm an interval serve all of them; a job that somebody ends stays ended."""
    calls, bin_ = tmp_path / "calls", tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "squeue").write_text(WRAPPER.format(calls=calls, squeue=shutil.which("squeue")))
    (bin_ / "squeue").chmod(0o755)
    runs = [SlurmRun(slurm, tmp_path, "cluster.sbatch=[--hold]", name=f"s{k}") for k in range(COUNT)]
    for run in runs:
        run.environment["TMPDIR"] = str(tmp_path)  # where waiting commands meet
        run.environment["PATH"] = f"{bin_}{os.pathsep}{run.environment['PATH']}"
    processes = [run.submit() for run in runs]

    def all_know() -> bool:
        return all(
            f"{run.root.name} segment 0: Slurm job {run.job} pending: JobHeldUser" in run.log.read_text()
            for run in runs
        )

    def asked() -> list[float]:
        return [float(line.split()[0]) for line in calls.read_text().splitlines() if "--name" not in line]

    until(all_know, "all of them know why they wait", 240)
    shells = [process.pid for process in processes]

    def one_python() -> list[int]:
        """The watcher, where it is the only Python that waits."""
        return [] if any(program(pid).startswith("python") for pid in shells) else watchers(tmp_path)

    until(one_python, "the commands are shells")
    [watcher] = one_python()
    print(
        f"{COUNT} wait: resident {resident_kib(watcher)} KiB and {sum(map(resident_kib, shells))} KiB, "
        f"proportional {proportional_kib(watcher)} KiB and {sum(map(proportional_kib, shells))} KiB"
    )
    before = len(asked())
    until(lambda: len(asked()) >= before + 3, "Slurm is asked again")
    times = asked()[before:]
    assert min(b - a for a, b in pairwise(times)) > 9, times

    before = len(asked())
    table = runs[0].rlhpc("status", str(tmp_path / "runs"))
    for run in runs:
        assert any(
            line.split()[:5] == [run.root.name, "pending", "Slurm", "job", run.job] for line in table.splitlines()
        )
    assert table.count("JobHeldUser") == COUNT

    # whoever waits notices that the watcher is gone, and one of them starts another
    os.kill(watcher, signal.SIGKILL)
    until(lambda: (found := one_python()) and found != [watcher], "another one has taken over")
    assert len(one_python()) == 1

    jobs = [run.job for run in runs]
    runs[0].rlhpc("cancel", str(runs[0].root))
    slurm.run("scancel", jobs[1])
    for run, process in zip(runs[:2], processes[:2], strict=True):
        assert "was cancelled" in run.finish(process, 60, code=143)
        # what a workflow engine does next; a person's own command starts it again
        assert "was cancelled" in run.finish(run.submit("--attempt", "2"), 60, code=143)
        assert "cancelled: Slurm job" in run.rlhpc("status", str(run.root))
    assert [run.job for run in runs] == jobs
    assert f"submitted Slurm job {jobs[0]}" not in runs[0].finish(runs[0].submit("--no-wait"), 60)[-400:]
    assert runs[0].job != jobs[0]
    for process in processes[2:]:
        process.terminate()
        process.wait(30)
    until(lambda: not watchers(tmp_path), "nobody waits, so nothing is left")
    assert not list(tmp_path.glob("rlhpc.waits-*"))


#: Asks for jobs by name, as a driver with helper jobs does.
LOOKS = """
import time
from rlhpc.jobs.probes import SlurmProbe
from rlhpc.jobs.shared_probe import SharedProbe
probe = SharedProbe(SlurmProbe())
while True:
    probe.jobs_named("helpers")
    time.sleep(1.0)
"""
WINDOW_S = 60.0


def job_queries(slurm: SlurmCluster) -> int:
    """Returns how often the controller was asked about jobs, by its own count."""
    return sum(int(count) for count in re.findall(r"REQUEST_JOB_\w*INFO\w* .*count:(\d+)", slurm.run("sdiag")))


def test_all_commands_of_a_user_ask_six_times_a_minute(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Waiters, followers, a driver with helpers and a loop of `rlhpc status`; counted by slurmctld."""
    runs = [SlurmRun(slurm, tmp_path, "cluster.sbatch=[--hold]", name=f"s{k}") for k in range(3)]
    for run in runs:
        run.environment["TMPDIR"] = str(tmp_path)
    waiting = [run.submit() for run in runs]
    until(
        lambda: all("pending: JobHeldUser" in run.log.read_text() for run in runs),
        "all of them know why they wait",
        240,
    )
    commands = [["-m", "rlhpc.cli", "logs", str(runs[0].root), "--follow"], ["-c", LOOKS], ["-c", LOOKS]]
    others = [
        subprocess.Popen([sys.executable, *command], env=runs[0].environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        for _ in range(2):  # until all have started
            assert runs[0].rlhpc("status", str(tmp_path / "runs")).count("JobHeldUser") == len(runs)
        before, end, num_status = job_queries(slurm), time.monotonic() + WINDOW_S, 0
        while time.monotonic() < end:
            runs[num_status % len(runs)].rlhpc("status", str(runs[num_status % len(runs)].root))
            num_status += 1
        asked = job_queries(slurm) - before
        assert all(process.poll() is None for process in (*waiting, *others))
    finally:
        for process in (*waiting, *others):
            process.terminate()
            process.wait(30)
    print(f"{asked} queries in {WINDOW_S:.0f} s, with {num_status} of `rlhpc status`")
    assert num_status > 2 <= asked <= WINDOW_S / 10 + 2
