"""The table that `rlhpc tune` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.metrics.page import size

#: Runs of the same that are further apart, relative to their mean, say that somebody else is at work on the machine.
_NOISY = 0.2
_BUSY = "that much says that others are at work on this machine: measure again when it is quiet, or with more --steps"


def render(record: Mapping[str, Any], tuned: str, command: str) -> str:
    """What tune.json has, as text.

    Args:
        record: Its content.
        tuned: The configuration of the winner.
        command: What to type to run that.
    """
    accelerators = record["hours_of"] == "accelerators"
    verified = any(row["measured_step_s"] is not None for row in record["rows"])
    head = ["", "placement", "changes", "s a step", "idle", "memory", "GPU-hours" if accelerators else "node hours"]
    table = [[*head, *(["measured", "error"] if verified else [])]]
    for index, row in enumerate(record["rows"]):
        cells = [
            f"{index + 1}{'*' if index == record['winner'] else ''}",
            _placement(row["placement"]) + (" (as configured)" if row["configured"] else ""),
            " ".join(f"{key}={_word(value)}" for key, value in row["settings"].items()) or "-",
            f"{row['step_s']:.3g}",
            f"{row['idle']:.0%}",
            size(row["device_memory"] if accelerators else row["memory"]),
            f"{row['hours']:.3g}",
        ]
        if verified:
            seconds, error = row["measured_step_s"], row["error"]
            cells += ["-", "-"] if seconds is None else [f"{seconds:.3g}", f"{error:+.0%}"]
        table.append(cells)
    machines, spread = record["machines"], record["costs"]["spread"]
    with_ = f", {machines['accelerators']} accelerators" if accelerators else f", {sum(machines['cores'])} cores"
    lines = [
        f"{machines['nodes']} node{'s' * (machines['nodes'] != 1)}{with_}; hours for {record['samples']} {record['unit']}; "
        f"runs of the same were up to {spread:.0%} apart",
        *([_BUSY] if spread > _NOISY else []),
        *_aligned(table),
        f"* {tuned}",
        f"  {command}",
    ]
    return "\n".join(lines)


def _placement(placement: Mapping[str, Any]) -> str:
    """Groups with the same place together."""
    by_place: dict[str, list[str]] = {}
    for group, place in placement.items():
        text = f"{place['node_group']} {place['placement']}" if isinstance(place, Mapping) else str(place)
        by_place.setdefault(text, []).append(group)
    return "; ".join(f"{','.join(groups)}: {text}" for text, groups in by_place.items())


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = (0, 1, 2)
    return [
        "  ".join(
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
