"""Evaluation of reward models on pairs."""

from __future__ import annotations

from typing import Any

import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.data.preferences import PreferenceRow
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.evaluation.reward_model import batch_of, rewards_of, split_rows
from tests.unit.language.data.pairs import encoder

NONE = torch.zeros(0, dtype=torch.long)


def test_a_rank_without_rows_takes_part() -> None:
    """In an evaluation of fewer rows than ranks."""
    asked = []

    def forward(batch: Any) -> torch.Tensor:
        asked.append(len(batch))
        return torch.zeros(batch.tokens)

    found = rewards_of([], encoder(), 32, 0, 60, forward, lambda parts, whole: [*parts, (NONE, whole.empty_sample())])
    assert found == [] and asked == [1]


def test_the_responses_of_a_pair_share_a_micro_batch() -> None:
    prompt = Prompt(0, ({"role": "user", "content": "1+1="},))
    rows = [PreferenceRow(prompt, ("2" * n, "3" * (9 - n)), float(n)) for n in range(1, 9)]
    whole = batch_of(rows, encoder(), 32, 0)
    parts = split_rows(whole, 2, 60)
    assert len(parts) > 2 and sorted(place for part, _ in parts for place in part.tolist()) == list(range(8))
    for part, batch in parts:
        assert len(batch) == 2 * len(part) and len(batch) * batch.width <= 60
        assert batch.reward.tolist() == [float(place + 1) for place in part.tolist() for _ in range(2)]
        for place, lengths in zip(part.tolist(), batch.lengths.view(-1, 2).tolist(), strict=True):
            assert lengths == [len(text) + 6 for text in rows[place].responses]
