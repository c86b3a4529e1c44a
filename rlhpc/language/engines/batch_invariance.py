"""Attention and experts that make the same numbers of a token, bit for bit, whatever else is computed with it.

A sum's last bits depend on the order of its terms, which a library chooses by shapes. So attention here is given shapes that a
row's own length determines. What a layer multiplies has as many rows as fill whole tiles, which makes libraries on CPUs take
the same order for each row; whether they do is looked at when an engine starts (`forward.Forward`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.language.models.vision import sub_attention

#: Columns come in blocks: what attention reads of a row is this much and a multiple of it, by the row's own length alone.
BLOCK = 32


def blocks(length: int) -> int:
    """The columns of the blocks that `length` tokens are in."""
    return -(-length // BLOCK) * BLOCK


class KeyValues:
    """The cache of all layers, `[rows, heads, columns, width]` each.

    Each row begins at column 0, whatever the others' lengths are; a row that joins or leaves copies no other but the one that
    takes its place. What is behind a row's end is finite, and weighs nothing.

    Attributes:
        rows: Rows in use.
        length: Tokens in each row.
        present: Row and column of each token that is computed next.
        places: The position of each of them: its column, but for what pictures before it make of that.
        only: The row whose token that is; None for all.
    """

    present: tuple[Tensor, Tensor]
    places: Tensor
    only: int | None

    def __init__(self, max_rows: int) -> None:
        self.max_rows, self.rows = max_rows, 0
        self.length, self._shift = (np.zeros(max_rows, dtype=np.int64) for _ in range(2))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def clear(self) -> None:
        """Drops the rows, keeps the memory."""
        self.rows = 0

    def free(self) -> None:
        """Drops the rows and the memory."""
        self.clear()
        self.keys, self.values = [], []

    def append(self, layers: Any, lengths: Sequence[int], source: Sequence[int], shifts: Sequence[int]) -> None:
        """Adds rows from a prefill of several sequences, one after the other.

        Args:
            layers: Of the cache that the prefill filled: `keys` and `values` `[1, heads, at least all tokens, width]`.
            lengths: Tokens of each sequence.
            source: The sequence of each new row; rows with the same prompt share one.
            shifts: By how much each sequence's next position is beyond its next column.
        """
        begins = [0, *accumulate(lengths)]
        theirs = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]
        first, stop = self.rows, self.rows + len(source)
        self._fit(theirs, stop, max(lengths[one] for one in source) + 1)
        for mine, given in zip((*self.keys, *self.values), theirs, strict=True):
            mine[first:stop].zero_()
            row = first
            for one, alike in groupby(source):
                count, length = len(list(alike)), lengths[one]
                mine[row : row + count, :, :length] = given[0, :, begins[one] : begins[one] + length]
                row += count
        self.length[first:stop] = [lengths[one] for one in source]
        self._shift[first:stop] = [shifts[one] for one in source]
        self.rows = stop

    def reserve(self, only: int | None = None) -> None:
        """Makes sure of a column for the next token, of each row or of one, and says where it is."""
        self._fit((*self.keys, *self.values), self.rows, int(self.length[: self.rows].max()) + 1)
        rows = np.arange(self.rows) if only is None else np.array([only])
        device = self.keys[0].device
        self.only = only
        self.present = torch.from_numpy(rows).to(device), torch.from_numpy(self.length[rows]).to(device)
        self.places = torch.from_numpy(self.length[rows] + self._shift[rows]).to(device)

    def drop(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Removes rows. The last ones move into their places: (from, to), to be done likewise by whoever has rows too."""
        moves = moves_into_places(self.rows, leaving)
        if moves:
            movers, holes = (list(side) for side in zip(*moves, strict=True))
            used = int(self.length[movers].max())
            for tensor in (*self.keys, *self.values):
                tensor[holes, :, :used] = tensor[movers, :, :used]
            self.length[holes], self._shift[holes] = self.length[movers], self._shift[movers]
        self.rows -= len(set(leaving))
        return moves

    def _fit(self, like: Sequence[Tensor], rows: int, columns: int) -> None:
        """Room for so many rows and columns, with some more where it has to grow."""
        room = self.keys[0].shape if self.keys else (0, 0, 0)
        if rows <= room[0] and columns <= room[2]:
            return
        if rows > room[0]:
            rows = min(self.max_rows, max(2 * room[0], rows))
        if columns > room[2]:
            columns = blocks(columns + columns // 2 + 64)
        rows, columns = max(rows, room[0]), max(columns, room[2])
        grown = list[Tensor]()
        for old in (*self.keys, *self.values) or like:
            # Zeros, not whatever was there: 0 weight times NaN is NaN.
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            if self.keys:
                new[: self.rows, :, : room[2]] = old[: self.rows]
            grown.append(new)
        half = len(grown) // 2
        self.keys, self.values = grown[:half], grown[half:]


def decoding_cache(store: KeyValues) -> Any:
    """`store` in the form in which transformers' models take a cache, for one token at a time of `store.present`.

    Of a single row, layers give back what is in it. Otherwise they give back all there is, and attention has to know what is
    whose.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        """Writes a token of each row and gives back views: nothing is copied."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.is_initialized = index, True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            rows, ends = store.present
            keys, values = store.keys[self.index], store.values[self.index]
            keys[rows, :, ends] = key_states[: len(ends), :, 0]
            values[rows, :, ends] = value_states[: len(ends), :, 0]
            if store.only is None:
                return keys, values
            row, end = slice(store.only, store.only + 1), self.get_seq_length() + 1
            return keys[row, :, :end], values[row, :, :end]

        def get_seq_length(self) -> int:
            return 0 if store.only is None else int(store.length[store.only])

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

    return Cache(layers=[Layer(index) for index in range(len(store.keys))])


def moves_into_places(rows: int, leaving: Sequence[int]) -> list[tuple[int, int]]:
    """Which of the last rows come into the places of those that leave: (from, to)."""
    gone = set(leaving)
    left = rows - len(gone)
    holes = [row for row in sorted(gone) if row < left]
    movers = [row for row in range(left, rows) if row not in gone]
    return list(zip(movers, holes, strict=True))


#: What transformers calls the functions here.
NAME = "rlhpc_alike"
#: Tokens come in multiples of this: vectorized functions then have no rest, which they compute in another way.
TILE = 32
#: Tokens of an expert come in multiples of this, enough for a product of matrices.
_EXPERT_TILE = 8
#: Bytes of which an address is to be a multiple for libraries to go about it in the same way.
_ALIGNED = 64
#: Kinds of layers, as configurations name them, that this attention is for.
_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: Positions that depend on the longest sequence of a batch.
_BY_LONGEST = frozenset({"dynamic", "longrope"})


def tiles(count: int, size: int = TILE) -> int:
    """The next multiple."""
    return -(-count // size) * size


@dataclass(frozen=True)
class _Group:
    """Rows that attention reads as many columns of: `first` to `end` of `rows`; `mask` `[rows, 1, 1, columns]`."""

    rows: slice | Tensor
    first: int
    end: int
    mask: Tensor


class Decoding:
    """One token for each row of a cache, the token's own column included."""

    def __init__(self, store: KeyValues, dtype: torch.dtype, device: torch.device) -> None:
        self._lengths = store.length[: store.rows] + 1
        self._dtype, self._device = dtype, device
        self._groups: dict[int | None, list[_Group]] = {}

    def groups(self, window: int | None) -> list[_Group]:
        """The rows by the columns they need, of those that a window lets them see."""
        if window not in self._groups:
            self._groups[window] = list(self._grouped(window))
        return self._groups[window]

    def _grouped(self, window: int | None) -> Iterator[_Group]:
        lengths = self._lengths
        begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        needs = np.stack([begins // BLOCK * BLOCK, [blocks(int(length)) for length in lengths]], axis=1)
        if self._device.type != "cpu":  # one launch for all
            needs[:] = needs[:, 0].min(), needs[:, 1].max()
        for first, end in np.unique(needs, axis=0).tolist():
            rows = np.flatnonzero((needs == (first, end)).all(axis=1))
            if len(rows) == 1 and torch.get_num_threads() > 1:
                rows = rows.repeat(
                    2
                )  # or the products of a single row with a single head would be divided among threads
            columns = np.arange(first, end)
            seen = (columns >= begins[rows, None]) & (columns < lengths[rows, None])
            mask = torch.from_numpy(np.where(seen, 0.0, -np.inf)).to(self._device, self._dtype)
            dense = rows[-1] - rows[0] + 1 == len(rows)
            chosen = slice(int(rows[0]), int(rows[-1]) + 1) if dense else torch.from_numpy(rows).to(self._device)
            yield _Group(chosen, first, end, mask[:, None, None])


#: What is computed: sequences of these lengths one after the other, or a token of each row; None is rectangles.
_present: ContextVar[Sequence[int] | Decoding | None] = ContextVar("present", default=None)


@contextmanager
def present(what: Sequence[int] | Decoding | None) -> Iterator[None]:
    """Tells attention what is computed."""
    token = _present.set(what)
    try:
        yield
    finally:
        _present.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Causal attention in the form that transformers calls, to `[B, T, heads, width]`.

    Args:
        module: The layer's attention.
        query: `[1, heads, T, d]` of a prefill, `[rows, heads, 1, d]` of a token of each row.
        key, value: Of the same tokens; where rows are decoded, the cache's.
        attention_mask: None: transformers makes none for a function that it does not know.
        scaling: Of the logits; None is 1/√d.
        dropout: None in generation.
        sliding_window: How many tokens, itself included, a token sees; None for all.
        further: What a family adds; a bound on logits is left out, as it is by the attention `sdpa`.
    """
    what = _present.get()
    found = query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    if isinstance(what, Decoding):
        with _one_thread(query.device):
            for group in what.groups(sliding_window):
                k, v = (each[group.rows][:, :, group.first : group.end] for each in (key, value))
                found[group.rows] = _last(query[group.rows], k, v, group.mask, scaling).transpose(1, 2)
        return found, None
    begin = 0
    for length in what or [query.shape[2]]:
        part = slice(begin, begin + length)
        begin += length
        q, k, v = (each[:, :, part].contiguous() for each in (query, key, value))
        found[:, part] = _causal(q, k, v, sliding_window, scaling).transpose(1, 2)
    return found, None


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, which of several threads computes a row may show in it."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _causal(query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None) -> Tensor:
    """Of whole sequences of the same length, `[B, heads, T, d]`."""
    length = query.shape[2]
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    behind = torch.arange(length, device=query.device)
    behind = behind[:, None] - behind
    mask = torch.zeros_like(behind, dtype=query.dtype).masked_fill_((behind < 0) | (behind >= window), -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _last(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Of one token for each row `[rows, heads, 1, d]`."""
    uneven = query.shape[3] != value.shape[3] or query[0].numel() * query.element_size() % _ALIGNED
    if query.device.type == "cpu" and uneven and len(query) > 1:
        # The library's own kernel for CPUs, which computes each row by itself, is not for these, or rows begin where they may.
        parts = zip(query.split(1), key.split(1), value.split(1), mask.split(1), strict=True)
        return torch.cat([_last(q.clone(), k, v, m, scaling) for q, k, v, m in parts])
    # Heads that share keys are as several tokens of one: keys need not be copied.
    shared = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    found = F.scaled_dot_product_attention(shared, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(*query.shape[:3], -1)


def expert_products(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A layer's experts in the form that transformers calls: `[T, H]` to `[T, H]`, each expert's tokens in whole tiles."""
    count, each = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts)
    room = -(-counts // _EXPERT_TILE) * _EXPERT_TILE
    # Where each pair of token and expert goes: behind the room of experts before, in the order among its expert's own.
    shift = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) + shift[chosen[order]]
    sizes = room.tolist()
    tokens = hidden.new_zeros((tiles(sum(sizes)), hidden.shape[1]))
    tokens[place] = hidden.repeat_interleave(each, dim=0)

    def product(x: Tensor, name: str) -> Tensor:
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        parts = list[Tensor]()
        for expert, part in enumerate(x[: sum(sizes)].split(sizes)):
            if len(part):
                weight = weights[expert].t() if module.is_transposed else weights[expert]
                parts.append(F.linear(part, weight, biases[expert]))
        parts.append(parts[0].new_zeros((len(x) - sum(sizes), parts[0].shape[1])))
        return torch.cat(parts)

    if module.has_gate:
        inner = module._apply_gate(product(tokens, "gate_up_proj"))
    else:
        inner = module.act_fn(product(tokens, "up_proj"))
    said = product(inner, "down_proj")[place] * top_k_weights.reshape(-1, 1)
    return said.view(count, each, -1).sum(dim=1).to(hidden.dtype)


def can_join(model: Any, context: int) -> bool:
    """Whether a causal model of transformers seems to be one whose attention is that of this module.

    Not where it mixes tokens in other ways, or where positions depend on the longest sequence of a batch.

    Args:
        model: From transformers.
        context: Tokens of the longest sequence.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = [
        each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("rope_type") in _BY_LONGEST
    ]
    usual = min((each.get("original_max_position_embeddings") or 0 for each in scaled), default=context)
    return bool(
        model._supports_attention_backend
        and not getattr(config, "alibi", False)
        and (model.config._attn_implementation == "sdpa" or not getattr(config, "attn_logit_softcapping", None))
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
        and set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYERS
        and usual >= context
    )


def join(model: Any, device: torch.device) -> None:
    """Has a model use the functions here."""
    sys.modules["transformers"].AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(sub_attention(model, NAME))
    if device.type == "cpu" and getattr(model, "_can_set_experts_implementation", lambda: False)():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, expert_products)
        model.set_experts_implementation(NAME)
