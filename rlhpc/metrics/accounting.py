"""Accounting of a run: hours, idle share, memory and restarts of each role, from one `sacct` query about all of its jobs.

A worker group is a job step of the same name, and the driver is the batch step. Steps overlap, so two groups may use the
same cores. The hours of the roles therefore do not add up to those of the job, but the hours of the components do.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.slurm import parse_time
from rlhpc.metrics.accounting_page import joined_account
from rlhpc.metrics.provenance import PlacedStart, Placement, placed_starts, read_provenance
from rlhpc.runtime.allocation import expand_hostlist
from rlhpc.runtime.disk_errors import unwritten
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.slurm import TIMEOUT_S, ask

#: Queried fields of sacct; JobName comes last because a name may contain the separator.
FIELDS = (
    "JobID", "State", "ElapsedRaw", "Start", "End", "AllocCPUS", "AllocTRES", "TotalCPU", "MaxRSS", "NodeList",
    "Partition", "JobName",
)  # fmt: skip
_QUERY_TIMEOUT_S = 45.0
_PAUSES_S = (0.5, 1.0, 2.0)
_JOB = re.compile(r"^(\d+(?:_\d+)?)(?:\+(\d+))?(?:\.(\w+))?$")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Messages of sacct after which a retry is pointless.
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|Slurm accounting.*(?:disabled|not running)|establish a configuration source",
    re.IGNORECASE,
)
_LIVE_STATES = ("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "STOPPED", "SIGNALING", "STAGE_OUT")


class NoAccounting(RlhpcError):
    """Error raised when sacct has no data on the jobs; the message gives the reason."""


@dataclass(frozen=True)
class JobIds:
    """Slurm jobs of a run.

    Attributes:
        ids: Job ids, in order of discovery.
        since: Unix time before the first submission, which excludes older jobs with the same ids; None if unknown.
        submitted: Ids of the jobs that rlhpc submitted, as opposed to allocations in which it was started.
        drivers: Number of recorded driver starts.
    """

    ids: tuple[str, ...]
    since: float | None = None
    submitted: frozenset[str] = frozenset()
    drivers: int = 0


@dataclass
class AccountingRow:
    """Accounting of a job step, or of one start of a job's component with its `steps`."""

    job_id: str
    component: int
    step: str
    state: str
    elapsed: float
    start: float | None
    end: float | None
    cpus: int
    gpus: int | None
    memory: int | None
    cpu_time: float
    max_rss: int | None
    nodes: list[str]
    partition: str
    name: str
    steps: list[AccountingRow] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.state in _LIVE_STATES

    @property
    def measured(self) -> bool:
        """True if the CPU time is known: Slurm records a step's CPU time only after its end, and at some sites never."""
        return not self.live and (self.cpu_time > 0 or self.max_rss is not None)

    @property
    def span(self) -> tuple[float, float]:
        start = self.start or 0.0
        return start, start + self.elapsed


def query(
    jobs: JobIds, *, timeout_s: float = TIMEOUT_S, sleep: Callable[[float], None] = time.sleep
) -> list[AccountingRow]:
    """Queries sacct about all jobs in one command, which is retried a few times; returns the starts (see `parse`).

    Raises:
        NoAccounting: The run had no jobs, or sacct is missing, failed, did not answer in time, or does not know the jobs.
    """
    if not jobs.ids:
        raise NoAccounting("the run had no Slurm jobs")
    if shutil.which("sacct") is None:
        raise NoAccounting("there is no sacct on this machine")
    argv = ["sacct", "--duplicates", "--parsable2", "--noheader", "--noconvert", f"--jobs={','.join(jobs.ids)}"]
    if jobs.since is not None:
        argv.append(f"--starttime={time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(jobs.since))}")
    argv.append(f"--format={','.join(FIELDS)}")
    deadline, message = time.monotonic() + _QUERY_TIMEOUT_S, ""
    for pause in (0.0, *_PAUSES_S):
        if pause:
            sleep(pause)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        sacct_output = ask(*argv, timeout_s=min(timeout_s, remaining_s))
        if sacct_output.ok:
            if rows := parse(sacct_output.lines):
                return rows
            raise NoAccounting(f"sacct knows nothing of job {', '.join(jobs.ids)}")
        message = sacct_output.words
        if sacct_output.code == 127 or _NO_ACCOUNTING.search(" ".join(sacct_output.lines)):
            raise NoAccounting(message)
    raise NoAccounting(message)


def parse(lines: Iterable[str]) -> list[AccountingRow]:
    """Parses lines of sacct; returns the starts of the jobs' components, in sacct's order, each with its steps."""
    starts: list[AccountingRow] = []
    for line in lines:
        row = _parse_row(line)
        if row is None:
            continue
        if not row.step:
            starts.append(row)
            continue
        step_owners = [s for s in starts[::-1] if (s.job_id, s.component) == (row.job_id, row.component)]
        if step_owners:
            step_owners[0].steps.append(row)
    for start in starts:
        _restore_start_time(start)
    return starts


def _restore_start_time(start: AccountingRow) -> None:
    """Restores a missing start time from the steps: Slurm loses the time if a job is updated during its requeue."""
    step_starts = [step.start for step in start.steps if step.start is not None]
    if start.elapsed == 0 and start.start is None and step_starts:
        ends = [step.span[1] for step in start.steps]
        start.start = min(step_starts)
        start.elapsed = max(0.0, (max(ends) if start.end is None else start.end) - start.start)


def _parse_row(line: str) -> AccountingRow | None:
    fields = line.rstrip("\n").split("|", len(FIELDS) - 1)
    match = _JOB.match(fields[0])
    if match is None or len(fields) < len(FIELDS):
        return None
    columns = dict(zip(FIELDS, fields, strict=True))
    tres = dict(resource.split("=", 1) for resource in columns["AllocTRES"].split(",") if "=" in resource)
    try:
        nodes = expand_hostlist(columns["NodeList"]) if columns["NodeList"] not in ("", "None assigned") else []
    except ConfigError:
        nodes = []
    return AccountingRow(
        job_id=match[1],
        component=int(match[2] or 0),
        step=match[3] or "",
        state=(columns["State"].split() or [""])[0],
        elapsed=float(columns["ElapsedRaw"] or 0) if columns["ElapsedRaw"].isdigit() else 0.0,
        start=parse_time(columns["Start"]),
        end=parse_time(columns["End"]),
        cpus=int(columns["AllocCPUS"]) if columns["AllocCPUS"].isdigit() else 0,
        gpus=_count_gpus(tres),
        memory=_parse_bytes(tres.get("mem", "")),
        cpu_time=_parse_seconds(columns["TotalCPU"]),
        max_rss=_parse_bytes(columns["MaxRSS"]),
        nodes=nodes,
        partition=columns["Partition"],
        name=columns["JobName"],
    )


def _parse_seconds(text: str) -> float:
    """Parses `[days-[hours:]]minutes:seconds[.fraction]` into seconds."""
    days, _, clock = text.rpartition("-")
    try:
        seconds = float(days or 0) * 86400.0
        for scale, digits in zip((1.0, 60.0, 3600.0), reversed(clock.split(":")), strict=False):
            seconds += scale * float(digits)
    except ValueError:
        return 0.0
    return seconds


def _parse_bytes(text: str) -> int | None:
    match = re.match(r"^([\d.]+)([KMGT]?)[nc]?$", text.strip())
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _count_gpus(tres: Mapping[str, str]) -> int | None:
    """Returns the number of allocated GPUs; None without GPUs or if the site does not count them."""
    if "gres/gpu" in tres:
        return int(tres["gres/gpu"])
    typed_counts = [int(count) for name, count in tres.items() if name.startswith("gres/gpu:")]
    return sum(typed_counts) if typed_counts else None


DRIVER = "driver"
_START_MARGIN_S = 3600.0


def job_ids(paths: RunPaths, provenance: Mapping[str, Any] | None = None) -> JobIds:
    """Returns the Slurm jobs of a run: submitted, requeued and resubmitted jobs, and allocations in which the run started."""
    submitted_ids: dict[str, None] = {}
    timestamps: list[float] = []
    num_drivers = 0
    record_paths = sorted(paths.submit.glob(f"{segment_name('*')}.json")) if paths.submit.is_dir() else []
    records = {path.name: record for path in record_paths if (record := read_json_file(path)) is not None}
    for name, record in records.items():
        if record.get("executor") != "slurm" or not str(record.get("job_id", "")).isdigit():
            continue
        submitted_ids[str(record["job_id"])] = None
        timestamps += [float(record[key]) for key in ("submitted", "started") if record.get(key)]
        attempts = records.get(name.removesuffix(".json") + ".attempts.json", {})
        if attempts.get("token") == record.get("token") and "attempt" in record:
            attempt_rows = [row for row in attempts.get("attempts") or () if isinstance(row, dict)]
            submitted_ids.update(
                (str(row["job_id"]), None) for row in attempt_rows if str(row.get("job_id", "")).isdigit()
            )
            num_drivers += len(attempt_rows)
    provenance = read_provenance(paths) if provenance is None else provenance
    ids = dict(submitted_ids)
    for start in [provenance, *(provenance.get("segments") or [])]:
        slurm = start.get("slurm") or {}
        job = str(slurm.get("JOB_ID") or "")
        if job.isdecimal():
            ids[job] = None
            if str(slurm.get("JOB_NAME", "")).startswith(f"rlhpc-{paths.root.name}-"):
                submitted_ids[job] = None
            for key in ("created", "started"):
                try:
                    timestamps.append(datetime.fromisoformat(str(start[key])).timestamp())
                except (KeyError, ValueError):
                    continue
    return JobIds(
        tuple(ids), min(timestamps) - _START_MARGIN_S if timestamps else None, frozenset(submitted_ids), num_drivers
    )


def account(
    starts: Sequence[AccountingRow], placement: Placement, jobs: JobIds, recorded_starts: Sequence[PlacedStart] = ()
) -> dict[str, Any]:
    """Computes the content of accounting.json.

    Args:
        starts: The result of `query`.
        placement: Last placement from provenance.json. The placement gives the accelerators of each group, because Slurm
            assigns all accelerators of a node to each step there.
        jobs: The run's jobs.
        recorded_starts: The run's starts with their placements, which may differ from the last placement.
    """
    started_components = [start for start in starts if start.elapsed > 0]
    ranks = {id(start): _node_ranks(start, started_components) for start in started_components}
    roles: dict[str, list[tuple[AccountingRow, set[Any]]]] = {}
    for start in started_components:
        for step in start.steps:
            step_placement = _placement_of(step, placement, recorded_starts)
            role = _role_of(step, step_placement)
            if role is not None:
                roles.setdefault(role, []).append((step, _accelerators(step, role, step_placement, ranks[id(start)])))
    component_starts = {
        start.component: [s for s in started_components if s.component == start.component]
        for start in started_components
    }
    role_names = [
        *(name for name in placement if name in roles),
        *(name for name in sorted(roles) if name not in placement),
    ]
    keys_by_step = {id(step): accelerators for rows in roles.values() for step, accelerators in rows}
    placements = [placement, *(start.placement for start in recorded_starts)]
    rank_entries = [entry for groups in placements for entries in groups.values() for entry in entries]
    first_components = {
        start.job_id: min(s.component for s in started_components if s.job_id == start.job_id)
        for start in started_components
    }
    return {
        "format": 1,
        "available": True,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "jobs": list(jobs.ids),
        "allocations": [job for job in jobs.ids if job not in jobs.submitted],
        "complete": not any(row.live for start in started_components for row in (start, *start.steps)),
        "requeues": sum(s.component == first_components[s.job_id] for s in started_components) - len(first_components),
        "driver_starts": jobs.drivers,
        "roles": {name: _role_entry(roles[name]) for name in role_names},
        "components": [
            _component_entry(k, component_starts[k], keys_by_step, rank_entries, ranks)
            for k in sorted(component_starts)
        ],
    }


def _placement_of(step: AccountingRow, last_placement: Placement, recorded_starts: Sequence[PlacedStart]) -> Placement:
    """Returns the placement of a step's start, which is the last start in the step's job before the step.

    Returns `last_placement` if no start in the job has a recorded placement.
    """
    in_job = [start for start in recorded_starts if start.job == step.job_id]
    earlier_starts = [start for start in in_job if step.start is None or start.began <= step.start]
    return earlier_starts[-1].placement if earlier_starts else in_job[0].placement if in_job else last_placement


def _role_of(step: AccountingRow, placement: Mapping[str, Any]) -> str | None:
    """Returns the group that a Slurm job step runs, or `DRIVER` for the batch script; None for steps of other programs."""
    if step.step == "batch":
        return DRIVER
    if not step.step.isdigit() or (placement and step.name not in placement):
        return None  # the steps extern and interactive, and commands such as rm
    return step.name


def _node_ranks(start: AccountingRow, starts: Sequence[AccountingRow]) -> list[int]:
    """Returns the ranks of a component's nodes in the run's cluster, whose nodes are ordered by component."""
    sizes = {s.component: len(s.nodes) for s in starts if s.job_id == start.job_id}
    first_rank = sum(size for component, size in sizes.items() if component < start.component)
    return list(range(first_rank, first_rank + len(start.nodes)))


def _accelerators(step: AccountingRow, role: str, placement: Placement, ranks: Sequence[int]) -> set[Any]:
    """Returns the accelerators that a step used, as keys; the driver has none.

    Groups that share an accelerator have equal keys for it.
    """
    if role == DRIVER:
        return set()
    if role not in placement:
        return {("?", number) for number in range(step.gpus or 0)}
    entries = [rank_entry for rank_entry in placement[role] if int(rank_entry.get("node_rank", 0)) in ranks]
    return {
        (int(rank_entry.get("node_rank", 0)), int(index))
        for rank_entry in entries
        for index in rank_entry.get("accelerators") or ()
    }


def _union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    length_s, covered_until = 0.0, float("-inf")
    for start, end in sorted(spans):
        length_s += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return length_s


def _hours(seconds: float) -> float:
    return round(seconds / 3600.0, 6)


def _idle_share(rows: Iterable[AccountingRow]) -> float | None:
    measured_rows = [row for row in rows if row.measured]
    granted_cpu_s = sum(row.elapsed * row.cpus for row in measured_rows)
    return (
        round(max(0.0, 1.0 - sum(row.cpu_time for row in measured_rows) / granted_cpu_s), 4) if granted_cpu_s else None
    )


def _role_entry(steps: Sequence[tuple[AccountingRow, set[Any]]]) -> dict[str, Any]:
    rows = [row for row, _ in steps]
    components = {row.component for row in rows}
    rows_by_component = [[row for row in rows if row.component == component] for component in components]
    return {
        "components": sorted(components),
        "elapsed_s": round(_union_length(row.span for row in rows), 3),
        "gpu_hours": _hours(sum(row.elapsed * len(accelerators) for row, accelerators in steps)),
        "cpu_hours": _hours(sum(row.elapsed * row.cpus for row in rows)),
        "cpu_hours_used": _hours(sum(row.cpu_time for row in rows if row.measured)),
        "idle_share": _idle_share(rows),
        "max_rss_bytes": max((row.max_rss for row in rows if row.max_rss is not None), default=None),
        # Another job is the next segment or a new submission, not a restart.
        "restarts": max(
            len(component_rows) - len({row.job_id for row in component_rows}) for component_rows in rows_by_component
        ),
    }


def _component_entry(
    index: int,
    starts: Sequence[AccountingRow],
    accelerators_by_step: Mapping[int, set[Any]],
    rank_entries: Sequence[Mapping[str, Any]],
    ranks: Mapping[int, Sequence[int]],
) -> dict[str, Any]:
    accelerator_seconds: list[float] = []
    for start in starts:
        spans: dict[Any, list[tuple[float, float]]] = {}
        for step in start.steps:
            for key in accelerators_by_step.get(id(step), ()):
                spans.setdefault(key, []).append(step.span)
        accelerator_seconds.append(sum(_union_length(s) for s in spans.values()))
    component_ranks = {rank for start in starts for rank in ranks[id(start)]}
    has_planned_gpus = any(
        rank_entry.get("accelerators")
        for rank_entry in rank_entries
        if int(rank_entry.get("node_rank", 0)) in component_ranks
    )
    gpu_seconds = [start.elapsed * start.gpus for start in starts if start.gpus is not None]
    counts_gpus = bool(gpu_seconds) or not has_planned_gpus  # some sites do not count GPUs
    steps = [step for start in starts for step in start.steps]
    return {
        "component": index,
        "partitions": sorted({start.partition for start in starts}),
        "nodes": max(len(start.nodes) for start in starts),
        "elapsed_s": round(sum(start.elapsed for start in starts), 3),
        "gpu_hours": _hours(sum(gpu_seconds)) if counts_gpus else None,
        "gpu_hours_used": _hours(sum(accelerator_seconds)),
        "cpu_hours": _hours(sum(start.elapsed * start.cpus for start in starts)),
        "cpu_hours_used": _hours(sum(step.cpu_time for step in steps if step.measured)),
        "memory_bytes": max((start.memory for start in starts if start.memory is not None), default=None),
        "max_rss_bytes": max((step.max_rss for step in steps if step.max_rss is not None), default=None),
        "restarts": len(starts) - len({start.job_id for start in starts}),
    }


def write_accounting(paths: RunPaths) -> dict[str, Any] | None:
    """Queries sacct about the run's jobs and writes report/accounting.json; a failure of the scheduler is not an error.

    Returns:
        The written record; None if the run had no Slurm jobs. If sacct has no answer, `available` is False and `reason`
        gives the cause; or, if an earlier record of the same jobs has numbers, that record with `reason` added.
    """
    provenance = read_provenance(paths)
    jobs = job_ids(paths, provenance)
    if not jobs.ids:
        return None
    file = paths.accounting
    try:
        record = account(query(jobs), provenance.get("placement") or {}, jobs, placed_starts(provenance))
    except NoAccounting as error:
        previous_record = read_json_file(file) or {}
        if previous_record.get("available") and previous_record.get("jobs") == list(jobs.ids):
            return {**previous_record, "reason": str(error)}
        record = {"format": 1, "available": False, "reason": str(error), "jobs": list(jobs.ids)}
    if (joined_entries := joined_account(paths)) is not None:
        record["joined"] = joined_entries
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(file, json.dumps(record, indent=2).encode() + b"\n")
    except OSError as error:
        raise unwritten(error, file) from error
    return record
