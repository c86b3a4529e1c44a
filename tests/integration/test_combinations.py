"""The generator of `make combinations`: all pairs meet, what is refused is put back, and each fault is told of."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.combinations.array import accepted, coverage, pairs_of, pairwise, refusal
from tests.combinations.options import KINDS, Kind
from tests.combinations.trial import Start, faults_of
from tests.extras import need_extra

need_extra("llm", "embodied")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_all_pairs_meet_in_the_rows(kind: Kind) -> None:
    rows = pairwise(kind, 1)
    met, total = coverage(kind, rows)
    assert met == total == len(set().union(*map(pairs_of, rows)))
    assert pairwise(kind, 1) == rows != pairwise(kind, 2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_defaults_are_accepted_and_what_is_refused_is_put_back(kind: Kind, tmp_path: Path) -> None:
    refused = {
        "language": {"offload": True, "staleness": 1},
        "preferences": {"divided": "context", "padding": "kept"},
        "embodied": {"chunks": 2, "level": "values", "loss": "gspo"},
    }
    assert refusal(kind, kind.default(), tmp_path) == ""
    row, said = accepted(kind, {**kind.default(), **refused[kind.name]}, tmp_path, random.Random(1))
    assert refusal(kind, row, tmp_path) == ""
    assert (row != {**kind.default(), **refused[kind.name]}) == bool(said)


def test_each_way_to_go_wrong_is_told_of() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "train/loss": 0.5} for step in (1, 2, 3)]
    assert faults_of(Start(0, "", rows), range(1, 4), "") == []
    starts = {
        "hang: slow": Start(None, "slow\n", rows),
        "refused late: error": Start(2, "first\nerror\n\n", []),
        "crash (-9): nothing was said": Start(-9, "", []),
        "rows: [1, 2] rather than [1, 2, 3]": Start(0, "", rows[:2]),
        "non-finite: train/loss": Start(0, "", [*rows[:2], {"step": 3, "train/loss": math.nan}]),
        "non-finite: train/kl": Start(0, "", [*rows[:2], {"step": 3, "train/kl": None}]),  # as the file has it
    }
    for fault, start in starts.items():
        assert faults_of(start, range(1, 4), "resume: ") == [f"resume: {fault}"]
