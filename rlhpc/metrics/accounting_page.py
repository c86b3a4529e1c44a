"""Accounting section of the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import Any

from rlhpc.jobs.elastic.records import HelperRecord, stays
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.page import Cell, duration, missing, table
from rlhpc.runtime.text import format_bytes


def accounting_tables(record: Mapping[str, Any]) -> str:
    """Renders two tables from accounting.json: the roles, and the job's components."""
    jobs = "job" + ("s " if len(record["jobs"]) > 1 else " ") + ", ".join(str(job) for job in record["jobs"])
    if not record.get("available"):
        return missing(f"Accounting is not available for {escape(jobs)}: {escape(str(record.get('reason', '')))}.")
    roles: list[list[Cell]] = [
        [
            name,
            duration(role["elapsed_s"]),
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
            duration(component["elapsed_s"]),
            _format_hours(component["gpu_hours"]),
            _format_hours(component["gpu_hours_used"]),
            _format_hours(component["cpu_hours"]),
            _format_hours(component["cpu_hours_used"]),
            _format_size(component["memory_bytes"]),
            _format_size(component["max_rss_bytes"]),
            component["restarts"],
        ]
        for component in record["components"]
    ]
    role_header = ["role", "elapsed", "GPU-hours", "CPU-hours", "used", "cores idle", "largest process", "restarts"]
    component_header = ["component", "nodes", "elapsed", "GPU-hours", "held by groups", "CPU-hours", "used", "memory",
                 "largest process", "restarts"]  # fmt: skip
    return (
        f'<p class="legend">{escape(_legend_text(record, jobs))}</p>'
        f'<div class="scroll">{table(role_header, roles, text_columns={0})}</div>'
        f'<h3>Job components</h3><div class="scroll">{table(component_header, components, text_columns={0})}</div>'
    )


def _legend_text(record: Mapping[str, Any], jobs: str) -> str:
    sentences = [f"From sacct, {jobs}, asked {str(record['made']).replace('T', ' ')[:16]}."]
    if record["requeues"]:
        sentences.append(f"Requeued {record['requeues']} time{'s' if record['requeues'] > 1 else ''}.")
    sentences.append("Groups of a node may use the same cores, so CPU-hours of the roles do not add up.")
    if not record["complete"]:
        sentences.append("Something still runs: its processor time and memory are known when it has ended.")
    if allocations := record.get("allocations"):
        sentences.append(f"Allocation {', '.join(allocations)} may have done other work, too.")
    if reason := record.get("reason"):
        sentences.append(f"Numbers of an earlier report, as accounting is not available now: {reason}.")
    return " ".join(sentences)


def _format_hours(value: float | None) -> str:
    if value is None:
        return "not counted"
    return "0" if value == 0 else f"{value:.3f}" if value < 1 else f"{value:,.2f}"


def _format_size(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


#: Maximum number of ranks with a row on the page; earlier ranks are only counted.
_MAX_ROWS = 200


def joined_account(paths: RunPaths) -> dict[str, Any] | None:
    """Returns the entries of accounting.json about ranks that joined, from the driver's record.

    Returns None if no rank joined and no helper job was submitted.
    """
    rank_stays, record, now = stays(paths), HelperRecord.read(paths), time.time()
    if not rank_stays and not record.jobs:
        return None
    return {
        "ranks": len(rank_stays),
        "rank_hours": round(sum(stay.hours(now) for stay in rank_stays), 6),
        "accelerator_hours": round(sum(stay.hours(now) * stay.accelerators for stay in rank_stays), 6),
        "jobs": list(record.jobs),
        "budget_hours": round(record.spent() + sum(job.hours(now) for job in record.live()), 6),
    }


def joined_section(paths: RunPaths) -> str:
    """Renders a summary sentence, and a table with a row for each rank that joined; "" if no rank ever joined."""
    rank_stays, account = stays(paths), joined_account(paths)
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
