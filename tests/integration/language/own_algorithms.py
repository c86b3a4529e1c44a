"""Algorithms from outside the package, with columns of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhpc import Column, Scorer, TokenBatch
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.base import MinibatchCounts, Reduce
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.rewards.pool import Scored


class Evenness(Scorer):
    """Which tokens have an even id."""

    def score(self, batch: TokenBatch) -> Tensor:
        return (batch.ids % 2 == 0).float()


class Stepwise(PolicyGradient):
    """GRPO, and beside the outcome a reward for each step: here for each even token, which two sides tell independently."""

    def __init__(self, cfg, bonus: float = 1.0) -> None:
        super().__init__(cfg)
        self.bonus = bonus
        self.columns = [*self.columns, Column("even", by=Evenness), Column("process_rewards", by="rollout")]

    def rollout_columns(self, episode: Episode, scored: Scored) -> Mapping[str, Sequence[float]]:
        return {"process_rewards": [float(token % 2 == 0) for token in episode.token_ids]}

    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        steps = batch.columns["process_rewards"]
        assert torch.equal(steps[batch.mask], batch.columns["even"][batch.mask]), "each is about its own token"
        sums = torch.stack([steps[batch.mask].sum(), batch.mask.sum()])
        total, count = (all_reduce(sums) if all_reduce else sums).unbind()
        mean = total / count
        return super().advantages(batch, all_reduce) + self.bonus * (steps - mean) * batch.mask

    def loss(self, scores: TokenScores, batch: TokenBatch, counts: MinibatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().loss(scores, batch, counts)
        even = (batch.columns["even"] * batch.mask).sum() / max(counts.tokens, 1.0)
        return loss, {**metrics, "even": even}


class Forgetful(Stepwise):
    """Asks the rollout ranks for something that it does not give them."""

    def rollout_columns(self, episode: Episode, scored: Scored) -> Mapping[str, Sequence[float]]:
        return {"process_rewards": [0.0]}
