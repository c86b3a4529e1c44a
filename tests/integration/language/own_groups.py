"""Groups from outside the package: one rates answers, one scores tokens; and an algorithm that asks for these scores."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from rlhpc import Column, Rater, Scorer, TokenBatch
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.rewards import Sample


class Ones(Rater):
    """What `lm_rewards.ones` says, by a group."""

    def __init__(self, cfg, device, group, pause_s: float = 0.0, refuses: str = "") -> None:
        super().__init__(cfg, device, group)
        self.pause_s, self.refuses = pause_s, refuses

    def rate(self, samples: Sequence[Sample]) -> list[float | None]:
        time.sleep(self.pause_s)
        assert all(sample.messages[-1]["content"] == sample.prompt for sample in samples)
        return [
            None if self.refuses and self.refuses in sample.response else sample.response.count("1") / 6
            for sample in samples
        ]


class Evenness(Scorer):
    """Which tokens have an even id."""

    def score(self, batch: TokenBatch) -> Tensor:
        return (batch.ids % 2 == 0).float()


class Even(PolicyGradient):
    """GRPO that measures a group's column, and checks that each value is about its own token."""

    def __init__(self, cfg) -> None:
        super().__init__(cfg)
        self.columns = [*self.columns, Column("even", by="evenness")]

    def loss(self, scores, batch, whole):
        assert bool((batch.columns["even"] == (batch.ids % 2 == 0)).all())
        loss, metrics = super().loss(scores, batch, whole)
        return loss, {**metrics, "even": (batch.columns["even"] * batch.mask).sum() / max(whole.tokens, 1.0)}


class Taught(PolicyGradient):
    """Policy gradient that measures how probable a teacher finds the tokens."""

    def __init__(self, cfg) -> None:
        super().__init__(cfg)
        self.columns = [*self.columns, Column("teacher_logprobs", by="teacher")]
