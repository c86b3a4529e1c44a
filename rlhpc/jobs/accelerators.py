"""Accelerators per node of a submission whose configuration leaves their number open."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import with_value
from rlhpc.jobs.plan import choose_launcher
from rlhpc.jobs.slurm import gpus_of_partition
from rlhpc.runtime.allocation import gpus_in
from rlhpc.runtime.cluster import Cluster, requests_nodes, without_accelerators
from rlhpc.runtime.errors import ConfigError, PlacementError, SubmitError
from rlhpc.runtime.placement import HybridComponentPlacement

Cfg = TypeVar("Cfg", bound=RunConfig)


@dataclass(frozen=True)
class _OpenSection:
    """Section without a number of accelerators: `cluster` or one of its node groups.

    Attributes:
        key: Key of the section.
        label: Node group; None for the nodes without a group.
        partition: Slurm partition of its nodes; None is the default one.
    """

    key: str
    label: str | None
    partition: str | None

    @property
    def number_key(self) -> str:
        return f"{self.key}.accelerators_per_node"


def with_accelerators(cfg: Cfg, launcher: str = "slurm") -> Cfg:
    """Returns the configuration with the number of accelerators that the job of a submission requests from Slurm.

    Where neither the configuration nor the site file gives a number (`accelerators_per_node` or `gres`), it is the smallest
    with which the placement is possible, at most the number that nodes of the partition have. It is 0 if the placement uses
    no accelerator there. The job itself uses what it was granted, so the run is not saved with this number. With another
    launcher than `slurm`, and in a Slurm job, the number of visible accelerators counts, and the configuration is unchanged.

    Raises:
        ConfigError: Slurm does not report the partition's GPUs, or a placement on `all` accelerators is on nodes with
            different numbers of them; the message names the key to set.
    """
    is_submission = launcher == "slurm" and "SLURM_JOB_ID" not in os.environ
    for section in _open_sections(cfg) if is_submission else ():
        try:
            gpu_counts = gpus_of_partition(section.partition)
        except SubmitError as error:
            raise ConfigError(
                f"{section.number_key} is null, and Slurm does not say how many GPUs the nodes of "
                f"{_partition_words(section)} have ({error}): set {section.number_key} in the configuration or the site file "
                "(0 computes on CPUs)"
            ) from None
        cfg = _find_smallest_that_fits(cfg, section, gpu_counts)
    return cfg


def with_likely_accelerators(cfg: Cfg, launcher: str) -> Cfg:
    """Returns the configuration of a plan: as `with_accelerators`, but a silent Slurm is an error only if Slurm is requested.

    Args:
        cfg: The configuration.
        launcher: See `build_plan`. With `auto`, Slurm's commands may be installed without a cluster; a note then says that a
            submission would be refused.
    """
    try:
        return with_accelerators(cfg, choose_launcher(cfg, launcher))
    except ConfigError as error:
        if launcher != "auto":
            raise
        _warn(f"rlhpc: a submission would be refused: {error}")
        return cfg


@functools.cache
def _warn(warning: str) -> None:
    """Prints a line once, although a sweep has many runs."""
    print(warning, file=sys.stderr)


def _open_sections(cfg: RunConfig) -> list[_OpenSection]:
    """Returns the sections whose nodes have an open number of accelerators, the whole cluster first."""
    cluster, sections = cfg.cluster, []
    if cluster.accelerators_per_node is not None or gpus_in(cluster.gres) is not None:
        return []
    planned_cluster, num_group_nodes = Cluster.planned(cluster), 0
    for index, group in enumerate(cluster.node_groups):
        if not requests_nodes(group):
            continue
        label, partition = str(group.label), group.partition or cluster.partition
        num_group_nodes += len(planned_cluster.node_group(label).node_ranks)  # a node belongs to one group
        is_known = group.accelerators_per_node is not None or gpus_in(group.gres) is not None
        if not is_known and not without_accelerators(group):
            sections.append(_OpenSection(f"cluster.node_groups[{index}]", label, partition))
    if num_group_nodes < planned_cluster.num_nodes:
        sections.insert(0, _OpenSection("cluster", None, cluster.partition))
    return sections


def _find_smallest_that_fits(cfg: Cfg, section: _OpenSection, gpu_counts: Sequence[int]) -> Cfg:
    """Returns the configuration with the smallest number of accelerators that its placement needs in a section.

    Args:
        cfg: The configuration.
        section: The section.
        gpu_counts: Numbers of GPUs that nodes of its partition have, in ascending order.
    """
    max_gpus = gpu_counts[-1]
    names_all = any(
        re.search(r"\ball\b", str(placement_value), re.I)
        for placement_value in cfg.cluster.component_placement.values()
    )
    if names_all and len(gpu_counts) > 1:
        raise ConfigError(
            f"{section.number_key} is null, cluster.component_placement names all accelerators, and nodes of "
            f"{_partition_words(section)} have {' or '.join(map(str, gpu_counts))}: set {section.number_key}"
        )
    for num_gpus in range(max_gpus if names_all else 1, max_gpus + 1):
        candidate = with_value(cfg, section.number_key, num_gpus)
        cluster = Cluster.planned(candidate.cluster)
        try:
            placements = HybridComponentPlacement(candidate, cluster).placements()
        except PlacementError:
            continue
        nodes = cluster.node_group(section.label or "node").node_ranks
        if any(rank.accelerators and rank.node_rank in nodes for ranks in placements.values() for rank in ranks):
            return candidate
        return with_value(cfg, section.number_key, 0)
    return with_value(cfg, section.number_key, max_gpus)


def _partition_words(section: _OpenSection) -> str:
    return "the default partition" if section.partition is None else f"partition {section.partition}"
