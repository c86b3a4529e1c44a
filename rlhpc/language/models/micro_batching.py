"""Dynamic micro-batching: cuts a batch into micro-batches, and balances the samples' costs over ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.comm.background import AsyncWork
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.worker import Worker

#: Indices of each micro-batch's samples, with the micro-batch.
Parts = list[tuple[Tensor, TokenBatch]]
#: An additional micro-batch must save this fraction of a full one in padding: it costs kernel launches and, with sharded
#: weights, another gathering of them.
_OVERHEAD = 16


def costs_of(lengths: Sequence[int] | Tensor, hidden: int) -> list[int]:
    """Returns the relative costs of samples in a transformer.

    In each layer, a token costs 24 h² operations, of four projections and a feed-forward part four times as wide, and 2 h for
    each token that it attends to, on average half of the sample.

    Args:
        lengths: Tokens of each sample.
        hidden: h, the width of the model; 0 counts attention alone.
    """
    return [int(length) * (12 * hidden + int(length)) for length in lengths]


def balance(
    costs: Sequence[int], bins: int, sizes: Sequence[int] | None = None, room: int | None = None
) -> list[list[int]] | None:
    """Distributes items over bins by their costs: the most expensive first, each to the bin with the lowest sum so far.

    The largest sum is at most 4/3 of the best possible one (Graham 1969), if no bin is full, and with many samples close to
    it.

    Args:
        costs: Of each item.
        bins: Number of bins.
        sizes: Capacity that each item takes; by default no capacity is counted.
        room: Capacity of each bin.

    Returns:
        The items of each bin, the most expensive first; None if some item does not fit. It depends only on the arguments.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads = [(0, number) for number in range(bins)]
    shares: list[list[int]] = [[] for _ in range(bins)]
    remaining = [room] * bins
    for i in order:
        full = list[tuple[int, int]]()
        while loads:
            load, number = heapq.heappop(loads)
            free = remaining[number]
            if free is None or sizes is None or sizes[i] <= free:
                break
            full.append((load, number))
        else:
            return None
        shares[number].append(i)
        if free is not None and sizes is not None:
            remaining[number] = free - sizes[i]
        for entry in (*full, (load + costs[i], number)):
            heapq.heappush(loads, entry)
    return shares


def rows(lengths: Sequence[int] | Tensor, max_tokens: int, hidden: int = 0, at_least: int = 1) -> list[Tensor]:
    """Cuts samples into rows without padding of at most `max_tokens` each, as few as `balance` can, of about equal cost.

    In each row the longest sample comes first.

    Args:
        lengths: Tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        hidden: The width of the model.
        at_least: Minimum number of rows; some of them may have no samples.

    Returns:
        Indices of each row's samples.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    sizes = _fitting(lengths, max_tokens)
    costs, number = costs_of(sizes, hidden), max(at_least, -(-sum(sizes) // max_tokens))
    while (shares := balance(costs, number, sizes, max_tokens)) is None:
        number += 1
    return [torch.tensor(share, dtype=torch.long) for share in shares]


def micro_batches(lengths: Sequence[int] | Tensor, max_tokens: int) -> list[Tensor]:
    """Cuts samples into micro-batches that are, padded, rectangles of at most `max_tokens` cells; the longest come first.

    Samples of similar length share a micro-batch. Among the ways to cut the sorted lengths, the one with the least
    padding (without many more micro-batches) is chosen. The result depends only on the arguments.

    Args:
        lengths: Tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.

    Returns:
        Indices of each micro-batch's samples.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    tokens = _fitting(lengths, max_tokens)
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    cuts = _cut([tokens[i] for i in order], max_tokens)
    return [torch.tensor(order[start:end]) for start, end in cuts]


def split_micro_batches(
    batch: TokenBatch,
    max_tokens: int,
    *,
    packed: bool = False,
    hidden: int = 0,
    agreed: Callable[[int], int] = lambda count: count,
) -> Parts:
    """Cuts a batch into micro-batches: rows without padding (`rows`), or rectangles (`micro_batches`).

    Args:
        batch: The batch.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        packed: The model reads rows.
        hidden: The width of the model.
        agreed: Returns the number of micro-batches on all ranks, from the number that this one needs; additional ones may have
            no samples, and train nothing.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    cuts = rows(batch.lengths, max_tokens, hidden) if packed else micro_batches(batch.lengths, max_tokens)
    number = agreed(max(1, len(cuts)))
    if packed and number > len(cuts) and len(wider := rows(batch.lengths, max_tokens, hidden, number)) == number:
        cuts = wider  # a rank with less work than others has shorter rows, not fewer
    cuts += [torch.zeros(0, dtype=torch.long)] * (number - len(cuts))
    return [(cut, (batch.select(cut) if len(cut) else batch.empty_sample()).read_by(packed)) for cut in cuts]


def values_of(score: Callable[[TokenBatch], Tensor], parts: Parts, batch: TokenBatch, score_name: str) -> Tensor:
    """Computes values of all tokens of a batch, one micro-batch after the other.

    Args:
        score: Returns `[t]` or `[t, k]` for a micro-batch's t tokens; called without gradients.
        parts: The micro-batches; see `split_micro_batches`.
        batch: The batch.
        score_name: Name of `score` in messages.

    Returns:
        `[T]` or `[T, k]` float32, on the host.

    Raises:
        RlhpcError: `score` returns another number of values.
    """
    all_values: Tensor | None = None
    for samples, part in parts:
        with torch.no_grad():
            values = score(part).float().cpu()
        if values.shape[:1] != (part.tokens,):
            raise RlhpcError(f"{score_name} gave {len(values)} values for {part.tokens} tokens")
        if all_values is None:
            all_values = values.new_zeros(batch.tokens, *values.shape[1:])
        all_values[batch.tokens_of(samples)] = values
    assert all_values is not None, "there is a micro-batch, if only one without tokens"
    return all_values


def _fitting(lengths: Sequence[int] | Tensor, max_tokens: int) -> list[int]:
    tokens = [int(length) for length in lengths]
    if tokens and max(tokens) > max_tokens:
        raise ConfigError(
            f"a sequence has {max(tokens)} tokens, more than actor.max_tokens_per_micro_batch({max_tokens}): raise it, "
            "or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    return tokens


def _cut(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cuts descending lengths into runs: the least sum of (rows × longest + overhead), exactly, by dynamic programming."""
    count = len(lengths)
    width = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    # best[i]: cost of the runs that cover lengths[i:]; a run from i to j is (j − i) × lengths[i] cells.
    best = np.zeros(count + 1, dtype=np.int64)
    end = np.zeros(count, dtype=np.int64)
    for i in range(count - 1, -1, -1):
        rows = np.arange(1, min(count - i, max_tokens // int(width[i])) + 1)
        cost = rows * width[i] + max_tokens // _OVERHEAD + best[i + rows]
        choice = int(cost.argmin())
        best[i], end[i] = cost[choice], i + choice + 1
    cuts, start = [], 0
    while start < count:
        cuts.append((start, int(end[start])))
        start = int(end[start])
    return cuts


def minibatches(
    batch: TokenBatch, total: int, size: int, epochs: int, seed: tuple[int, int]
) -> Iterator[tuple[str, TokenBatch]]:
    """Yields a rank's part of each optimizer step's samples, in complete episodes.

    Args:
        batch: The rank's samples.
        total: Episodes of the step, over all ranks.
        size: Episodes of an optimizer step, over all ranks.
        epochs: Passes over the samples.
        seed: Seed and step. All ranks draw the same order from it; with one minibatch per epoch the episodes keep theirs.

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


def balance_across_ranks(
    batch: TokenBatch, worker: Worker, sizes: MeshSizes, *, each: int = 1, hidden: int = 0
) -> TokenBatch:
    """Balances the samples of all ranks and returns this rank's new part; all ranks call it.

    The assignment depends on the lengths alone. Ranks of a model-parallel block have the same samples; ranks at the same index
    of all blocks exchange them.

    Args:
        batch: The samples that this rank has, on the host. Their columns have the same names on all ranks.
        worker: The rank.
        sizes: Of the worker's group.
        each: This number of neighbouring samples stays on one rank, such as the responses of a pair.
        hidden: The width of the model (`costs_of`).

    Returns:
        Samples in the order of the first block, then of the second, …; the rank's own batch if balancing gains nothing.
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
    moves = [
        [[i - starts[of] for i in range(starts[of], starts[of + 1]) if owner[i] == to] for to in range(len(peers))]
        for of in range(len(peers))
    ]
    here, sent = sizes.data_of(worker.rank), list[AsyncWork | None]()
    for to, units in enumerate(moves[here]):
        if units and to != here:
            sent.append(worker.send(_units(batch, units, each).pack(), worker.group_name, peers[to], async_op=True))
    received = []
    for of, rank_moves in enumerate(moves):
        if of == here:
            received.append(_units(batch, rank_moves[here], each))
        elif rank_moves[here]:
            received.append(TokenBatch.unpack(worker.recv(worker.group_name, peers[of])))
    for work in sent:
        if work is not None:
            work.wait()
    return TokenBatch.joined(received)


def _costs(batch: TokenBatch, each: int, hidden: int) -> list[int]:
    return [sum(part) for part in torch.tensor(costs_of(batch.lengths, hidden)).view(-1, each).tolist()]


def _units(batch: TokenBatch, units: list[int], each: int) -> TokenBatch:
    places = torch.tensor(units, dtype=torch.long)[:, None] * each + torch.arange(each)
    return batch.select(places.flatten())
