"""What a judge has said, and what follows from it. Whatever is not exactly in the form asked for is no verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_SCORE = re.compile(r"Score: (-?[0-9]{1,9}(?:\.[0-9]{1,9})?)")
_BETTER = re.compile(r"Better: (A|B|neither)")
#: The better of two answers: the one shown first, the one shown second, or neither.
FIRST, SECOND, NEITHER = "A", "B", "neither"


def score_in(reply: str, low: float, high: float) -> float | None:
    """The grade that a reply ends with, 0 at `low` and 1 at `high`.

    Args:
        reply: What the judge wrote; its last line has to be `Score: <number>`, and no other may have anything like it.
        low, high: The scale.

    Returns:
        None if there is no such line, if there are several, or if the number is off the scale.
    """
    found = _verdict(reply, "score", _SCORE)
    if found is None or not low <= float(found) <= high:
        return None
    return (float(found) - low) / (high - low)


def better_in(reply: str) -> str | None:
    """Which of two answers a reply prefers: `FIRST`, `SECOND` or `NEITHER`; None where its last line, `Better: <which>`, is
    missing, or is not the only one."""
    return _verdict(reply, "better", _BETTER)


def _verdict(reply: str, word: str, form: re.Pattern[str]) -> str | None:
    reply = reply.rpartition("</think>")[2]  # what it thought is no verdict
    if reply.lstrip().startswith("<think>"):  # and it still thinks
        return None
    last = reply.rstrip("\n").rpartition("\n")[2]
    found = form.fullmatch(last.strip(" "))
    if found is None or len(re.findall(rf"{word}\W*[:=]", reply, re.IGNORECASE)) != 1:
        return None
    return found[1]


def pairs(count: int) -> Iterator[tuple[int, int]]:
    """All pairs of `count` answers, by rounds: in each, everyone meets one other at most, so that a few rounds treat all
    alike."""
    places = [*range(count), *([count] if count % 2 else [])]  # the one beyond the end: whoever meets it has a rest
    for _ in range(len(places) - 1):
        for one, other in zip(places[: len(places) // 2], reversed(places), strict=False):
            if max(one, other) < count:
                yield min(one, other), max(one, other)
        places = [places[0], places[-1], *places[1:-1]]


def both_say(in_order: str | None, swapped: str | None) -> float | None:
    """The part of a comparison that the first answer wins, when the judge has seen the pair in both orders; None where it has
    not said the same both times."""
    if in_order == NEITHER and swapped == NEITHER:
        return 0.5
    if (in_order, swapped) == (FIRST, SECOND):
        return 1.0
    return 0.0 if (in_order, swapped) == (SECOND, FIRST) else None


def shares(count: int, won: Mapping[tuple[int, int], float | None]) -> list[float | None]:
    """Each answer's share of the comparisons that count; None for one that has none.

    Args:
        count: Number of answers.
        won: Pair → the part that its first one wins; None where that is not known.
    """
    parts: Sequence[list[float]] = [[] for _ in range(count)]
    for (one, other), part in won.items():
        if part is not None:
            parts[one].append(part)
            parts[other].append(1.0 - part)
    return [sum(found) / len(found) if found else None for found in parts]
