"""Facts of a cluster, read from what Slurm prints."""

from __future__ import annotations

from rlhpc.jobs.doctor.slurm_facts import Site, SiteNodeGroup, gres_of, parse_config, seconds_of, version_of
from tests.unit.jobs.doctor.cluster import CONFIG, facts


def test_outputs_are_read() -> None:
    record = facts().nodes[0]
    assert record["OS"] == "Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0" and record["RealMemory"] == "8000"
    assert record["Partitions"] == "gpu,all" and record["State"] == "IDLE"
    assert parse_config(CONFIG)["MinJobAge"] == "300 sec"
    assert gres_of("gpu:a100:4(S:0-1),gpu:2,nvme") == [("gpu", "a100", 4), ("gpu", "", 2), ("nvme", "", 1)]
    assert gres_of("(null)") == []
    assert (seconds_of("300 sec"), seconds_of(""), version_of("slurm 23.11.4-1")) == (300, None, (23, 11, 4))


def test_a_site_is_read() -> None:
    section = {
        "partition": "batch", "account": "a", "sbatch": ["--exclusive"],
        "node_groups": [{"label": "gpu", "gres": "nvme:1,gpu:a100:4"}, {"label": "cpu", "partition": "cpu", "time": "60"}],
    }  # fmt: skip
    found = Site.from_config(section)
    assert found.groups == (
        SiteNodeGroup("gpu", "batch", "a", gres="gpu:a100"),
        SiteNodeGroup("cpu", "cpu", "a", time="60"),
    )
    assert found.sbatch == ("--exclusive",) and Site.from_config(None).groups == (SiteNodeGroup(),)
