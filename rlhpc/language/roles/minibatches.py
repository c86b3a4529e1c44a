"""How the samples of a step are cut into optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlhpc.language.tokens.batches import TokenBatch


def minibatches(
    batch: TokenBatch, total: int, size: int, epochs: int, seed: tuple[int, int]
) -> Iterator[tuple[str, TokenBatch]]:
    """A rank's part of each optimizer step's samples, whole episodes at a time.

    Args:
        batch: The rank's samples.
        total: Episodes of the step, over all ranks.
        size: Episodes of an optimizer step, over all ranks.
        epochs: Passes over the samples.
        seed: Seed and step. All ranks draw the same order from it; without a choice the episodes keep theirs.

    Yields:
        "epoch 0, minibatch 1", and the samples.
    """
    for epoch in range(epochs):
        order = np.arange(total)
        if size < total:
            np.random.default_rng((*seed, epoch)).shuffle(order)
        place = torch.from_numpy(np.argsort(order))[batch.episode]
        for number in range(total // size):
            chosen = torch.nonzero((number * size <= place) & (place < (number + 1) * size)).flatten()
            yield f"epoch {epoch}, minibatch {number}", batch.select(chosen)
