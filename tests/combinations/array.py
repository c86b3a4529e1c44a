"""Rows of options in which any two values of two options meet, as far as `rlhpc plan` accepts them together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from rlhpc.jobs.plan import build_plan
from rlhpc.runs.checks import check_planned
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import RlhpcError
from tests.combinations.options import Kind, Row, Value

#: Two options with a value each.
Pair = tuple[str, Value, str, Value]
#: Rows from which the one with most new pairs is taken.
_CANDIDATES = 30


def pairs_of(row: Row) -> set[Pair]:
    """Returns the pairs that meet in a row."""
    names = sorted(row)
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def pairwise(kind: Kind, seed: object) -> list[dict[str, Value]]:
    """Returns rows in which all pairs meet, whether or not they are accepted; the same for a seed."""
    draw = random.Random(f"{seed} {kind.name}")
    names = sorted(kind.options)
    order = [
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in kind.options[a]
        for y in kind.options[b]
    ]  # fmt: skip
    draw.shuffle(order)
    left, rows = dict.fromkeys(order), list[dict[str, Value]]()
    while left:
        a, x, b, y = next(iter(left))
        candidates = [
            {name: draw.choice(kind.options[name]) for name in names} | {a: x, b: y} for _ in range(_CANDIDATES)
        ]
        best = max(candidates, key=lambda row: len(pairs_of(row) & left.keys()))
        for pair in pairs_of(best):
            left.pop(pair, None)
        rows.append(best)
    return rows


def refusal(kind: Kind, row: Row, folder: Path) -> str:
    """Returns what `rlhpc plan` says against a row, in this process; "" if it accepts it."""
    try:
        cfg = load_config(kind.write(row, folder), kind.overrides(row))
        check_planned(cfg)
        build_plan(cfg, launcher="local")
    except RlhpcError as error:
        return str(error)
    return ""


def accepted(kind: Kind, row: Row, folder: Path, draw: random.Random) -> tuple[dict[str, Value], list[str]]:
    """Puts options of a row back to their defaults, as few as it finds, until `rlhpc plan` accepts it.

    Returns:
        The row, and what was said against it on the way.
    """
    row, default, said = dict(row), kind.default(), list[str]()
    while reason := refusal(kind, row, folder):
        said.append(reason)
        other = [name for name in row if row[name] != default[name]]
        draw.shuffle(other)
        other.sort(key=lambda name: not _is_named(kind, row, name, reason))
        outcomes = list[tuple[str, str]]()
        for name in other[:8]:
            after = refusal(kind, {**row, name: default[name]}, folder)
            outcomes.append((name, after))
            if not after:
                break
        name = next(
            (name for name, after in outcomes if not after),
            next((name for name, after in outcomes if after != reason), outcomes[0][0]),
        )
        row[name] = default[name]
    return row, said


def _is_named(kind: Kind, row: Row, name: str, reason: str) -> bool:
    """Whether a refusal names a key that an option sets."""
    before = {*kind.overrides({**row, name: kind.options[name][0]})}
    keys = [word.partition("=")[0] for word in kind.overrides(row) if word not in before]
    return any(key in reason for key in keys)


def coverage(kind: Kind, rows: Sequence[Row]) -> tuple[int, int]:
    """Returns how many pairs meet in these rows, and how many there are."""
    met = set[Pair]().union(*(pairs_of(row) for row in rows)) if rows else set()
    counts = [len(values) for values in kind.options.values()]
    return len(met), sum(a * b for a, b in itertools.combinations(counts, 2))
