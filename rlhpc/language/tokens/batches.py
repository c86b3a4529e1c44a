"""Sequences of different lengths to micro-batches of at most so many tokens, and to ranks of equal work."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhpc.runtime.errors import ConfigError

#: A micro-batch more is worth it when it saves this part of a full one in padding: it costs kernel launches and, with
#: sharded weights, another gathering of them.
_OVERHEAD = 16


@dataclass
class TokenBatch:
    """Sequences, padded on the right. B sequences, T tokens of the longest.

    Attributes:
        input_ids: `[B, T]` int64: prompt and response.
        attention_mask: `[B, T]` bool.
        fields: Tensors `[B, T]` or `[B]` that the loss wants beside it. Those of `[B, T]` are aligned with `input_ids`:
            column t is about token t, and column 0, which nothing predicts, is masked out.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    fields: dict[str, torch.Tensor]

    def to(self, device: torch.device) -> TokenBatch:
        """On a device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        fields = {name: move(tensor) for name, tensor in self.fields.items()}
        return TokenBatch(move(self.input_ids), move(self.attention_mask), fields)


def pack(sequences: Sequence[Mapping[str, Any]], max_tokens: int, pad_id: int) -> list[TokenBatch]:
    """Micro-batches, each a rectangle of at most `max_tokens` cells, padded on the right; the longest come first.

    Sequences of similar length share a micro-batch; among the ways to cut the sorted lengths, the one with the least
    padding (and not many more batches for it) is taken. The result depends on the arguments alone.

    Args:
        sequences: Each has `ids` (token ids) and the same further fields: one value a token (a list or tensor as long
            as `ids`, which becomes `[B, T]`, 0 on padding), or a number (which becomes `[B]`). A field with the
            sequence's position tells afterwards which row is whose.
        max_tokens: `actor.max_tokens_per_micro_batch`.
        pad_id: Token on padding.

    Raises:
        ConfigError: A sequence is longer than `max_tokens`.
    """
    lengths = [len(sequence["ids"]) for sequence in sequences]
    if lengths and max(lengths) > max_tokens:
        raise ConfigError(
            f"a sequence has {max(lengths)} tokens, more than actor.max_tokens_per_micro_batch({max_tokens}): raise it, "
            "or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    order = sorted(range(len(sequences)), key=lambda i: (-lengths[i], i))
    cuts = _cut([lengths[i] for i in order], max_tokens)
    return [_batch([sequences[i] for i in order[start:end]], pad_id) for start, end in cuts]


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


def _batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> TokenBatch:
    lengths = [len(row["ids"]) for row in rows]
    width = max(2, *lengths)  # one column predicts nothing, and a model may refuse it
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]

    def column(name: str, fill: int = 0) -> torch.Tensor:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].dim() == 0:
            return torch.stack(values)
        for value, length in zip(values, lengths, strict=True):
            if value.shape != (length,):
                raise ValueError(f"field {name} has shape {tuple(value.shape)}; its sequence has {length} tokens")
        full = values[0].new_full((len(rows), width), fill)
        full[mask] = torch.cat(values)
        return full

    fields = {name: column(name) for name in rows[0] if name != "ids"}
    return TokenBatch(column("ids", pad_id).long(), mask, fields)


def empty_batch(like: TokenBatch, pad_id: int) -> TokenBatch:
    """A batch that trains nothing: its mask is empty, its fields are those of `like`, and 0."""
    fields = {name: tensor.new_zeros((1, 2) if tensor.dim() > 1 else (1,)) for name, tensor in like.fields.items()}
    return TokenBatch(torch.full((1, 2), pad_id), torch.zeros(1, 2, dtype=torch.bool), fields)


def fill_up(batches: list[TokenBatch], count: int, pad_id: int, like: TokenBatch | None = None) -> list[TokenBatch]:
    """Adds empty batches until there are `count`, as the ranks must give equally many.

    Args:
        batches: The rank's own.
        count: The most that a rank has: `worker.all_reduce(torch.tensor(len(batches)), "max")`.
        pad_id: Token on padding.
        like: Which fields they have; needed where `batches` is empty.
    """
    if len(batches) >= count:
        return batches
    example = batches[0] if batches else like
    if example is None:
        raise ValueError("a rank without batches needs `like`, to know the fields of an empty one")
    return batches + [empty_batch(example, pad_id) for _ in range(count - len(batches))]


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions for each rank, such that the ranks' sums of lengths are nearly equal (Karmarkar & Karp's differencing).

    Each rank's positions are ascending; the result depends on the arguments alone.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}")
    # An entry is a set of `ranks` parts, by descending sum; the two whose parts differ most are put together, large on
    # small, until one is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for position, length in enumerate(lengths):
        parts = [(int(length), [position])] + [(0, []) for _ in range(ranks - 1)]
        heap.append((-int(length), position, parts))
    heapq.heapify(heap)
    ticket = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], ticket, joined))
        ticket += 1
    if not heap:
        return [[] for _ in range(ranks)]
    return [sorted(positions) for _, positions in heap[0][2]]


def padding_waste(batches: Sequence[TokenBatch]) -> float:
    """Part of the cells that is padding, 0 to 1."""
    cells = sum(batch.attention_mask.numel() for batch in batches)
    return 1.0 - sum(int(batch.attention_mask.sum()) for batch in batches) / cells if cells else 0.0
