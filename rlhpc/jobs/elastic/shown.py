"""The ranks that joined a run, and the jobs that they are from, as `rlhpc status` shows them."""

from __future__ import annotations

import time

from rlhpc.jobs.attendance import stays
from rlhpc.jobs.elastic.record import HelperRecord
from rlhpc.jobs.paths import RunPaths

#: Ranks that have left of which a line is shown.
_SHOWN = 12


def helper_lines(paths: RunPaths, *, over: bool) -> list[str]:
    """A table of who has joined, and a line for the jobs in the queue; nothing where nobody ever has."""
    record, found, now = HelperRecord.read(paths), stays(paths), time.time()
    queued = [] if over else [job for job in record.live() if job.started is None]
    lines = []
    if queued:
        reasons = ", ".join(dict.fromkeys(job.reason for job in queued if job.reason)) or "submitted"
        lines.append(f"helpers      {len(queued)} job{'s' if len(queued) > 1 else ''} in the queue: {reasons}")
    if not found:
        return lines
    there, gone = [stay for stay in found if stay.left is None], [stay for stay in found if stay.left is not None]
    hours = sum(stay.hours(now) for stay in found)
    lines.append(f"joined       {len(found)} ranks in all, {len(there)} there now, {hours:.2f} hours")
    lines += ["", f"{'joined':<16} {'node':<16} {'job':>10}  {'came':<11}  {'left':<11}  {'hours':>6}  why"]
    for stay in [*gone[-_SHOWN:], *there]:
        came, left = _clock(stay.joined), "" if stay.left is None else _clock(stay.left)
        why = stay.why or ("works" if stay.works else "loads")
        lines.append(
            f"{f'{stay.group}-{stay.rank}':<16} {stay.node:<16} {stay.job or '-':>10}  {came:<11}  {left:<11}  "
            f"{stay.hours(now):>6.2f}  {why}"
        )
    if len(gone) > _SHOWN:
        lines.append(f"… and {len(gone) - _SHOWN} that left before; {paths.attendance.name} has all")
    return lines


def _clock(at: float) -> str:
    return time.strftime("%d.%m %H:%M", time.localtime(at))
