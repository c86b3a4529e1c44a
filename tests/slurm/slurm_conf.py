"""The configuration files of the test cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GPUS_PER_NODE = 4
CPUS_PER_NODE = 8
MEMORY_MB_PER_NODE = 32_000
REQUEUE_DELAY_S = 10
"""How long Slurm holds a requeued job back.

It is one second more than the lifetime of a step's credential: the nodes must have forgotten the old ones before the job may
run there again under the same id. That is `AuthInfo=cred_expire=`, 120 s unless set, and so two minutes on most sites
(slurm.conf(5), AuthInfo). No parameter of the scheduler changes it.
"""


@dataclass(frozen=True)
class Node:
    """A compute node of the test cluster."""

    name: str
    address: str
    port: int
    gpus: int = 0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """Everything the files say that differs between clusters."""

    root: Path
    cluster: str
    user: str
    host: str
    address: str
    """Of the login side, where slurmctld and slurmdbd listen."""
    controller_port: int
    nodes: Sequence[Node]
    munge_socket: Path | None = None
    accounting_port: int | None = None
    nodes_are_hosts: bool = True
    measures_energy: bool = False
    """Whether the nodes have counters of energy, as those of Cray have."""


def slurm_conf(layout: Layout) -> str:
    root = layout.root
    auth_info = [f"cred_expire={REQUEUE_DELAY_S - 1}"]
    if layout.munge_socket:
        auth_info.insert(0, f"socket={layout.munge_socket}")
    lines = [
        f"ClusterName={layout.cluster}",
        f"SlurmctldHost={layout.host}({layout.address})",
        f"SlurmctldPort={layout.controller_port}",
        f"AuthType=auth/{'munge' if layout.munge_socket else 'none'}",
        f"CredType=cred/{'munge' if layout.munge_socket else 'none'}",
        f"AuthInfo={','.join(auth_info)}",
        f"SlurmUser={layout.user}",
        f"SlurmdUser={layout.user}",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/nodes/%n/spool",
        f"SlurmctldPidFile={root}/run/slurmctld.pid",
        f"SlurmdPidFile={root}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={root}/log/slurmctld.log",
        f"SlurmdLogFile={root}/log/slurmd-%n.log",
        # No cgroups: a container seldom may make any. The price: a task that leaves its process tree is not followed.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # Nodes offer what is written here, not what the machine has.
        "SlurmdParameters=config_overrides",
        "DefMemPerCPU=2000",
        "GresTypes=gpu",
        # Het jobs start in the backfill cycle only.
        "SchedulerParameters=bf_interval=1,sched_interval=1",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        # A preempted job gets the signal of its --signal first, and then has the partition's GraceTime.
        "SlurmctldParameters=preempt_send_user_signal",
        "JobRequeue=1",
        # Half of the default: on a busy machine, ranks may need some seconds to leave nothing behind.
        "KillWait=15",
        "MinJobAge=300",
        "InactiveLimit=0",
        "SlurmdTimeout=20",
        # A node whose step does not end within this is drained, for every job after it. On a starved machine 60 s pass.
        "UnkillableStepTimeout=900",
        "ReturnToService=2",
        # A step over its memory is killed, seen by sampling. Only cgroups would make its state OUT_OF_MEMORY.
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=2",
        "JobAcctGatherParams=NoShared,OverMemoryKill",
    ]
    if layout.accounting_port:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={layout.address}",
            f"AccountingStoragePort={layout.accounting_port}",
            # With munge the "password" is its socket; the clients of slurmdbd look at nothing else.
            f"AccountingStoragePass={layout.munge_socket}",
            "AccountingStorageTRES=gres/gpu",
        ]
    if layout.measures_energy:
        lines.remove("JobAcctGatherFrequency=task=2")
        lines += [
            "AcctGatherEnergyType=acct_gather_energy/pm_counters",
            "AcctGatherNodeFreq=1",
            "JobAcctGatherFrequency=task=2,energy=1",
        ]
    for node in layout.nodes:
        lines.append(
            f"NodeName={node.name} NodeHostname={node.name if layout.nodes_are_hosts else layout.host}"
            f" NodeAddr={node.address} Port={node.port} CPUs={CPUS_PER_NODE} CoresPerSocket={CPUS_PER_NODE}"
            f" RealMemory={MEMORY_MB_PER_NODE}" + (f" Gres=gpu:fake:{node.gpus}" if node.gpus else "")
        )
    with_gpus = ",".join(node.name for node in layout.nodes if node.gpus)
    without = ",".join(node.name for node in layout.nodes if not node.gpus)
    lines += [
        f"PartitionName=gpu Nodes={with_gpus} PriorityTier=10 PreemptMode=OFF",
        f"PartitionName=cpu Nodes={without} PriorityTier=10 PreemptMode=OFF",
        "PartitionName=all Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF",
        "PartitionName=preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(layout: Layout) -> str:
    """`File=` must lead to character devices: with plain files or a bare count no step gets CUDA_VISIBLE_DEVICES."""
    return "".join(
        f"NodeName={node.name} Name=gpu Type=fake File={layout.root}/dev/gpu[0-{node.gpus - 1}]\n"
        for node in layout.nodes
        if node.gpus
    )


def slurmdbd_conf(layout: Layout) -> str:
    root = layout.root
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            f"DbdHost={layout.host}",
            f"DbdAddr={layout.address}",
            f"DbdPort={layout.accounting_port}",
            f"SlurmUser={layout.user}",
            f"LogFile={root}/log/slurmdbd.log",
            f"PidFile={root}/run/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            # "localhost" means the socket, which MYSQL_UNIX_PORT in slurmdbd's environment names.
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )
