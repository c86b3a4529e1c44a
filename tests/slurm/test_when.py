"""What `rlhpc plan --when` says of a full partition and an empty one, and what then happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.jobs.slurm import allowance
from rlhpc.runs.start_estimate import StartTimes, estimate_starts, verdict
from rlhpc.runs.tuning.tune import TuneRequest

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
WORDS = (
    "cluster.time=00:10:00", "cluster.cpus_per_node=2", "cluster.setup=[export OMP_NUM_THREADS=1]", "env.train.num_envs=3",
    "algorithm.rollout_steps=5", "actor.global_batch_size=15", "algorithm.update_epochs=1",
)  # fmt: skip
#: Longer than Slurm takes to see that a job is over its time and to start the next one.
_LATE_S = 120.0


@pytest.fixture
def full(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Partition cpu is full until the time given, when the jobs there are over their limit."""
    monkeypatch.setenv("SLURM_CONF", slurm.env()["SLURM_CONF"])
    fill = ["sbatch", "--partition=cpu", "--exclusive", "--time=3", "--wrap=sleep 600", "--output=/dev/null"]
    jobs = [slurm.run(*fill).split()[-1] for _ in range(2)]

    def ends() -> list[str]:
        rows = slurm.run("squeue", "--noheader", f"--jobs={','.join(jobs)}", "--states=RUNNING", "--format=%e").split()
        return rows if len(rows) == len(jobs) else []

    found = until(ends, "both nodes are taken")
    yield max(time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) for end in found)
    end_jobs(slurm)


def rlhpc(*words: str) -> str:
    command = [sys.executable, "-m", "rlhpc.cli", *words]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_start_it_predicts_and_what_then_happens(slurm: SlurmCluster, full: float, tmp_path: Path) -> None:
    words = (*WORDS, f"runner.run_dir={tmp_path}")
    rlhpc("tune", CONFIG, *words, "--steps", "3")
    found = estimate_starts(TuneRequest(CONFIG, words), [1], ["cpu", "gpu"])
    said: dict[str, StartTimes] = {answer.shape.partition: answer for answer in found.answers if answer.shape.partition}
    empty, later = said["gpu"], said["cpu"]
    assert empty.start.time is not None
    assert later.start.time is not None
    assert empty.start.time < later.start.time
    assert abs(later.start.time - full) < 60
    assert empty.end is not None
    assert empty.shape.hours is not None
    assert "before 1 node in cpu" in verdict(found)[0]

    text = rlhpc("plan", CONFIG, *words, "--when", "--nodes", "1", "--partitions", "cpu,gpu")
    assert "1 (as configured)" in text

    jobs = {
        name: json.loads(
            rlhpc(
                "submit",
                CONFIG,
                *words,
                f"cluster.partition={name}",
                f"runner.name={name}",
                "--executor",
                "slurm",
                "--no-wait",
            )
        )["job_id"]
        for name in said
    }

    def started(name: str) -> float | None:
        record = slurm.run("scontrol", "--oneliner", "show", "job", jobs[name])
        fields = dict(word.partition("=")[::2] for word in record.split())
        waits = fields["JobState"] in ("PENDING", "CONFIGURING")
        return None if waits else time.mktime(time.strptime(fields["StartTime"], "%Y-%m-%dT%H:%M:%S"))

    at = {name: until(lambda name=name: started(name), f"the run in {name} starts", 330) for name in ("gpu", "cpu")}
    print(
        {name: f"predicted {said[name].start.time - found.now:.0f} s, was {at[name] - found.now:.0f} s" for name in at}
    )
    assert at["gpu"] < full
    assert at["cpu"] >= full
    assert at["cpu"] - later.start.time < _LATE_S


def test_what_the_account_has_left(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    if not slurm.has_accounting:
        pytest.skip("this cluster has no accounting")
    monkeypatch.setenv("SLURM_CONF", slurm.env()["SLURM_CONF"])
    slurm.run("sacctmgr", "--immediate", "modify", "account", "rlhpc", "set", "GrpTRESMins=gres/gpu=600")
    try:
        found = until(lambda: (one := allowance("rlhpc")) and one.minutes and one, "the limit is known")
        assert found.account == "rlhpc"
        limit, used = found.minutes["gres/gpu"]
        assert limit == 600
        assert 0 <= used < 600
        assert allowance("nobody_has_this_one") is None or not allowance("nobody_has_this_one").minutes
    finally:
        slurm.run("sacctmgr", "--immediate", "modify", "account", "rlhpc", "set", "GrpTRESMins=gres/gpu=-1")
