"""Batch-invariant attention and expert kernels: a token's result is bitwise independent of the rest of the batch.

The last bits of a sum depend on the order of its terms, which libraries choose by the shapes. Therefore the shapes of
attention depend only on a row's length, and inputs of matrix products are padded to full tiles, with which CPU libraries use
the same order for each row. The engine verifies this at its start (`hf_forward.Forward`).
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

from rlhpc.language.models.loading import linear_of
from rlhpc.language.models.vision import sub_attention

#: Attention reads the columns of a row in blocks of this size; their number depends only on the row's length.
_BLOCK = 32


def _round_up_to_block(length: int) -> int:
    """Rounds a number of tokens up to a multiple of the block size."""
    return -(-length // _BLOCK) * _BLOCK


class KVCache:
    """KV cache of all layers, `[rows, heads, columns, width]` each.

    Each row begins at column 0. Adding or removing a row copies no other row, except the last row that replaces a removed
    row. Values after a row's end are finite and get attention weight zero.

    Attributes:
        max_rows: Maximum number of rows.
        rows: Number of rows in use.
        length: Number of tokens in each row, `[max_rows]`.
        next_cells: Rows and columns of the tokens that the next pass computes.
        places: Positions of these tokens: their columns, shifted by preceding images.
        single_row: The row whose token the next pass computes; None for all rows.
        keys, values: Tensor of each layer.
    """

    next_cells: tuple[Tensor, Tensor]
    places: Tensor
    single_row: int | None

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows = 0
        self.length, self._shift = (np.zeros(max_rows, dtype=np.int64) for _ in range(2))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def clear(self) -> None:
        """Removes all rows and keeps the memory."""
        self.rows = 0

    def free(self) -> None:
        """Removes all rows and frees the memory."""
        self.clear()
        self.keys, self.values = [], []

    def append(self, layers: Any, lengths: Sequence[int], source: Sequence[int], shifts: Sequence[int]) -> None:
        """Adds rows from a prefill of several concatenated sequences.

        Args:
            layers: Layers of the prefill's cache, with `keys` and `values` `[1, heads, at least all tokens, width]`.
            lengths: Number of tokens of each sequence.
            source: Index of each new row's sequence, ascending; rows with the same prompt share a sequence.
            shifts: Next position of each sequence minus its next column.
        """
        starts = [0, *accumulate(lengths)]
        prefilled = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]
        first_row, end_row = self.rows, self.rows + len(source)
        self._grow(prefilled, end_row, max(lengths[sequence] for sequence in source) + 1)
        for tensor, source_tensor in zip((*self.keys, *self.values), prefilled, strict=True):
            tensor[first_row:end_row].zero_()
            target_row = first_row
            for sequence, equal_sources in groupby(source):
                count, length = len(list(equal_sources)), lengths[sequence]
                tensor[target_row : target_row + count, :, :length] = source_tensor[
                    0, :, starts[sequence] : starts[sequence] + length
                ]
                target_row += count
        self.length[first_row:end_row] = [lengths[sequence] for sequence in source]
        self._shift[first_row:end_row] = [shifts[sequence] for sequence in source]
        self.rows = end_row

    def reserve(self, single_row: int | None = None) -> None:
        """Reserves a column for the next token of each row, or of row `single_row`; sets `next_cells` and `places`."""
        self._grow((*self.keys, *self.values), self.rows, int(self.length[: self.rows].max()) + 1)
        rows = np.arange(self.rows) if single_row is None else np.array([single_row])
        device = self.keys[0].device
        self.single_row = single_row
        self.next_cells = torch.from_numpy(rows).to(device), torch.from_numpy(self.length[rows]).to(device)
        self.places = torch.from_numpy(self.length[rows] + self._shift[rows]).to(device)

    def drop(self, removed_rows: Sequence[int]) -> list[tuple[int, int]]:
        """Removes rows and moves the last rows into their places; returns the moves (from, to), for other per-row data."""
        row_moves = plan_row_moves(self.rows, removed_rows)
        if row_moves:
            moved_rows, freed_rows = (list(rows) for rows in zip(*row_moves, strict=True))
            max_length = int(self.length[moved_rows].max())
            for tensor in (*self.keys, *self.values):
                tensor[freed_rows, :, :max_length] = tensor[moved_rows, :, :max_length]
            self.length[freed_rows], self._shift[freed_rows] = self.length[moved_rows], self._shift[moved_rows]
        self.rows -= len(set(removed_rows))
        return row_moves

    def _grow(self, templates: Sequence[Tensor], rows: int, columns: int) -> None:
        """Grows the tensors, if necessary, to at least `rows` rows and `columns` columns, with spare capacity.

        Before the first allocation, `templates` holds a tensor for the keys of each layer, then for the values.
        """
        capacity = self.keys[0].shape if self.keys else (0, 0, 0)
        if rows <= capacity[0] and columns <= capacity[2]:
            return
        if rows > capacity[0]:
            rows = min(self.max_rows, max(2 * capacity[0], rows))
        if columns > capacity[2]:
            columns = _round_up_to_block(columns + columns // 2 + 64)
        rows, columns = max(rows, capacity[0]), max(columns, capacity[2])
        resized_tensors = list[Tensor]()
        for tensor in (*self.keys, *self.values) or templates:
            # Zeros rather than uninitialized memory, because weight 0 times NaN is NaN.
            resized_tensor = tensor.new_zeros((rows, tensor.shape[1], columns, tensor.shape[3]))
            if self.keys:
                resized_tensor[: self.rows, :, : capacity[2]] = tensor[: self.rows]
            resized_tensors.append(resized_tensor)
        num_layers = len(resized_tensors) // 2
        self.keys, self.values = resized_tensors[:num_layers], resized_tensors[num_layers:]


def decoding_cache(store: KVCache) -> Any:
    """Wraps `store` as a transformers cache for decoding one token of each row in `store.next_cells`.

    If `store.single_row` is set, layers return the keys and values of this row. Otherwise layers return all rows, and the
    attention function selects the columns of each row.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        """Cache layer that writes one token per row and returns views of the store."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            rows, columns = store.next_cells
            keys, values = store.keys[self.index], store.values[self.index]
            keys[rows, :, columns] = key_states[: len(columns), :, 0]
            values[rows, :, columns] = value_states[: len(columns), :, 0]
            if store.single_row is None:
                return keys, values
            row, end = slice(store.single_row, store.single_row + 1), self.get_seq_length() + 1
            return keys[row, :, :end], values[row, :, :end]

        def get_seq_length(self) -> int:
            return 0 if store.single_row is None else int(store.length[store.single_row])

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

    return Cache(layers=[Layer(index) for index in range(len(store.keys))])


def plan_row_moves(rows: int, removed_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the moves (from, to) that replace removed rows by the last rows."""
    removed_set = set(removed_rows)
    num_remaining = rows - len(removed_set)
    freed_rows = [row for row in sorted(removed_set) if row < num_remaining]
    moved_rows = [row for row in range(num_remaining, rows) if row not in removed_set]
    return list(zip(moved_rows, freed_rows, strict=True))


#: Name under which the functions are registered with transformers.
NAME = "rlhpc_batch_invariant"
#: Multiple to which the number of tokens is padded, because vectorized functions compute a remainder differently.
TILE = 32
#: Multiple to which the rows of a matrix product are padded.
_PRODUCT_TILE = 8
#: Alignment in bytes at which libraries use the same kernel for all rows.
_ALIGNMENT_BYTES = 64
#: Layer types of configurations that this attention supports.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Rotary position types that depend on the longest sequence of a batch.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def round_up_to_tile(count: int, size: int = TILE) -> int:
    """Rounds a count up to a multiple of the tile size."""
    return -(-count // size) * size


@dataclass(frozen=True)
class _Group:
    """Rows for which attention reads the same columns, `first` to `end - 1`; `mask` is `[rows, 1, 1, columns]`."""

    rows: slice | Tensor
    first: int
    end: int
    mask: Tensor


class Decoding:
    """Shapes of a decoding pass that computes one token for each row of a cache.

    Args:
        store: The cache, in which columns for the tokens are reserved.
        padded_rows: Number of rows of the layers' inputs; the cache's rows come first.
        dtype, device: Dtype and device of the model.

    Attributes:
        product_rows: Number of rows for which matrix products are computed.
        padded_rows: Number of rows of the layers' inputs.
    """

    def __init__(self, store: KVCache, padded_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.product_rows = min(round_up_to_tile(store.rows, _PRODUCT_TILE), padded_rows)
        self.padded_rows = padded_rows
        self._lengths = store.length[: store.rows] + 1
        self._dtype = dtype
        self._device = device
        self._groups: dict[int | None, list[_Group]] = {}

    def groups(self, window: int | None) -> list[_Group]:
        """Returns groups of rows for which attention reads the same columns; `window` is the sliding window or None."""
        if window not in self._groups:
            self._groups[window] = list(self._iter_groups(window))
        return self._groups[window]

    def _iter_groups(self, window: int | None) -> Iterator[_Group]:
        lengths = self._lengths
        starts = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        column_ranges = np.stack(
            [starts // _BLOCK * _BLOCK, [_round_up_to_block(int(length)) for length in lengths]], axis=1
        )
        if self._device.type != "cpu":  # one launch for all rows
            column_ranges[:] = column_ranges[:, 0].min(), column_ranges[:, 1].max()
        for begin, end in np.unique(column_ranges, axis=0).tolist():
            rows = np.flatnonzero((column_ranges == (begin, end)).all(axis=1))
            if len(rows) == 1 and torch.get_num_threads() > 1:
                rows = rows.repeat(2)  # otherwise torch may divide the products of a single row among threads
            columns = np.arange(begin, end)
            visible = (columns >= starts[rows, None]) & (columns < lengths[rows, None])
            mask = torch.from_numpy(np.where(visible, 0.0, -np.inf)).to(self._device, self._dtype)
            is_contiguous = rows[-1] - rows[0] + 1 == len(rows)
            selection = (
                slice(int(rows[0]), int(rows[-1]) + 1) if is_contiguous else torch.from_numpy(rows).to(self._device)
            )
            yield _Group(selection, begin, end, mask[:, None, None])


#: Shapes of the current pass: lengths of concatenated sequences (prefill), or `Decoding`; None for equal lengths.
_pass_shapes: ContextVar[Sequence[int] | Decoding | None] = ContextVar("pass_shapes", default=None)


@contextmanager
def pass_shapes(computation: Sequence[int] | Decoding | None) -> Iterator[None]:
    """Sets the shapes of the model's passes within the block: lengths of a prefill's sequences, or `Decoding`."""
    token = _pass_shapes.set(computation)
    try:
        yield
    finally:
        _pass_shapes.reset(token)


class DecodingLinear(nn.Linear):
    """Linear layer that computes only the first `product_rows` rows in decoding, because the other rows are padding."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes `[rows, …, outputs]` from `[rows, …, inputs]`; rows that are not computed are zero."""
        decoding = _pass_shapes.get()
        if isinstance(decoding, Decoding) and decoding.product_rows < decoding.padded_rows == len(input):
            outputs = super().forward(input[: decoding.product_rows])
            return F.pad(outputs, (0, 0) * (outputs.dim() - 1) + (0, len(input) - len(outputs)))
        return super().forward(input)


def _attend(
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
    """Computes causal attention; transformers calls it as a registered attention function.

    Args:
        module: The layer's attention module.
        query: `[1, heads, T, d]` in a prefill, `[rows, heads, 1, d]` in decoding.
        key, value: Keys and values of the same tokens in a prefill, of the whole cache in decoding.
        attention_mask: Always None, because transformers builds no mask for functions that it does not know.
        scaling: Factor of the attention logits; None means 1/√d.
        dropout: Unused in generation.
        sliding_window: Number of tokens that a token attends to, including itself; None for all.
        further: Additional arguments of a model family; soft-capping of logits is ignored, as in `sdpa` attention.

    Returns:
        Outputs `[B, T, heads, width]`, and None in place of attention weights.
    """
    computation = _pass_shapes.get()
    outputs = query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    if isinstance(computation, Decoding):
        with _one_thread(query.device):
            for group in computation.groups(sliding_window):
                k, v = (states[group.rows][:, :, group.first : group.end] for states in (key, value))
                outputs[group.rows] = _attend_last(query[group.rows], k, v, group.mask, scaling).transpose(1, 2)
        return outputs, None
    start = 0
    for length in computation or [query.shape[2]]:
        tokens = slice(start, start + length)
        start += length
        q, k, v = (states[:, :, tokens].contiguous() for states in (query, key, value))
        outputs[:, tokens] = _causal(q, k, v, sliding_window, scaling).transpose(1, 2)
    return outputs, None


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limits torch to one thread within the block on a CPU, where a row's result may depend on its thread."""
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
    """Computes causal attention of complete sequences of equal length, `[B, heads, T, d]`."""
    length = query.shape[2]
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance
    mask = torch.zeros_like(distance, dtype=query.dtype).masked_fill_((distance < 0) | (distance >= window), -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _attend_last(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Computes attention of one query token per row, `[rows, heads, 1, d]`, to the row's keys and values."""
    is_misaligned = query.shape[3] != value.shape[3] or query[0].numel() * query.element_size() % _ALIGNMENT_BYTES
    if query.device.type == "cpu" and is_misaligned and len(query) > 1:
        # Row by row, because torch's CPU kernel does not support these shapes or the rows are not aligned.
        row_inputs = zip(query.split(1), key.split(1), value.split(1), mask.split(1), strict=True)
        return torch.cat([_attend_last(q.clone(), k, v, m, scaling) for q, k, v, m in row_inputs])
    # Heads that share keys are computed as several tokens of one head, which avoids copies of the keys.
    grouped_query = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    outputs = F.scaled_dot_product_attention(grouped_query, key, value, attn_mask=mask, scale=scaling)
    return outputs.reshape(*query.shape[:3], -1)


def _expert_products(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the output of a layer's experts, `[T, H]`; transformers calls it as a registered experts function.

    Each expert's tokens are padded to full tiles.
    """
    count, top_k = top_k_index.shape
    expert_ids = top_k_index.reshape(-1)
    by_expert = expert_ids.argsort(stable=True)
    counts = torch.bincount(expert_ids, minlength=module.num_experts)
    padded_counts = -(-counts // _PRODUCT_TILE) * _PRODUCT_TILE
    # Index of each (token, expert) pair: pairs of an expert are adjacent and begin after the preceding experts' tiles.
    padding = (padded_counts.cumsum(0) - padded_counts) - (counts.cumsum(0) - counts)
    positions = torch.empty_like(by_expert)
    positions[by_expert] = torch.arange(len(by_expert), device=by_expert.device) + padding[expert_ids[by_expert]]
    sizes = padded_counts.tolist()
    tokens = hidden.new_zeros((round_up_to_tile(sum(sizes)), hidden.shape[1]))
    tokens[positions] = hidden.repeat_interleave(top_k, dim=0)

    def product(x: Tensor, name: str) -> Tensor:
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        products = list[Tensor]()
        for expert, rows in enumerate(x[: sum(sizes)].split(sizes)):
            if len(rows):
                weight = weights[expert].t() if module.is_transposed else weights[expert]
                products.append(F.linear(rows, weight, biases[expert]))
        products.append(products[0].new_zeros((len(x) - sum(sizes), products[0].shape[1])))
        return torch.cat(products)

    if module.has_gate:
        activations = module._apply_gate(product(tokens, "gate_up_proj"))
    else:
        activations = module.act_fn(product(tokens, "up_proj"))
    outputs = product(activations, "down_proj")[positions] * top_k_weights.reshape(-1, 1)
    return outputs.view(count, top_k, -1).sum(dim=1).to(hidden.dtype)


def supports_batch_invariance(model: Any, context: int) -> bool:
    """Returns whether the configuration of a causal model permits the attention of this module.

    The result is false if tokens interact other than through this attention, or if positions depend on a batch's longest
    sequence.

    Args:
        model: Model of transformers.
        context: Maximum number of tokens of a sequence.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    rope_parameters = [
        parameters
        for parameters in (rope, *rope.values())
        if isinstance(parameters, dict) and parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    original_context = min(
        (parameters.get("original_max_position_embeddings") or 0 for parameters in rope_parameters), default=context
    )
    return bool(
        model._supports_attention_backend
        and not getattr(config, "alibi", False)
        and (model.config._attn_implementation == "sdpa" or not getattr(config, "attn_logit_softcapping", None))
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
        and set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES
        and original_context >= context
    )


def use_batch_invariance(model: Any, device: torch.device) -> None:
    """Makes a model use this module's attention, and on CPUs also its experts function and `DecodingLinear`."""
    for name, module in list(model.named_modules()) if device.type == "cpu" else ():
        if type(module) is nn.Linear:
            model.set_submodule(name, linear_of(DecodingLinear, module))
    sys.modules["transformers"].AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(sub_attention(model, NAME))
    if device.type == "cpu" and getattr(model, "_can_set_experts_implementation", lambda: False)():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, _expert_products)
        model.set_experts_implementation(NAME)
