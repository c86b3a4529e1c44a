"""Walltimes in Slurm's syntax."""

from __future__ import annotations


def minutes_of(time: str) -> int:
    """Minutes of a walltime in Slurm's syntax, rounded up as Slurm does: `90`, `30:00`, `02:00:00`, `1-12`, `1-12:00:00`."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # minutes[:seconds]
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    else:
        hours, minutes, seconds = parts
    return int(days or 0) * 1440 + hours * 60 + minutes + (seconds + 59) // 60
