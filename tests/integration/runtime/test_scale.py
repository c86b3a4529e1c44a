"""What a group costs as it grows: counted, not timed, with the members of `bench/scale.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import warm

REPO = Path(__file__).resolve().parents[3]


def simulated(members: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scale", "--only", "simulated", str(members)]
    done = warm.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_a_member_asks_of_the_filesystem_does_not_grow_with_the_group():
    few, many = simulated(20), simulated(1000)
    assert few["file operations a member"] == many["file operations a member"] <= 5
    # the driver writes its table of ranks at most once a second, so a longer start has more of these writes
    assert few["file operations of the driver"] <= many["file operations of the driver"] <= 20
