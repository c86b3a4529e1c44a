"""Grammar of `cluster.component_placement`: `resource ranks[:process ranks]`, comma-separated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement.strategies import extent

Fail = Callable[[str, str], PlacementError]


@dataclass(frozen=True)
class _Segment:
    """Segment of a placement: resources, and the processes that share them."""

    text: str
    resources: tuple[int, ...]
    processes: tuple[int, ...]


def _parse_ranks(text: str, total: int | None, fail: Fail) -> list[int]:
    """Parses a rank, a range, or (if `total` is given) `all`."""
    text = text.strip()
    if text.lower() == "all":
        if total is None:
            raise fail(text, "'all' stands for resources only; write process ranks as 0-3")
        return list(range(total))
    match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", text)
    if not match or len(text) > 24:
        raise fail(text, "not a rank (3), a range (0-3) or 'all'")
    first_number, last_number = int(match[1]), int(match[2] or match[1])
    if last_number < first_number:
        raise fail(text, "a range runs upwards")
    if total is not None and last_number >= total:
        raise fail(text, f"resource {last_number} does not exist")
    if last_number - first_number >= 10**6:
        raise fail(text, "more than a million processes")
    return list(range(first_number, last_number + 1))


def _split_segments(text: str, resources: int, fail: Fail) -> list[_Segment]:
    """Splits a placement into segments.

    Parts without `:` before a part with `:` have two possible meanings. They are separate segments with one process per
    resource, or they are resources of the segment that ends with the part with `:`. The first process rank after the `:`
    decides: in the first case, it counts on after the processes of these parts.
    """
    segments: list[_Segment] = []
    open_parts: list[tuple[str, list[int]]] = []
    num_placed = 0

    def add_segment(part: str, ranks: list[int]) -> None:
        nonlocal num_placed
        segments.append(_Segment(part, tuple(ranks), tuple(range(num_placed, num_placed + len(ranks)))))
        num_placed += len(ranks)

    for part_text in (p.strip() for p in text.split(",")):
        resource_text, colon, process_text = part_text.partition(":")
        if not resource_text.strip() or (colon and not process_text.strip()):
            raise fail(part_text, "ranks are missing; write resource ranks, or resource ranks:process ranks")
        if ":" in process_text:
            raise fail(part_text, "more than one ':'; separate segments with commas")
        ranks = _parse_ranks(resource_text, resources, fail)
        if not colon:
            open_parts.append((part_text, ranks))
            continue
        process_ranks = _parse_ranks(process_text, None, fail)
        if open_parts and process_ranks[0] != num_placed:
            for open_part in open_parts:
                add_segment(*open_part)
            open_parts = []
        segment_text = ",".join([*(p for p, _ in open_parts), part_text])
        if process_ranks[0] != num_placed:
            raise fail(
                segment_text,
                f"process ranks start at {process_ranks[0]} instead of {num_placed}: they count up from 0 without gaps",
            )
        resource_ranks = [r for _, rs in open_parts for r in rs] + ranks
        segments.append(_Segment(segment_text, tuple(resource_ranks), tuple(process_ranks)))
        num_placed, open_parts = num_placed + len(process_ranks), []
    for open_part in open_parts:
        add_segment(*open_part)
    return segments


def parse_placement(
    component: str, text: str, resources: int, unit: str = "resource", label: str = "cluster"
) -> list[list[int]]:
    """Parses one placement string.

    Args:
        component: Name of the component, for messages.
        text: `resource ranks[:process ranks]`, comma-separated.
        resources: Number of resources.
        unit: Type of the resources (accelerator or node), for messages.
        label: Node group of the resources, for messages.

    Returns:
        Resource ranks of each process, in rank order.

    Raises:
        PlacementError: The text breaks a rule; the message has the component, the wrong part of the text and the rule.
    """

    def fail(part: str, rule: str) -> PlacementError:
        context = "" if part.strip() == text.strip() else f" in {text!r}"
        return PlacementError(
            f"cluster.component_placement.{component}: {part!r}{context}: {rule} ({extent(label, unit, resources)})"
        )

    processes: list[list[int]] = []
    previous_rank = -1
    for segment in _split_segments(text, resources, fail):
        for rank in segment.resources:
            if rank <= previous_rank:
                raise fail(
                    segment.text, f"{unit} {rank} follows {previous_rank}; resource ranks are unique and ascending, and each "
                    f"comma after a ':' begins the next segment"
                )  # fmt: skip
            previous_rank = rank
        num_resources, num_processes = len(segment.resources), len(segment.processes)
        if num_resources == 0:
            raise fail(segment.text, f"there is no {unit}")
        if num_resources % num_processes and num_processes % num_resources:
            raise fail(
                segment.text, f"{num_resources} {unit}s and {num_processes} processes: one count must divide the other"
            )
        if num_resources >= num_processes:
            per_process = num_resources // num_processes
            processes += [
                list(segment.resources[i * per_process : (i + 1) * per_process]) for i in range(num_processes)
            ]
        else:
            processes += [[rank] for rank in segment.resources for _ in range(num_processes // num_resources)]
    return processes
