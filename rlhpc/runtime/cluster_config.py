"""Section `cluster` of a configuration. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhpc.runtime.key_metadata import COUNT, NOT_NEGATIVE, POSITIVE, Choices, Range


@dataclass
class SlurmOptions:
    """Slurm options that request the nodes of a job component."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Slurm node features."""
    gres: str | None = None
    """Slurm's generic resources in full, such as `gpu:a100:4,nvme:1`; by default `gres_name` with the accelerators' number."""
    gres_name: str | None = None
    """Name and type of the accelerators among Slurm's generic resources, such as `gpu:a100` (default `gpu`)."""
    mem: str | None = None
    """Memory per node, as Slurm writes it: `64G`."""
    cpus_per_node: Annotated[int | None, COUNT] = None
    """Cores per node."""
    time: str | None = None
    """Walltime, as Slurm writes it: `02:00:00`."""


@dataclass
class NodeGroupConfig(SlurmOptions):
    """Nodes with a label, which components name in their placement. A Slurm option that a group omits is taken from
    `cluster`."""

    label: str = "???"  # `omegaconf.MISSING`, whose import would take a tenth of a second in each process of a run
    """Name of the group; `cluster` and `node` are reserved."""
    node_ranks: Any = None
    """Nodes of the group, such as `0-1,3`; by default all, or those of `het_component`."""
    het_component: Annotated[int | None, NOT_NEGATIVE] = None
    """Component of the heterogeneous Slurm job that the group's nodes come from."""
    num_nodes: Annotated[int | None, COUNT] = None
    """How many nodes this component of the job asks for."""
    accelerators_per_node: Annotated[int | None, NOT_NEGATIVE] = None
    """Accelerators per node of this component."""
    accelerator_memory: str | None = None
    """Memory of one accelerator of this group, such as `80G`, by which `rlhpc plan` says what fits."""
    accelerator_kind: str | None = None
    """Kind of accelerator; `cpu` hides the nodes' accelerators from the group."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables for every process on these nodes."""
    python_interpreter: str | None = None
    """Python that starts processes there, if the group needs an environment of its own."""


@dataclass
class ClusterConfig(SlurmOptions):
    """Machines of a run, and the placement of its components."""

    num_nodes: Annotated[int, COUNT] = 1
    """Number of nodes."""
    accelerators_per_node: Annotated[int | None, NOT_NEGATIVE] = None
    """Accelerators per node; null takes those that are visible, and a submission requests as many as the placement needs, at
    most those of the partition's nodes. 0 computes on CPUs."""
    accelerator_memory: str | None = None
    """Memory of one accelerator, such as `80G`; null takes what those of this machine have, and says nothing of others."""
    memory_check: Annotated[str, Choices("refuse", "warn", "off")] = "refuse"
    """What happens to a run that cannot fit into memory, as `rlhpc plan` accounts for it: `refuse` starts and submits nothing,
    `warn` says so and goes on, `off` does not look."""
    component_placement: dict[str, Any] = field(default_factory=dict)
    """Component → `resource ranks[:process ranks]`, for example `actor,rollout: 0-7`; or a mapping with `node_group`
    and `placement`."""
    node_groups: list[NodeGroupConfig] = field(default_factory=list)
    """Labelled groups of nodes."""
    interface: str | None = None
    """Network interface by which nodes reach one another, such as `ib0`; by default the one on the route between them."""
    scratch: str | None = None
    """Folder on each node's own disk for data that do not fit into its shared memory; by default below `/tmp`."""
    environment_archive: str | None = None
    """Archive of the Python environment (`rlhpc pack FILE`). Each node unpacks it below `scratch` before ranks start there and
    removes it after the run, unless another run on the node uses it. Ranks then import from the node's disk. Null imports from
    the environment itself, and so do ranks that one process of this machine forks."""
    bind_cores: bool = True
    """Ranks with accelerators stay on the granted cores of these accelerators' NUMA nodes, where those are as many as a rank
    has threads."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job's script before the driver starts: `module load …`, `source …/activate`."""
    sbatch: list[str] = field(default_factory=list)
    """Further sbatch options for the whole job, such as `--reservation=rl`."""
    srun: list[str] = field(default_factory=list)
    """Further srun options for every job step, each one word, such as `--network=single_node_vni` or
    `--container-image=/shared/rlhpc.sqsh`. Steps have `--mpi=none` unless one of these is `--mpi=…`. Options that rlhpc itself
    sets, such as `--nodes`, are refused."""
    mail_type: str | None = None
    """Events of the job about which Slurm itself sends a mail, in upper case and joined by commas, such as `END,FAIL,REQUEUE`
    (`sbatch --mail-type`)."""
    mail_user: str | None = None
    """Address of these mails (`sbatch --mail-user`); null: the user who submits."""
    container: list[str] = field(default_factory=list)
    """Words put before every command of a job step, and of evaluation and conversion on Slurm, such as
    `[apptainer, exec, --nv, rlhpc.sif]`. The image must show the run folder under its own path; `/tmp` and `/dev/shm` are
    best those of the node."""
    container_python: str | None = None
    """Python in the image of `container`, such as `/opt/venv/bin/python`; null: that of the driver, which the image must then
    show under the same path. A node group's `python_interpreter` comes first."""
    signal_lead_s: Annotated[int, Range(1, 65535)] = 120  # what Slurm accepts for --signal
    """Seconds before the walltime at which Slurm asks the job to save and end."""


@dataclass
class ElasticConfig(SlurmOptions):
    """Ranks that join and leave with their own Slurm jobs, wherever the cluster has capacity. Partition, account and
    `gres_name` default to those of `cluster`; nothing else does.
    """

    group: str = "rollout"
    """Group that the ranks are added to: `rollout` of language models; `env` of runs with simulators that play ahead of
    their actors (`algorithm.max_staleness`), where each of these ranks also acts."""
    min: Annotated[int, NOT_NEGATIVE] = 0
    """Ranks that are asked for at all times, whatever the queue says."""
    max: Annotated[int, COUNT] = 1
    """Most ranks that there are besides those that the run starts with."""
    ranks_per_job: Annotated[int, COUNT] = 1
    """Ranks of a job; each job asks for one node."""
    accelerators_per_rank: Annotated[int | None, NOT_NEGATIVE] = None
    """Accelerators of a rank; null takes as many as the group's other ranks have."""
    time: str = "01:00:00"
    """Walltime of a job, as Slurm writes it; a short one starts sooner, and another job may follow it."""
    max_gpu_hours: Annotated[float | None, POSITIVE] = None
    """Budget of all these jobs together, over all starts of the run: accelerators times hours. A job without accelerators
    counts the hours of its node instead. No job is submitted whose whole walltime does not fit any more; null: no limit."""
    start_within_s: Annotated[float, NOT_NEGATIVE] = 300.0
    """A job beyond `min` is only submitted if Slurm expects it to start within these seconds (`sbatch --test-only`)."""
    react_s: Annotated[float, NOT_NEGATIVE] = 60.0
    """Seconds for which the actor must have waited for rollouts, or not at all, before there are more ranks, or fewer."""
    look_s: Annotated[float, Range(5)] = 15.0  # commands of a host share one query in ten seconds
    """Seconds between two looks at the queue, 5 at least. Slurm's answer is up to 10 s old: commands of a host share it."""
    signal_lead_s: Annotated[int, Range(1, 65535)] = 30
    """Seconds before the walltime at which a job leaves."""


@dataclass
class ElasticClusterConfig(ClusterConfig):
    """Machines of a run whose ranks may join and leave, and the placement of its components."""

    elastic: list[ElasticConfig] = field(default_factory=list)
    """Ranks that join from jobs of their own, on whatever partition is named; at most one entry a group."""


#: Keys of these sections, and of the sections that contain them, which `read_key` also reads from plain mappings.
Key = Literal[
    "cluster", "runner", "workflow", "name", "eval_job", "convert_job",
    "partition", "account", "qos", "constraint", "gres", "gres_name", "mem", "cpus_per_node", "time",
    "label", "node_ranks", "het_component", "num_nodes", "accelerators_per_node", "accelerator_memory", "accelerator_kind",
    "env_vars",
    "python_interpreter", "component_placement", "node_groups", "interface", "scratch", "environment_archive", "bind_cores",
    "setup", "sbatch", "srun", "container", "container_python", "mail_type", "mail_user", "signal_lead_s", "elastic", "group",
    "min", "max",
    "ranks_per_job",
    "accelerators_per_rank", "max_gpu_hours", "start_within_s", "react_s", "look_s", "memory_check", "save_reserve_s",
    "run_dir", "trace", "profile", "nsys", "nsys_steps", "nsys_options",
]  # fmt: skip
#: Section of a configuration: a dataclass, or a mapping with some of the keys.
SectionSource = SlurmOptions | Mapping[str, Any] | None
