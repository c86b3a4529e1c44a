"""The model of `bench.scale_model` and real runs of the same loop: equal numbers of requests, file operations and bytes."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.scale_model import list_count_differences
from tests import warm

REPO = Path(__file__).resolve().parents[3]


@functools.cache
def real_run(ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.scale_loop", "--ranks", str(ranks)]
    done = warm.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return {"ranks": ranks, "phases": json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_model_counts_what_a_real_run_does(ranks: int) -> None:
    assert not list_count_differences(real_run(ranks))


def test_a_step_does_nothing_with_the_registry() -> None:
    for phase in ("rollout", "weights", "calls"):
        for measured in real_run(8)["phases"][phase][1:]:
            assert not [kind for kind in measured["numbers"] if kind.startswith("file ") and kind != "file watch"], (
                phase
            )


def test_an_announcement_of_weights_does_not_grow_with_the_receivers() -> None:
    """All places in the tree are sent with the first version only."""
    sizes = {
        ranks: [
            measured["num_bytes"]["request PUT"] / (ranks // 2) for measured in real_run(ranks)["phases"]["weights"]
        ]
        for ranks in (4, 8)
    }
    assert sizes[8][0] > sizes[4][0] + 30
    assert sizes[8][1] == pytest.approx(sizes[4][1], abs=20)
