"""Memory plan: the accounts of all groups, summed by accelerator and by node, compared with the available memory."""

from __future__ import annotations

import functools
import logging
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import mapping
from rlhpc.jobs.plan import JobPlan, build_plan
from rlhpc.runs.memory.account import GIB, MIB, SPARE, Account, GroupRanks, MemoryTerm, gib
from rlhpc.runs.task_type import task_type_of
from rlhpc.runtime.cluster import Cluster, read_key
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.os_resources import total_memory
from rlhpc.runtime.placement import HybridComponentPlacement, Placement
from rlhpc.runtime.plugins import load_attribute

_UNITS = {"": 20, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_ASK_S = 10.0


def parse_bytes(text: str) -> float | None:
    """Parses a size in Slurm's form into bytes: `80G`, `512M`; a bare number is in MiB. Returns None for another form, or for
    0 (all memory).
    """
    match = _SIZE.fullmatch(text.strip())
    return float(match[1]) * (1 << _UNITS[match[2].upper()]) or None if match else None


def accelerator_room(cfg: RunConfig, cluster: Cluster, node: int) -> tuple[float | None, str]:
    """Returns the bytes of an accelerator of a node, and the source of the number.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node: Rank of the node.
    """
    for group_section in read_key(cfg.cluster, "node_groups", ()):
        label = str(read_key(group_section, "label"))
        group_memory = read_key(group_section, "accelerator_memory")
        if group_memory is not None and node in cluster.node_group(label).node_ranks:
            return parse_bytes(str(group_memory)), f"cluster.node_groups[{label}].accelerator_memory"
    if (memory_size := read_key(cfg.cluster, "accelerator_memory")) is not None:
        return parse_bytes(str(memory_size)), "cluster.accelerator_memory"
    detected_bytes = _detect_memory() if len(cluster.nodes) == 1 else None
    return detected_bytes, "nvidia-smi" if detected_bytes else ""


@functools.cache
def _detect_memory() -> float | None:
    """Returns the bytes of this machine's smallest accelerator, from its driver; None without an accelerator."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout
        return min(float(line) * (1 << 20) for line in output.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_room(cfg: RunConfig, cluster: Cluster, node: int, *, here: bool) -> tuple[float | None, str]:
    """Returns the bytes of a node that the run may use, and the source of the number.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node: Rank of the node.
        here: True if the run starts on this machine rather than in a job.
    """
    for group_section in read_key(cfg.cluster, "node_groups", ()):
        label = str(read_key(group_section, "label"))
        if read_key(group_section, "mem") is not None and node in cluster.node_group(label).node_ranks:
            return parse_bytes(str(mapping(group_section)["mem"])), f"cluster.node_groups[{label}].mem"
    if cfg.cluster.mem is not None and not here:
        return parse_bytes(cfg.cluster.mem), "cluster.mem"
    if here:
        return float(total_memory()), "this machine"
    return None, ""


log = logging.getLogger(__name__)

REFUSE, WARN, OFF = "refuse", "warn", "off"
#: Default share of a node's memory that /dev/shm has.
_SHM = 0.5


class Accounting(Protocol):
    """Function of a task type that returns the memory accounts of its groups (`Planning.account`)."""

    def __call__(self, cfg: Any, ranks: Mapping[str, GroupRanks], *, build: bool, measure: bool) -> Sequence[Account]:
        """Returns the memory account of a rank of each group.

        Args:
            cfg: The configuration.
            ranks: Ranks of each group.
            build: Allow building models without their weights for inspection; that imports torch.
            measure: Also allow slower measurements, such as the creation of an environment.
        """


@dataclass(frozen=True)
class MemoryPool:
    """Memory of an accelerator or a node, with the bytes of each group.

    Attributes:
        name: `node0, accelerators 0-7` or `node0, host memory`.
        held: Group → bytes of all its ranks in the pool.
        room: Available bytes; None if unknown.
        source: Source of that number.
        usable: Share of `room` that may be used.
        turns: Colocated groups, of which only one is in the pool at a time.
        certain_nbytes: Bytes that are used for any size of micro-batches; on an accelerator, which cannot swap, all bytes.
    """

    name: str
    held: Mapping[str, float]
    room: float | None
    source: str
    usable: float
    turns: frozenset[str]
    certain_nbytes: float | None = None

    @property
    def nbytes(self) -> float:
        """Maximum use in bytes."""
        resident_bytes = math.fsum(n for group, n in self.held.items() if group not in self.turns)
        return resident_bytes + max((n for group, n in self.held.items() if group in self.turns), default=0.0)

    @property
    def fits(self) -> bool | None:
        """True if the groups fit; None if `room` is unknown."""
        return None if self.room is None else self.nbytes <= self.usable * self.room

    @property
    def refused(self) -> bool:
        """True if the groups certainly do not fit."""
        nbytes = self.nbytes if self.certain_nbytes is None else self.certain_nbytes
        return self.room is not None and nbytes > self.usable * self.room

    def left_for(self, group: str) -> float | None:
        """Returns the bytes that the other groups leave to a group."""
        if self.room is None:
            return None
        other_groups = {name: n for name, n in self.held.items() if name != group and not ({name, group} <= self.turns)}
        return self.usable * self.room - math.fsum(other_groups.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a run.

    Attributes:
        accounts: Memory accounts of the groups.
        places: Memory pools; neighbouring equal pools are merged into one.
        available: Group → bytes that one of its ranks may use; None if unknown.
        accelerated: Group → True if its ranks compute on accelerators.
    """

    accounts: Sequence[Account]
    places: Sequence[MemoryPool]
    available: Mapping[str, float | None]
    accelerated: Mapping[str, bool]

    def refusals(self) -> list[str]:
        """Returns the reasons why the run cannot fit, one for each group or pool."""
        reasons = [
            f"{account.group}: {refusal}" + _fitting(account, self.available.get(account.group))
            for account in self.accounts
            for refusal in account.refusals
        ]
        refused_groups = {account.group for account in self.accounts if account.refusals}
        return reasons + [
            _overfull(self, pool) for pool in self.places if pool.refused and refused_groups != set(pool.held)
        ]

    def doubts(self) -> list[str]:
        """Returns the pools that may overflow: host memory of ranks, if micro-batches are not smaller than their limit."""
        return [_overfull(self, pool) for pool in self.places if pool.fits is False and not pool.refused]


def memory_plan(cfg: RunConfig, plan: JobPlan, *, build: bool = True, measure: bool = False) -> MemoryPlan:
    """Computes the memory of each group's ranks, and the totals of each memory pool.

    Args:
        cfg: The configuration.
        plan: Placement of all ranks.
        build: Allow building models for inspection if their family is not known by its configuration.
        measure: Also allow slower measurements.
    """
    cluster = Cluster.planned(cfg.cluster)
    ranks_by_group: dict[str, GroupRanks] = {}
    for group, ranks in plan.placements.items():
        accelerated = bool(ranks[0].accelerators)
        available_bytes, _ = accelerator_room(cfg, cluster, ranks[0].node_rank) if accelerated else (None, "")
        nodes = [rank.node_rank for rank in ranks]
        ranks_by_group[group] = GroupRanks(len(ranks), accelerated, available_bytes, max(map(nodes.count, nodes)))
    accounts = _accounts(_apply_placement(cfg, cluster), ranks_by_group, build, measure)
    pools = [*_accelerators(cfg, cluster, plan, accounts), *_hosts(cfg, cluster, plan, accounts)]
    available = {
        account.group: _available_bytes(account.group, ranks_by_group[account.group], pools) for account in accounts
    }
    return MemoryPlan(
        accounts, _merge_equal(pools), available, {name: ranks.accelerated for name, ranks in ranks_by_group.items()}
    )


def _apply_placement(cfg: RunConfig, cluster: Cluster) -> RunConfig:
    """Returns the configuration with the values that follow from the placement: the number of ranks of an engine."""
    placement = HybridComponentPlacement(cfg, cluster)
    replicas = {name: placement.get_strategy(name).replica for name in placement.components}
    placed_cfg: RunConfig = task_type_of(cfg).groups.placed(cfg, replicas)
    return placed_cfg


def _accounts(cfg: RunConfig, ranks: Mapping[str, GroupRanks], build: bool, measure: bool) -> Sequence[Account]:
    task_type = task_type_of(cfg)
    if not task_type.planning.account:
        return ()
    account: Accounting = load_attribute(task_type.planning.account, f"the account of the kind {task_type.name}")
    return account(cfg, ranks, build=build, measure=measure)


def memory_at_start(cfg: RunConfig, launcher: str) -> MemoryPlan | None:
    """Returns the memory plan that a start of the run checks; None if it checks none.

    Args:
        cfg: The configuration.
        launcher: `slurm` or `local`.
    """
    if cfg.cluster.memory_check == OFF:
        return None
    try:
        plan = build_plan(cfg, launcher=launcher)
    except PlacementError:  # only a job knows its accelerators where the configuration leaves them open
        return None
    # Only `rlhpc plan` builds models of unknown families: that takes too long for a submission.
    return memory_plan(cfg, plan, build=False)


def refuse_overfull(cfg: RunConfig, source: str, launcher: str) -> None:
    """Raises an error for a run whose ranks cannot fit, before anything is started or submitted.

    Args:
        cfg: The configuration; `cluster.memory_check` selects an error, a warning, or no check.
        source: Name of the configuration.
        launcher: `slurm` or `local`.

    Raises:
        ConfigError: The run does not fit; names the largest term, and the nearest sizes that fit.
    """
    memory = memory_at_start(cfg, launcher)
    if memory is None:
        return
    for doubt in memory.doubts():
        log.warning("%s: memory may not suffice:\n  %s", source, doubt)
    refusals = memory.refusals()
    if not refusals:
        return
    reasons = "\n  ".join(refusals)
    if cfg.cluster.memory_check == WARN:
        log.warning("%s: memory does not suffice:\n  %s", source, reasons)
        return
    raise ConfigError(
        f"{source}: memory does not suffice, so nothing is started:\n  {reasons}\n  all terms: rlhpc plan {source}; to start "
        "it all the same: cluster.memory_check=warn"
    )


# -- places -----------------------------------------------------------------------------------------------------------


def _accelerators(cfg: RunConfig, cluster: Cluster, plan: JobPlan, accounts: Sequence[Account]) -> list[MemoryPool]:
    accounts_by_group = {account.group: account for account in accounts if account.peak is not None}
    held_by_device: dict[tuple[int, int], dict[str, float]] = {}
    for group, account in accounts_by_group.items():
        for rank in plan.placements[group]:
            for index in rank.accelerators:
                group_bytes = held_by_device.setdefault((rank.node_rank, index), {})
                group_bytes[group] = group_bytes.get(group, 0.0) + _peak(account) / len(rank.accelerators)
    turns = frozenset(group for group, account in accounts_by_group.items() if account.turns)
    pools = []
    for (node, index), group_bytes in sorted(held_by_device.items()):
        available_bytes, source = accelerator_room(cfg, cluster, node)
        pools.append(
            MemoryPool(
                f"node{node}, accelerator {index}",
                group_bytes,
                available_bytes,
                source,
                1.0 - SPARE,
                turns & set(group_bytes),
            )
        )
    return pools


def _hosts(cfg: RunConfig, cluster: Cluster, plan: JobPlan, accounts: Sequence[Account]) -> list[MemoryPool]:
    pools: list[MemoryPool] = []
    shm_pools: list[MemoryPool] = []
    for node in range(len(plan.nodes)):
        group_bytes: dict[str, float] = {}
        shared: dict[str, float] = {}
        sums: list[float] = []
        for account in accounts:
            local_ranks = [rank for rank in plan.placements[account.group] if rank.node_rank == node]
            if local_ranks and account.peak is not None:
                group_bytes[account.group] = math.fsum(_of_host(account, rank) for rank in local_ranks)
                shared[account.group] = account.in_shared
                sums += [account.on_host + (0.0 if rank.accelerators else account.min_nbytes) for rank in local_ranks]
        if not group_bytes:
            continue
        available_bytes, source = host_room(cfg, cluster, node, here=plan.launcher == "local")
        in_memory = max(shared.values())  # those who write and those who read share it
        host_terms = {name: n for name, n in {**group_bytes, "/dev/shm": in_memory}.items() if n}
        if host_terms:
            measured_bytes = math.fsum(sums) + in_memory
            pools.append(
                MemoryPool(
                    f"node{node}, host memory", host_terms, available_bytes, source, 1.0, frozenset(), measured_bytes
                )
            )
        if in_memory:
            shm_bytes = None if available_bytes is None else _SHM * available_bytes
            largest_share = dict([max(shared.items(), key=lambda one: one[1])])
            shm_pools.append(
                MemoryPool(
                    f"node{node}, /dev/shm",
                    largest_share,
                    shm_bytes,
                    f"half of {source}" if source else "",
                    1.0,
                    frozenset(),
                )
            )
    return pools + shm_pools


def _of_host(account: Account, rank: Placement) -> float:
    return account.on_host + (0.0 if rank.accelerators else _peak(account))


def _peak(account: Account) -> float:
    return 0.0 if account.peak is None else account.peak.nbytes


def _available_bytes(group: str, ranks: GroupRanks, places: Sequence[MemoryPool]) -> float | None:
    """Returns the bytes that one of a group's ranks may use where it computes, in the fullest pool."""
    resource_name = "accelerator" if ranks.accelerated else "host memory"
    free_bytes = [pool.left_for(group) for pool in places if resource_name in pool.name and group in pool.held]
    available = [nbytes for nbytes in free_bytes if nbytes is not None]
    if not available:
        return None
    return min(available) / (1 if ranks.accelerated else ranks.per_node)


def _merge_equal(places: Sequence[MemoryPool]) -> list[MemoryPool]:
    """Merges neighbouring pools with equal contents under one name."""
    groups: list[list[MemoryPool]] = []
    for pool in places:
        is_equal = groups and _contents(groups[-1][0]) == _contents(pool)
        if is_equal:
            groups[-1].append(pool)
        else:
            groups.append([pool])
    return [
        group[0]
        if len(group) == 1
        else MemoryPool(f"{group[0].name} to {group[-1].name}", *_fields_after_name(group[0]))
        for group in groups
    ]


def _contents(place: MemoryPool) -> tuple[object, ...]:
    return place.name.split(" ", 1)[1].rstrip("0123456789 "), *_fields_after_name(place)  # without the node's number


def _fields_after_name(
    place: MemoryPool,
) -> tuple[Mapping[str, float], float | None, str, float, frozenset[str], float | None]:
    return place.held, place.room, place.source, place.usable, place.turns, place.certain_nbytes


# -- words ------------------------------------------------------------------------------------------------------------


def _overfull(plan: MemoryPlan, place: MemoryPool) -> str:
    """Formats the excess of a pool, the groups in it, and changes that would fit."""
    assert place.room is not None
    reserve = f", of which {1 - place.usable:.0%} is left free" if place.usable < 1 else ""
    message = (
        f"{place.name}: {gib(place.nbytes)} would be there, and it has {gib(place.room)} ({place.source}{reserve})"
    )
    accounts = {account.group: account for account in plan.accounts}
    for group in sorted(place.held, key=lambda name: -place.held[name]):
        account = accounts.get(group)
        if account is None or account.peak is None or "/dev/shm" in place.name:
            continue
        moment, term = account.peak, account.peak.largest
        message += f"\n    {group}: most at the {moment.name}, {gib(moment.nbytes)} a rank; "
        message += f"largest term: {term.name}, {gib(term.nbytes)}"
        available_bytes = plan.available.get(group)
        message += _fitting(account, available_bytes)
    return message


def _fitting(account: Account, room: float | None) -> str:
    changes = account.changes(room) if room is not None and room > 0 else ()
    return "".join(f"\n      fits: {' '.join(c.overrides)} ({gib(c.nbytes)} a rank)" for c in changes)


_NAME = 38


def render_memory(plan: MemoryPlan, *, measure: bool = False) -> str:
    """Formats the accounts of all groups, and their memory pools.

    Args:
        plan: The memory plan.
        measure: Also let PyTorch trace a step of the trained groups.
    """
    if not plan.accounts:
        return ""
    lines = ["memory"]
    for account in plan.accounts:
        lines += _of_group(account, accelerated=plan.accelerated[account.group], room=plan.available[account.group])
        if measure and account.measured is not None:
            lines.append(f"    {account.measured()}")
    lines += ["", *(f"  {_of_place(pool)}" for pool in plan.places)]
    refusals = plan.refusals()
    if refusals:
        lines += ["", "does not fit; rlhpc submit, run and train refuse it (cluster.memory_check):"]
        lines += [f"  {refusal}" for refusal in refusals]
    for doubt in plan.doubts():
        lines += ["", "may not fit:", f"  {doubt}"]
    if any(pool.room is None and "accelerator" in pool.name for pool in plan.places):
        lines += [
            "",
            "  nobody says how much memory an accelerator has: set cluster.accelerator_memory, such as 80G, best in the site "
            "file",
        ]
    return "\n".join(lines)


def _of_group(account: Account, *, accelerated: bool, room: float | None) -> list[str]:
    if account.unknown:
        return ["", f"  {account.group}: not known: {account.unknown}"]
    lines = ["", f"  {account.group}: {account.about}" if account.about else f"  {account.group}"]
    memory_label = "on its accelerator" if accelerated else "of its node"
    unit = GIB if max((moment.nbytes for moment in account.moments), default=0.0) >= GIB else MIB
    memory_label += ", GiB" if unit == GIB else ", MiB"
    lines.append(
        f"    {'a rank holds ' + memory_label:<{_NAME}}"
        + "".join(f"  {m.name:>{_wide(m.name)}}" for m in account.moments)
    )
    for name in dict.fromkeys(term.name for moment in account.moments for term in moment.terms):
        cells = []
        for moment in account.moments:
            sizes = [term.nbytes for term in moment.terms if term.name == name]
            cells.append(f"  {_number(sum(sizes) / unit) if sizes else '':>{_wide(moment.name)}}")
        lines.append(f"      {name:<{_NAME - 2}}" + "".join(cells))
    lines.append(
        f"    {'together':<{_NAME}}"
        + "".join(f"  {_number(m.nbytes / unit):>{_wide(m.name)}}" for m in account.moments)
    )
    if (peak := account.peak) is not None:
        lines.append(
            f"    most: {peak.name}, {gib(peak.nbytes)}; largest term: {peak.largest.name}, {gib(peak.largest.nbytes)}"
        )
    for label, terms in (
        ("host memory of a rank", account.host),
        ("pinned host memory of a rank", account.pinned),
        ("host memory of a rank, if there is room", account.spare),
        ("/dev/shm of a node", account.shared),
    ):
        if terms:
            lines.append(f"    {label}: {_listed(terms)}")
    lines += [f"    {remark}" for remark in account.remarks]
    if room is not None and room > 0:
        lines += [f"    fits up to: {key}={value}" for key, value in account.max_fitting(room).items()]
    return lines


def _wide(name: str) -> int:
    return max(7, len(name))


def _number(size: float) -> str:
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _listed(terms: Sequence[MemoryTerm]) -> str:
    return ", ".join(f"{term.name} {gib(term.nbytes)}" for term in terms)


def _of_place(place: MemoryPool) -> str:
    resident_texts = [f"{name} {gib(n)}" for name, n in place.held.items() if name not in place.turns]
    turns = [f"{name} {gib(n)}" for name, n in place.held.items() if name in place.turns]
    sum_text = " + ".join([*resident_texts, *([f"{' or '.join(turns)} (in turns)"] if len(turns) > 1 else turns)])
    if place.room is None:
        return f"{place.name}: {sum_text} = {gib(place.nbytes)}"
    verdict = "fits" if place.fits else "does not fit" if place.refused else "may not fit"
    return f"{place.name}: {sum_text} = {gib(place.nbytes)} of {gib(place.room)} ({place.source}): {verdict}"
