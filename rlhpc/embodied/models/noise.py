"""Seeded noise of policies: a row depends on its seed, slot and decision, not on ranks, batches or other draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

#: Slots whose noise one generator draws: as many rows are drawn beyond a rank's share at either end at most.
BLOCK = 16
Sample = Callable[[tuple[int, ...], torch.Generator], Tensor]


def generator_of(*words: int) -> torch.Generator:
    """Returns a generator whose state follows from `words`, each at least 0."""
    seed = np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1)
    return torch.Generator().manual_seed(int(seed))


def noise_of_slots(sample: Sample, words: Sequence[int], slots: range) -> Tensor:
    """Draws the noise of one decision for a share of the slots, `[len(slots), ...]`, without holding more rows.

    Args:
        sample: `Policy.sample_noise`.
        words: Seed, step, decision: numbers that identify this decision.
        slots: Global numbers of the slots.
    """
    blocks = range(slots.start // BLOCK, -(-slots.stop // BLOCK))
    rows = [sample((BLOCK,), generator_of(*words, block)) for block in blocks]
    first = blocks.start * BLOCK
    return torch.cat(rows)[slots.start - first : slots.stop - first]


def noise_of_episodes(sample: Sample, seed: int, episodes: Sequence[int], decisions: Sequence[int]) -> Tensor:
    """Draws the start noise of an evaluation's slots, `[N, ...]`.

    Args:
        sample: `Policy.sample_start`.
        seed: Seed of the evaluation.
        episodes, decisions: Number of each slot's episode, and of the decision within it.
    """
    each = zip(episodes, decisions, strict=True)
    return torch.cat([sample((1,), generator_of(seed, slot, e, t)) for slot, (e, t) in enumerate(each)])
