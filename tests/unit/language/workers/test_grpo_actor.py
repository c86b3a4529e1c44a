"""GRPO actor: memory that its algorithm holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhpc.language.algorithms.distillation import FullDivergenceReader
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.workers.grpo_actor import GrpoActor
from tests.unit.language.scoring.moved import accelerator_events, scorer  # noqa: F401 (a fixture)


def test_an_actor_gives_back_what_its_algorithm_holds_beside_it(said: list[str]) -> None:
    reader: Any = FullDivergenceReader.__new__(FullDivergenceReader)
    reader.teacher = SimpleNamespace(offload=scorer(LogProbs, said).offload)
    actor: Any = GrpoActor.__new__(GrpoActor)
    actor.backend = SimpleNamespace(offload=lambda: said.append("moved"))
    actor._scorers, actor._reader = {"teacher": scorer(LogProbs, said)}, reader
    actor.offload()
    assert said == ["moved"] * 3 + ["given back"]
