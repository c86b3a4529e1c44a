"""Scoring worker: how its ranks are started."""

from __future__ import annotations

from pathlib import Path

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.workers.scoring import JudgeWorker
from tests.unit.language.scoring.judges import Scripted, judge_model, second  # noqa: F401 (a fixture)


def test_ranks_are_forked_where_all_engines_allow_it(model: Path) -> None:
    assert JudgeWorker.forks(second(model, rollout_backend="hf"))
    assert not JudgeWorker.forks(second(model, rollout_backend=f"{Scripted.__module__}:Scripted"))
