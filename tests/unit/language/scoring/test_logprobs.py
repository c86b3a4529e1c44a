"""What a role moves to the host leaves memory that torch keeps for itself: it goes back last, when all has been moved."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.scoring.reward_models import ProcessRewards
from rlhpc.language.workers.scoring import ScoringWorker
from tests.unit.language.scoring.moved import accelerator_events, scorer  # noqa: F401 (a fixture)


@pytest.mark.parametrize("cls", [LogProbs, ProcessRewards])
def test_a_rank_that_scores_gives_its_memory_back(cls: type, said: list[str]) -> None:
    worker: Any = ScoringWorker.__new__(ScoringWorker)
    worker.scorer = scorer(cls, said)
    worker.offload()
    assert said == ["moved", "given back"]
