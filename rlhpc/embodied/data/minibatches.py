"""Minibatches over the transitions of the whole run, so that any number of ranks makes the same updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhpc.training.flat_parameters import Reduce


def permutation(total: int, *entropy: int) -> torch.Tensor:
    """A permutation of `range(total)` that depends on `entropy` alone (seed, step, epoch)."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def permutation_by_part(slots: int, steps: int, parts: int, *entropy: int) -> torch.Tensor:
    """A permutation of a step's transitions, numbered slot by slot, in which each part of its decisions comes in an order of
    its own, before the part that follows."""
    size = steps // parts
    drawn = [permutation(slots * size, *entropy, part) for part in range(parts)]
    return torch.cat([(one // size) * steps + part * size + one % size for part, one in enumerate(drawn)])


def local_minibatches(order: torch.Tensor, size: int, held: range) -> list[torch.Tensor]:
    """The part of each global minibatch that one rank holds.

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


def passes(own: Sequence[int], rank: int, ranks: int, reduce: Reduce) -> list[int]:
    """Forward passes of each minibatch where all ranks have to make equally many: the most that one of them needs.

    Args:
        own: What this rank needs for each minibatch.
        rank, ranks: Of the group.
        reduce: Sums a tensor over the group, in place.
    """
    table = torch.zeros((ranks, len(own)), dtype=torch.int64)
    table[rank] = torch.tensor(list(own), dtype=torch.int64)
    if ranks > 1:
        reduce(table)
    return [max(int(most), 1) for most in table.amax(0)]
