"""Minibatches over the transitions of the complete run, so that any number of ranks makes the same updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhpc.training.flat_parameters import Reduce


def permutation(total: int, *entropy: int) -> torch.Tensor:
    """Draws a permutation of `range(total)` that depends on `entropy` alone (seed, step, epoch)."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def permutation_by_part(slots: int, steps: int, parts: int, *entropy: int) -> torch.Tensor:
    """Draws a permutation of a step's transitions, numbered slot by slot. Each part of its decisions is permuted
    separately and comes before the next part.
    """
    size = steps // parts
    drawn = [permutation(slots * size, *entropy, part) for part in range(parts)]
    return torch.cat([(one // size) * steps + part * size + one % size for part, one in enumerate(drawn)])


def local_minibatches(order: torch.Tensor, size: int, held: range) -> list[torch.Tensor]:
    """Returns the part of each global minibatch that one rank holds.

    Args:
        order: Permutation of all transitions of the run; minibatch m is `order[m·size : (m+1)·size]`.
        size: Transitions of a minibatch over all ranks.
        held: Transitions of this rank.

    Returns:
        For each minibatch the indices into this rank's transitions; may be empty.
    """
    if held == range(len(order)):
        return list(order.split(size))
    inside = (order >= held.start) & (order < held.stop)
    return [part[mask] - held.start for part, mask in zip(order.split(size), inside.split(size), strict=True)]


def passes(num_local: Sequence[int], rank: int, ranks: int, reduce: Reduce) -> list[int]:
    """Returns the forward passes of each minibatch, the same number on all ranks: the maximum over the ranks.

    Args:
        num_local: Passes that this rank needs for each minibatch.
        rank, ranks: Rank in the group, and its size.
        reduce: Sums a tensor over the group, in place.
    """
    table = torch.zeros((ranks, len(num_local)), dtype=torch.int64)
    table[rank] = torch.tensor(list(num_local), dtype=torch.int64)
    if ranks > 1:
        reduce(table)
    return [max(int(num_passes), 1) for num_passes in table.amax(0)]
