"""The loss of values, of a critic's or of the policy's own head."""

from __future__ import annotations

from torch import Tensor

from rlhpc.algorithms.losses import value_loss
from rlhpc.language.algorithm.base import RETURNS, VALUES, Whole
from rlhpc.language.config import GrpoAlgorithmConfig
from rlhpc.language.tokens.batches import TokenBatch


def value_part(
    values: Tensor, batch: TokenBatch, options: GrpoAlgorithmConfig, minibatch: Whole
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the minibatch's loss.

    Args:
        values: `[T]`, with gradients.
        batch: The micro-batch, with the columns `values` and `returns`.
        options: `value_clip` and `loss_agg`.
        minibatch: Its counts.

    Returns:
        A scalar; metrics, as shares: `value`, the mean, and `value_clip_fraction`.
    """
    loss, found = value_loss(
        values=batch.padded(values), returns=batch.padded(batch.columns[RETURNS]), loss_mask=batch.padded(batch.mask),
        old_values=batch.padded(batch.columns[VALUES]), value_clip=options.value_clip,
        weights=batch.padded(minibatch.weights(batch, options.loss_agg, values.dtype)),
    )  # fmt: skip
    return loss, {"value": minibatch.mean(values, batch), **minibatch.of_means(found, batch)}
