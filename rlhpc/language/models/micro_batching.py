"""Dynamic micro-batching, minibatches, and load balancing of samples over ranks."""

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

#: Micro-batches, each with the indices of its samples.
Parts = list[tuple[Tensor, TokenBatch]]
#: Divisor of `max_tokens` for the cost of a micro-batch. An additional micro-batch must save at least 1/16 of a full one in
#: padding, because it costs kernel launches and, with sharded weights, another all-gather.
_OVERHEAD = 16


def costs_of(lengths: Sequence[int] | Tensor, hidden: int) -> list[int]:
    """Returns the relative compute costs of samples in a transformer.

    In each layer a token costs 24 h² operations, for four projections and a feed-forward network of width 4 h, plus operations
    proportional to h for each token that it attends to, on average half of the sample.

    Args:
        lengths: Number of tokens of each sample.
        hidden: h, the hidden size of the model; 0 counts only attention.
    """
    return [int(length) * (12 * hidden + int(length)) for length in lengths]


def balance(
    costs: Sequence[int], bins: int, sizes: Sequence[int] | None = None, bin_capacity: int | None = None
) -> list[list[int]] | None:
    """Distributes items over bins: takes items in descending order of cost and puts each into the bin of least cost so far.

    If no bin becomes full, the largest bin costs at most 4/3 of the optimum (Graham 1969), and about the optimum with many
    items.

    Args:
        costs: Cost of each item.
        bins: Number of bins.
        sizes: Size of each item; None if bins have no size limit.
        bin_capacity: Largest sum of sizes in a bin; None for no limit.

    Returns:
        The indices of each bin's items, the most expensive first; None if an item does not fit. The result is deterministic.
    """
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads_by_bin = [(0, bin_index) for bin_index in range(bins)]
    items_by_bin: list[list[int]] = [[] for _ in range(bins)]
    remaining = [bin_capacity] * bins
    for i in by_cost:
        full_bins = list[tuple[int, int]]()
        while loads_by_bin:
            load, bin_index = heapq.heappop(loads_by_bin)
            free_capacity = remaining[bin_index]
            if free_capacity is None or sizes is None or sizes[i] <= free_capacity:
                break
            full_bins.append((load, bin_index))
        else:
            return None
        items_by_bin[bin_index].append(i)
        if free_capacity is not None and sizes is not None:
            remaining[bin_index] = free_capacity - sizes[i]
        for bin_load in (*full_bins, (load + costs[i], bin_index)):
            heapq.heappush(loads_by_bin, bin_load)
    return items_by_bin


def rows(lengths: Sequence[int] | Tensor, max_tokens: int, hidden: int = 0, min_rows: int = 1) -> list[Tensor]:
    """Distributes samples over packed rows of at most `max_tokens` tokens and about equal cost; adds rows until all fit.

    Args:
        lengths: Number of tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        hidden: Hidden size of the model (`costs_of`).
        min_rows: Minimum number of rows; some of them may have no samples.

    Returns:
        Indices of each row's samples, the longest first.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    sizes = _checked_lengths(lengths, max_tokens)
    costs, num_rows = costs_of(sizes, hidden), max(min_rows, -(-sum(sizes) // max_tokens))
    while (samples_by_row := balance(costs, num_rows, sizes, max_tokens)) is None:
        num_rows += 1
    return [torch.tensor(row_samples, dtype=torch.long) for row_samples in samples_by_row]


def micro_batches(lengths: Sequence[int] | Tensor, max_tokens: int) -> list[Tensor]:
    """Splits samples into micro-batches that take at most `max_tokens` tokens including padding.

    Samples of similar length share a micro-batch: the samples are sorted by length and split where padding is least, with a
    cost for each additional micro-batch. The result is deterministic.

    Args:
        lengths: Number of tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.

    Returns:
        Indices of each micro-batch's samples, the longest first.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    tokens = _checked_lengths(lengths, max_tokens)
    by_length = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    spans = _split_by_length([tokens[i] for i in by_length], max_tokens)
    return [torch.tensor(by_length[start:end]) for start, end in spans]


def split_micro_batches(
    batch: TokenBatch,
    max_tokens: int,
    *,
    packed: bool = False,
    hidden: int = 0,
    agree_count: Callable[[int], int] = lambda count: count,
) -> Parts:
    """Splits a batch into micro-batches: packed rows (`rows`) or padded rectangles (`micro_batches`).

    Args:
        batch: The batch.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        packed: Whether the model reads packed rows.
        hidden: Hidden size of the model (`costs_of`).
        agree_count: Function from the number of micro-batches that this rank needs to the number that all ranks use;
            additional micro-batches may have no samples and train nothing.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    index_groups = rows(batch.lengths, max_tokens, hidden) if packed else micro_batches(batch.lengths, max_tokens)
    num_batches = agree_count(max(1, len(index_groups)))
    if (
        packed
        and num_batches > len(index_groups)
        and len(more_rows := rows(batch.lengths, max_tokens, hidden, num_batches)) == num_batches
    ):
        index_groups = more_rows  # a rank with fewer tokens has shorter rows rather than empty rows
    index_groups += [torch.zeros(0, dtype=torch.long)] * (num_batches - len(index_groups))
    return [
        (indices, (batch.select(indices) if len(indices) else batch.empty_sample()).read_by(packed))
        for indices in index_groups
    ]


def values_of(score: Callable[[TokenBatch], Tensor], parts: Parts, batch: TokenBatch, score_name: str) -> Tensor:
    """Computes values of all tokens of a batch, micro-batch by micro-batch.

    Args:
        score: Function that returns `[t]` or `[t, k]` for a micro-batch of t tokens; called without gradients.
        parts: The micro-batches of `split_micro_batches`.
        batch: The batch.
        score_name: Name of `score` in messages.

    Returns:
        `[T]` or `[T, k]` float32 on the host.

    Raises:
        RlhpcError: `score` returned a wrong number of values.
    """
    all_values: Tensor | None = None
    for samples, micro_batch in parts:
        with torch.no_grad():
            token_values = score(micro_batch).float().cpu()
        if token_values.shape[:1] != (micro_batch.tokens,):
            raise RlhpcError(f"{score_name} gave {len(token_values)} values for {micro_batch.tokens} tokens")
        if all_values is None:
            all_values = token_values.new_zeros(batch.tokens, *token_values.shape[1:])
        all_values[batch.tokens_of(samples)] = token_values
    assert all_values is not None, "there is a micro-batch, if only one without tokens"
    return all_values


def _checked_lengths(lengths: Sequence[int] | Tensor, max_tokens: int) -> list[int]:
    tokens = [int(length) for length in lengths]
    if tokens and max(tokens) > max_tokens:
        raise ConfigError(
            f"a sequence has {max(tokens)} tokens, more than actor.max_tokens_per_micro_batch({max_tokens}): raise it, "
            "or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    return tokens


def _split_by_length(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Splits descending lengths into runs that minimize Σ (rows × longest + overhead), by dynamic programming.

    Returns:
        (start, end) of each run; a run's rows × longest is at most `max_tokens`.
    """
    count = len(lengths)
    width = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    # best_cost[i] is the least cost of runs that cover lengths[i:]; a run from i to j has (j − i) × lengths[i] tokens.
    best_cost = np.zeros(count + 1, dtype=np.int64)
    run_ends = np.zeros(count, dtype=np.int64)
    for i in range(count - 1, -1, -1):
        num_rows = np.arange(1, min(count - i, max_tokens // int(width[i])) + 1)
        cost = num_rows * width[i] + max_tokens // _OVERHEAD + best_cost[i + num_rows]
        best_rows = int(cost.argmin())
        best_cost[i], run_ends[i] = cost[best_rows], i + best_rows + 1
    spans, start = [], 0
    while start < count:
        spans.append((start, int(run_ends[start])))
        start = int(run_ends[start])
    return spans


def minibatches(
    batch: TokenBatch, total: int, size: int, epochs: int, seed: tuple[int, int]
) -> Iterator[tuple[str, TokenBatch]]:
    """Yields a rank's samples of each optimizer step's minibatch; all samples of an episode are in one minibatch.

    Args:
        batch: The rank's samples.
        total: Number of episodes of the training step over all ranks.
        size: Number of episodes of a minibatch over all ranks.
        epochs: Number of passes over the samples.
        seed: Seed and step of the shuffle, equal on all ranks; with one minibatch per epoch, episodes are not shuffled.

    Yields:
        A name such as "epoch 0, minibatch 1", and the samples.
    """
    for epoch in range(epochs):
        minibatch_index = minibatch_of(batch, total, size, (*seed, epoch))
        for index in range(total // size):
            samples = torch.nonzero(minibatch_index == index).flatten()
            yield f"epoch {epoch}, minibatch {index}", batch.select(samples)


def minibatch_of(batch: TokenBatch, total: int, size: int, seed: tuple[int, int, int]) -> Tensor:
    """Returns the index of each sample's minibatch in an epoch, `[N]` (`minibatches`).

    Args:
        batch: Samples of the rank; those of a part of its episodes get the same indices as with all.
        total, size: See `minibatches`.
        seed: Seed, step and epoch.
    """
    episode_order = np.arange(total)
    if size < total:
        np.random.default_rng(seed).shuffle(episode_order)
    return torch.from_numpy(np.argsort(episode_order))[batch.episode] // size


def balance_across_ranks(
    batch: TokenBatch, worker: Worker, sizes: MeshSizes, *, unit_size: int = 1, hidden: int = 0
) -> TokenBatch:
    """Redistributes the samples of all ranks so that ranks have about equal costs; all ranks must call this function.

    The assignment depends only on the lengths. Ranks of a model-parallel block have the same samples; ranks with the same
    index in their blocks exchange samples.

    Args:
        batch: This rank's samples, on the host; all ranks have columns of the same names.
        worker: This rank.
        sizes: Mesh sizes of the worker's group.
        unit_size: Number of adjacent samples that stay together, such as the two responses of a pair.
        hidden: Hidden size of the model (`costs_of`).

    Returns:
        This rank's new samples, ordered by the block that sent them; `batch` if balancing would not reduce the largest cost.
    """
    mp_rank = sizes.lane_of(worker.rank)
    peers = range(mp_rank, worker.world_size, sizes.block)
    costs_by_rank: list[list[int]] = worker.all_gather_object(_costs(batch, unit_size, hidden))[mp_rank :: sizes.block]
    unit_costs = [cost for costs in costs_by_rank for cost in costs]
    units_by_rank = balance(unit_costs, len(peers))
    assert units_by_rank is not None, "without a limit there is room for all"
    if max(sum(unit_costs[i] for i in rank_units) for rank_units in units_by_rank) >= max(map(sum, costs_by_rank)):
        return batch
    target_rank = {i: rank for rank, rank_units in enumerate(units_by_rank) for i in rank_units}
    starts = torch.tensor([0, *map(len, costs_by_rank)]).cumsum(0).tolist()
    transfers = [
        [
            [i - starts[source] for i in range(starts[source], starts[source + 1]) if target_rank[i] == target]
            for target in range(len(peers))
        ]
        for source in range(len(peers))
    ]
    local_index, sends = sizes.data_of(worker.rank), list[AsyncWork | None]()
    for target, units in enumerate(transfers[local_index]):
        if units and target != local_index:
            sends.append(
                worker.send(_units(batch, units, unit_size).pack(), worker.group_name, peers[target], async_op=True)
            )
    received_batches = []
    for source, units_by_target in enumerate(transfers):
        if source == local_index:
            received_batches.append(_units(batch, units_by_target[local_index], unit_size))
        elif units_by_target[local_index]:
            received_batches.append(TokenBatch.unpack(worker.recv(worker.group_name, peers[source])))
    for send in sends:
        if send is not None:
            send.wait()
    return TokenBatch.joined(received_batches)


def _costs(batch: TokenBatch, unit_size: int, hidden: int) -> list[int]:
    return [
        sum(unit_costs) for unit_costs in torch.tensor(costs_of(batch.lengths, hidden)).view(-1, unit_size).tolist()
    ]


def _units(batch: TokenBatch, units: list[int], unit_size: int) -> TokenBatch:
    sample_indices = torch.tensor(units, dtype=torch.long)[:, None] * unit_size + torch.arange(unit_size)
    return batch.select(sample_indices.flatten())
