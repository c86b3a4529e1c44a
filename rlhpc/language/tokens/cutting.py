"""How a batch is cut into micro-batches, and how samples are shared so that all have about equally much to compute."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.runtime.errors import ConfigError, RlhpcError

#: Which samples each micro-batch has, and the micro-batches.
Parts = list[tuple[Tensor, TokenBatch]]
#: One more micro-batch is worth it if it saves this fraction of a full one in padding: it costs kernel launches and,
#: with sharded weights, another gathering of them.
_OVERHEAD = 16


def costs_of(lengths: Sequence[int] | Tensor, hidden: int) -> list[int]:
    """What samples cost a transformer, relative to each other: a token the same 24 h² operations in each layer, of four
    projections and a feed-forward part four times as wide, and 2 h for each token that it attends to on average half of.

    Args:
        lengths: Tokens of each sample.
        hidden: h, the width of the model; 0 looks at attention alone.
    """
    return [int(length) * (12 * hidden + int(length)) for length in lengths]


def balance(
    costs: Sequence[int], bins: int, sizes: Sequence[int] | None = None, room: int | None = None
) -> list[list[int]] | None:
    """Shares out what costs something: the dearest first, each to who has least so far. The sum of the dearest bin is at most
    4/3 of the best possible one (Graham 1969), if none is full, and with many samples close to it.

    Args:
        costs: Of each.
        bins: How many have a share.
        sizes: What each takes of the room; by default no room is counted.
        room: Of each bin.

    Returns:
        Which ones each bin has, the dearest first; None if they do not all find room this way. It depends on the arguments
        alone.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads = [(0, number) for number in range(bins)]
    shares: list[list[int]] = [[] for _ in range(bins)]
    left = [room] * bins
    for i in order:
        full = list[tuple[int, int]]()
        while loads:
            load, number = heapq.heappop(loads)
            free = left[number]
            if free is None or sizes is None or sizes[i] <= free:
                break
            full.append((load, number))
        else:
            return None
        shares[number].append(i)
        if free is not None and sizes is not None:
            left[number] = free - sizes[i]
        for entry in (*full, (load + costs[i], number)):
            heapq.heappush(loads, entry)
    return shares


def rows(lengths: Sequence[int] | Tensor, max_tokens: int, hidden: int = 0, at_least: int = 1) -> list[Tensor]:
    """Cuts samples into rows without padding of at most `max_tokens` each, as few as `balance` can, which cost about the same;
    in each the longest sample comes first.

    Args:
        lengths: Tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        hidden: The width of the model.
        at_least: So many rows, some of them maybe without samples.

    Returns:
        Which samples each row has.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    sizes = _fitting(lengths, max_tokens)
    costs, number = costs_of(sizes, hidden), max(at_least, -(-sum(sizes) // max_tokens))
    while (shares := balance(costs, number, sizes, max_tokens)) is None:
        number += 1
    return [torch.tensor(share, dtype=torch.long) for share in shares]


def micro_batches(lengths: Sequence[int] | Tensor, max_tokens: int) -> list[Tensor]:
    """Cuts samples into micro-batches, each of which is, padded, a rectangle of at most `max_tokens` cells; the longest come
    first.

    Samples of similar length share a micro-batch; among the ways to cut the sorted lengths, the one with the least
    padding (and not many more batches for it) is taken. The result depends on the arguments alone.

    Args:
        lengths: Tokens of each sample.
        max_tokens: `actor.max_tokens_per_micro_batch`.

    Returns:
        Which samples each micro-batch has.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    tokens = _fitting(lengths, max_tokens)
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    cuts = _cut([tokens[i] for i in order], max_tokens)
    return [torch.tensor(order[start:end]) for start, end in cuts]


def cut_up(
    batch: TokenBatch,
    max_tokens: int,
    *,
    packed: bool = False,
    hidden: int = 0,
    agreed: Callable[[int], int] = lambda count: count,
) -> Parts:
    """A batch's micro-batches: rows without padding (`rows`), or rectangles (`micro_batches`).

    Args:
        batch: What is cut.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        packed: Whether the model reads rows.
        hidden: The width of the model.
        agreed: How many all ranks have, of those that this one needs; one more may have no samples, and trains nothing.

    Raises:
        ConfigError: A sample is longer than `max_tokens`.
    """
    cuts = rows(batch.lengths, max_tokens, hidden) if packed else micro_batches(batch.lengths, max_tokens)
    number = agreed(max(1, len(cuts)))
    if packed and number > len(cuts) and len(wider := rows(batch.lengths, max_tokens, hidden, number)) == number:
        cuts = wider  # a rank with less to do than others has shorter rows, not fewer
    cuts += [torch.zeros(0, dtype=torch.long)] * (number - len(cuts))
    return [(cut, (batch.select(cut) if len(cut) else batch.nothing()).read_by(packed)) for cut in cuts]


def values_of(score: Callable[[TokenBatch], Tensor], parts: Parts, batch: TokenBatch, who: str) -> Tensor:
    """What is said of all tokens of a batch, one micro-batch after the other.

    Args:
        score: `[t]` or `[t, k]` of a micro-batch's t tokens; called without gradients.
        parts: The micro-batches; see `cut_up`.
        batch: The batch.
        who: What a message calls `score`.

    Returns:
        `[T]` or `[T, k]` float32, on the host.

    Raises:
        RlhpcError: It gives another number of values.
    """
    found: Tensor | None = None
    for samples, part in parts:
        with torch.no_grad():
            values = score(part).float().cpu()
        if values.shape[:1] != (part.tokens,):
            raise RlhpcError(f"{who} gave {len(values)} values for {part.tokens} tokens")
        if found is None:
            found = values.new_zeros(batch.tokens, *values.shape[1:])
        found[batch.tokens_of(samples)] = values
    assert found is not None, "there is a micro-batch, if only one without tokens"
    return found


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
