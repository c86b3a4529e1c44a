"""Placement grid: a picture of nodes × slots × ranks, from `placement` in provenance.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhpc.metrics.page import missing

_CPU = -1


def placement_grid(placement: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> str:
    """Renders a table with one row per node and one column per accelerator; processes without one are listed under `CPU`.

    Args:
        placement: `{component: [{"rank": 0, "node": "n1", "accelerators": [0, 1]}, ...]}`; `node_rank` is used if
            `node` is missing.
    """
    if not placement or not any(placement.values()):
        return missing("No placement recorded in provenance.json.")
    try:
        return _grid(placement)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return missing(f"The placement in provenance.json cannot be read: {escape(str(error))}")


def _grid(placement: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    # A node is identified by rank and name: virtual nodes on one machine may share the name.
    cells: dict[tuple[int, str], dict[int, dict[str, list[int]]]] = {}
    for component, ranks in placement.items():
        for entry in ranks:
            node_rank = int(entry.get("node_rank", 0))
            slots_of = cells.setdefault((node_rank, str(entry.get("node", f"node {node_rank}"))), {})
            for slot in entry.get("accelerators") or [_CPU]:
                slots_of.setdefault(int(slot), {}).setdefault(component, []).append(int(entry["rank"]))
    used = {slot for slots_of in cells.values() for slot in slots_of}
    slots = [*range(max(used) + 1), *([_CPU] if _CPU in used else [])]
    colors = {component: index % 8 for index, component in enumerate(placement)}
    head = "".join(f"<th>{'CPU' if slot == _CPU else f'accelerator {slot}'}</th>" for slot in slots)
    names = [name for _, name in cells]
    body = ""
    for node_rank, name in sorted(cells):
        label = name if names.count(name) == 1 else f"{name} ({node_rank})"
        body += f'<tr><td class="name">{escape(label)}</td>'
        for slot in slots:
            inside = cells[node_rank, name].get(slot, {})
            chips = "".join(_chips(component, ranks, colors[component]) for component, ranks in inside.items())
            body += f"<td>{chips}</td>" if chips else '<td class="free"></td>'
        body += "</tr>"
    legend = "".join(
        f"<span>{_chip(component, colors[component])}{len(ranks)} process{'es' if len(ranks) != 1 else ''}</span>"
        for component, ranks in placement.items()
    )
    return (
        f'<p class="legend">{legend}</p><div class="scroll"><table class="grid"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _chips(component: str, ranks: Sequence[int], color: int) -> str:
    """Renders one chip per rank or, for many ranks, per range of ranks."""
    ordered = sorted(ranks)
    if len(ordered) <= 6:
        return "".join(_chip(f"{component} {rank}", color) for rank in ordered)
    stretches: list[list[int]] = []
    for rank in ordered:
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    spans = ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in stretches)
    return _chip(f"{component} {spans}", color)


def _chip(text: str, color: int) -> str:
    return f'<span class="chip" style="background:var(--c{color})">{escape(text)}</span>'
