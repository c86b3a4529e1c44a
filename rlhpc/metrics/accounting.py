"""Accounting of a run: hours, idle share, memory and restarts of each role, from one `sacct` query about all of its
jobs, and the section of the report.

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
from html import escape
from typing import Any

from rlhpc.jobs.elastic.records import HelperRecord, read_stays
from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.slurm import parse_time
from rlhpc.metrics.energy import format_joules
from rlhpc.metrics.page import Cell, render_placeholder, table
from rlhpc.metrics.provenance import PlacedStart, Placement, placed_starts, read_provenance
from rlhpc.runtime.allocation import expand_hostlist
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.slurm import TIMEOUT_S, ask
from rlhpc.runtime.text import format_bytes, format_duration

#: Queried fields of sacct; JobName comes last because a name may contain the separator.
FIELDS = (
    "JobID", "State", "ElapsedRaw", "Start", "End", "AllocCPUS", "AllocTRES", "TotalCPU", "MaxRSS", "NodeList",
    "Partition", "ConsumedEnergyRaw", "JobName",
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
        submitted_ids: Ids of the jobs that rlhpc submitted, as opposed to allocations in which it was started.
        num_drivers: Number of recorded driver starts.
    """

    ids: tuple[str, ...]
    since: float | None = None
    submitted_ids: frozenset[str] = frozenset()
    num_drivers: int = 0


@dataclass
class AccountingRow:
    """Accounting of a job step, or of one start of a job's component with its `steps`."""

    job_id: str
    component: int
    step: str
    state: str
    elapsed_s: float
    start: float | None
    end: float | None
    cpus: int
    gpus: int | None
    memory: int | None
    cpu_time: float
    max_rss: int | None
    nodes: list[str]
    partition: str
    energy: int | None
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
        return start, start + self.elapsed_s


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
    for pause_s in (0.0, *_PAUSES_S):
        if pause_s:
            sleep(pause_s)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        sacct_output = ask(*argv, timeout_s=min(timeout_s, remaining_s))
        if sacct_output.ok:
            if rows := parse(sacct_output.lines):
                return rows
            raise NoAccounting(f"sacct knows nothing of job {', '.join(jobs.ids)}")
        message = sacct_output.last_line
        if sacct_output.code == 127 or _NO_ACCOUNTING.search(" ".join(sacct_output.lines)):
            raise NoAccounting(message)
    raise NoAccounting(message)


def parse(lines: Iterable[str]) -> list[AccountingRow]:
    """Parses lines of sacct; returns the starts of the jobs' components, in sacct's order, each with its steps."""
    component_starts: list[AccountingRow] = []
    for line in lines:
        row = _parse_row(line)
        if row is None:
            continue
        if not row.step:
            component_starts.append(row)
            continue
        step_owners = [s for s in component_starts[::-1] if (s.job_id, s.component) == (row.job_id, row.component)]
        if step_owners:
            step_owners[0].steps.append(row)
    for start in component_starts:
        _restore_start_time(start)
    return component_starts


def _restore_start_time(component_start: AccountingRow) -> None:
    """Restores a missing start time from the steps: Slurm loses the time if a job is updated during its requeue."""
    step_starts = [step.start for step in component_start.steps if step.start is not None]
    if component_start.elapsed_s == 0 and component_start.start is None and step_starts:
        step_ends = [step.span[1] for step in component_start.steps]
        component_start.start = min(step_starts)
        component_start.elapsed_s = max(
            0.0, (max(step_ends) if component_start.end is None else component_start.end) - component_start.start
        )


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
        elapsed_s=float(columns["ElapsedRaw"] or 0) if columns["ElapsedRaw"].isdigit() else 0.0,
        start=parse_time(columns["Start"]),
        end=parse_time(columns["End"]),
        cpus=int(columns["AllocCPUS"]) if columns["AllocCPUS"].isdigit() else 0,
        gpus=_count_gpus(tres),
        memory=_parse_bytes(tres.get("mem", "")),
        cpu_time=_parse_seconds(columns["TotalCPU"]),
        max_rss=_parse_bytes(columns["MaxRSS"]),
        nodes=nodes,
        partition=columns["Partition"],
        energy=_parse_energy(columns["ConsumedEnergyRaw"]),
        name=columns["JobName"],
    )


def _parse_seconds(time_text: str) -> float:
    """Parses `[days-[hours:]]minutes:seconds[.fraction]` into seconds."""
    days_text, _, clock = time_text.rpartition("-")
    try:
        total_s = float(days_text or 0) * 86400.0
        for scale, digits in zip((1.0, 60.0, 3600.0), reversed(clock.split(":")), strict=False):
            total_s += scale * float(digits)
    except ValueError:
        return 0.0
    return total_s


def _parse_energy(energy_text: str) -> int | None:
    """Parses joules; None if there is no measurement, for which Slurm writes nothing, 0 or a number near 2^64."""
    energy_j = int(energy_text) if energy_text.isdecimal() else 0
    return energy_j if 0 < energy_j < 1 << 62 else None


def _parse_bytes(size_text: str) -> int | None:
    match = re.match(r"^([\d.]+)([KMGT]?)[nc]?$", size_text.strip())
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _count_gpus(tres: Mapping[str, str]) -> int | None:
    """Returns the number of allocated GPUs; None without GPUs or if the site does not count them."""
    if "gres/gpu" in tres:
        return int(tres["gres/gpu"])
    typed_counts = [int(num_gpus) for name, num_gpus in tres.items() if name.startswith("gres/gpu:")]
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
        attempt_record = records.get(name.removesuffix(".json") + ".attempts.json", {})
        if attempt_record.get("token") == record.get("token") and "attempt" in record:
            attempt_rows = [row for row in attempt_record.get("attempts") or () if isinstance(row, dict)]
            submitted_ids.update(
                (str(row["job_id"]), None) for row in attempt_rows if str(row.get("job_id", "")).isdigit()
            )
            num_drivers += len(attempt_rows)
    provenance = read_provenance(paths) if provenance is None else provenance
    ids = dict(submitted_ids)
    for start_record in [provenance, *(provenance.get("segments") or [])]:
        slurm = start_record.get("slurm") or {}
        job = str(slurm.get("JOB_ID") or "")
        if job.isdecimal():
            ids[job] = None
            if str(slurm.get("JOB_NAME", "")).startswith(f"rlhpc-{paths.root.name}-"):
                submitted_ids[job] = None
            for key in ("created", "started"):
                try:
                    timestamps.append(datetime.fromisoformat(str(start_record[key])).timestamp())
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
    started_components = [start for start in starts if start.elapsed_s > 0]
    ranks = {id(start): _find_node_ranks(start, started_components) for start in started_components}
    roles: dict[str, list[tuple[AccountingRow, set[Any]]]] = {}
    for start in started_components:
        for step in start.steps:
            step_placement = _find_placement(step, placement, recorded_starts)
            role = _find_role(step, step_placement)
            if role is not None:
                roles.setdefault(role, []).append(
                    (step, _list_accelerators(step, role, step_placement, ranks[id(start)]))
                )
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
    rank_entries = [
        rank_entry for groups in placements for rank_entries in groups.values() for rank_entry in rank_entries
    ]
    first_components = {
        start.job_id: min(s.component for s in started_components if s.job_id == start.job_id)
        for start in started_components
    }
    return {
        "format": 1,
        "available": True,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "jobs": list(jobs.ids),
        "allocations": [job for job in jobs.ids if job not in jobs.submitted_ids],
        "complete": not any(row.live for start in started_components for row in (start, *start.steps)),
        "requeues": sum(s.component == first_components[s.job_id] for s in started_components) - len(first_components),
        "driver_starts": jobs.num_drivers,
        "roles": {name: _build_role_entry(roles[name]) for name in role_names},
        "components": [
            _build_component_entry(k, component_starts[k], keys_by_step, rank_entries, ranks)
            for k in sorted(component_starts)
        ],
    }


def _find_placement(
    step: AccountingRow, last_placement: Placement, recorded_starts: Sequence[PlacedStart]
) -> Placement:
    """Returns the placement of a step's start, which is the last start in the step's job before the step.

    Returns `last_placement` if no start in the job has a recorded placement.
    """
    job_placements = [job_starts for job_starts in recorded_starts if job_starts.job == step.job_id]
    earlier_starts = [start for start in job_placements if step.start is None or start.start_time <= step.start]
    return (
        earlier_starts[-1].placement
        if earlier_starts
        else job_placements[0].placement
        if job_placements
        else last_placement
    )


def _find_role(step: AccountingRow, placement: Mapping[str, Any]) -> str | None:
    """Returns the group that a Slurm job step runs, or `DRIVER` for the batch script; None for steps of other programs."""
    if step.step == "batch":
        return DRIVER
    if not step.step.isdigit() or (placement and step.name not in placement):
        return None  # the steps extern and interactive, and commands such as rm
    return step.name


def _find_node_ranks(component_start: AccountingRow, starts: Sequence[AccountingRow]) -> list[int]:
    """Returns the ranks of a component's nodes in the run's cluster, whose nodes are ordered by component."""
    nodes_by_component = {s.component: len(s.nodes) for s in starts if s.job_id == component_start.job_id}
    first_rank = sum(
        num_nodes for component, num_nodes in nodes_by_component.items() if component < component_start.component
    )
    return list(range(first_rank, first_rank + len(component_start.nodes)))


def _list_accelerators(step: AccountingRow, role: str, placement: Placement, ranks: Sequence[int]) -> set[Any]:
    """Returns the accelerators that a step used, as keys; the driver has none.

    Groups that share an accelerator have equal keys for it.
    """
    if role == DRIVER:
        return set()
    if role not in placement:
        return {("?", gpu_index) for gpu_index in range(step.gpus or 0)}
    rank_entries_of_step = [
        rank_entry for rank_entry in placement[role] if int(rank_entry.get("node_rank", 0)) in ranks
    ]
    return {
        (int(rank_entry.get("node_rank", 0)), int(index))
        for rank_entry in rank_entries_of_step
        for index in rank_entry.get("accelerators") or ()
    }


def _measure_union(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    length_s, covered_until = 0.0, float("-inf")
    for span_start, span_end in sorted(spans):
        length_s += max(0.0, span_end - max(span_start, covered_until))
        covered_until = max(covered_until, span_end)
    return length_s


def _to_hours(duration_s: float) -> float:
    return round(duration_s / 3600.0, 6)


def _compute_idle_share(rows: Iterable[AccountingRow]) -> float | None:
    measured_rows = [row for row in rows if row.measured]
    granted_cpu_s = sum(row.elapsed_s * row.cpus for row in measured_rows)
    return (
        round(max(0.0, 1.0 - sum(row.cpu_time for row in measured_rows) / granted_cpu_s), 4) if granted_cpu_s else None
    )


def _build_role_entry(steps: Sequence[tuple[AccountingRow, set[Any]]]) -> dict[str, Any]:
    rows = [row for row, _ in steps]
    components = {row.component for row in rows}
    rows_by_component = [[row for row in rows if row.component == component] for component in components]
    return {
        "components": sorted(components),
        "elapsed_s": round(_measure_union(row.span for row in rows), 3),
        "gpu_hours": _to_hours(sum(row.elapsed_s * len(accelerators) for row, accelerators in steps)),
        "cpu_hours": _to_hours(sum(row.elapsed_s * row.cpus for row in rows)),
        "cpu_hours_used": _to_hours(sum(row.cpu_time for row in rows if row.measured)),
        "idle_share": _compute_idle_share(rows),
        "max_rss_bytes": max((row.max_rss for row in rows if row.max_rss is not None), default=None),
        # Another job is the next segment or a new submission, not a restart.
        "restarts": max(
            len(component_rows) - len({row.job_id for row in component_rows}) for component_rows in rows_by_component
        ),
    }


def _build_component_entry(
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
        accelerator_seconds.append(sum(_measure_union(s) for s in spans.values()))
    component_ranks = {rank for start in starts for rank in ranks[id(start)]}
    has_planned_gpus = any(
        rank_entry.get("accelerators")
        for rank_entry in rank_entries
        if int(rank_entry.get("node_rank", 0)) in component_ranks
    )
    gpu_seconds = [start.elapsed_s * start.gpus for start in starts if start.gpus is not None]
    counts_gpus = bool(gpu_seconds) or not has_planned_gpus  # some sites do not count GPUs
    steps = [step for start in starts for step in start.steps]
    return {
        "component": index,
        "partitions": sorted({start.partition for start in starts}),
        "nodes": max(len(start.nodes) for start in starts),
        "elapsed_s": round(sum(start.elapsed_s for start in starts), 3),
        "gpu_hours": _to_hours(sum(gpu_seconds)) if counts_gpus else None,
        "gpu_hours_used": _to_hours(sum(accelerator_seconds)),
        "cpu_hours": _to_hours(sum(start.elapsed_s * start.cpus for start in starts)),
        "cpu_hours_used": _to_hours(sum(step.cpu_time for step in steps if step.measured)),
        "memory_bytes": max((start.memory for start in starts if start.memory is not None), default=None),
        "max_rss_bytes": max((step.max_rss for step in steps if step.max_rss is not None), default=None),
        **_measure_component_energy(starts),
        "restarts": len(starts) - len({start.job_id for start in starts}),
    }


def _measure_component_energy(starts: Sequence[AccountingRow]) -> dict[str, Any]:
    """Returns the energy of a component's nodes, and the reason if it is unknown.

    Slurm measures nodes, and a step's figure is that of its nodes while it ran. Steps overlap, so their figures do not add up.
    The figure of a start is that of the step that lasts as long: `extern`, or on a single node the batch step.
    """
    energies: list[int] = []
    for start in starts:
        by_name = {step.step: step for step in start.steps}
        spanning_step = by_name.get("extern") or (by_name.get("batch") if len(start.nodes) == 1 else None)
        if spanning_step is None:
            return {"energy_j": None, "energy_missing": "no step lasts as long as the job on all of its nodes"}
        if spanning_step.energy is None:
            return {"energy_j": None, "energy_missing": "Slurm measures no energy here (AcctGatherEnergyType)"}
        energies.append(spanning_step.energy)
    return {"energy_j": sum(energies), "energy_missing": ""}


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
    if (joined_entries := _joined_account(paths)) is not None:
        record["joined"] = joined_entries
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(file, json.dumps(record, indent=2).encode() + b"\n")
    except OSError as error:
        raise unwritten_page_error(error, file) from error
    return record


def render_accounting_tables(record: Mapping[str, Any]) -> str:
    """Renders two tables from accounting.json: the roles, and the job's components."""
    jobs = "job" + ("s " if len(record["jobs"]) > 1 else " ") + ", ".join(str(job) for job in record["jobs"])
    if not record.get("available"):
        return render_placeholder(
            f"Accounting is not available for {escape(jobs)}: {escape(str(record.get('reason', '')))}."
        )
    roles: list[list[Cell]] = [
        [
            name,
            format_duration(role["elapsed_s"]),
            _format_hours(role["gpu_hours"]),
            _format_hours(role["cpu_hours"]),
            _format_hours(role["cpu_hours_used"]),
            "–" if role["idle_share"] is None else f"{role['idle_share']:.1%}",
            _format_size(role["max_rss_bytes"]),
            role["restarts"],
        ]
        for name, role in record["roles"].items()
    ]
    components: list[list[Cell]] = [
        [
            f"{component['component']}: {', '.join(component['partitions']) or '–'}",
            component["nodes"],
            format_duration(component["elapsed_s"]),
            _format_hours(component["gpu_hours"]),
            _format_hours(component["gpu_hours_used"]),
            _format_hours(component["cpu_hours"]),
            _format_hours(component["cpu_hours_used"]),
            _format_size(component["memory_bytes"]),
            _format_size(component["max_rss_bytes"]),
            format_joules(component.get("energy_j")),
            component["restarts"],
        ]
        for component in record["components"]
    ]
    role_header = ["role", "elapsed", "GPU-hours", "CPU-hours", "used", "cores idle", "largest process", "restarts"]
    component_header = ["component", "nodes", "elapsed", "GPU-hours", "held by groups", "CPU-hours", "used", "memory",
                 "largest process", "energy of nodes", "restarts"]  # fmt: skip
    return (
        f'<p class="legend">{escape(_format_legend(record, jobs))}</p>'
        f'<div class="scroll">{table(role_header, roles, text_columns={0})}</div>'
        f'<h3>Job components</h3><div class="scroll">{table(component_header, components, text_columns={0})}</div>'
    )


def _format_legend(record: Mapping[str, Any], jobs: str) -> str:
    sentences = [f"From sacct, {jobs}, asked {str(record['made']).replace('T', ' ')[:16]}."]
    if record["requeues"]:
        sentences.append(f"Requeued {record['requeues']} time{'s' if record['requeues'] > 1 else ''}.")
    sentences.append("Groups of a node may use the same cores, so CPU-hours of the roles do not add up.")
    if reasons := dict.fromkeys(filter(None, (c.get("energy_missing") for c in record["components"]))):
        sentences.append(f"Energy is not known: {'; '.join(reasons)}.")
    if not record["complete"]:
        sentences.append("Something still runs: its processor time and memory are known when it has ended.")
    if allocations := record.get("allocations"):
        sentences.append(f"Allocation {', '.join(allocations)} may have done other work, too.")
    if reason := record.get("reason"):
        sentences.append(f"Numbers of an earlier report, as accounting is not available now: {reason}.")
    return " ".join(sentences)


def _format_hours(num_hours: float | None) -> str:
    if num_hours is None:
        return "not counted"
    return "0" if num_hours == 0 else f"{num_hours:.3f}" if num_hours < 1 else f"{num_hours:,.2f}"


def _format_size(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else format_bytes(num_bytes)


#: Maximum number of ranks with a row on the page; earlier ranks are only counted.
_MAX_ROWS = 200


def _joined_account(paths: RunPaths) -> dict[str, Any] | None:
    """Returns the entries of accounting.json about ranks that joined, from the driver's record.

    Returns None if no rank joined and no helper job was submitted.
    """
    rank_stays, record, now = read_stays(paths), HelperRecord.read(paths), time.time()
    if not rank_stays and not record.jobs:
        return None
    return {
        "ranks": len(rank_stays),
        "rank_hours": round(sum(stay.hours(now) for stay in rank_stays), 6),
        "accelerator_hours": round(sum(stay.hours(now) * stay.accelerators for stay in rank_stays), 6),
        "jobs": list(record.jobs),
        "budget_hours": round(record.spent() + sum(job.hours(now) for job in record.live()), 6),
    }


def render_joined_section(paths: RunPaths) -> str:
    """Renders a summary sentence, and a table with a row for each rank that joined; "" if no rank ever joined."""
    rank_stays, account = read_stays(paths), _joined_account(paths)
    if account is None:
        return ""
    rows: list[list[Cell]] = [
        [
            f"{stay.group}-{stay.rank}", stay.node, stay.job or "–",
            *map(_format_time, (stay.joined, stay.works, stay.left_at)),
            f"{stay.hours():.2f}", stay.leave_reason or "it was there to the end of this account",
        ]
        for stay in rank_stays[-_MAX_ROWS:]
    ]  # fmt: skip
    sentence = (
        f"{account['ranks']} ranks joined, for {account['rank_hours']:.2f} hours in all. "
        f"{len(account['jobs'])} jobs were submitted for them (cluster.elastic), which took {account['budget_hours']:.2f} "
        "hours of their budget."
    )
    if len(rank_stays) > _MAX_ROWS:
        sentence += f" The last {_MAX_ROWS} of them:"
    header = ["rank", "node", "job", "joined", "took part", "left", "hours", "why"]
    table_html = f'<div class="scroll">{table(header, rows, text_columns={0, 1, 2, 3, 4, 5, 7})}</div>' if rows else ""
    return f'<p class="legend">{escape(sentence)}</p>{table_html}'


def _format_time(timestamp: float | None) -> str:
    return "–" if timestamp is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))
