"""What there is too much of for every run: each takes a part, drawn by the commit; `make test-all` takes all of it.

What is to be drawn from is shuffled by a seed and dealt into n parts, of which this run takes the k-th: the n parts together
are everything. pytest says which part it took, and with `make test-all SEED=… PART=k/n` anybody takes it again.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEED, PART = "RLHPC_TESTS_SEED", "RLHPC_TESTS_PART"


def commit() -> str:
    """What is checked out; of a tree without its history nothing but the same each time."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "1"


def part() -> tuple[int, int]:
    """(k, n) of this run.

    Raises:
        pytest.UsageError: It is not one.
    """
    text = os.environ.get(PART, "1/20")
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"{PART} is {text!r}; it must be k/n with 1 <= k <= n, such as 1/20")
    return int(number), int(count)


def seed() -> str:
    return os.environ.setdefault(SEED, commit())


def number() -> int:
    """The seed, for what wants a number."""
    return random.Random(seed()).randrange(2**31)


def drawn(what: str, everything: Iterable[str], *, always: Sequence[str] = (), least: int = 1) -> list[str]:
    """This run's part, sorted.

    Args:
        what: A word of its own for each that draws.
        always: Those that each run takes.
        least: So many are drawn even where the part has fewer.
    """
    names, (k, n) = sorted(everything), part()
    random.Random(f"{seed()} {what}").shuffle(names)
    ordered = [name for first in range(n) for name in names[(k - 1 + first) % n :: n]]
    return sorted({*always, *ordered[: max(least, len(names[k - 1 :: n]))]})


def pytest_report_header() -> str:
    k, n = part()
    return f"part {k}/{n} of the long tests, drawn by {seed()}: make test-all SEED={seed()} PART={k}/{n} takes it again"
