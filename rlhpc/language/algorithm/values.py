"""The loss of values, of a critic's or of the policy's own head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhpc.algorithms.losses import aggregate, value_loss
from rlhpc.language.algorithm.base import RETURNS, VALUES
from rlhpc.language.config import GrpoAlgorithmConfig
from rlhpc.language.tokens.batches import TokenBatch


def value_part(
    values: Tensor, batch: TokenBatch, options: GrpoAlgorithmConfig, counts: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the whole's loss.

    Args:
        values: `[T]`, with gradients.
        batch: The micro-batch, with the columns `values` and `returns`.
        options: `value_clip` and `loss_agg`.
        counts: `global_tokens` and `global_seqs`, of the whole.

    Returns:
        A scalar; metrics, as shares: `value`, the mean, and `value_clip_fraction`.
    """
    mask = batch.padded(batch.mask)
    loss, found = value_loss(
        values=batch.padded(values), returns=batch.padded(batch.columns[RETURNS]), loss_mask=mask,
        old_values=batch.padded(batch.columns[VALUES]), value_clip=options.value_clip, loss_agg=options.loss_agg, **counts,
    )  # fmt: skip
    share = mask.sum() / max(counts["global_tokens"], 1.0)
    mean = aggregate(batch.padded(values.detach()), mask, "token-mean", **counts)
    return loss, {"value": mean, **{name: torch.as_tensor(value) * share for name, value in found.items()}}
