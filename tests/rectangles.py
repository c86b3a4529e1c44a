"""What whole logits of rectangles say, for tests that compare with rectangles."""

from __future__ import annotations

import torch

from rlhpc.language.models.divergence import FullDivergence, TopKDivergence, top_logprobs
from rlhpc.language.models.logprobs import LogitRows, RowReader, TokenReader, TokenScores, read_rows
from rlhpc.language.models.token_batch import TokenBatch


def scores_of(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0, entropy: bool = False
) -> TokenScores:
    """Of logits `[N, W, V]` and tokens `[N, W]` there, `[N, W]`; 0 in column 0, which nothing predicts, and on padding."""
    known = mask.bool().clone()
    known[:, 0] = False
    where = torch.nonzero(known.flatten()).flatten()
    said = read_rows(logits, where - 1, TokenReader(ids.flatten()[where], temperature, entropy))
    every = said.new_zeros(ids.numel(), said.shape[1]).index_copy(0, where, said).view(*ids.shape, -1)
    return TokenScores(every[..., 0], every[..., 1] if entropy else None)


def full_divergence(
    logits: torch.Tensor, batch: TokenBatch, teacher: torch.Tensor, temperature: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """`[T]`, of whole logits `[N, W, V]` of both models."""
    return _placed(
        logits, batch, FullDivergence(LogitRows.from_logits(teacher, batch.predictors()[1]), temperature, beta)
    )


def top_divergence(
    logits: torch.Tensor, batch: TokenBatch, told: torch.Tensor, temperature: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """`[T]`, of whole logits and what a teacher told `[T, k + 1, 2]`."""
    return _placed(logits, batch, TopKDivergence(told[batch.predictors()[0]], temperature, beta))


def top_told(
    logits: torch.Tensor, batch: TokenBatch, k: int, temperature: float = 1.0, vocabulary: int | None = None
) -> torch.Tensor:
    """What a teacher tells, of its whole logits."""
    return top_logprobs(LogitRows.from_logits(logits, batch.predictors()[1]), batch, k, temperature, vocabulary)


def _placed(logits: torch.Tensor, batch: TokenBatch, reader: RowReader) -> torch.Tensor:
    where, places = batch.predictors()
    return logits.new_zeros(batch.tokens).index_copy(0, where, read_rows(logits, places, reader)[:, 0])
