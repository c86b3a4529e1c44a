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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.language.models.loading import linear_of
from rlhpc.language.models.vision import sub_attention

#: Name under which the functions are registered with transformers.
_NAME = "rlhpc_batch_invariant"
#: Multiple to which the number of tokens is padded, because vectorized functions compute a remainder differently.
TILE = 32
#: Multiple to which the rows of a matrix product are padded: libraries add up products of fewer rows in another order (on an
#: AMD EPYC those of fewer than 8, on an Intel Xeon from a width of 256 on those of fewer than 16).
_PRODUCT_TILE = 16
#: Alignment in bytes at which libraries use the same kernel for all rows.
_ALIGNMENT_BYTES = 64
#: Layer types of configurations that this attention supports.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Rotary position types that depend on the longest sequence of a batch.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

#: Attention reads the columns of a row in blocks of this size; their number depends only on the row's length.
_BLOCK = 32


def round_up_to_block(num_tokens: int) -> int:
    """Rounds a number of tokens up to a multiple of the block size."""
    return -(-num_tokens // _BLOCK) * _BLOCK


#: Layer types of configurations that have recurrent states, or that need no cache in models with such layers.
STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"})


def has_states(config: Any) -> bool:
    """Returns whether a text model has layers with recurrent states, according to its configuration."""
    return not STATE_LAYER_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


def round_up_to_tile(num_rows: int, tile_size: int = TILE) -> int:
    """Rounds a count up to a multiple of the tile size."""
    return -(-num_rows // tile_size) * tile_size


@dataclass(frozen=True)
class _Group:
    """Rows for which attention reads the same columns, `first_index` to `end - 1`; `mask` is `[rows, 1, 1, columns]`."""

    rows: slice | Tensor
    first_index: int
    end: int
    mask: Tensor


class Decoding:
    """Shapes of a decoding pass that computes one token for each row of a cache.

    Args:
        lengths: Number of tokens of each row before the pass, `[rows]`.
        num_padded_rows: Number of rows of the layers' inputs; the cache's rows come first.
        dtype, device: Dtype and device of the model.

    Attributes:
        product_rows: Number of rows for which matrix products are computed.
        padded_rows: Number of rows of the layers' inputs.
    """

    def __init__(self, lengths: np.ndarray, num_padded_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.product_rows = min(round_up_to_tile(len(lengths), _PRODUCT_TILE), num_padded_rows)
        self.padded_rows = num_padded_rows
        self._lengths = lengths + 1
        self._dtype = dtype
        self._device = device
        self._groups: dict[int | None, list[_Group]] = {}

    def groups(self, window: int | None) -> list[_Group]:
        """Returns groups of rows for which attention reads the same columns; `window` is the sliding window or None."""
        if window not in self._groups:
            groups = _attention_groups(self._lengths, window, self._dtype, self._device)
            self._groups[window] = list(groups)
        return self._groups[window]


def _attention_groups(
    row_lengths: np.ndarray, window: int | None, dtype: torch.dtype, device: torch.device
) -> Iterator[_Group]:
    """Yields groups of rows for which the attention of the last token reads the same columns.

    Args:
        row_lengths: Number of tokens of each row, with the token that attends.
        window: Number of tokens that it attends to; None for all.
        dtype, device: Dtype and device of the masks.
    """
    window_starts = np.zeros_like(row_lengths) if window is None else np.maximum(row_lengths - window, 0)
    column_ranges = np.stack(
        [window_starts // _BLOCK * _BLOCK, [round_up_to_block(int(row_length)) for row_length in row_lengths]],
        axis=1,
    )
    if device.type != "cpu":  # one launch for all rows
        column_ranges[:] = column_ranges[:, 0].min(), column_ranges[:, 1].max()
    for first_column, end_column in np.unique(column_ranges, axis=0).tolist():
        rows = np.flatnonzero((column_ranges == (first_column, end_column)).all(axis=1))
        if len(rows) == 1 and torch.get_num_threads() > 1:
            rows = rows.repeat(2)  # otherwise torch may divide the products of a single row among threads
        columns = np.arange(first_column, end_column)
        is_visible = (columns >= window_starts[rows, None]) & (columns < row_lengths[rows, None])
        mask = torch.from_numpy(np.where(is_visible, 0.0, -np.inf)).to(device, dtype)
        is_contiguous = rows[-1] - rows[0] + 1 == len(rows)
        selection = slice(int(rows[0]), int(rows[-1]) + 1) if is_contiguous else torch.from_numpy(rows).to(device)
        yield _Group(selection, first_column, end_column, mask[:, None, None])


#: Shapes of the current pass: lengths of concatenated sequences (prefill), or `Decoding`; None for equal lengths.
_pass_shapes: ContextVar[Sequence[int] | Decoding | None] = ContextVar("pass_shapes", default=None)


@contextmanager
def pass_shapes(pass_shape: Sequence[int] | Decoding | None) -> Iterator[None]:
    """Sets the shapes of the model's passes within the block: lengths of a prefill's sequences, or `Decoding`."""
    token = _pass_shapes.set(pass_shape)
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


def _compute_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **attention_kwargs: Any,
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
        attention_kwargs: Additional arguments of a model family; soft-capping of logits is ignored, as in `sdpa` attention.

    Returns:
        Outputs `[B, T, heads, width]`, and None in place of attention weights.
    """
    pass_shape = _pass_shapes.get()
    if isinstance(pass_shape, Decoding):
        return _decode_attention(query, key, value, pass_shape, sliding_window, scaling), None
    outputs = query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    sequence_start = 0
    for sequence_length in pass_shape or [query.shape[2]]:
        tokens = slice(sequence_start, sequence_start + sequence_length)
        sequence_start += sequence_length
        q, k, v = (states[:, :, tokens].contiguous() for states in (query, key, value))
        outputs[:, tokens] = _compute_causal_attention(q, k, v, sliding_window, scaling).transpose(1, 2)
    return outputs, None


def _decode_attention(
    query: Tensor, key: Tensor, value: Tensor, decoding: Decoding, window: int | None, scaling: float | None
) -> Tensor:
    """Computes attention of one token per row, `[rows, 1, heads, width]`.

    Args:
        query: `[rows, heads, 1, d]`.
        key, value: Keys and values of the cache.
        decoding: Shapes of the pass.
        window: Number of tokens that a token attends to; None for all.
        scaling: Factor of the attention logits; None means 1/√d.
    """
    outputs = query.new_zeros((query.shape[0], 1, query.shape[1], value.shape[3]))
    with _use_one_thread(query.device):
        for group in decoding.groups(window):
            k, v = (states[group.rows][:, :, group.first_index : group.end] for states in (key, value))
            outputs[group.rows] = _compute_last_attention(query[group.rows], k, v, group.mask, scaling).transpose(1, 2)
    return outputs


def attend_as_decoding(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int] | None, window: int | None, scaling: float | None
) -> Tensor:
    """Computes causal attention in which each token has the bits that decoding gives it.

    Args:
        query, key, value: `[1, heads, T, d]` of several concatenated sequences; in decoding, `[rows, heads, 1, d]` and the
            keys and values of the cache.
        lengths: Lengths of the sequences; None for those of the pass (`pass_shapes`).
        window: Number of tokens that a token attends to, including itself; None for all.
        scaling: Factor of the attention logits; None means 1/√d.

    Returns:
        Outputs `[1, T, heads, width]`, 0 for tokens after the last sequence, or `[rows, 1, heads, width]`.

    Raises:
        ValueError: The sequences are the rows of a rectangle.
    """
    pass_shape = _pass_shapes.get()
    if isinstance(pass_shape, Decoding):
        return _decode_attention(query, key, value, pass_shape, window, scaling)
    if len(query) != 1:
        raise ValueError("exact attention reads rows without padding")
    outputs, start = list[Tensor](), 0
    for length in lengths or pass_shape or [query.shape[2]]:
        tokens = slice(start, start + length)
        sequence_query, sequence_key, sequence_value = (states[0, :, tokens] for states in (query, key, value))
        outputs.append(_attend_tokens(sequence_query, sequence_key, sequence_value, window, scaling))
        start += length
    outputs.append(query.new_zeros(query.shape[2] - start, query.shape[1], value.shape[3]))
    return torch.cat(outputs)[None]


def _attend_tokens(query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None) -> Tensor:
    """Computes the attention of one sequence, `[T, heads, width]`, from `[heads, T, d]`: as if each token were decoded."""
    length, num_padded = query.shape[1], -query.shape[1] % TILE
    # Padding keeps the shapes of all calls equal; its values are finite and get the weight zero.
    query, key, value = (F.pad(states, (0, 0, 0, num_padded)) for states in (query, key, value))
    lengths = np.arange(1, length + num_padded + 1)
    outputs = list[Tensor]()
    for group in _attention_groups(lengths, window, query.dtype, query.device):
        columns = slice(group.first_index, group.end)
        k, v = (states[None, :, columns].expand(len(group.mask), -1, -1, -1) for states in (key, value))
        token_query = query[:, group.rows].transpose(0, 1)[:, :, None]
        outputs.append(_compute_last_attention(token_query, k, v, group.mask, scaling)[:, :, 0])
    return torch.cat(outputs)[:length]


@contextmanager
def _use_one_thread(device: torch.device) -> Iterator[None]:
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


def _compute_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """Computes causal attention of complete sequences of equal length, `[B, heads, T, d]`."""
    query_length = query.shape[2]
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    if window is None or window >= query_length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    query_positions = torch.arange(query_length, device=query.device)
    query_positions = query_positions[:, None] - query_positions
    mask = torch.zeros_like(query_positions, dtype=query.dtype).masked_fill_(
        (query_positions < 0) | (query_positions >= window), -torch.inf
    )
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _compute_last_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Computes attention of one query token per row, `[rows, heads, 1, d]`, to the row's keys and values."""
    is_misaligned = query.shape[3] != value.shape[3] or query[0].numel() * query.element_size() % _ALIGNMENT_BYTES
    if query.device.type == "cpu" and is_misaligned and len(query) > 1:
        # Row by row, because torch's CPU kernel does not support these shapes or the rows are not aligned.
        row_inputs = zip(query.split(1), key.split(1), value.split(1), mask.split(1), strict=True)
        return torch.cat([_compute_last_attention(q.clone(), k, v, m, scaling) for q, k, v, m in row_inputs])
    # Heads that share keys are computed as several tokens of one head, which avoids copies of the keys.
    grouped_query = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    outputs = F.scaled_dot_product_attention(grouped_query, key, value, attn_mask=mask, scale=scaling)
    return outputs.reshape(*query.shape[:3], -1)


def _compute_expert_products(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the output of a layer's experts, `[T, H]`; transformers calls it as a registered experts function.

    Each expert's tokens are padded to full tiles.
    """
    num_tokens, top_k = top_k_index.shape
    expert_ids = top_k_index.reshape(-1)
    by_expert = expert_ids.argsort(stable=True)
    tokens_per_expert = torch.bincount(expert_ids, minlength=module.num_experts)
    padded_counts = -(-tokens_per_expert // _PRODUCT_TILE) * _PRODUCT_TILE
    # Index of each (token, expert) pair: pairs of an expert are adjacent and begin after the preceding experts' tiles.
    padding = (padded_counts.cumsum(0) - padded_counts) - (tokens_per_expert.cumsum(0) - tokens_per_expert)
    inverse_order = torch.empty_like(by_expert)
    inverse_order[by_expert] = torch.arange(len(by_expert), device=by_expert.device) + padding[expert_ids[by_expert]]
    expert_sizes = padded_counts.tolist()
    tokens = hidden_states.new_zeros((round_up_to_tile(sum(expert_sizes)), hidden_states.shape[1]))
    tokens[inverse_order] = hidden_states.repeat_interleave(top_k, dim=0)

    def product(x: Tensor, name: str) -> Tensor:
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        products = list[Tensor]()
        for expert, rows in enumerate(x[: sum(expert_sizes)].split(expert_sizes)):
            if len(rows):
                weight = weights[expert].t() if module.is_transposed else weights[expert]
                products.append(F.linear(rows, weight, biases[expert]))
        products.append(products[0].new_zeros((len(x) - sum(expert_sizes), products[0].shape[1])))
        return torch.cat(products)

    if module.has_gate:
        activations = module._apply_gate(product(tokens, "gate_up_proj"))
    else:
        activations = module.act_fn(product(tokens, "up_proj"))
    outputs = product(activations, "down_proj")[inverse_order] * top_k_weights.reshape(-1, 1)
    return outputs.view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


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
    # Families with states do not declare that they take other attention functions; the engine's comparison decides.
    return bool(
        (model._supports_attention_backend or has_states(config))
        and not getattr(config, "alibi", False)
        and (model.config._attn_implementation == "sdpa" or not getattr(config, "attn_logit_softcapping", None))
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
        and set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES | STATE_LAYER_TYPES
        and original_context >= context
    )


def use_batch_invariance(model: Any, device: torch.device) -> None:
    """Makes a model use this module's attention, and on CPUs also its experts function and `DecodingLinear`."""
    for name, module in list(model.named_modules()) if device.type == "cpu" else ():
        if type(module) is nn.Linear:
            model.set_submodule(name, linear_of(DecodingLinear, module))
    sys.modules["transformers"].AttentionInterface.register(_NAME, _compute_attention)
    model.set_attn_implementation(sub_attention(model, _NAME))
    if device.type == "cpu":
        use_invariant_experts(model)


def use_invariant_experts(model: Any) -> None:
    """Makes the experts of a model, if it has any, compute each expert's tokens in full tiles."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_NAME, _compute_expert_products)
        model.set_experts_implementation(_NAME)
