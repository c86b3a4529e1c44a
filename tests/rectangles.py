"""What whole logits of rectangles say, for tests that compare with rectangles."""

from __future__ import annotations

import torch

from rlhpc.language.tokens.scores import TokenScores, scores_of_logits


def scores_of(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0, entropy: bool = False
) -> TokenScores:
    """Of logits `[N, W, V]` and tokens `[N, W]` there, `[N, W]`; 0 in column 0, which nothing predicts, and on padding."""
    known = mask.bool().clone()
    known[:, 0] = False
    where = torch.nonzero(known.flatten()).flatten()
    said = scores_of_logits(logits, where - 1, ids.flatten()[where], temperature, entropy)
    every = said.new_zeros(ids.numel(), said.shape[1]).index_copy(0, where, said).view(*ids.shape, -1)
    return TokenScores(every[..., 0], every[..., 1] if entropy else None)
