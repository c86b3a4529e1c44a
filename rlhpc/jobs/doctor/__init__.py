"""Cluster checks of `rlhpc doctor`: compares a cluster with its site file and with the needs of runs."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rlhpc.jobs.doctor import filesystem_checks, slurm_checks
from rlhpc.jobs.doctor import node_checks as nodes
from rlhpc.jobs.doctor.node_probe import space
from rlhpc.jobs.doctor.probe_jobs import Probed, plan_jobs, probe_this_machine, run_probes, wake_up_s
from rlhpc.jobs.doctor.slurm_facts import Finding, Site, SlurmFacts, render, to_json, worst_level
from rlhpc.runtime.allocation import visible_accelerators
from rlhpc.runtime.cluster_config import SectionSource
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.slurm import ask

__all__ = ["Finding", "examine", "render", "to_json", "worst_level"]

_PACKAGES = ("snakemake", "snakemake-executor-plugin-slurm", "snakemake-executor-plugin-slurm-jobstep", "submitit")
_USUAL_CONF = Path("/etc/slurm/slurm.conf")


def examine(section: SectionSource, folder: Path, *, start_s: float = 60.0, max_nodes: int = 8) -> list[Finding]:
    """Runs all checks and returns their findings.

    Args:
        section: Section `cluster` of a site file; None examines the default partition.
        folder: Folder for runs; if the folder does not exist, the nearest existing parent is examined.
        start_s: Maximum seconds to wait for the probe jobs to start.
        max_nodes: Maximum number of nodes to examine in each partition; 0 submits no probe jobs.
    """
    site = Site.from_config(section)
    folder = nodes.nearest_folder(expand_home(folder).absolute())
    commands = slurm_checks.commands(shutil.which)
    findings = [commands, *_check_machine(folder)]
    if commands.level != "pass":
        results = probe_this_machine(site, folder, len(visible_accelerators(os.environ)))
        return [
            *findings,
            *nodes.gpus_in_torch(results, os.environ),
            *nodes.engines(results),
            *_check_simulation(results, site),
            *nodes.limits(results),
        ]
    slurm_facts = SlurmFacts.gather(getpass.getuser())
    findings += [slurm_checks.version(slurm_facts), slurm_checks.controller(slurm_facts)]
    if findings[-1].level == "fail":
        return findings
    findings += [
        *slurm_checks.partitions(slurm_facts, site), *slurm_checks.accounts(slurm_facts, site),
        *slurm_checks.resources(slurm_facts, site),
        slurm_checks.het_jobs(slurm_facts, _find_refusal(slurm_facts, site)),
    ]  # fmt: skip
    jobs = plan_jobs(site, slurm_facts, max_nodes) if max_nodes else []
    start_s += wake_up_s(jobs, slurm_facts)
    results = run_probes(jobs, site, folder, start_s=start_s) if jobs else Probed(folder, [])
    return [
        *findings,
        slurm_checks.requeue(slurm_facts, results.jobs, os.environ, site),
        slurm_checks.accounting(slurm_facts),
        slurm_checks.min_job_age(slurm_facts),
        *slurm_checks.walltime(slurm_facts, site),
        *slurm_checks.preemption(slurm_facts, site),
        *nodes.job_starts(results.jobs),
        *nodes.srun_options(results, site),
        *nodes.overlapping_steps(results),
        *nodes.meeting_folders(results),
        *nodes.shared_folder(results),
        *nodes.file_locks(results),
        *nodes.interface(results, site, os.environ),
        *nodes.ports(results),
        *nodes.host_names(results),
        *nodes.gpu_masks(results, os.environ),
        *nodes.gpus_in_torch(results, os.environ),
        *nodes.engines(results),
        *nodes.python(results),
        *_check_simulation(results, site),
        *nodes.clocks(results),
        *nodes.limits(results),
    ]


def _check_simulation(results: Probed, site: Site) -> list[Finding]:
    """Checks shared memory, local disks and Vulkan drivers of the nodes."""
    return [*nodes.shared_memory(results), *nodes.node_disks(results, site), *nodes.simulators(results)]


def _check_machine(folder: Path) -> Iterator[Finding]:
    """Runs the checks of this machine: packages, environment, disks and quotas."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    slurm_conf = os.environ.get("SLURM_CONF")
    yield from nodes.packages(
        versions, slurm_conf if slurm_conf and not _is_same_file(slurm_conf, _USUAL_CONF) else None
    )
    yield from nodes.environment(os.environ)
    yield nodes.disk("folder of runs", str(folder), space(str(folder)))
    yield from filesystem_checks.examine(folder)
    yield nodes.disk("home", str(Path.home()), space(str(Path.home())))
    yield from nodes.quotas(ask("quota", "-wp").text)


def _is_same_file(path: str, other_path: Path) -> bool:
    with contextlib.suppress(OSError):
        return other_path.samefile(path)
    return False


def _find_refusal(slurm_facts: SlurmFacts, site: Site) -> str | None:
    """Returns Slurm's reason to refuse a het job; None if Slurm accepts it, or if no partition of the site exists."""
    groups = [group for group in site.groups if slurm_facts.partition(group.partition)]
    if not groups:
        return None
    sbatch_output = ask("sbatch", "--test-only", stdin=slurm_checks.het_script(groups))
    return sbatch_output.last_line if sbatch_output.code else None
