"""What the doctor makes of what commands and nodes said; the outputs are recorded from Slurm 22.05."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.jobs.doctor import Finding, examine, node_probe, render, slurm_checks, to_json, torch_probe, worst
from rlhpc.jobs.doctor import node_checks as here
from rlhpc.jobs.doctor import node_checks as nodes
from rlhpc.jobs.doctor.probe_jobs import Probed, ProbeJob, plan_jobs, script_of, source_of, wake_up_s
from rlhpc.jobs.doctor.slurm_facts import (
    CommandOutput,
    Site,
    SiteNodeGroup,
    SlurmFacts,
    gres_of,
    is_asleep,
    is_out_of_service,
    parse_config,
    seconds_of,
    usable,
    version_of,
)

CONFIG = """Configuration data as of 2026-11-21T12:05:00
AccountingStorageEnforce = none
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu
AccountingStorageType   = accounting_storage/slurmdbd
BOOT_TIME               = 2026-11-21T10:52:59
ClusterName             = dev
JobRequeue              = 1
MinJobAge               = 300 sec
PreemptType             = preempt/partition_prio
SchedulerParameters     = bf_interval=1,sched_interval=1
SchedulerType           = sched/backfill
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = preempt_send_user_signal

Slurmctld(primary) at vm is UP
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO GraceTime=20 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 "
    "Nodes=gpu[1-2] PriorityJobFactor=1 PriorityTier=10 PreemptMode={mode} State={state} TotalCPUs=16 TotalNodes=2"
)
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 AvailableFeatures=(null) Gres={gres} "
    "NodeAddr=10.77.9.11 NodeHostName={name} Port=16818 Version=22.05.8 OS=Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0 "
    " RealMemory=8000 AllocMem=0 Sockets=8 State={state} ThreadsPerCore=1 Partitions={partitions}  CurrentWatts=0"
)
ASSOCIATIONS = "rlhpc||normal,long\nroot||normal\n"
SPACE = {"total": 2**40, "free": 2**39, "inodes": 10**6, "inodes_free": 10**6, "writable": True}


def facts(**changed: str) -> SlurmFacts:
    config = {**parse_config(CONFIG), **changed}
    partitions = [
        PARTITION.format(name="gpu", default="NO", mode="OFF", state="UP"),
        PARTITION.format(name="cpu", default="YES", mode="REQUEUE", state="UP"),
        PARTITION.format(name="old", default="NO", mode="OFF", state="DOWN"),
    ]
    hosts = [
        NODE.format(name="gpu1", gres="gpu:fake:4(S:0-1)", state="IDLE", partitions="gpu,all"),
        NODE.format(name="gpu2", gres="gpu:fake:4", state="MIXED", partitions="gpu,all"),
        NODE.format(name="cpu1", gres="(null)", state="DOWN*", partitions="cpu,all"),
        NODE.format(name="cpu2", gres="(null)", state="IDLE", partitions="cpu,all"),
    ]
    return SlurmFacts(
        CommandOutput(0, "slurm-wlm 22.05.8\n"), config, CommandOutput(0, CONFIG),
        CommandOutput(0, "\n".join(partitions)).records,
        CommandOutput(0, "\n".join(hosts)).records, CommandOutput(0, ASSOCIATIONS), CommandOutput(0, ""),
    )  # fmt: skip


def site(*groups: SiteNodeGroup, **changed: Any) -> Site:
    return Site(groups or (SiteNodeGroup("gpu", "gpu", gres="gpu:fake"), SiteNodeGroup("cpu", "cpu")), **changed)


def hello(node: str, **changed: Any) -> dict[str, Any]:
    said = {
        "host": node, "node": node, "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "mask": None,
        "python": list(sys.version_info[:3]), "executable": sys.executable, "packages": {"rlhpc": True, "torch": True},
        "vulkan": {"loader": True, "drivers": ["nvidia_icd.json"]}, "port": 4711, "canary": {"ms": 3.0, "parent": True},
        "limits": {"nofile": 65536, "nproc": -1, "memlock": 65536},
        "space": dict.fromkeys(("runs", "home", "/tmp", "/dev/shm"), SPACE),
    }  # fmt: skip
    return {**said, **changed}


def probed(*hellos: dict[str, Any], gpus: int = 0, reach: dict[str, Any] | None = None) -> Probed:
    job = ProbeJob("cpu", ("cpu",), (), None, gpus, len(hellos), len(hellos), job_id="7", requeue="1")
    for said in hellos:
        job.hello[said["node"]] = said
        job.canary_views[said["node"]] = {"ms": 8.2}
        found = reach or {"ms": 1.5, "interface": "eth0", "address": "10.0.0.1"}
        job.peers[said["node"]] = {"second": {"ms": 5.0}, "reach": {other["node"]: found for other in hellos}}
    return Probed(Path("/runs"), [job])


def levels(lines: list[Finding] | Finding) -> list[str]:
    return [line.level for line in (lines if isinstance(lines, list) else [lines])]


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
    found = Site.of(section)
    assert found.groups == (
        SiteNodeGroup("gpu", "batch", "a", gres="gpu:a100"),
        SiteNodeGroup("cpu", "cpu", "a", time="60"),
    )
    assert found.sbatch == ("--exclusive",) and Site.of(None).groups == (SiteNodeGroup(),)


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
    lines = slurm_checks.partitions(
        facts(),
        site(
            SiteNodeGroup("a", "gpu"), SiteNodeGroup("b", "cpu"), SiteNodeGroup("c", "gpux"), SiteNodeGroup("d", "old")
        ),
    )
    assert levels(lines) == ["pass", "warn", "fail", "fail"]
    assert "out of service: cpu1" in lines[1].found
    assert "gpu, cpu, old" in lines[2].found and "of c in the site file" in lines[2].do
    assert lines[3].found == "is DOWN"


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
    assert (is_out_of_service(node), is_asleep(node), usable(node)) == (is_out, asleep, free)
    partition = replace(facts(ResumeTimeout="900 sec"), nodes=[node, {**node, "NodeName": "n2"}])
    [line] = slurm_checks.partitions(partition, site(SiteNodeGroup("cpu", "cpu")))
    assert line.level == ("fail" if is_out else "pass") and ("2 asleep" in line.found) == asleep
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
        assert level == "fail" or f"{year}.{month:02}" in line.found + line.do
        assert f"{year}.{month:02}" in docs


def test_accounts() -> None:
    asked = site(
        SiteNodeGroup("a", "gpu", "rlhpc", "long"),
        SiteNodeGroup("b", "gpu", "foo"),
        SiteNodeGroup("c", "gpu", "root", "long"),
    )
    by_level = {line.found.split()[0]: line.level for line in slurm_checks.accounts(facts(), asked)}
    assert by_level == {"rlhpc": "pass", "foo": "warn", "root": "warn"}
    enforced = slurm_checks.accounts(facts(AccountingStorageEnforce="associations,limits"), asked)
    assert sorted(levels(enforced)) == ["fail", "fail", "pass"]


def test_resources_that_are_not_there() -> None:
    [line] = slurm_checks.resources(facts(), site(SiteNodeGroup("gpu", "gpu", gres="gpu:a100")))
    assert line.level == "fail" and "gpu:fake" in line.found and "gres_name" in line.do


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
    assert line.level == "fail" and words in line.found


def test_requeue() -> None:
    jobs = probed(hello("n1")).jobs
    assert slurm_checks.requeue(facts(JobRequeue="0"), jobs, {}, site()).level == "warn"
    jobs[0].requeue = "0"
    assert "SBATCH_NO_REQUEUE" in slurm_checks.requeue(facts(), jobs, {"SBATCH_NO_REQUEUE": "1"}, site()).do
    line = slurm_checks.requeue(facts(JobRequeue="0"), jobs, {}, site())
    assert line.level == "fail" and "disabled" in line.found and "JobRequeue=0" in line.found
    assert "site file" in slurm_checks.requeue(facts(), jobs, {}, site(sbatch=("--no-requeue",))).found


def test_without_accounting() -> None:
    found = facts(AccountingStorageType="accounting_storage/none", MinJobAge="60 sec")
    assert slurm_checks.accounting(found).level == "warn" and "slurm-no-accounting" in slurm_checks.accounting(found).do
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


def test_this_shell() -> None:
    lines = here.environment({"CUDA_VISIBLE_DEVICES": "7", "SBATCH_PARTITION": "gpu"})
    assert levels(lines) == ["warn", "warn"] and "'7'" in lines[0].found and "SBATCH_PARTITION" in lines[1].found
    assert here.environment({"PATH": "/bin"}) == []


def test_versions() -> None:
    plugin = "snakemake-executor-plugin-slurm"
    versions = {"snakemake": "9.27.1", plugin: None, f"{plugin}-jobstep": "0.6.1", "submitit": "1.4.9"}
    assert levels(here.packages(versions, "/other/slurm.conf")) == ["pass", "warn", "warn", "fail"]
    assert levels(here.packages(versions, None)) == ["pass", "warn", "pass", "fail"]


def test_disk_and_quota() -> None:
    assert here.disk("d", "/d", SPACE).level == "pass"
    assert here.disk("d", "/d", {**SPACE, "inodes_free": 5}).level == "warn"
    assert here.disk("d", "/d", {**SPACE, "writable": False}).level == "fail"
    assert here.disk("d", "/d", {"error": "No such file or directory"}).level == "fail"
    lines = here.quotas(
        "Disk quotas for user me (uid 1000): \n"
        "     Filesystem   space   quota   limit   grace   files   quota   limit   grace\n"
        " server:/home 20400000*  20480000  20971520     0   12000  100000  110000       0\n"
    )
    assert levels(lines) == ["warn", "pass"] and "100 % of 20 GiB space on server:/home" in lines[0].found


def test_nodes_as_they_should_be() -> None:
    found = probed(hello("n1"), hello("n2"))
    found.jobs[0].offsets = {"n1": (0.2, 0.01), "n2": (-0.1, 0.01)}
    lines = [
        *nodes.started(found.jobs), *nodes.shared_folder(found), *nodes.interface(found, site()), *nodes.ports(found),
        *nodes.gpu_masks(found, {}), *nodes.python(found), *nodes.shared_memory(found), *nodes.node_disks(found, site()),
        *nodes.simulators(found), *nodes.clocks(found), *nodes.limits(found),
    ]  # fmt: skip
    assert levels(lines) == ["pass"] * 11
    assert "within 9 ms" in lines[1].found and "eth0: n1, n2" in lines[2].found


def test_an_unshared_folder() -> None:
    found = probed(
        hello("n1", canary={"error": "no such file", "parent": True}),
        hello("n2", canary={"error": "no such file", "parent": False}),
        hello("n3"), hello("n4"), hello("n5", canary={"ms": 1.0, "parent": True, "write_error": "Disk quota exceeded"}),
    )  # fmt: skip
    found.jobs[0].canary_views["n4"] = {"error": "no such file"}
    lines = nodes.shared_folder(found)
    assert levels(lines) == ["fail", "fail", "fail", "fail", "pass"]
    assert "not shared: n1 have another folder" in lines[0].found and "n2 have no such folder" in lines[1].found
    assert "n4 write files there that are not seen here" in lines[2].found and "Disk quota" in lines[3].found
    assert "from n3," in lines[4].found
    found.jobs[0].peers["n3"]["second"] = {"error": "no such file"}
    assert worst(nodes.shared_folder(found)) == "fail"


def test_masks() -> None:
    found = probed(hello("n1", mask="7"), hello("n2"))
    [line] = nodes.gpu_masks(found, {"CUDA_VISIBLE_DEVICES": "7"})
    assert line.level == "fail" and "stale on n1" in line.found and "this shell's" in line.found and "unset" in line.do
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="0,1"), gpus=1), {})) == ["fail"]
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="3"), gpus=1), {})) == ["pass"]
    assert levels(nodes.gpu_masks(probed(hello("n1"), gpus=1), {})) == ["warn"]
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="")), {})) == ["pass"]


#: What torch says where all is well.
FINE = {
    "driver": "13.0", "torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "seen": 2, "warning": "", "computes": True,
    "nccl": True, "code": 0,
}  # fmt: skip


def in_torch(*, granted: int = 2, without: tuple[str, ...] = (), **changed: Any) -> Finding:
    found = probed(hello("n1", mask="0,1"), gpus=granted)
    found.jobs[0].torch["n1"] = {key: value for key, value in {**FINE, **changed}.items() if key not in without}
    [line] = nodes.gpus_in_torch(found, {})
    return line


def test_gpus_that_torch_can_use() -> None:
    line = in_torch()
    assert (line.level, line.do) == ("pass", "")
    assert line.found == "torch 2.13.0+cu130 computes on the 2 granted, and sums over 2 of them by NCCL (n1)"
    one = in_torch(granted=1, seen=1, without=("nccl",))
    assert one.level == "pass" and "NCCL" not in one.found
    assert nodes.gpus_in_torch(probed(hello("n1")), {}) == []  # none was asked for
    missing = probed(hello("n1", packages={"torch": False}), gpus=1)
    assert nodes.gpus_in_torch(missing, {}) == []  # another line says that


@pytest.mark.parametrize(
    ("said", "found", "do"),
    [
        ({"seen": 0, "torch": "2.13.0+cpu", "cuda": None}, "granted 2, torch sees 0: torch 2.13.0+cpu is built for the "
         "CPU; the driver takes CUDA up to 13.0", "RLHPC_TORCH=cu130 bash envs/setup.sh"),
        ({"seen": 0, "cuda": None, "driver": "12.9"}, "up to 12.9", "RLHPC_TORCH=cu128 "),
        ({"seen": 0, "cuda": None, "driver": "12.2"}, "up to 12.2", "RLHPC_TORCH=cu126 "),
        ({"seen": 0, "cuda": None, "driver": ""}, "there is no libcuda.so.1", "RLHPC_TORCH=auto "),
        ({"seen": 0, "driver": "12.4", "warning": "The NVIDIA driver on your system is too old"},
         "is built for CUDA 13.0 and finds 0 of them (CUDA_VISIBLE_DEVICES=0,1) (The NVIDIA driver on your system is too "
         "old); the driver takes CUDA up to 12.4", "nvidia-smi"),
        ({"seen": 1}, "granted 2, torch sees 1", "nvidia-smi"),
        ({"error": "RuntimeError: CUDA error: device busy", "without": ("computes", "nccl")},
         "computing on a GPU failed: RuntimeError: CUDA error: device busy", "nvidia-smi"),
        ({"error": "RuntimeError: NCCL Error 1", "without": ("nccl",)}, "NCCL's all-reduce failed: RuntimeError", "P2P"),
        ({"hung_s": 60.0, "without": ("nccl", "code")}, "NCCL's all-reduce did not end within 60 s", "P2P"),
        ({"nccl": False}, "a wrong sum", "NCCL_P2P_DISABLE=1"),
        ({"hung_s": 60.0, "without": ("seen", "code")}, "counting GPUs did not end within 60 s", "nvidia-smi"),
        ({"code": -11, "words": "Segmentation fault", "without": ("torch",)},
         "importing torch ended with exit code -11: Segmentation fault", "import torch"),
    ],
)  # fmt: skip
def test_gpus_that_torch_cannot_use(said: dict[str, Any], found: str, do: str) -> None:
    line = in_torch(**said)
    assert line.level == "fail" and line.found.startswith("n1: ") and found in line.found and do in line.do


def test_gpus_that_are_only_a_number_are_not_looked_at() -> None:
    [line] = nodes.gpus_in_torch(probed(hello("n1"), gpus=1), {"RLHPC_VIRTUAL_ACCELERATORS": "1"})
    assert line.level == "warn" and "not looked at on n1: RLHPC_VIRTUAL_ACCELERATORS" in line.found
    [line] = nodes.gpus_in_torch(probed(hello("n1"), gpus=1), {})
    assert line.level == "fail" and "did not end in time" in line.found  # the node said nothing of it


def test_a_child_says_what_torch_sees() -> None:
    """The real one, where no GPU is to be seen; and one that hangs, and one that dies."""
    found = probed(hello("n1", mask=""), gpus=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        found.jobs[0].torch["n1"] = node_probe.ask_torch(source_of(torch_probe), 120)
    [line] = nodes.gpus_in_torch(found, {})
    assert line.level == "fail" and line.found.startswith(
        f"n1: granted 1, torch sees 0: torch {torch.__version__} is built "
    )
    assert ("for the CPU;" if torch.version.cuda is None else "finds 0 of them") in line.found
    assert "RLHPC_TORCH=" in line.do
    first = 'print(\'{"driver": "", "torch": "2.13"}\', flush=True); print(\'is\', \'loading\', flush=True); '
    hangs = node_probe.ask_torch(f"{first} import time; time.sleep(60)", 2)
    assert hangs == {"driver": "", "torch": "2.13", "words": "is loading", "hung_s": 2}
    assert node_probe.ask_torch(f"{first} import os; os._exit(3)", 60)["code"] == 3


def test_without_slurm_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPUs that it has, or that a mask names; where there is none, torch is not asked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for mask, asked in (("0", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        lines = {line.what: line for line in examine(None, tmp_path)}
        assert lines["Slurm commands"].level == "warn" and lines["limits"].level == "pass"
        assert {"/dev/shm", "node-local disk", "Vulkan"} <= lines.keys()
        assert ("GPUs in torch" in lines) == asked
        lacking = {line.what: line for line in examine({"scratch": str(tmp_path / "nowhere")}, tmp_path)}
        assert lacking["node-local disk"].level == "fail" and "nowhere" in lacking["node-local disk"].found
        if asked and torch.version.cuda is None:
            found = lines["GPUs in torch"]
            assert found.level == "fail" and "granted 1, torch sees 0" in found.found


def test_network() -> None:
    closed = nodes.ports(probed(hello("n1"), hello("n2"), reach={"error": "timed out"}))
    assert levels(closed) == ["fail"] and "2 of 2 connections" in closed[0].found and "timed out" in closed[0].found
    assert levels(nodes.ports(probed(hello("n1")))) == ["warn"]
    [line] = nodes.interface(probed(hello("n1"), hello("n2")), site(interface="ib0"))
    assert line.level == "fail" and "ib0 has no address on n1, n2" in line.found
    fast = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    [line] = nodes.interface(probed(hello("n1", interfaces=fast), hello("n2", interfaces=fast)), site())
    assert line.level == "warn" and "interface: ib0" in line.do


def test_what_nodes_lack() -> None:
    small = {**hello("n")["space"], "/dev/shm": {**SPACE, "free": 64 * 2**20}}
    found = probed(
        hello("n1", packages={"rlhpc": False, "torch": True}), hello("n2", python=[3, 9, 1]), hello("n3", space=small),
        hello("n4", vulkan={"loader": False, "drivers": []}, limits={"nofile": 1024, "nproc": -1, "memlock": -1}),
    )  # fmt: skip
    found.jobs[0].offsets = {"n1": (40.0, 0.1)}
    assert [line.found.split()[0] for line in nodes.python(found)] == ["n1", "n2"]
    assert "64 MiB" in nodes.shared_memory(found)[0].found
    assert levels([*nodes.simulators(found), *nodes.limits(found), *nodes.clocks(found)]) == ["warn"] * 3
    assert (
        nodes.started([ProbeJob("gpu", ("gpu",), (), None, 0, 1, 1, error="did not start within 60 s")])[0].level
        == "warn"
    )


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


def test_text_and_json() -> None:
    lines = [Finding("pass", "a", "fine"), Finding("fail", "bc", "broken", "mend it")]
    text = render(lines)
    assert "pass  a   fine\n" in text and "fail  bc  broken\n" in text and "→ mend it" in text
    assert text.endswith("2 checks: 1 pass, 0 warn, 1 fail")
    assert json.loads(to_json(lines))["lines"][1]["do"] == "mend it" and json.loads(to_json(lines))["level"] == "fail"


def test_the_probe_needs_nothing_but_python(tmp_path: Path) -> None:
    """Its text alone, as a node gets it; it says in short lines what it sees."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "login").write_text("token")
    (canary / "second").write_text("token")
    plan = {
        "token": "token", "canary": str(canary), "patience_s": 2, "limit_s": 60, "packages": ["json", "nonesuch"],
        "torch": "print('{\"torch\": \"2.13\"}')", "torch_s": 30,
    }  # fmt: skip
    told = {"peers": [], "second": True}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", Path(node_probe.__file__).read_text()],
        input=f"{json.dumps(plan)}\n{json.dumps(told)}\n\n", capture_output=True, text=True, timeout=60,
        env={"SLURM_PROCID": "3", "SLURMD_NODENAME": "n3", "CUDA_VISIBLE_DEVICES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {(words[0], words[1]) for words in lines} == {(node_probe.MARK, "3")}
    assert [words[2] for words in lines if words[3] == "0"] == ["hello", "clock", "peers", "torch"]
    assert max(map(len, done.stdout.splitlines())) < 700
    assert (canary / "node-n3").read_text() == "token"
