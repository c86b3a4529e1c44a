"""Memory plan: compares the accounts of all groups, summed per accelerator and per node, with the available memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhpc.config.sections import RunConfig
from rlhpc.jobs.plan import JobPlan, build_plan
from rlhpc.runs.memory.account import GIB, MIB, SPARE, Account, GroupRanks, gib
from rlhpc.runs.task_type import task_type_of
from rlhpc.runtime.cluster import Cluster, read_key
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.os_resources import total_memory
from rlhpc.runtime.placement import HybridComponentPlacement
from rlhpc.runtime.plugins import load_attribute

_UNITS = {"": 20, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TIMEOUT_S = 10.0


def parse_bytes(size_text: str) -> float | None:
    """Parses a size in Slurm's form, such as `80G` or `512M`, to bytes. A number without a unit is in MiB.

    Returns None for other forms, and for 0, which stands for all memory.
    """
    match = _SIZE.fullmatch(size_text.strip())
    return float(match[1]) * (1 << _UNITS[match[2].upper()]) or None if match else None


def accelerator_capacity(cfg: RunConfig, cluster: Cluster, node_rank: int) -> tuple[float | None, str]:
    """Returns (bytes of an accelerator of a node, source of the number); (None, "") if unknown.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node_rank: Rank of the node.
    """
    if (configured_bytes := _find_configured_memory(cfg, cluster, node_rank, "accelerator_memory")) is not None:
        return configured_bytes
    detected_bytes = _detect_memory() if len(cluster.nodes) == 1 else None
    return detected_bytes, "nvidia-smi" if detected_bytes else ""


def _find_configured_memory(
    cfg: RunConfig,
    cluster: Cluster,
    node_rank: int,
    key: Literal["accelerator_memory", "mem"],
    *,
    groups_only: bool = False,
) -> tuple[float | None, str] | None:
    """Returns (bytes, key) from a memory key of the node's group or of `cluster`; None if neither section sets the key."""
    for group_section in read_key(cfg.cluster, "node_groups", ()):
        label = str(read_key(group_section, "label"))
        memory_size = read_key(group_section, key)
        if memory_size is not None and node_rank in cluster.node_group(label).node_ranks:
            return parse_bytes(str(memory_size)), f"cluster.node_groups[{label}].{key}"
    memory_size = None if groups_only else read_key(cfg.cluster, key)
    return None if memory_size is None else (parse_bytes(str(memory_size)), f"cluster.{key}")


@functools.cache
def _detect_memory() -> float | None:
    """Returns the bytes of this machine's smallest accelerator, from nvidia-smi; None if there is no answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query_command = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query_command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        return min(float(line) * (1 << 20) for line in output.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_capacity(cfg: RunConfig, cluster: Cluster, node_rank: int, *, is_local: bool) -> tuple[float | None, str]:
    """Returns (bytes of host memory of a node that the run may use, source of the number); (None, "") if unknown.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node_rank: Rank of the node.
        is_local: True if the run starts on this machine rather than in a job.
    """
    if (configured_bytes := _find_configured_memory(cfg, cluster, node_rank, "mem", groups_only=is_local)) is not None:
        return configured_bytes
    return (float(total_memory()), "this machine") if is_local else (None, "")


log = logging.getLogger(__name__)

WARN, OFF = "warn", "off"
#: Default size of /dev/shm, as a share of the node's memory.
_SHM_SHARE = 0.5


class Accounting(Protocol):
    """Function of a task type that returns the memory accounts of its groups (`Planning.account`)."""

    def __call__(self, cfg: Any, ranks: Mapping[str, GroupRanks], *, build: bool, measure: bool) -> Sequence[Account]:
        """Returns the memory account of a rank of each group.

        Args:
            cfg: The configuration.
            ranks: Ranks of each group.
            build: True to allow building models without weights for inspection, which imports torch.
            measure: True to allow also slower measurements, such as the creation of an environment.
        """


@dataclass(frozen=True)
class MemoryPool:
    """Memory of an accelerator or a node, with the bytes of each group.

    Attributes:
        name: `node0, accelerators 0-7` or `node0, host memory`.
        bytes_by_group: Group → bytes of all ranks of the group in the pool.
        capacity: Available bytes; None if unknown.
        source: Source of `capacity`.
        usable: Share of `capacity` that may be used.
        colocated: Colocated groups. Only one of them is in the pool at a time.
        certain_nbytes: Bytes that the groups use with any size of micro-batches; None to count all bytes, as for an
            accelerator, which cannot swap.
    """

    name: str
    bytes_by_group: Mapping[str, float]
    capacity: float | None
    source: str
    usable: float = 1.0
    colocated: frozenset[str] = frozenset()
    certain_nbytes: float | None = None

    @property
    def nbytes(self) -> float:
        """Maximum memory use in bytes."""
        resident_bytes = math.fsum(n for group, n in self.bytes_by_group.items() if group not in self.colocated)
        return resident_bytes + max(
            (n for group, n in self.bytes_by_group.items() if group in self.colocated), default=0.0
        )

    @property
    def fits(self) -> bool | None:
        """True if the groups fit into the pool; None if `capacity` is unknown."""
        return None if self.capacity is None else self.nbytes <= self.usable * self.capacity

    @property
    def is_refused(self) -> bool:
        """True if the groups certainly do not fit into the pool."""
        required_bytes = self.nbytes if self.certain_nbytes is None else self.certain_nbytes
        return self.capacity is not None and required_bytes > self.usable * self.capacity

    def max_bytes_for(self, group: str) -> float | None:
        """Returns the bytes that the other groups leave free for a group; None if `capacity` is unknown."""
        if self.capacity is None:
            return None
        return self.usable * self.capacity - math.fsum(
            n for name, n in self.bytes_by_group.items() if name != group and not ({name, group} <= self.colocated)
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a run.

    Attributes:
        accounts: Memory accounts of the groups.
        pools: Memory pools; neighbouring equal pools are merged into one.
        available: Group → bytes that one rank of the group may use; None if unknown.
        accelerated: Group → True if the ranks of the group compute on accelerators.
    """

    accounts: Sequence[Account]
    pools: Sequence[MemoryPool]
    available: Mapping[str, float | None]
    accelerated: Mapping[str, bool]

    def refusals(self) -> list[str]:
        """Returns the reasons why the run cannot fit, one for each group or pool."""
        reasons = [
            f"{account.group}: {refusal}" + _describe_changes(account, self.available.get(account.group))
            for account in self.accounts
            for refusal in account.refusals
        ]
        refused_groups = {account.group for account in self.accounts if account.refusals}
        return reasons + [
            _describe_overflow(self, pool)
            for pool in self.pools
            if pool.is_refused and refused_groups != set(pool.bytes_by_group)
        ]

    def warnings(self) -> list[str]:
        """Returns a message for each memory pool that may overflow, and is not refused: host memory, in large updates."""
        return [_describe_overflow(self, pool) for pool in self.pools if pool.fits is False and not pool.is_refused]


def compute_memory_plan(cfg: RunConfig, plan: JobPlan, *, build: bool = True, measure: bool = False) -> MemoryPlan:
    """Computes the memory of each group's ranks, and the totals of each memory pool.

    Args:
        cfg: The configuration.
        plan: Placement of all ranks.
        build: True to allow building models of unknown families for inspection.
        measure: True to also allow slower measurements.
    """
    cluster = Cluster.planned(cfg.cluster)
    ranks_by_group: dict[str, GroupRanks] = {}
    for group, ranks in plan.placements.items():
        has_accelerators = bool(ranks[0].accelerators)
        nodes = [rank.node_rank for rank in ranks]
        available_bytes = accelerator_capacity(cfg, cluster, nodes[0])[0] if has_accelerators else None
        ranks_by_group[group] = GroupRanks(len(ranks), has_accelerators, available_bytes, max(map(nodes.count, nodes)))
    accounts = _compute_accounts(_apply_placement(cfg, cluster), ranks_by_group, build, measure)
    pools = [*_list_accelerator_pools(cfg, cluster, plan, accounts), *_list_host_pools(cfg, cluster, plan, accounts)]
    available_by_pool = {
        account.group: _free_bytes(account.group, ranks_by_group[account.group], pools) for account in accounts
    }
    return MemoryPlan(
        accounts,
        _merge_equal(pools),
        available_by_pool,
        {name: ranks.accelerated for name, ranks in ranks_by_group.items()},
    )


def _apply_placement(cfg: RunConfig, cluster: Cluster) -> RunConfig:
    """Returns the configuration with the values that the placement determines, such as the number of ranks of an engine."""
    placement = HybridComponentPlacement(cfg, cluster)
    replicas = {name: placement.get_strategy(name).replica for name in placement.components}
    placed_cfg: RunConfig = task_type_of(cfg).groups.placed(cfg, replicas)
    return placed_cfg


def _compute_accounts(
    cfg: RunConfig, ranks: Mapping[str, GroupRanks], builds_model: bool, measures_peak: bool
) -> Sequence[Account]:
    task_type = task_type_of(cfg)
    if not task_type.planning.account:
        return ()
    account: Accounting = load_attribute(task_type.planning.account, f"the account of the kind {task_type.name}")
    return account(cfg, ranks, build=builds_model, measure=measures_peak)


def memory_at_start(cfg: RunConfig, launcher: str) -> MemoryPlan | None:
    """Returns the memory plan for the check at a start of the run; None if `cluster.memory_check` is off, or if only a job can
    determine the placement.

    Args:
        cfg: The configuration.
        launcher: `slurm` or `local`.
    """
    if cfg.cluster.memory_check == OFF:
        return None
    try:
        plan = build_plan(cfg, launcher=launcher)
    except PlacementError:  # the configuration leaves the accelerators open, so that only a job knows them
        return None
    # Does not build models of unknown families, which takes too long for a submission; `rlhpc plan` does.
    return compute_memory_plan(cfg, plan, build=False)


def refuse_overfull(cfg: RunConfig, source_name: str, launcher: str) -> None:
    """Checks that the ranks of a run fit into memory, before the run is started or submitted.

    Args:
        cfg: The configuration; `cluster.memory_check` selects an error, a warning, or no check.
        source_name: Name of the configuration.
        launcher: `slurm` or `local`.

    Raises:
        ConfigError: The run does not fit; the message names the largest term and the nearest sizes that fit.
    """
    memory = memory_at_start(cfg, launcher)
    if memory is None:
        return
    for warning in memory.warnings():
        log.warning("%s: memory may not suffice:\n  %s", source_name, warning)
    memory_refusals = memory.refusals()
    if not memory_refusals:
        return
    reasons_text = "\n  ".join(memory_refusals)
    if cfg.cluster.memory_check == WARN:
        log.warning("%s: memory does not suffice:\n  %s", source_name, reasons_text)
        return
    raise ConfigError(
        f"{source_name}: memory does not suffice, so nothing is started:\n  {reasons_text}\n  all terms: rlhpc plan "
        f"{source_name}; to start "
        "it all the same: cluster.memory_check=warn"
    )


# -- memory pools -----------------------------------------------------------------------------------------------------


def _list_accelerator_pools(
    cfg: RunConfig, cluster: Cluster, plan: JobPlan, accounts: Sequence[Account]
) -> list[MemoryPool]:
    bytes_by_device: dict[tuple[int, int], dict[str, float]] = {}
    for account in accounts:
        for rank in plan.placements[account.group] if account.peak is not None else ():
            for index in rank.accelerators:
                group_bytes = bytes_by_device.setdefault((rank.node_rank, index), {})
                previous_bytes = group_bytes.get(account.group, 0.0)
                group_bytes[account.group] = previous_bytes + account.peak_bytes / len(rank.accelerators)
    colocated_groups = frozenset(account.group for account in accounts if account.colocated)
    return [
        MemoryPool(
            f"node{node}, accelerator {index}",
            group_bytes,
            *accelerator_capacity(cfg, cluster, node),
            1.0 - SPARE,
            colocated_groups & set(group_bytes),
        )
        for (node, index), group_bytes in sorted(bytes_by_device.items())
    ]


def _list_host_pools(cfg: RunConfig, cluster: Cluster, plan: JobPlan, accounts: Sequence[Account]) -> list[MemoryPool]:
    pools: list[MemoryPool] = []
    shm_pools: list[MemoryPool] = []
    for node in range(len(plan.nodes)):
        group_bytes: dict[str, float] = {}
        shm_bytes: dict[str, float] = {}
        certain_bytes: list[float] = []
        for account in accounts:
            local_ranks = [rank for rank in plan.placements[account.group] if rank.node_rank == node]
            if local_ranks and account.peak is not None:
                group_bytes[account.group] = math.fsum(
                    account.extra_host_bytes + (0.0 if rank.accelerators else account.peak_bytes)
                    for rank in local_ranks
                )
                shm_bytes[account.group] = account.shm_bytes
                certain_bytes += [
                    account.extra_host_bytes + (0.0 if rank.accelerators else account.min_nbytes)
                    for rank in local_ranks
                ]
        if not group_bytes:
            continue
        available_bytes, capacity_source = host_capacity(cfg, cluster, node, is_local=plan.launcher == "local")
        shm_pool_bytes = max(shm_bytes.values())  # the maximum, because writers and readers share the same segments
        host_terms = {name: n for name, n in {**group_bytes, "/dev/shm": shm_pool_bytes}.items() if n}
        if host_terms:
            pools.append(
                MemoryPool(
                    f"node{node}, host memory",
                    host_terms,
                    available_bytes,
                    capacity_source,
                    certain_nbytes=math.fsum(certain_bytes) + shm_pool_bytes,
                )
            )
        if shm_pool_bytes:
            shm_pools.append(
                MemoryPool(
                    f"node{node}, /dev/shm",
                    {max(shm_bytes, key=shm_bytes.__getitem__): shm_pool_bytes},
                    None if available_bytes is None else _SHM_SHARE * available_bytes,
                    f"half of {capacity_source}" if capacity_source else "",
                )
            )
    return pools + shm_pools


def _free_bytes(group: str, ranks: GroupRanks, pools: Sequence[MemoryPool]) -> float | None:
    """Returns the bytes that one rank of a group may use on its device, in the fullest pool; None if unknown."""
    resource_name = "accelerator" if ranks.accelerated else "host memory"
    free_bytes = [
        pool.max_bytes_for(group) for pool in pools if resource_name in pool.name and group in pool.bytes_by_group
    ]
    available_bytes = min((node_bytes for node_bytes in free_bytes if node_bytes is not None), default=None)
    return None if available_bytes is None else available_bytes / (1 if ranks.accelerated else ranks.per_node)


def _merge_equal(pools: Sequence[MemoryPool]) -> list[MemoryPool]:
    """Merges neighbouring pools with equal contents into one pool with a common name."""

    def without_numbers(pool: MemoryPool) -> MemoryPool:
        return dataclasses.replace(pool, name=pool.name.split(" ", 1)[1].rstrip("0123456789 "))

    merged_pools: list[MemoryPool] = []
    for _, equal_pools in itertools.groupby(pools, without_numbers):
        first_pool, *other_pools = equal_pools
        name = f"{first_pool.name} to {other_pools[-1].name}" if other_pools else first_pool.name
        merged_pools.append(dataclasses.replace(first_pool, name=name))
    return merged_pools


# -- text -------------------------------------------------------------------------------------------------------------


def _describe_overflow(plan: MemoryPlan, pool: MemoryPool) -> str:
    """Formats the use of an overfull pool, the groups in the pool, and changes after which the groups would fit."""
    assert pool.capacity is not None
    reserve_text = f", of which {1 - pool.usable:.0%} is left free" if pool.usable < 1 else ""
    message = (
        f"{pool.name}: {gib(pool.nbytes)} would be there, and it has {gib(pool.capacity)} ({pool.source}{reserve_text})"
    )
    accounts = {account.group: account for account in plan.accounts}
    for group in sorted(pool.bytes_by_group, key=lambda name: -pool.bytes_by_group[name]):
        account = accounts.get(group)
        if account is None or account.peak is None or "/dev/shm" in pool.name:
            continue
        moment, term = account.peak, account.peak.largest
        message += f"\n    {group}: most at the {moment.name}, {gib(moment.nbytes)} a rank; "
        message += f"largest term: {term.name}, {gib(term.nbytes)}" + _describe_changes(
            account, plan.available.get(group)
        )
    return message


def _describe_changes(account: Account, capacity: float | None) -> str:
    key_changes = account.changes(capacity) if capacity is not None and capacity > 0 else ()
    return "".join(f"\n      fits: {' '.join(c.overrides)} ({gib(c.nbytes)} a rank)" for c in key_changes)


_LABEL_WIDTH = 38


def render_memory(plan: MemoryPlan, *, is_measured: bool = False) -> str:
    """Formats the accounts of all groups, and their memory pools.

    Args:
        plan: The memory plan.
        is_measured: True to let PyTorch also trace a step of the trained groups.
    """
    if not plan.accounts:
        return ""
    lines = ["memory"]
    for account in plan.accounts:
        lines += _format_account(
            account, on_accelerator=plan.accelerated[account.group], capacity=plan.available[account.group]
        )
        if is_measured and account.measured is not None:
            lines.append(f"    {account.measured()}")
    lines += ["", *(f"  {_format_pool(pool)}" for pool in plan.pools)]
    if memory_refusals := plan.refusals():
        lines += ["", "does not fit; rlhpc submit, run and train refuse it (cluster.memory_check):"]
        lines += [f"  {refusal}" for refusal in memory_refusals]
    for warning in plan.warnings():
        lines += ["", "may not fit:", f"  {warning}"]
    if any(pool.capacity is None and "accelerator" in pool.name for pool in plan.pools):
        lines += [
            "",
            "  nobody says how much memory an accelerator has: set cluster.accelerator_memory, such as 80G, best in the site "
            "file",
        ]
    return "\n".join(lines)


def _format_account(account: Account, *, on_accelerator: bool, capacity: float | None) -> list[str]:
    if account.unknown:
        return ["", f"  {account.group}: not known: {account.unknown}"]
    lines = ["", f"  {account.group}: {account.description}" if account.description else f"  {account.group}"]
    unit_bytes, unit_name = (GIB, "GiB") if account.peak_bytes >= GIB else (MIB, "MiB")

    def format_line(label: str, cells: Iterable[str]) -> str:
        widths = (max(7, len(moment.name)) for moment in account.moments)
        padded_cells = (f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"    {label:<{_LABEL_WIDTH}}" + "".join(padded_cells)

    owner_text = "on its accelerator" if on_accelerator else "of its node"
    lines.append(format_line(f"a rank holds {owner_text}, {unit_name}", (moment.name for moment in account.moments)))
    for name in dict.fromkeys(term.name for moment in account.moments for term in moment.terms):
        term_sizes = ([term.nbytes for term in moment.terms if term.name == name] for moment in account.moments)
        lines.append(
            format_line(
                f"  {name}",
                (_format_number(sum(term_bytes) / unit_bytes) if term_bytes else "" for term_bytes in term_sizes),
            )
        )
    lines.append(format_line("together", (_format_number(moment.nbytes / unit_bytes) for moment in account.moments)))
    if (peak := account.peak) is not None:
        lines.append(
            f"    most: {peak.name}, {gib(peak.nbytes)}; largest term: {peak.largest.name}, {gib(peak.largest.nbytes)}"
        )
    for label, terms in (
        ("host memory of a rank", account.host),
        ("pinned host memory of a rank", account.pinned),
        ("host memory of a rank, if there is room", account.optional),
        ("/dev/shm of a node", account.shm),
    ):
        if terms:
            lines.append(f"    {label}: " + ", ".join(f"{term.name} {gib(term.nbytes)}" for term in terms))
    lines += [f"    {remark}" for remark in account.remarks]
    if capacity is not None and capacity > 0:
        lines += [
            f"    fits up to: {key}={fitting_value}" for key, fitting_value in account.max_fitting(capacity).items()
        ]
    return lines


def _format_number(unit_size: float) -> str:
    return f"{unit_size:.2f}" if unit_size < 10 else f"{unit_size:.1f}"


def _format_pool(pool: MemoryPool) -> str:
    resident_texts = [f"{name} {gib(n)}" for name, n in pool.bytes_by_group.items() if name not in pool.colocated]
    colocated_texts = [f"{name} {gib(n)}" for name, n in pool.bytes_by_group.items() if name in pool.colocated]
    sum_text = " + ".join(
        [
            *resident_texts,
            *([f"{' or '.join(colocated_texts)} (in turns)"] if len(colocated_texts) > 1 else colocated_texts),
        ]
    )
    if pool.capacity is None:
        return f"{pool.name}: {sum_text} = {gib(pool.nbytes)}"
    verdict_text = "fits" if pool.fits else "does not fit" if pool.is_refused else "may not fit"
    return f"{pool.name}: {sum_text} = {gib(pool.nbytes)} of {gib(pool.capacity)} ({pool.source}): {verdict_text}"
