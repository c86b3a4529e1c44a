"""Tuning of a run's layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import compute_memory_plan
from rlhpc.runs.tuning.shapes import Candidate, GroupPlacement
from rlhpc.runs.tuning.tune import TuneRequest, is_allowed

MATH = str(Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "math.yaml")


@pytest.mark.parametrize(
    ("memory", "check", "here"),
    [
        ("24G", "refuse", False),
        ("80G", "warn", False),
        ("80G", "refuse", True),
        ("80G", "off", True),
        (None, "refuse", False),
    ],
)
def test_what_the_account_of_memory_refuses_is_not_proposed(memory: str | None, check: str, here: bool) -> None:
    """For each number of ranks as a start of the very configuration would be judged, whatever fewer or more ranks held."""
    words = ["cluster.accelerators_per_node=8", f"cluster.memory_check={check}"]
    words += [] if memory is None else [f"cluster.accelerator_memory={memory}"]
    verdicts = []
    for ranks in (8, 1):
        place = GroupPlacement.from_range("cluster", 0, ranks)
        candidate = Candidate({"actor": place, "rollout": place}, {})
        cfg = load_config(MATH, [*words, *candidate.overrides()])
        fits = not compute_memory_plan(
            cfg, build_plan(cfg, launcher="local" if here else "slurm"), build=False
        ).refusals()
        verdicts.append(is_allowed(TuneRequest(MATH, tuple(words)), candidate, is_local=here))
        assert verdicts[-1] == (fits or check == "off")
    if not here:
        assert verdicts == {"24G": [False, False], "80G": [True, False], None: [True, True]}[memory]
