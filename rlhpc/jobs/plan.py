"""Job plan of a run: job components with sbatch directives, one step per worker group, and the placement grid.

Pure functions that turn a configuration and a cluster into data and text. They submit nothing.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.config.constraints import format_steps, parse_steps
from rlhpc.config.sections import JobConfig, RunConfig
from rlhpc.jobs.elastic.helper_plan import HelperPlan, helper_plans, submitit_options
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.slurm import minutes_of
from rlhpc.runtime.allocation import gpus_in
from rlhpc.runtime.cluster import Cluster, read_key, without_accelerators
from rlhpc.runtime.cluster_config import Key, SectionSource
from rlhpc.runtime.environment_archive import check_archive, folder_of, python_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.launchers.srun_commands import SrunStep, job_steps, nsys_command, nsys_options
from rlhpc.runtime.os_resources import file_limit, open_files_of_driver
from rlhpc.runtime.placement import HybridComponentPlacement, Placement

LAUNCHERS = ("auto", "slurm", "local")
#: Keys of a node group that become sbatch options of the same name.
_DIRECTIVES: tuple[Key, ...] = ("partition", "account", "qos", "constraint", "mem", "gres", "time")
#: Keys that make a node group a separate job component.
_RESOURCES: tuple[Key, ...] = ("het_component", "cpus_per_node", *_DIRECTIVES)

#: Keys of `cluster` that become options of the job's first component.
_MAIL: tuple[Key, ...] = ("mail_type", "mail_user")
#: Workflow sections for jobs other than training.
_WORKFLOW_JOBS: tuple[Key, ...] = ("eval_job", "convert_job")


@dataclass(frozen=True)
class JobComponent:
    """Component of a Slurm job; a heterogeneous job has several components.

    Attributes:
        index: Number of the component for `--het-group`.
        label: Labels of the component's node groups; `cluster` for nodes without a group.
        nodes: Ranks of the component's nodes.
        options: sbatch options and their values, in order.
    """

    index: int
    label: str
    nodes: tuple[int, ...]
    options: tuple[tuple[str, str], ...]

    @property
    def directives(self) -> tuple[str, ...]:
        """Lines of the batch script that request this component."""
        het_separator = ("#SBATCH hetjob",) if self.index else ()
        return (*het_separator, *(f"#SBATCH --{name}={option_value}" for name, option_value in self.options))


@dataclass(frozen=True)
class PlannedNode:
    """Node of the placement grid; `cpus` is 0 if the site determines the number of CPUs."""

    name: str
    component: int
    cpus: int
    accelerators: int


@dataclass(frozen=True)
class JobPlan:
    """Job plan of a run, as `rlhpc plan` prints it."""

    name: str
    launcher: str
    components: tuple[JobComponent, ...]
    steps: tuple[SrunStep, ...]
    nodes: tuple[PlannedNode, ...]
    placements: Mapping[str, Sequence[Placement]]
    warnings: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    job_options: tuple[str, ...] = ()
    workflow_jobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    signal_lead_s: int = 120
    helpers: tuple[HelperPlan, ...] = ()

    def submitit_parameters(self) -> dict[str, Any]:
        """Returns the job's resources as parameters of `submitit.SlurmExecutor`.

        submitit writes one component only. The `#SBATCH` lines of the other components are at the start of `setup`, where
        sbatch still reads them.
        """
        options = [
            f"#SBATCH {sbatch_option}" for sbatch_option in self.job_options
        ]  # Slurm applies them to one component only
        other_lines = [line for component in self.components[1:] for line in (*component.directives, *options)]
        return {
            **submitit_options(self.components[0].options),
            "setup": [*options, *other_lines, *self.setup],
            "additional_parameters": {"signal": f"B:USR2@{self.signal_lead_s}"},
        }

    def test_script(self) -> str:
        """Returns a batch script for `sbatch --test-only` that requests the same nodes and does nothing."""
        options = [f"#SBATCH {sbatch_option}" for sbatch_option in self.job_options]
        directive_blocks = ("\n".join((*component.directives, *options)) for component in self.components)
        return "\n".join(["#!/bin/sh", *directive_blocks, "exit 0", ""])


def build_plan(
    cfg: RunConfig | Mapping[str, Any], cluster: Cluster | None = None, *, launcher: str = "auto"
) -> JobPlan:
    """Builds the job plan of a run.

    Args:
        cfg: Configuration, as `load_config` returns it.
        cluster: The allocation; by default the virtual nodes that the configuration requests.
        launcher: `slurm`, `local`, or `auto`: Slurm if `sbatch` exists, or if the configuration requests resources that only
            Slurm can provide.

    Raises:
        ConfigError: The node groups do not form components, or a walltime is too short for a step.
        PlacementError: The placement breaks a rule.
    """
    section = read_key(cfg, "cluster")
    groups = list(read_key(section, "node_groups", ()))
    launcher = choose_launcher(cfg, launcher, cluster)
    is_submitted = cluster is None and launcher == "slurm"
    if cluster is None:
        cluster = Cluster.planned(section, cpus=0 if launcher == "slurm" else None)
    placements = HybridComponentPlacement(cfg, cluster).placements()
    components = _build_components(groups, section, cluster)
    if is_submitted:
        _check_walltimes(components, read_key(cfg, "runner"), section)
    unpacked_python = None
    if launcher == "slurm" and (archive := read_key(section, "environment_archive")):
        check_archive(expand_home(archive))
        unpacked_python = python_of(folder_of(expand_home(archive), read_key(section, "scratch")))
    component_by_node = {node: c.index for c in components for node in c.nodes}
    node_names = [n.name if cluster.source == "slurm" else f"node{n.rank}" for n in cluster.nodes]
    nodes = tuple(
        PlannedNode(name, component_by_node[n.rank], n.cpus, len(n.accelerators))
        for name, n in zip(node_names, cluster.nodes, strict=True)
    )
    steps: list[SrunStep] = []
    runner = read_key(cfg, "runner")
    run_folder = RunPaths.from_run_dir(str(read_key(runner, "run_dir", "runs")), str(read_key(runner, "name", "run")))
    profile = read_key(read_key(runner, "trace"), "profile")
    profiled_groups = read_key(profile, "nsys", ())
    options = nsys_options(
        read_key(profile, "nsys_options", {}), parse_steps(read_key(profile, "nsys_steps", "")) or ()
    )
    for group, ranks in placements.items():
        interpreter = cluster.interpreter(ranks[0].node_group, in_step=launcher == "slurm") or unpacked_python
        prefix = nsys_command(run_folder.nsys, group, options) if group in profiled_groups else ()
        if launcher == "slurm":
            steps += job_steps(group, ranks, cluster, [n.component for n in nodes], node_names, interpreter, prefix)
        else:
            steps.append(_plan_local_step(group, ranks, node_names, interpreter, prefix))
    name = str(read_key(read_key(cfg, "runner"), "name", "run"))
    warnings = tuple(_list_placement_warnings(nodes, placements))
    workflow = read_key(cfg, "workflow", {})
    return JobPlan(
        name, launcher, components, tuple(steps), nodes, placements, warnings,
        setup=tuple(read_key(section, "setup", ())), job_options=tuple(read_key(section, "sbatch", ())),
        signal_lead_s=int(read_key(section, "signal_lead_s", 120)),
        workflow_jobs={key: job_options(section, job) for key in _WORKFLOW_JOBS if (job := read_key(workflow, key))},
        helpers=helper_plans(section, placements),
    )  # fmt: skip


def choose_launcher(cfg: RunConfig | Mapping[str, Any], launcher: str, cluster: Cluster | None = None) -> str:
    """Returns `slurm` or `local`; see `build_plan`.

    Raises:
        ConfigError: No launcher has that name.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher is {launcher!r}; choose from {', '.join(LAUNCHERS)}")
    if launcher != "auto":
        return launcher
    section = read_key(cfg, "cluster")
    groups = list(read_key(section, "node_groups", ()))
    return "slurm" if _needs_slurm(section, groups, cluster) or shutil.which("sbatch") else "local"


def _check_walltimes(components: Sequence[JobComponent], runner: SectionSource, section: SectionSource) -> None:
    """Checks that walltimes exceed the time reserved for saving; otherwise a job would be requeued before its first step.

    Raises:
        ConfigError: A component's walltime is no longer than `cluster.signal_lead_s` or `runner.save_reserve_s`.
    """
    reserved_s = {
        "cluster.signal_lead_s": int(read_key(section, "signal_lead_s", 120)),
        "runner.save_reserve_s": float(read_key(runner, "save_reserve_s", 60.0)),
    }
    key = max(reserved_s, key=lambda name: reserved_s[name])
    for component in components:
        time = dict(component.options).get("time")
        if time is not None and 0 < 60 * minutes_of(time) <= reserved_s[key]:
            raise ConfigError(
                f"cluster.time is {time} ({component.label}), of which the last {reserved_s[key]:g} s are for saving ({key}): "
                f"no step has room in it; allowed: more than {math.ceil((reserved_s[key] + 1) / 60)} minutes, or a lower {key}"
            )


def job_options(section: SectionSource, job: JobConfig | Mapping[str, Any]) -> dict[str, str]:
    """Returns the configured partition, account, qos and constraint of a Slurm job other than training.

    Without a partition, the values that the job's section omits come from one of the run's node groups with a partition: the
    first group with accelerators if the job requests accelerators, otherwise the first group without; failing that, the
    first group.

    Args:
        section: Section `cluster` of the configuration.
        job: Section `workflow.eval_job` or `workflow.convert_job`.
    """
    directive_keys = _DIRECTIVES[:4]
    options = {key: option_value for key in directive_keys if (option_value := read_key(job, key)) is not None}
    groups = [
        raw_group for raw_group in read_key(section, "node_groups", ()) if read_key(raw_group, "partition") is not None
    ]
    if "partition" not in options and groups:
        needs_accelerators = gpus_in(read_key(job, "gres")) is not None
        group = next(
            (raw_group for raw_group in groups if _has_accelerators(raw_group) == needs_accelerators), groups[0]
        )
        options = {
            **{key: option_value for key in directive_keys if (option_value := read_key(group, key)) is not None},
            **options,
        }
    return {key: str(option_value) for key, option_value in options.items()}


def _has_accelerators(group: SectionSource) -> bool:
    accelerator_keys: tuple[Key, ...] = ("gres", "gres_name", "accelerators_per_node")
    return not without_accelerators(group) and any(read_key(group, key) for key in accelerator_keys)


def _needs_slurm(section: SectionSource, groups: Sequence[SectionSource], cluster: Cluster | None) -> bool:
    if cluster is not None and cluster.source != "virtual":
        return cluster.source == "slurm"
    requests_resources = any(
        read_key(raw_section, key) is not None for raw_section in [*groups, section] for key in _RESOURCES
    )
    return requests_resources or (len(cluster.nodes) if cluster else read_key(section, "num_nodes", 1)) > 1


# -- components -------------------------------------------------------------------------------------------------------


def _build_components(
    groups: Sequence[SectionSource], section: SectionSource, cluster: Cluster
) -> tuple[JobComponent, ...]:
    """Divides the nodes into components: the allocation's components, or one for each node group that requests resources."""
    by_rank = {
        r: raw_group for raw_group in groups for r in cluster.node_group(str(read_key(raw_group, "label"))).node_ranks
    }
    has_allocation = cluster.source == "slurm" or any(n.het_group is not None for n in cluster.nodes)
    node_ranges: list[tuple[Any, list[int]]] = []
    for node in cluster.nodes:
        raw_group = by_rank.get(node.rank)
        has_resources = raw_group is not None and any(read_key(raw_group, key) is not None for key in _RESOURCES)
        key = (
            (node.het_group or 0)
            if has_allocation
            else str(read_key(raw_group, "label"))
            if has_resources
            else "cluster"
        )
        if not node_ranges or node_ranges[-1][0] != key:
            node_ranges.append((key, []))
        node_ranges[-1][1].append(node.rank)
    node_keys = [key for key, _ in node_ranges]
    for key, ranks in node_ranges:
        if node_keys.count(key) > 1:
            raise ConfigError(
                f"cluster.node_groups: the nodes of {key!r} do not follow one another (node {ranks[0]}): a job component "
                f"is a row of nodes; give the groups node_ranks without gaps"
            )
    components = []
    for index, (_, ranks) in enumerate(node_ranges):
        members = [raw_group for raw_group in groups if any(by_rank.get(r) is raw_group for r in ranks)]
        labels = "+".join(str(read_key(raw_group, "label")) for raw_group in members) or "cluster"
        accelerators = max(len(cluster.nodes[r].accelerators) for r in ranks)
        options = _build_sbatch_options(members, section, labels, accelerators, len(ranks))
        if index == 0:  # one mail for the job, not one for each component
            options += tuple(
                (key.replace("_", "-"), str(v)) for key in _MAIL if (v := read_key(section, key)) is not None
            )
        components.append(JobComponent(index, labels, tuple(ranks), options))
    return tuple(components)


def _build_sbatch_options(
    members: Sequence[SectionSource], section: SectionSource, labels: str, num_accelerators: int, num_nodes: int
) -> tuple[tuple[str, str], ...]:
    """Returns the sbatch options of a component from its node groups; the cluster's values are the defaults."""

    def common_value(key: Key) -> str | None:
        group_values = {str(v) for raw_group in members if (v := read_key(raw_group, key)) is not None}
        if len(group_values) > 1:
            raise ConfigError(
                f"cluster.node_groups[{labels}].{key} is {' and '.join(sorted(group_values))}: groups of one job component "
                f"share their resources; give each its own het_component"
            )
        cluster_value = read_key(section, key)
        return next(iter(group_values), None if cluster_value is None else str(cluster_value))

    gres_text = common_value("gres")
    if num_accelerators and gpus_in(gres_text) is None:
        gres_text = ",".join(filter(None, (gres_text, f"{common_value('gres_name') or 'gpu'}:{num_accelerators}")))
    options: dict[str, str | None] = {key: common_value(key) for key in _DIRECTIVES[:4]}
    # the only task is the driver; ranks run in steps
    options |= {"nodes": str(num_nodes), "ntasks-per-node": "1", "cpus-per-task": common_value("cpus_per_node")}
    options |= {"mem": common_value("mem"), "gres": gres_text, "time": common_value("time")}
    return tuple((name, option) for name, option in options.items() if option is not None)


def _plan_local_step(
    group: str, ranks: Sequence[Placement], node_names: Sequence[str], interpreter: str | None, prefix: Sequence[str]
) -> SrunStep:
    """Returns the step of a group on this machine. The driver's fork server forks the ranks; with an `interpreter` or a
    `prefix`, a new interpreter starts each rank.
    """
    is_forked = not interpreter and not prefix
    module = "rlhpc.runtime.launchers.fork_server" if is_forked else "rlhpc.runtime.worker_process"
    hosts = tuple(node_names[p.node_rank] for p in ranks)
    argv = (*prefix, *run_module(module, python=interpreter))
    return SrunStep(group, 0, tuple(p.rank for p in ranks), hosts, argv)


def _list_placement_warnings(nodes: Sequence[PlannedNode], placements: Mapping[str, Sequence[Placement]]) -> list[str]:
    warnings = []
    for rank, node in enumerate(nodes):
        local_ranks = [p for ranks in placements.values() for p in ranks if p.node_rank == rank]
        if node.cpus and len(local_ranks) > node.cpus:
            warnings.append(f"{node.name}: {len(local_ranks)} processes share {count_noun(node.cpus, 'core')}")
        indices_by_users: dict[tuple[str, ...], list[int]] = {}
        for index in range(node.accelerators):
            users = tuple(_find_ranks_on(placements, rank, index))
            if len(users) != 1:
                indices_by_users.setdefault(tuple(dict.fromkeys(u.rpartition("-")[0] for u in users)), []).append(index)
        for groups, indices in indices_by_users.items():
            resource_name = f"{node.name}: {_format_ranges('accelerator', indices)}"
            if not groups:
                warnings.append(f"{resource_name}: nobody uses {'them' if len(indices) > 1 else 'it'}")
            elif len(groups) == 1:
                warnings.append(f"{resource_name}: shared by several ranks of {groups[0]}")
            else:
                warnings.append(f"{resource_name}: shared by {', '.join(groups)}")
    num_ranks, open_file_limit = sum(map(len, placements.values())), file_limit()
    if open_file_limit is not None and open_file_limit < (num_open_files := open_files_of_driver(num_ranks)):
        warnings.append(
            f"the driver of {count_noun(num_ranks, 'rank')} opens {num_open_files} files, and a process may open "
            f"{open_file_limit} files "
            "here: have the hard limit raised (ulimit -Hn) if that is so on the first node, too"
        )
    return warnings


def _find_ranks_on(placements: Mapping[str, Sequence[Placement]], node_rank: int, index: int | None) -> list[str]:
    """Returns the ranks on one accelerator of a node; if `index` is None, the node's ranks without an accelerator."""
    return [
        f"{group}-{p.rank}"
        for group, ranks in placements.items()
        for p in ranks
        if p.node_rank == node_rank and (index in p.accelerators if index is not None else not p.accelerators)
    ]


# -- text -------------------------------------------------------------------------------------------------------------


def render_plan(plan: JobPlan) -> str:
    """Renders the plan as the text that `rlhpc plan` prints."""
    is_slurm = plan.launcher == "slurm"
    nodes_text = count_noun(len(plan.nodes), "node")
    lines = [
        f"run {plan.name}: {nodes_text}, "
        + (count_noun(len(plan.components), "job component") if is_slurm else "without Slurm")
    ]
    if is_slurm:
        for component in plan.components:
            nodes = _format_ranges("node", component.nodes)
            lines += ["", f"# component {component.index}: {component.label}, {nodes}", *component.directives]
        for job, options in plan.workflow_jobs.items():
            options_text = (
                ", ".join(f"{key} {option_value}" for key, option_value in options.items()) or "the default partition"
            )
            lines += (
                ["", f"# jobs of workflow.{job}: {options_text}"]
                if job == "eval_job"
                else [f"# jobs of workflow.{job}: {options_text}"]
            )
    for helpers in plan.helpers:
        lines += ["", *helpers.lines()]
    lines += ["", "steps", f"  driver: {'the batch step' if is_slurm else 'this process'}, {plan.nodes[0].name}"]
    for step in plan.steps:
        ranks = _format_ranges("rank", step.ranks)
        if is_slurm:
            lines += [f"  {step.group}: {ranks}", f"    SLURM_HOSTFILE: {' '.join(step.hosts)}"]
            lines.append(f"    {shlex.join(step.argv)}")
        else:
            start_method = "forked from" if step.argv[-1].endswith("fork_server") else "started with"
            lines.append(f"  {step.group}: {ranks}, {start_method} {shlex.join(step.argv)}")
    lines += ["", "placement"]
    for rank, node in enumerate(plan.nodes):
        cores = count_noun(node.cpus, "core") if node.cpus else "the site's number of cores"
        lines.append(f"  {node.name}: {cores}, {count_noun(node.accelerators, 'accelerator')}")
        for index in range(node.accelerators):
            lines.append(f"    accelerator {index}: {' '.join(_find_ranks_on(plan.placements, rank, index)) or '-'}")
        if (cpu_ranks := _find_ranks_on(plan.placements, rank, None)) or not node.accelerators:
            lines.append(f"    no accelerator: {' '.join(cpu_ranks) or '-'}")
    if is_slurm and not all(node.cpus for node in plan.nodes):
        lines += ["", "--cpus-per-task=?: a node's cores, once Slurm has granted them, shared by the ranks on it"]
    if plan.warnings:
        lines += ["", *(f"warning: {warning}" for warning in plan.warnings)]
    return "\n".join(lines)


def count_noun(count: int, noun: str) -> str:
    """Formats a number with its noun, such as "1 run" or "3 runs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _format_ranges(noun: str, sorted_numbers: Sequence[int]) -> str:
    """Formats numbers as ranges: [0, 1, 2, 5] → `nodes 0-2,5`."""
    return f"{noun}{'' if len(sorted_numbers) == 1 else 's'} {format_steps(sorted_numbers)}"
