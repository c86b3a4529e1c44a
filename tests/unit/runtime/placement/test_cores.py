"""Ranks stay on cores near their accelerators: of those that were granted, and never on fewer than they have threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime import os_resources

CARDS = ("0000:1b:00.0", "0001:e3:00.0")
#: Binds itself as told, then says what it and a child of it may use.
PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
from rlhpc.runtime.os_resources import bind_near
said = bind_near(sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[1]))
child = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], text=True)
print(json.dumps({"said": said, "mine": sorted(os.sched_getaffinity(0)), "childs": json.loads(child)}))
"""


@pytest.fixture
def granted() -> list[int]:
    """Two cores of this machine."""
    found = sorted(os.sched_getaffinity(0))[:2]
    assert len(found) == 2
    return found


def bound(pci: Path, cards: tuple[str, ...], threads: int, granted: list[int]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(pci), ",".join(cards), str(threads)], capture_output=True, text=True, check=True,
        timeout=60, preexec_fn=lambda: os.sched_setaffinity(0, granted),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["mine"] == found["childs"], "what it starts is bound with it"
    return found


@pytest.fixture
def bus(tmp_path: Path, granted: list[int]) -> Path:
    """Two cards: one near the first core, and some that were not granted; one near the second."""
    for card, text in zip(CARDS, (f"{granted[0]},4000-4003", f"{granted[1]}"), strict=True):
        (tmp_path / card).mkdir()
        (tmp_path / card / "local_cpulist").write_text(f"{text}\n")
    return tmp_path


def test_lists_of_cores() -> None:
    assert os_resources.parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert os_resources.parse_cores("\n") == set()


def test_a_rank_is_bound_to_granted_cores_near_its_card(bus: Path, granted: list[int]) -> None:
    for card, core in zip(CARDS, granted, strict=True):
        found = bound(bus, (card,), 1, granted)
        assert found["mine"] == [core]
        assert found["said"] == f"bound to 1 of its 2 cores, those near its accelerators ({card})"


@pytest.mark.parametrize(
    ("cards", "threads", "granted_of", "said"),
    [
        (CARDS, 1, slice(2), "not bound: all its 2 cores are near its accelerators"),
        (CARDS[:1], 2, slice(2), "not bound: 1 of its 2 cores are near its accelerators, and it has 2 threads"),
        (CARDS[:1], 1, slice(1, 2), "not bound: the kernel does not tell of a granted core that is near"),
        (("0000:ff:00.0",), 1, slice(2), "not bound: the kernel does not tell of a granted core that is near"),
    ],
    ids=["all near", "too few", "not granted", "not there"],
)
def test_otherwise_it_keeps_what_it_was_granted(
    bus: Path, granted: list[int], cards: tuple[str, ...], threads: int, granted_of: slice, said: str
) -> None:
    found = bound(bus, cards, threads, granted[granted_of])
    assert found["mine"] == granted[granted_of] and found["said"].startswith(said)
