"""What the tests of routing replay are made of: routers that cannot decide, an engine that decides otherwise than the trainer,
and ranks that score and train what it wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from mesh_ranks import by_names, make_config, whole

from rlhpc.language.engines.hf import HFRollout
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.moe_routing import EXPERTS
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from tests.forked import Rank

#: Of each four experts of a layer three are equally likely, but for so much, where two are chosen.
SLIGHT = 2e-6


def decided(model: torch.nn.Module, sign: float) -> None:
    """Which of them it is, a sign says."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):
                blocks = weight.view(-1, 4, weight.shape[1])
                blocks[:, :3] = blocks[:, :1] * (1 + sign * SLIGHT * torch.arange(3)[:, None])
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.zero_()


class Otherwise(HFRollout):
    """An engine whose routers decide otherwise than the weights that it gets would."""

    def update_weights(self, version: int, named_tensors: Any, *, complete: bool = True) -> None:
        super().update_weights(version, named_tensors, complete=complete)
        decided(self._model, -1.0)

    def held(self, name: str) -> Tensor | None:
        """Not of the routers: that they are others than those that were sent would be noticed."""
        return None if name.endswith(".gate.weight") else super().held(name)


def _loss(scores: TokenScores, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -scores.logprobs.sum() / 100, {}


def _gradients(trainer: TokenTrainer, batch: TokenBatch, rank: Rank) -> dict[str, Tensor]:
    sizes = trainer.backend.sizes
    mine = batch.select(torch.arange(sizes.data_of(rank.rank), len(batch), sizes.data))
    trainer.forward_backward(list(mine.split([1] * len(mine))), _loss)
    module = trainer.backend.module
    return by_names(module, {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None})


def scored(
    rank: Rank, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]
) -> list[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Of each case (model, settings, a packed batch): log-probs with replay and without, and gradients likewise."""
    found = []
    for model, changes, packed in cases:
        trainer, batch = TokenTrainer(make_config(model, **changes), rank), TokenBatch.unpack(packed)
        said, gradients = trainer.forward(batch).logprobs, _gradients(trainer, batch, rank)
        del batch.columns[EXPERTS]
        found.append((said, trainer.forward(batch).logprobs, gradients, _gradients(trainer, batch, rank)))
    return found
