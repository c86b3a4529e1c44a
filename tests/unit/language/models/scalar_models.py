"""Tiny models with a value head."""

from __future__ import annotations

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.models.token_batch import TokenBatch

SAMPLES = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 9, 9, 9, 9, 2], [1]]


def batch_of(samples: list[list[int]], pad: int = 0) -> TokenBatch:
    return TokenBatch.from_sequences(samples, [[True] * len(sample) for sample in samples], pad_id=pad)
