"""Variables that users set for Slurm's commands: what rlhpc reads and does is the same with all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlhpc.jobs.doctor.slurm_facts import SlurmFacts
from rlhpc.jobs.probes import SlurmProbe
from rlhpc.jobs.signals import end_of_job
from rlhpc.jobs.slurm import end_of, scancel, would_start
from rlhpc.metrics.accounting import JobIds, query

from .cluster import SlurmCluster
from .jobs import end_jobs, wait_gone
from .runs import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

#: From the lists in squeue(1), sinfo(1), sacct(1), scontrol(1) and scancel(1) of Slurm 22.05 to 26.05.
VARIABLES = {
    "SLURM_TIME_FORMAT": "%d %b %H:%M", "SLURM_BITSTR_LEN": "4", "SLURM_JSON": "compact", "LC_ALL": "POSIX", "LC_TIME": "C",
    "SQUEUE_FORMAT": "%u", "SQUEUE_FORMAT2": "UserName", "SQUEUE_STATES": "PENDING", "SQUEUE_SORT": "-i", "SQUEUE_ARRAY": "1",
    "SQUEUE_USERS": "nobody", "SQUEUE_PARTITION": "cpu", "SQUEUE_NAMES": "other", "SQUEUE_ACCOUNT": "none",
    "SQUEUE_LICENSES": "none", "SQUEUE_QOS": "none", "SQUEUE_ALL": "1", "SQUEUE_PRIORITY": "1",
    "SINFO_FORMAT": "%n", "SINFO_PARTITION": "cpu", "SINFO_SORT": "-n", "SACCT_FORMAT": "User", "SACCT_LOCAL": "1",
    "SCONTROL_ALL": "1", "SCONTROL_FUTURE": "1", "SCANCEL_STATE": "PENDING", "SCANCEL_USER": "nobody",
    "SCANCEL_PARTITION": "cpu", "SCANCEL_NAME": "other", "SCANCEL_ACCOUNT": "none", "SCANCEL_QOS": "none",
    "SCANCEL_INTERACTIVE": "1", "SCANCEL_VERBOSE": "1", "SCANCEL_BATCH": "1",
}  # fmt: skip
SCRIPT = "#!/bin/bash\n#SBATCH --partition=gpu --time=5\nsleep 1\n"


@pytest.fixture(autouse=True)
def on_the_cluster(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in slurm.env().items():
        monkeypatch.setenv(name, value)
    yield
    end_jobs(slurm)


def submitted(slurm: SlurmCluster) -> str:
    job = slurm.run("sbatch", "--parsable", "--partition=gpu", "--job-name=asked", "--time=20", "--output=/dev/null",
                    "--wrap", "sleep 600").strip()  # fmt: skip
    until(lambda: slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "RUNNING", "it runs", 60)
    return job


def answers(slurm: SlurmCluster, job: str) -> dict[str, Any]:
    """What rlhpc makes of Slurm's answers."""
    facts = SlurmFacts.gather("root")
    found: dict[str, Any] = {
        "state": SlurmProbe().query_job(job), "end": end_of(job),
        "jobs": [row for row in SlurmProbe().snapshot([]).jobs or [] if row.id == job],
        "nodes": [(node["NodeName"], node["State"], node["Partitions"]) for node in facts.nodes],
        "partitions": [partition["PartitionName"] for partition in facts.partitions],
    }  # fmt: skip
    if slurm.has_accounting:
        found["start"] = [(row.job_id, row.start, row.partition) for row in query(JobIds((job,)))]
    return found


def test_none_of_them_changes_an_answer(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(slurm)
    if slurm.has_accounting:
        until(lambda: job in slurm.run("sacct", "--noheader", "--parsable2", "--format=JobID"), "sacct knows it")
    expected = answers(slurm, job)
    assert expected["end"] and expected["jobs"][0].started and expected["state"].state.value == "RUNNING"
    assert len(expected["nodes"]) == 4
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
        assert answers(slurm, job) == expected, name
        start = would_start(SCRIPT).time
        assert start is not None and abs(start - time.time()) < 600, name
        monkeypatch.delenv(name)


def test_a_time_limit_that_is_changed(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new end counts, also where the job's environment has the old one."""
    job = submitted(slurm)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    first = end_of(job)
    assert first is not None
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{first:.0f}")
    assert end_of_job() == first
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=40")
    assert end_of_job(queries_slurm=True) == first + 20 * 60
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    end = end_of_job(queries_slurm=True)
    assert end is None or end > first + 300 * 24 * 3600


def test_none_of_them_keeps_a_job_from_being_cancelled(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(slurm)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    scancel(job, name="asked")
    wait_gone(slurm, job)
