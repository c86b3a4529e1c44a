"""A small cluster as Slurm and its nodes describe it, for the doctor's checks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhpc.jobs.doctor import Finding
from rlhpc.jobs.doctor.probe_jobs import Probed, ProbeJob
from rlhpc.jobs.doctor.slurm_facts import CommandOutput, Site, SiteNodeGroup, SlurmFacts, parse_config

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
FOLDERS = {"/tmp": "fd01.2", "/dev/shm": "1b.1"}
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
        "vulkan": {"loader": True, "drivers": ["nvidia_icd.json"]}, "physx": None, "port": 4711,
        "canary": {"ms": 3.0, "parent": True}, "lock": "held", "folders": FOLDERS,
        "limits": {"nofile": 65536, "nproc": -1, "memlock": 65536},
        "space": dict.fromkeys(("runs", "home", "/tmp", "/dev/shm"), SPACE),
    }  # fmt: skip
    return {**said, **changed}


def probed(*hellos: dict[str, Any], gpus: int = 0, reach: dict[str, Any] | None = None) -> Probed:
    job = ProbeJob("cpu", ("cpu",), (), None, gpus, len(hellos), len(hellos), job_id="7", requeue="1")
    for said in hellos:
        job.hello[said["node"]] = said
        job.canary_views[said["node"]] = {"ms": 8.2}
        found = reach or {"ms": 1.5, "interface": "eth0", "address": "10.0.0.1", "interfaces": ["eth0"]}
        looked_up = {other["host"]: {"addresses": ["10.0.0.1"]} for other in hellos}
        job.peers[said["node"]] = {
            "second": {"ms": 5.0}, "reach": {other["node"]: found for other in hellos}, "names": looked_up,
        }  # fmt: skip
        job.second_steps[said["node"]] = {key: said[key] for key in ("node", "folders", "mask")}
    return Probed(Path("/runs"), [job])


def levels(lines: Iterable[Finding] | Finding) -> list[str]:
    return [line.level for line in ([lines] if isinstance(lines, Finding) else lines)]
