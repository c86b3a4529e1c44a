"""What a role moves to the host leaves memory that torch keeps for itself: it goes back last, when all has been moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhpc.language.algorithms.distillation import FromAll
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.scoring.reward_models import ProcessRewards
from rlhpc.language.workers.grpo_actor import GrpoActor
from rlhpc.language.workers.scoring import ScoringWorker


class Moved(nn.Module):
    """A model that says when it goes to the host."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def to(self, *given: Any, **options: Any) -> Any:
        self.said.append("moved")
        return self


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in turn, as on a machine with an accelerator."""
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("given back"))
    return events


def scorer(cls: type, said: list[str]) -> Any:
    made = cls.__new__(cls)
    made.model = Moved(said)
    return made


@pytest.mark.parametrize("cls", [LogProbs, ProcessRewards])
def test_a_rank_that_scores_gives_its_memory_back(cls: type, said: list[str]) -> None:
    worker: Any = ScoringWorker.__new__(ScoringWorker)
    worker.scorer = scorer(cls, said)
    worker.offload()
    assert said == ["moved", "given back"]


def test_an_actor_gives_back_what_its_algorithm_holds_beside_it(said: list[str]) -> None:
    reader: Any = FromAll.__new__(FromAll)
    reader.teacher = SimpleNamespace(offload=scorer(LogProbs, said).offload)
    actor: Any = GrpoActor.__new__(GrpoActor)
    actor.backend = SimpleNamespace(offload=lambda: said.append("moved"))
    actor._scorers, actor._reader = {"teacher": scorer(LogProbs, said)}, reader
    actor.offload()
    assert said == ["moved"] * 3 + ["given back"]
