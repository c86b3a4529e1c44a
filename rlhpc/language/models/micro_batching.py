"""Dynamic micro-batching, minibatches, and load balancing of samples over ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.models.token_batch import TokenBatch, branch_points
from rlhpc.runtime.comm.background import AsyncWork
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.worker import Worker

#: Micro-batches, each with the indices of its samples.
Parts = list[tuple[Tensor, TokenBatch]]
#: Divisor of `max_tokens` for the cost of a micro-batch. An additional micro-batch must save at least 1/16 of a full one in
#: padding, because it costs kernel launches and, with sharded weights, another all-gather.
_OVERHEAD = 16


def costs_of(
    lengths: Sequence[int] | Tensor, hidden_size: int, common_lengths: Sequence[int] | None = None
) -> list[int]:
    """Returns the relative compute costs of samples in a transformer.

    In each layer a token costs 24 h² operations, for four projections and a feed-forward network of width 4 h, plus operations
    proportional to h for each token that it attends to, on average half of the sample.

    Args:
        lengths: Number of tokens of each sample.
        hidden_size: h, the hidden size of the model; 0 counts only attention.
        common_lengths: Number of first tokens of each sample that are computed with another sample; None for 0.
    """
    sizes = [int(length) for length in lengths]
    return [
        (length - num_shared) * (12 * hidden_size + length + num_shared)
        for length, num_shared in zip(sizes, common_lengths or [0] * len(sizes), strict=True)
    ]


class _Unit(NamedTuple):
    """Samples that stay together on a rank or in a packed row.

    Attributes:
        samples: Indices of the samples.
        size: Number of tokens that the model reads.
        cost: See `costs_of`.
    """

    samples: list[int]
    size: int
    cost: int


def prefix_trees(batch: TokenBatch) -> list[tuple[list[int], list[int]]]:
    """Returns the samples in an order in which those with common prefixes are adjacent, tree by tree.

    Returns:
        Of each tree of samples that share a prefix, in the order of their first samples: the indices of its samples, and
        their `common_prefixes`. A sample that shares none is a tree.
    """
    ids, starts, groups = batch.ids.numpy().astype(">i4"), batch.cu_seqlens.tolist(), batch.group.tolist()
    by_tokens = sorted(
        range(len(batch)),
        key=lambda sample: (groups[sample], ids[starts[sample] : starts[sample + 1]].tobytes(), sample),
    )
    trees, common_prefixes = list[tuple[list[int], list[int]]](), batch.common_prefixes(by_tokens)
    for sample, num_shared, depth in zip(by_tokens, common_prefixes, branch_points(common_prefixes), strict=True):
        if not depth:
            trees.append(([], []))
        trees[-1][0].append(sample)
        trees[-1][1].append(num_shared)
    return sorted(trees, key=lambda tree: min(tree[0]))


def units_of(batch: TokenBatch, hidden_size: int, max_tokens: int | None = None) -> list[_Unit]:
    """Returns the samples of a batch that share prefixes as units; other samples are units of one.

    Args:
        batch: The batch.
        hidden_size: Hidden size of the model (`costs_of`).
        max_tokens: Largest size of a unit; larger units are divided. None for no limit.
    """
    lengths, units = batch.lengths.tolist(), list[_Unit]()
    for samples, common_lengths in prefix_trees(batch):
        unit = _unit(lengths, samples, common_lengths, hidden_size)
        if max_tokens is None or unit.size <= max_tokens:
            units.append(unit)
            continue
        start = 0
        for end in range(1, len(samples) + 1):
            longer_unit = _unit(lengths, samples[start:end], common_lengths[start:end], hidden_size)
            if longer_unit.size > max_tokens:
                units.append(unit)
                start = end - 1
                longer_unit = _unit(lengths, samples[start:end], common_lengths[start:end], hidden_size)
            unit = longer_unit
        units.append(unit)
    return units


def _unit(lengths: list[int], samples: list[int], common_lengths: list[int], hidden_size: int) -> _Unit:
    """Creates a unit of samples, whose first one has no other one to share with."""
    sizes, num_shared = [lengths[sample] for sample in samples], branch_points([0, *common_lengths[1:]])
    return _Unit(samples, sum(sizes) - sum(num_shared), sum(costs_of(sizes, hidden_size, num_shared)))


def balance(
    costs: Sequence[int], num_bins: int, sizes: Sequence[int] | None = None, bin_capacity: int | None = None
) -> list[list[int]] | None:
    """Distributes items over bins: takes items in descending order of cost and puts each into the bin of least cost so far.

    If no bin becomes full, the largest bin costs at most 4/3 of the optimum (Graham 1969), and about the optimum with many
    items.

    Args:
        costs: Cost of each item.
        num_bins: Number of bins.
        sizes: Size of each item; None if bins have no size limit.
        bin_capacity: Largest sum of sizes in a bin; None for no limit.

    Returns:
        The indices of each bin's items, the most expensive first; None if an item does not fit. The result is deterministic.
    """
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads_by_bin = [(0, bin_index) for bin_index in range(num_bins)]
    items_by_bin: list[list[int]] = [[] for _ in range(num_bins)]
    remaining = [bin_capacity] * num_bins
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


def rows(lengths: Sequence[int] | Tensor, max_tokens: int, hidden_size: int = 0, min_rows: int = 1) -> list[Tensor]:
    """Distributes samples over packed rows of at most `max_tokens` tokens and about equal cost; adds rows until all fit.

    Args:
        lengths: Number of tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        hidden_size: Hidden size of the model (`costs_of`).
        min_rows: Minimum number of rows; some of them may have no samples.

    Returns:
        Indices of each row's samples, the longest first.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    sizes = _checked_lengths(lengths, max_tokens)
    units = [
        _Unit([i], size, cost) for i, (size, cost) in enumerate(zip(sizes, costs_of(sizes, hidden_size), strict=True))
    ]
    return _rows_of(units, max_tokens, min_rows)


def _shared_rows(batch: TokenBatch, max_tokens: int, hidden_size: int = 0, min_rows: int = 1) -> list[Tensor]:
    """Distributes samples over packed rows like `rows`, for a model that reads shared prefixes once.

    Samples that share a prefix are adjacent in a row; only those that do not fit into a row are in several.
    """
    _checked_lengths(batch.lengths, max_tokens)
    return _rows_of(units_of(batch, hidden_size, max_tokens), max_tokens, min_rows)


def _rows_of(units: list[_Unit], max_tokens: int, min_rows: int) -> list[Tensor]:
    """Distributes units over rows of at most `max_tokens` tokens (`rows`)."""
    sizes, costs = [unit.size for unit in units], [unit.cost for unit in units]
    num_rows = max(min_rows, -(-sum(sizes) // max_tokens))
    while (units_by_row := balance(costs, num_rows, sizes, max_tokens)) is None:
        num_rows += 1
    return [
        torch.tensor([sample for unit in row_units for sample in units[unit].samples], dtype=torch.long)
        for row_units in units_by_row
    ]


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
    is_packed: bool = False,
    shares_prefixes: bool = False,
    hidden_size: int = 0,
    agree_count: Callable[[int], int] = lambda count: count,
) -> Parts:
    """Splits a batch into micro-batches: packed rows (`rows`) or padded rectangles (`micro_batches`).

    Args:
        batch: The batch.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        is_packed: Whether the model reads packed rows.
        shares_prefixes: Whether the model reads shared prefixes of a packed row once.
        hidden_size: Hidden size of the model (`costs_of`).
        agree_count: Function from the number of micro-batches that this rank needs to the number that all ranks use;
            additional micro-batches may have no samples and train nothing.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    if is_packed and shares_prefixes:
        batch = batch.sharing_prefixes()
        make_rows = partial(_shared_rows, batch, max_tokens, hidden_size)
    else:
        make_rows = partial(rows, batch.lengths, max_tokens, hidden_size)
    index_groups = make_rows() if is_packed else micro_batches(batch.lengths, max_tokens)
    num_batches = agree_count(max(1, len(index_groups)))
    if is_packed and num_batches > len(index_groups) and len(more_rows := make_rows(num_batches)) == num_batches:
        index_groups = more_rows  # a rank with fewer tokens has shorter rows rather than empty rows
    index_groups += [torch.zeros(0, dtype=torch.long)] * (num_batches - len(index_groups))
    return [
        (indices, (batch.select(indices) if len(indices) else batch.empty_sample()).read_by(is_packed))
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
            values = score(micro_batch).float().cpu()
        if values.shape[:1] != (micro_batch.tokens,):
            raise RlhpcError(f"{score_name} gave {len(values)} values for {micro_batch.tokens} tokens")
        if all_values is None:
            all_values = values.new_zeros(batch.tokens, *values.shape[1:])
        all_values[batch.tokens_of(samples)] = values
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
        best_row = int(cost.argmin())
        best_cost[i], run_ends[i] = cost[best_row], i + best_row + 1
    spans, start = [], 0
    while start < count:
        spans.append((start, int(run_ends[start])))
        start = int(run_ends[start])
    return spans


def minibatches(
    batch: TokenBatch, total: int, size: int, num_epochs: int, seed: tuple[int, int]
) -> Iterator[tuple[str, TokenBatch]]:
    """Yields a rank's samples of each optimizer step's minibatch; all samples of an episode are in one minibatch.

    Args:
        batch: The rank's samples.
        total: Number of episodes of the training step over all ranks.
        size: Number of episodes of a minibatch over all ranks.
        num_epochs: Number of passes over the samples.
        seed: Seed and step of the shuffle, equal on all ranks; with one minibatch per epoch, episodes are not shuffled.

    Yields:
        A name such as "epoch 0, minibatch 1", and the samples.
    """
    for epoch in range(num_epochs):
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
    batch: TokenBatch,
    worker: Worker,
    sizes: MeshSizes,
    *,
    unit_size: int = 1,
    hidden_size: int = 0,
    shares_prefixes: bool = False,
) -> TokenBatch:
    """Redistributes the samples of all ranks so that ranks have about equal costs; all ranks must call this function.

    The assignment depends only on the lengths. Ranks of a model-parallel block have the same samples; ranks with the same
    index in their blocks exchange samples.

    Args:
        batch: This rank's samples, on the host; all ranks have columns of the same names.
        worker: This rank.
        sizes: Mesh sizes of the worker's group.
        unit_size: Number of adjacent samples that stay together, such as the two responses of a pair.
        hidden_size: Hidden size of the model (`costs_of`).
        shares_prefixes: Whether the model reads shared prefixes once; samples that share one then stay together, too.

    Returns:
        This rank's new samples, ordered by the block that sent them; `batch` if balancing would not reduce the largest cost.
    """
    mp_rank = sizes.lane_of(worker.rank)
    peers = range(mp_rank, worker.world_size, sizes.block)
    if shares_prefixes and unit_size == 1:
        local_units = units_of(batch, hidden_size)
    else:
        local_units = _units_of_size(batch, unit_size, hidden_size)
    local_costs = [unit.cost for unit in local_units]
    costs_by_rank: list[list[int]] = worker.all_gather_object(local_costs)[mp_rank :: sizes.block]
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
                worker.send(
                    _select_units(batch, local_units, units).pack(), worker.group_name, peers[target], async_op=True
                )
            )
    received_batches = []
    for source, units_by_target in enumerate(transfers):
        if source == local_index:
            received_batches.append(_select_units(batch, local_units, units_by_target[local_index]))
        elif units_by_target[local_index]:
            received_batches.append(TokenBatch.unpack(worker.recv(worker.group_name, peers[source])))
    for send in sends:
        if send is not None:
            send.wait()
    return TokenBatch.joined(received_batches)


def _units_of_size(batch: TokenBatch, size: int, hidden_size: int) -> list[_Unit]:
    """Returns each `size` adjacent samples as a unit."""
    lengths = batch.lengths.tolist()
    starts = range(0, len(lengths), size)
    return [_unit(lengths, list(range(start, start + size)), [0] * size, hidden_size) for start in starts]


def _select_units(batch: TokenBatch, units: list[_Unit], indices: list[int]) -> TokenBatch:
    samples = [sample for index in indices for sample in units[index].samples]
    return batch.select(torch.tensor(samples, dtype=torch.long))
