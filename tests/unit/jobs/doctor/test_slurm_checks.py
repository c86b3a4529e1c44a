"""Checks of Slurm's configuration, accounts and partitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.jobs.doctor import slurm_checks
from rlhpc.jobs.doctor.probe_jobs import plan_jobs, wake_up_s
from rlhpc.jobs.doctor.slurm_facts import CommandOutput, SiteNodeGroup, is_asleep, is_out_of_service, is_usable
from tests.unit.jobs.doctor.cluster import NODE, facts, hello, levels, probed, site


def test_slurm_as_it_should_be() -> None:
    found, asked = facts(), site()
    assert (
        levels(slurm_checks.version(found))
        == levels(slurm_checks.controller(found))
        == levels(slurm_checks.het_jobs(found))
        == ["pass"]
    )
    assert levels(slurm_checks.accounting(found)) == levels(slurm_checks.min_job_age(found)) == ["pass"]
    assert levels(slurm_checks.resources(found, asked)) == ["pass"]
    assert levels(slurm_checks.walltime(found, asked)) == ["pass", "pass"]
    assert levels(slurm_checks.requeue(found, probed(hello("n1")).jobs, {}, asked)) == ["pass"]
    assert levels(slurm_checks.preemption(found, asked)) == ["pass"]


def test_partitions() -> None:
    lines = list(
        slurm_checks.partitions(
            facts(),
            site(
                SiteNodeGroup("a", "gpu"),
                SiteNodeGroup("b", "cpu"),
                SiteNodeGroup("c", "gpux"),
                SiteNodeGroup("d", "old"),
            ),
        )
    )
    assert levels(lines) == ["pass", "warn", "fail", "fail"]
    assert "out of service: cpu1" in lines[1].result
    assert "gpu, cpu, old" in lines[2].result and "of c in the site file" in lines[2].advice
    assert lines[3].result == "is DOWN"


@pytest.mark.parametrize(
    ("state", "is_out", "asleep", "free"),
    [
        ("IDLE", False, False, True),
        ("MIXED+PLANNED", False, False, True),
        ("IDLE+CLOUD", False, False, True),
        ("IDLE+DYNAMIC_NORM", False, False, True),
        ("ALLOCATED", False, False, False),
        ("IDLE+CLOUD+POWERED_DOWN", False, True, False),
        ("IDLE+POWERED_DOWN", False, True, False),
        ("IDLE+POWERING_DOWN", False, True, False),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", False, True, False),
        ("MIXED*+POWERING_UP", False, True, False),
        ("DOWN+CLOUD+POWERED_DOWN", True, False, False),
        ("DOWN*", True, False, False),
        ("IDLE*", True, False, False),
        ("IDLE+NOT_RESPONDING", True, False, False),
        ("IDLE+DRAIN", True, False, False),
        ("DOWN+DRAIN+INVALID_REG", True, False, False),
        ("IDLE+MAINTENANCE", False, False, False),
        ("IDLE+RESERVED", False, False, False),
        ("IDLE+REBOOT_REQUESTED", False, False, False),
    ],
)
def test_states_of_nodes(state: str, is_out: bool, asleep: bool, free: bool) -> None:
    """Whole words decide: POWERED_DOWN is not DOWN. A partition of sleeping nodes is a good one."""
    node = CommandOutput(0, NODE.format(name="n1", gres="(null)", state=state, partitions="cpu")).records[0]
    assert (is_out_of_service(node), is_asleep(node), is_usable(node)) == (is_out, asleep, free)
    partition = replace(facts(ResumeTimeout="900 sec"), nodes=[node, {**node, "NodeName": "n2"}])
    [line] = slurm_checks.partitions(partition, site(SiteNodeGroup("cpu", "cpu")))
    assert line.level == ("fail" if is_out else "pass") and ("2 asleep" in line.result) == asleep
    jobs = plan_jobs(site(SiteNodeGroup("cpu", "cpu")), partition, 2)
    assert wake_up_s(jobs, partition) == (900 if asleep else 0)


@pytest.mark.parametrize(
    ("text", "level"), [("20.02.1", "fail"), ("21.08.8-2", "warn"), ("22.05.8", "pass"), ("26.11.0", "pass")]
)
def test_versions_of_slurm(text: str, level: str) -> None:
    """Those that the tests run on are named, by the doctor and by the docs."""
    line = slurm_checks.version(replace(facts(), version=CommandOutput(0, f"slurm {text}\n")))
    docs = (Path(__file__).parents[4] / "docs" / "how-to" / "administer.md").read_text()
    assert line.level == level
    for year, month in slurm_checks.TESTED_SLURM:
        assert level == "fail" or f"{year}.{month:02}" in line.result + line.advice
        assert f"{year}.{month:02}" in docs


def test_accounts() -> None:
    asked = site(
        SiteNodeGroup("a", "gpu", "rlhpc", "long"),
        SiteNodeGroup("b", "gpu", "foo"),
        SiteNodeGroup("c", "gpu", "root", "long"),
    )
    by_level = {line.result.split()[0]: line.level for line in slurm_checks.accounts(facts(), asked)}
    assert by_level == {"rlhpc": "pass", "foo": "warn", "root": "warn"}
    enforced = slurm_checks.accounts(facts(AccountingStorageEnforce="associations,limits"), asked)
    assert sorted(levels(enforced)) == ["fail", "fail", "pass"]


def test_resources_that_are_not_there() -> None:
    [line] = slurm_checks.resources(facts(), site(SiteNodeGroup("gpu", "gpu", gres="gpu:a100")))
    assert line.level == "fail" and "gpu:fake" in line.result and "gres_name" in line.advice


@pytest.mark.parametrize(
    ("changed", "test", "words"),
    [
        ({"SchedulerType": "sched/builtin"}, None, "sched/builtin"),
        ({"SchedulerParameters": "disable_hetero_steps"}, None, "disabled"),
        ({}, "Invalid partition", "Invalid partition"),
    ],
)
def test_het_jobs(changed: dict[str, str], test: str | None, words: str) -> None:
    line = slurm_checks.het_jobs(facts(**changed), test)
    assert line.level == "fail" and words in line.result


def test_requeue() -> None:
    jobs = probed(hello("n1")).jobs
    assert slurm_checks.requeue(facts(JobRequeue="0"), jobs, {}, site()).level == "warn"
    jobs[0].requeue = "0"
    assert "SBATCH_NO_REQUEUE" in slurm_checks.requeue(facts(), jobs, {"SBATCH_NO_REQUEUE": "1"}, site()).advice
    line = slurm_checks.requeue(facts(JobRequeue="0"), jobs, {}, site())
    assert line.level == "fail" and "disabled" in line.result and "JobRequeue=0" in line.result
    assert "site file" in slurm_checks.requeue(facts(), jobs, {}, site(sbatch=("--no-requeue",))).result


def test_without_accounting() -> None:
    found = facts(AccountingStorageType="accounting_storage/none", MinJobAge="60 sec")
    assert (
        slurm_checks.accounting(found).level == "warn"
        and "slurm-no-accounting" in slurm_checks.accounting(found).advice
    )
    assert slurm_checks.min_job_age(found).level == "fail"
    assert slurm_checks.min_job_age(facts(MinJobAge="60 sec")).level == "warn"


def test_walltime() -> None:
    groups = (
        SiteNodeGroup("a", "gpu", time="2-00:00:00"),
        SiteNodeGroup("b", "gpu", time="3"),
        SiteNodeGroup("c", "gpu", time="60"),
    )
    assert levels(slurm_checks.walltime(facts(), site(*groups))) == ["fail", "fail", "pass"]
    assert levels(slurm_checks.walltime(facts(), site(groups[2], signal_lead_s=10))) == ["warn"]
