"""Token batches of samples that share prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from rlhpc.language.models.token_batch import TokenBatch

#: (parent, tokens) of each node of a tree that agents' turns make; four deep, and some samples end where others go on.
NODES = [
    (-1, 70),
    (0, 36),
    (0, 40),
    (1, 33),
    (1, 3),
    (3, 5),
    (3, 40),
    (6, 8),
    (6, 9),
    (2, 4),
    (2, 50),
    (10, 6),
    (-1, 41),
]


def paths(nodes: Sequence[tuple[int, int]], vocabulary: int = 61, seed: int = 3) -> list[torch.Tensor]:
    """The tokens from the root to each node."""
    generator, found = torch.Generator().manual_seed(seed), list[torch.Tensor]()
    for parent, length in nodes:
        own = torch.randint(1, vocabulary, (length,), generator=generator)
        found.append(own if parent < 0 else torch.cat([found[parent], own]))
    return found


def one_group(samples: Sequence[torch.Tensor]) -> TokenBatch:
    """Samples of one prompt, in which each token but a sample's first is trained."""
    batch = TokenBatch.from_sequences(samples, [torch.arange(len(sample)) > 0 for sample in samples])
    return dataclasses.replace(batch, group=torch.zeros_like(batch.group))


def shuffled_tree() -> TokenBatch:
    """A sample for each node of `NODES`, and one of them twice, in no order."""
    samples = paths(NODES)
    samples.append(samples[4].clone())
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    return one_group([samples[i] for i in order])
