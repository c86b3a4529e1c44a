"""GRPO actor: memory that its algorithm holds, and minibatches that it leaves out."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.algorithms.nonfinite import SkippedSteps
from rlhpc.language.algorithms.base import MinibatchCounts
from rlhpc.language.algorithms.distillation import FullDivergenceReader
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.workers.grpo_actor import GrpoActor
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.scoring.moved import accelerator_events, scorer  # noqa: F401 (a fixture)


def test_an_actor_gives_back_what_its_algorithm_holds_beside_it(said: list[str]) -> None:
    reader: Any = FullDivergenceReader.__new__(FullDivergenceReader)
    reader.teacher = SimpleNamespace(offload=scorer(LogProbs, said).offload)
    actor: Any = GrpoActor.__new__(GrpoActor)
    actor.backend = SimpleNamespace(offload=lambda: said.append("moved"))
    actor._scorers, actor._reader = {"teacher": scorer(LogProbs, said)}, reader
    actor.offload()
    assert said == ["moved"] * 3 + ["given back"]


def stopping_actor(ratios: list[float], limit: float | None) -> Any:
    """An actor whose backend reports a ratio for each minibatch in turn, and counts the optimizer steps."""
    remaining, cfg = list(ratios), GrpoConfig()
    cfg.algorithm.early_stop_imp_ratio = limit
    actor: Any = GrpoActor.__new__(GrpoActor)
    actor.cfg, actor.rank, actor.world_size, actor.section_name, actor.temperature = cfg, 0, 1, "actor", 1.0
    actor.policies, actor._columns_of_loss, actor._reader = SimpleNamespace(names=()), [], None
    actor._balances_load, actor.skips, actor._num_early_stopped = False, SkippedSteps(False), 0
    actor.algorithm = SimpleNamespace(entropy=False, summarize=lambda metrics: metrics)
    actor._micro_batches = lambda batch, packed, shares_prefixes: [(None, batch)]
    actor.backend = SimpleNamespace(
        backend=SimpleNamespace(loss_scale=None, overflowed=False),
        packed=False,
        shares_prefixes=False,
        device=torch.device("cpu"),
        steps=[],
        forward_backward=lambda *args, **kwargs: [{"ratio": torch.tensor(remaining.pop(0)), "loss": torch.tensor(1.0)}],
        optimizer_step=lambda rate: actor.backend.steps.append(rate) or 0.5,
    )
    return actor


def batch_of_one() -> TokenBatch:
    zero = torch.zeros(1, dtype=torch.long)
    return TokenBatch(
        torch.tensor([0, 2]), torch.zeros(2, dtype=torch.long), torch.tensor([False, True]),
        torch.zeros(2, dtype=torch.long), zero, zero, zero, torch.zeros(1),
    )  # fmt: skip


@pytest.mark.parametrize(("limit", "steps"), [(None, 3), (5.0, 2), (1.5, 1), (10.0, 3)])
def test_a_minibatch_whose_ratio_is_too_large_takes_no_step_and_the_next_is_tried(limit: float, steps: int) -> None:
    actor = stopping_actor([1.0, 6.0, 2.0], limit)
    given = [(f"minibatch {number}", batch_of_one()) for number in range(3)]
    metrics, updates = actor._run_minibatches(given, 1.0, partial(actor._train_minibatch, 1e-3))
    assert updates == len(actor.backend.steps) == steps
    assert actor._num_early_stopped == 3 - steps
    kept = [ratio for ratio in (1.0, 6.0, 2.0) if limit is None or ratio <= limit]
    assert metrics["ratio"] == pytest.approx(sum(kept) / steps) and metrics["grad_norm"] == 0.5


def test_a_ratio_that_is_not_a_number_is_left_to_the_check_of_gradients() -> None:
    actor = stopping_actor([float("nan")], 5.0)
    actor._run_minibatches([("minibatch", batch_of_one())], 1.0, partial(actor._train_minibatch, 1e-3))
    assert actor.backend.steps == [1e-3] and actor._num_early_stopped == 0


def test_a_loss_without_a_ratio_cannot_be_stopped_by_it() -> None:
    actor = stopping_actor([1.0], 5.0)
    actor.backend.forward_backward = lambda *args, **kwargs: [{"loss": torch.tensor(1.0)}]
    with pytest.raises(ConfigError, match=r"early_stop_imp_ratio: the loss of .* reports no metric 'ratio'"):
        actor._train_minibatch(1e-3, batch_of_one(), MinibatchCounts(1.0, 1.0), "step 1")
