"""Probe jobs of the doctor: one small job a partition."""

from __future__ import annotations

from rlhpc.jobs.doctor.probe_jobs import plan_jobs, script_of
from rlhpc.jobs.doctor.slurm_facts import SiteNodeGroup
from tests.unit.jobs.doctor.cluster import facts, site


def test_one_small_job_a_partition() -> None:
    asked = site(
        SiteNodeGroup("a", "gpu", "acct", gres="gpu:fake"), SiteNodeGroup("b", "gpu"), SiteNodeGroup("c", "cpu"),
        SiteNodeGroup("d", "gpux"),
        sbatch=("--reservation=r",),
    )  # fmt: skip
    first, second = plan_jobs(asked, facts(), 8)
    assert (first.partition, first.labels, first.nodes, first.gres) == ("gpu", ("a", "b"), 2, "gpu:fake:2")
    assert (second.partition, second.nodes, second.gres) == ("cpu", 1, None)  # cpu1 is down
    script = script_of(first, asked, 90)
    for option in (
        "--partition=gpu",
        "--account=acct",
        "--nodes=2",
        "--time=2",
        "--requeue",
        "--reservation=r",
        "--mem=4G",
    ):
        assert f"#SBATCH {option}\n" in script
    assert "#SBATCH --mem=500M\n" in script_of(second, asked, 90)
    assert plan_jobs(asked, facts(), 1)[0].nodes == 1
