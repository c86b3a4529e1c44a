"""What `rlhpc plan --when` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlhpc.runs.when import SAME_S, Answer, Outlook, Shape


def render(found: Outlook) -> str:
    """What `rlhpc plan --when` prints."""
    unit = "GPU-hours" if any(answer.shape.accelerators for answer in found.answers) else "node hours"
    table = [["", "nodes", "GPUs", "partition", "walltime", "start", "end", "jobs", unit]]
    for index, answer in enumerate(found.answers):
        shape = answer.shape
        table.append(
            [
                f"{index + 1}{' (as configured)' if shape.configured else ''}",
                str(shape.nodes), str(shape.accelerators), shape.partition or "default",
                "default" if shape.walltime is None else f"{shape.walltime} min",
                answer.start.words if answer.start.at is None else moment(answer.start.at, found.now),
                "-" if answer.end is None else moment(answer.end, found.now),
                "-" if shape.jobs is None else str(shape.jobs),
                "-" if shape.hours is None else f"{shape.hours:.3g}",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["when (sbatch --test-only: an estimate; jobs may end sooner, or others overtake this one)"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines += [f"not possible on {text}" for text in found.left_out]
    if found.why_no_end:
        lines.append(found.why_no_end)
    lines += [*verdict(found), *_account(found)]
    return "\n".join(lines)


def verdict(found: Outlook) -> list[str]:
    """What the best is, and what it is better than; and the words that make the configuration ask for it."""
    possible = [answer for answer in found.answers if answer.start.at is not None]
    if not possible:
        return ["no shape would start: rlhpc doctor says what this cluster allows"]
    best = possible[0]
    lines = []
    other = next((answer for answer in possible[1:] if answer.rank[1] > best.rank[1]), None)
    if other is not None:
        ends = best.end is not None and other.end is not None
        verb, count = "end" if ends else "start", best.shape.accelerators or best.shape.nodes
        lines.append(
            f"{_what(best, found.now)} {verb}{'s' * (count == 1)} before {_what(other, found.now)}"
            + (f": {moment(best.end or 0, found.now)}, not {moment(other.end or 0, found.now)}" if ends else "")
        )
    if best.shape.idle_gpus:
        where = best.shape.partition or "the default partition"
        lines.append(f"the nodes of {where} have GPUs, which this run would not use: ask whether the site allows that")
    if best.shape.overrides:
        lines.append(f"for the first: {' '.join(best.shape.overrides)}")
    return lines


def _what(answer: Answer, now: float) -> str:
    shape = answer.shape
    count = _some(shape.accelerators, "GPU") if shape.accelerators else _some(shape.nodes, "node")
    where = f" in {shape.partition}" if shape.partition else ""
    when = moment(answer.start.at or now, now)
    return f"{count}{where} {when if when == 'now' else f'from {when}'}"


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def moment(at: float, now: float) -> str:
    """A time as a person says it: now, the hour of today, a weekday, or a date."""
    if at - now < SAME_S:
        return "now"
    local, today = time.localtime(at), time.localtime(now)
    if local[:3] == today[:3]:
        return time.strftime("%H:%M", local)
    return time.strftime("%A %H:%M" if at - now < 6 * 86400 else "%Y-%m-%d %H:%M", local)


def _account(found: Outlook) -> list[str]:
    """What the account has left, and which shapes need more."""
    allowed = found.allowed
    if allowed is None:
        return ["what the account may use is not known: sshare does not tell"]
    share = "" if allowed.fair_share is None else f"; fair share {allowed.fair_share:.2f}"
    parts = [
        f"{(limit - used) / 60:.3g} of {limit / 60:.3g} {_word(resource)}-hours left"
        for resource, (limit, used) in allowed.minutes.items()
        if limit > 0
    ]
    lines = [f"account {allowed.account}: {', '.join(parts) or 'no limit'}{share}"]
    for answer in found.answers:
        lines += [f"  {text}" for text in _beyond(answer.shape, allowed.minutes)]
    return lines


def _word(resource: str) -> str:
    return {"gres/gpu": "GPU", "cpu": "CPU"}.get(resource, resource)


def _beyond(shape: Shape, minutes: Mapping[str, tuple[float, float]]) -> list[str]:
    """Limits that a shape's run would exceed."""
    needs: dict[str, Any] = {"gres/gpu": shape.accelerators, "node": shape.nodes}
    found = []
    for resource, count in needs.items():
        if shape.train_s is None or not count or resource not in minutes:
            continue
        limit, used = minutes[resource]
        hours = shape.train_s * count / 3600
        if hours > (limit - used) / 60:
            found.append(
                f"{_some(shape.nodes, 'node')} in {shape.partition or 'the default partition'}: {hours:.3g} "
                f"{_word(resource)}-hours are more than that"
            )
    return found
