"""The grammar of `cluster.component_placement`: `resource ranks[:process ranks]`, comma-separated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement.strategies import extent

Fail = Callable[[str, str], PlacementError]


@dataclass(frozen=True)
class _Segment:
    """A piece of a placement: resources, and the processes that share them."""

    text: str
    resources: tuple[int, ...]
    processes: tuple[int, ...]


def _numbers(text: str, total: int | None, fail: Fail) -> list[int]:
    """Parses a rank, a range, or (if `total` is given) `all`."""
    text = text.strip()
    if text.lower() == "all":
        if total is None:
            raise fail(text, "'all' stands for resources only; write process ranks as 0-3")
        return list(range(total))
    match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", text)
    if not match or len(text) > 24:
        raise fail(text, "not a rank (3), a range (0-3) or 'all'")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise fail(text, "a range runs upwards")
    if total is not None and last >= total:
        raise fail(text, f"resource {last} does not exist")
    if last - first >= 10**6:
        raise fail(text, "more than a million processes")
    return list(range(first, last + 1))


def _segments(text: str, resources: int, fail: Fail) -> list[_Segment]:
    """Splits a placement into segments.

    Parts without `:` before one with `:` are either separate segments, one process per resource, or the head of a comma
    list whose processes the last part names. The first process rank after the `:` decides: either it counts the processes of
    those parts, or it does not.
    """
    segments: list[_Segment] = []
    head: list[tuple[str, list[int]]] = []
    done = 0

    def each(part: str, ranks: list[int]) -> None:
        nonlocal done
        segments.append(_Segment(part, tuple(ranks), tuple(range(done, done + len(ranks)))))
        done += len(ranks)

    for part in (p.strip() for p in text.split(",")):
        resource_text, colon, right = part.partition(":")
        if not resource_text.strip() or (colon and not right.strip()):
            raise fail(part, "ranks are missing; write resource ranks, or resource ranks:process ranks")
        if ":" in right:
            raise fail(part, "more than one ':'; separate segments with commas")
        ranks = _numbers(resource_text, resources, fail)
        if not colon:
            head.append((part, ranks))
            continue
        names = _numbers(right, None, fail)
        if head and names[0] != done:
            for bare in head:
                each(*bare)
            head = []
        segment_text = ",".join([*(p for p, _ in head), part])
        if names[0] != done:
            raise fail(
                segment_text, f"process ranks start at {names[0]} instead of {done}: they count up from 0 without gaps"
            )
        joined = [r for _, rs in head for r in rs] + ranks
        segments.append(_Segment(segment_text, tuple(joined), tuple(names)))
        done, head = done + len(names), []
    for bare in head:
        each(*bare)
    return segments


def parse_placement(
    component: str, text: str, resources: int, unit: str = "resource", label: str = "cluster"
) -> list[list[int]]:
    """Parses one placement string.

    Args:
        component: Name, for messages.
        text: `resource ranks[:process ranks]`, comma-separated.
        resources: Number of resources.
        unit: Their type (accelerator or node), for messages.
        label: Their node group, for messages.

    Returns:
        The resource ranks of each process, in rank order.

    Raises:
        PlacementError: The text breaks a rule; names the component, the text at fault and the rule.
    """

    def fail(part: str, rule: str) -> PlacementError:
        where = "" if part.strip() == text.strip() else f" in {text!r}"
        return PlacementError(
            f"cluster.component_placement.{component}: {part!r}{where}: {rule} ({extent(label, unit, resources)})"
        )

    processes: list[list[int]] = []
    last = -1
    for segment in _segments(text, resources, fail):
        for rank in segment.resources:
            if rank <= last:
                raise fail(
                    segment.text, f"{unit} {rank} follows {last}; resource ranks are unique and ascending, and each "
                    f"comma after a ':' begins the next segment"
                )  # fmt: skip
            last = rank
        n, p = len(segment.resources), len(segment.processes)
        if n == 0:
            raise fail(segment.text, f"there is no {unit}")
        if n % p and p % n:
            raise fail(segment.text, f"{n} {unit}s and {p} processes: one count must divide the other")
        if n >= p:
            each = n // p
            processes += [list(segment.resources[i * each : (i + 1) * each]) for i in range(p)]
        else:
            processes += [[rank] for rank in segment.resources for _ in range(p // n)]
    return processes
