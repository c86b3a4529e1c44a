"""The part of the report that says what a run cost."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rlhpc.metrics.page import Cell, duration, missing, size, table


def accounting_tables(record: Mapping[str, Any]) -> str:
    """Two tables from accounting.json: one of the roles, one of the job's components."""
    jobs = "job" + ("s " if len(record["jobs"]) > 1 else " ") + ", ".join(str(job) for job in record["jobs"])
    if not record.get("available"):
        return missing(f"Accounting is not available for {escape(jobs)}: {escape(str(record.get('reason', '')))}.")
    roles: list[list[Cell]] = [
        [
            name,
            duration(role["elapsed_s"]),
            _hours(role["gpu_hours"]),
            _hours(role["cpu_hours"]),
            _hours(role["cpu_hours_used"]),
            _share(role["idle_share"]),
            _size(role["max_rss_bytes"]),
            role["restarts"],
        ]
        for name, role in record["roles"].items()
    ]
    parts: list[list[Cell]] = [
        [
            f"{part['component']}: {', '.join(part['partitions']) or '–'}",
            part["nodes"],
            duration(part["elapsed_s"]),
            _hours(part["gpu_hours"]),
            _hours(part["gpu_hours_used"]),
            _hours(part["cpu_hours"]),
            _hours(part["cpu_hours_used"]),
            _size(part["memory_bytes"]),
            _size(part["max_rss_bytes"]),
            part["restarts"],
        ]
        for part in record["components"]
    ]
    role_head = ["role", "elapsed", "GPU-hours", "CPU-hours", "used", "cores idle", "largest process", "restarts"]
    part_head = ["component", "nodes", "elapsed", "GPU-hours", "held by groups", "CPU-hours", "used", "memory",
                 "largest process", "restarts"]  # fmt: skip
    return (
        f'<p class="legend">{escape(_words(record, jobs))}</p>'
        f'<div class="scroll">{table(role_head, roles, text_columns={0})}</div>'
        f'<h3>Job components</h3><div class="scroll">{table(part_head, parts, text_columns={0})}</div>'
    )


def _words(record: Mapping[str, Any], jobs: str) -> str:
    sentences = [f"From sacct, {jobs}, asked {str(record['made']).replace('T', ' ')[:16]}."]
    if record["requeues"]:
        sentences.append(f"Requeued {record['requeues']} time{'s' if record['requeues'] > 1 else ''}.")
    sentences.append("Groups of a node may use the same cores, so CPU-hours of the roles do not add up.")
    if not record["complete"]:
        sentences.append("Something still runs: its processor time and memory are known when it has ended.")
    if other := record.get("allocations"):
        sentences.append(f"Allocation {', '.join(other)} may have done other work, too.")
    if reason := record.get("reason"):
        sentences.append(f"Numbers of an earlier report, as accounting is not available now: {reason}.")
    return " ".join(sentences)


def _hours(value: float | None) -> str:
    if value is None:
        return "not counted"
    return "0" if value == 0 else f"{value:.3f}" if value < 1 else f"{value:,.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _size(value: int | None) -> str:
    return "–" if value is None else size(value)
