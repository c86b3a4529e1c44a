"""Samples change ranks, so that all ranks of a trainer have about equally much to compute."""

from __future__ import annotations

import torch

from rlhpc.config.parallel import Sizes
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.cutting import balance, costs_of
from rlhpc.runtime.comm.background import AsyncWork
from rlhpc.runtime.worker import Worker


def share_out(batch: TokenBatch, worker: Worker, sizes: Sizes, *, each: int = 1, hidden: int = 0) -> TokenBatch:
    """A rank's new part of the samples of all ranks. All ranks call it; who gets what depends on the lengths alone. Ranks of a
    block have the same samples, and those at the same place of all blocks share them out.

    Args:
        batch: The samples that this rank has, on the host. Their columns have the same names on all ranks.
        worker: The rank.
        sizes: Of the worker's group.
        each: So many neighbours stay together, as the answers of a pair do.
        hidden: The width of the model (`costs_of`).

    Returns:
        Samples as they lay in the first block, then in the second, …; what a rank had, where sharing gains nothing.
    """
    lane = sizes.lane_of(worker.rank)
    peers = range(lane, worker.world_size, sizes.block)
    held: list[list[int]] = worker.all_gather_object(_costs(batch, each, hidden))[lane :: sizes.block]
    every = [cost for costs in held for cost in costs]
    shares = balance(every, len(peers))
    assert shares is not None, "without a limit there is room for all"
    if max(sum(every[i] for i in share) for share in shares) >= max(map(sum, held)):
        return batch
    owner = {i: rank for rank, share in enumerate(shares) for i in share}
    starts = torch.tensor([0, *map(len, held)]).cumsum(0).tolist()
    moves = [[[i - starts[of] for i in range(starts[of], starts[of + 1]) if owner[i] == to]
              for to in range(len(peers))] for of in range(len(peers))]  # fmt: skip
    here, sent = sizes.data_of(worker.rank), list[AsyncWork | None]()
    for to, units in enumerate(moves[here]):
        if units and to != here:
            sent.append(worker.send(_units(batch, units, each).pack(), worker.group_name, peers[to], async_op=True))
    found = []
    for of, theirs in enumerate(moves):
        if of == here:
            found.append(_units(batch, theirs[here], each))
        elif theirs[here]:
            found.append(TokenBatch.unpack(worker.recv(worker.group_name, peers[of])))
    for work in sent:
        if work is not None:
            work.wait()
    return TokenBatch.joined(found)


def _costs(batch: TokenBatch, each: int, hidden: int) -> list[int]:
    return [sum(part) for part in torch.tensor(costs_of(batch.lengths, hidden)).view(-1, each).tolist()]


def _units(batch: TokenBatch, units: list[int], each: int) -> TokenBatch:
    places = torch.tensor(units, dtype=torch.long)[:, None] * each + torch.arange(each)
    return batch.select(places.flatten())
