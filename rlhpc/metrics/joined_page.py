"""The part of the report that says who joined a run under way, and what the jobs cost that they came from."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from rlhpc.jobs.attendance import stays
from rlhpc.jobs.elastic.record import HelperRecord
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.page import Cell, table

#: Ranks of which the page has a row; those before them are counted.
_ROWS = 200


def joined_account(paths: RunPaths) -> dict[str, Any] | None:
    """What accounting.json says of ranks that joined, by the driver's own record; None if nobody ever has."""
    found, record, now = stays(paths), HelperRecord.read(paths), time.time()
    if not found and not record.jobs:
        return None
    return {
        "ranks": len(found),
        "rank_hours": round(sum(stay.hours(now) for stay in found), 6),
        "accelerator_hours": round(sum(stay.hours(now) * stay.accelerators for stay in found), 6),
        "jobs": list(record.jobs),
        "budget_hours": round(record.spent() + sum(job.hours(now) for job in record.live()), 6),
    }


def joined_section(paths: RunPaths) -> str:
    """A sentence, and a row for each rank that joined; "" if nobody ever has."""
    found, account = stays(paths), joined_account(paths)
    if account is None:
        return ""
    rows: list[list[Cell]] = [
        [
            f"{stay.group}-{stay.rank}", stay.node, stay.job or "–", *map(_clock, (stay.joined, stay.works, stay.left)),
            f"{stay.hours():.2f}", stay.why or "it was there to the end of this account",
        ]
        for stay in found[-_ROWS:]
    ]  # fmt: skip
    words = (
        f"{account['ranks']} ranks joined, for {account['rank_hours']:.2f} hours in all. "
        f"{len(account['jobs'])} jobs were submitted for them (cluster.elastic), which took {account['budget_hours']:.2f} "
        "hours of their budget."
    )
    if len(found) > _ROWS:
        words += f" The last {_ROWS} of them:"
    head = ["rank", "node", "job", "joined", "took part", "left", "hours", "why"]
    listed = f'<div class="scroll">{table(head, rows, text_columns={0, 1, 2, 3, 4, 5, 7})}</div>' if rows else ""
    return f'<p class="legend">{escape(words)}</p>{listed}'


def _clock(at: float | None) -> str:
    return "–" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
