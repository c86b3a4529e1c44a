"""Batch-invariant prefill and decoding of the rows of the hf engine, and their cache: no row depends on other rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.engines.batch_invariance import (
    Decoding,
    has_states,
    pass_shapes,
    round_up_to_block,
    round_up_to_tile,
    supports_batch_invariance,
    use_batch_invariance,
)
from rlhpc.language.models.loading import agrees
from rlhpc.language.models.vision import sub_attention
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line
from rlhpc.runtime.torch_adapter import replace_forward

if TYPE_CHECKING:
    from rlhpc.language.data.images import PromptImages
    from rlhpc.language.models.moe_routing import Routing

logger = logging.getLogger(__name__)

#: Maximum number of tokens in a joint prefill; up to this number torch computes norms in one thread.
_PREFILL_TOKENS = 1024
#: Largest number of elements that torch does not divide among threads, and step of vectorized functions, in any dtype.
_MAX_THREAD_ELEMENTS, _STEP = 32768, 64


#: Attributes of transformers' recurrent cache layers that hold states by their number.
_STATE_KINDS = ("conv_states", "recurrent_states")


class KVCache:
    """KV cache of all attention layers, `[rows, heads, columns, width]` each, and states of recurrent layers, `[rows, …]`.

    Each row begins at column 0. Adding or removing a row copies no other row, except the last row that replaces a removed
    row. Values after a row's end are finite and get attention weight zero.

    Attributes:
        max_rows: Maximum number of rows.
        rows: Number of rows in use.
        length: Number of tokens in each row, `[max_rows]`.
        next_cells: Rows and columns of the tokens that the next pass computes.
        places: Positions of these tokens: their columns, shifted by preceding images.
        single_row: The row whose token the next pass computes; None for all rows.
        pass_rows: Rows whose states the next pass reads and changes.
        keys, values: Tensor of each attention layer.
        attention_indices: Index of each layer in `keys` and `values`; None for a layer without attention.
        states: Recurrent states of each layer by kind and number; empty for a layer without states.
    """

    next_cells: tuple[Tensor, Tensor]
    places: Tensor
    single_row: int | None
    pass_rows: slice

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows = 0
        self.length, self._shift = (np.zeros(max_rows, dtype=np.int64) for _ in range(2))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.attention_indices: list[int | None] = []
        self.states: list[dict[tuple[str, int], Tensor]] = []

    def clear(self) -> None:
        """Removes all rows and keeps the memory."""
        self.rows = 0

    def free(self) -> None:
        """Removes all rows and frees the memory."""
        self.clear()
        self.keys, self.values, self.attention_indices, self.states = [], [], [], []

    def append(self, layers: Any, lengths: Sequence[int], source: Sequence[int], shifts: Sequence[int]) -> None:
        """Adds rows from a prefill of several concatenated sequences, or of one sequence if layers have states.

        Args:
            layers: Layers of the prefill's cache, with `keys` and `values` `[1, heads, at least all tokens, width]`, or with
                states `[1, …]` after the sequence's last token, or with both.
            lengths: Number of tokens of each sequence.
            source: Index of each new row's sequence, ascending; rows with the same prompt share a sequence.
            shifts: Next position of each sequence minus its next column.
        """
        sequence_starts = [0, *accumulate(lengths)]
        attention_layers = [layer for layer in layers if getattr(layer, "keys", None) is not None]
        prefilled = [*(layer.keys for layer in attention_layers), *(layer.values for layer in attention_layers)]
        first_row, end_row = self.rows, self.rows + len(source)
        self._append_states(layers, first_row, end_row)
        self._grow_tensors(prefilled, end_row, max(lengths[sequence] for sequence in source) + 1)
        for tensor, source_tensor in zip((*self.keys, *self.values), prefilled, strict=True):
            tensor[first_row:end_row].zero_()
            target_row = first_row
            for sequence, equal_sources in groupby(source):
                num_copies, sequence_length = len(list(equal_sources)), lengths[sequence]
                tensor[target_row : target_row + num_copies, :, :sequence_length] = source_tensor[
                    0, :, sequence_starts[sequence] : sequence_starts[sequence] + sequence_length
                ]
                target_row += num_copies
        self.length[first_row:end_row] = [lengths[sequence] for sequence in source]
        self._shift[first_row:end_row] = [shifts[sequence] for sequence in source]
        self.rows = end_row

    def _append_states(self, layers: Sequence[Any], first_row: int, end_row: int) -> None:
        """Copies the states of a prefill's layers to rows from `first_row` to `end_row - 1`."""
        if not self.states:
            indices = accumulate(getattr(layer, "keys", None) is not None for layer in layers)
            self.attention_indices = [
                index - 1 if getattr(layer, "keys", None) is not None else None
                for index, layer in zip(indices, layers, strict=True)
            ]
            self.states = [
                {
                    (kind, number): tensor[:0]
                    for kind in _STATE_KINDS
                    for number, tensor in getattr(layer, kind, {}).items()
                    if tensor is not None
                }
                for layer in layers
            ]
        self._grow_states(end_row)
        for states, layer in zip(self.states, layers, strict=True):
            for (kind, number), tensor in states.items():
                tensor[first_row:end_row] = getattr(layer, kind)[number]

    def _grow_states(self, num_rows: int) -> None:
        """Grows the states to at least `num_rows` rows, with spare capacity; new rows are zero."""
        for states in self.states:
            for key, tensor in states.items():
                if len(tensor) < num_rows:
                    capacity = max(num_rows, min(2 * len(tensor), round_up_to_block(self.max_rows)))
                    states[key] = tensor.new_zeros((capacity, *tensor.shape[1:]))
                    states[key][: self.rows] = tensor[: self.rows]

    def reserve(self, single_row: int | None = None, padded_rows: int = 0) -> None:
        """Reserves a column for the next token of each row, or of row `single_row`; sets `next_cells`, `places`, `pass_rows`.

        Args:
            single_row: The row whose token the next pass computes; None for all rows.
            padded_rows: Number of rows of a pass over all rows; rows after the cache's rows are padding.
        """
        self._grow_tensors((*self.keys, *self.values), self.rows, int(self.length[: self.rows].max()) + 1)
        self._grow_states(max(self.rows, padded_rows))
        rows = np.arange(self.rows) if single_row is None else np.array([single_row])
        first_row, end_row = (0, max(self.rows, padded_rows)) if single_row is None else (single_row, single_row + 1)
        device = next(tensor.device for tensor in self._iter_tensors())
        self.single_row, self.pass_rows = single_row, slice(first_row, end_row)
        self.next_cells = torch.from_numpy(rows).to(device), torch.from_numpy(self.length[rows]).to(device)
        self.places = torch.from_numpy(self.length[rows] + self._shift[rows]).to(device)

    def _iter_tensors(self) -> Iterator[Tensor]:
        yield from (*self.keys, *self.values)
        for states in self.states:
            yield from states.values()

    def drop(self, removed_rows: Sequence[int]) -> list[tuple[int, int]]:
        """Removes rows and moves the last rows into their places; returns the moves (from, to), for other per-row data."""
        row_moves = plan_row_moves(self.rows, removed_rows)
        if row_moves:
            moved_rows, freed_rows = (list(rows) for rows in zip(*row_moves, strict=True))
            max_length = int(self.length[moved_rows].max())
            for tensor in (*self.keys, *self.values):
                tensor[freed_rows, :, :max_length] = tensor[moved_rows, :, :max_length]
            for states in self.states:
                for tensor in states.values():
                    tensor[freed_rows] = tensor[moved_rows]
            self.length[freed_rows], self._shift[freed_rows] = self.length[moved_rows], self._shift[moved_rows]
        self.rows -= len(set(removed_rows))
        return row_moves

    def _grow_tensors(self, templates: Sequence[Tensor], num_rows: int, num_columns: int) -> None:
        """Grows the tensors, if necessary, to at least `num_rows` rows and `num_columns` columns, with spare capacity.

        Before the first allocation, `templates` holds a tensor for the keys of each layer, then for the values.
        """
        capacity = self.keys[0].shape if self.keys else (0, 0, 0)
        if num_rows <= capacity[0] and num_columns <= capacity[2]:
            return
        if num_rows > capacity[0]:
            num_rows = min(self.max_rows, max(2 * capacity[0], num_rows))
        if num_columns > capacity[2]:
            num_columns = round_up_to_block(num_columns + num_columns // 2 + 64)
        num_rows, num_columns = max(num_rows, capacity[0]), max(num_columns, capacity[2])
        resized_tensors = list[Tensor]()
        for tensor in (*self.keys, *self.values) or templates:
            # Zeros rather than uninitialized memory, because weight 0 times NaN is NaN.
            resized_tensor = tensor.new_zeros((num_rows, tensor.shape[1], num_columns, tensor.shape[3]))
            if self.keys:
                resized_tensor[: self.rows, :, : capacity[2]] = tensor[: self.rows]
            resized_tensors.append(resized_tensor)
        num_layers = len(resized_tensors) // 2
        self.keys, self.values = resized_tensors[:num_layers], resized_tensors[num_layers:]


def prefill_cache(model: Any) -> Any:
    """Creates an empty transformers cache for a prefill: recurrent layers have states, attention layers keep all keys."""
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
    )

    if not has_states(model.config.get_text_config()):
        return DynamicCache()
    layers = list[Any]()
    for layer in DynamicCache(config=model.config).layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layers.append(DynamicLayer())
        elif isinstance(layer, DynamicLayer):
            layers.append(LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states))
        else:
            layers.append(LinearAttentionLayer(number_of_states=layer.number_of_states))
    return Cache(layers=layers)


def decoding_cache(store: KVCache) -> Any:
    """Wraps `store` as a transformers cache for decoding one token of each row in `store.next_cells`.

    If `store.single_row` is set, layers return the keys and values of this row. Otherwise layers return all rows, and the
    attention function selects the columns of each row. The states of recurrent layers are views of `store.pass_rows`, which
    models change in place; `select_rows` must be called before each pass.
    """
    from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

    class AttentionLayer(DynamicLayer):
        """Cache layer that writes one token per row and returns views of the store."""

        index: int

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            rows, columns = store.next_cells
            keys, values = store.keys[self.index], store.values[self.index]
            keys[rows, :, columns] = key_states[: len(columns), :, 0]
            values[rows, :, columns] = value_states[: len(columns), :, 0]
            if store.single_row is None:
                return keys, values
            row, end_position = slice(store.single_row, store.single_row + 1), self.get_seq_length() + 1
            return keys[row, :, :end_position], values[row, :, :end_position]

        def get_seq_length(self) -> int:
            return 0 if store.single_row is None else int(store.length[store.single_row])

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

    class RecurrentAttentionLayer(LinearAttentionLayer, AttentionLayer):  # type: ignore[misc,override]
        """Cache layer of a layer that has both states and attention."""

        def __init__(self) -> None:
            AttentionLayer.__init__(self)
            LinearAttentionLayer.__init__(self)

    class RowsCache(Cache):
        """Cache of the store's layers."""

        def select_rows(self) -> None:
            """Makes the states of all layers views of the rows that the next pass computes."""
            layers: list[Any] = self.layers
            for layer, states in zip(layers, store.states, strict=True):
                for (kind, number), tensor in states.items():
                    view = tensor[store.pass_rows]
                    getattr(layer, kind)[number] = view
                    getattr(layer, f"is_{kind}_initialized")[number] = True
                    layer.has_previous_state[number] = True
                    if kind == "conv_states":
                        layer.conv_kernel_size[number] = view.shape[-1]

    layers = list[Any]()
    for attention_index, states in zip(store.attention_indices, store.states, strict=True):
        if attention_index is None:
            layers.append(LinearAttentionLayer())
            continue
        layer = RecurrentAttentionLayer() if states else AttentionLayer()
        layer.index, layer.is_initialized = attention_index, True
        layers.append(layer)
    return RowsCache(layers=layers)


def plan_row_moves(num_rows: int, removed_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the moves (from, to) that replace removed rows by the last rows."""
    removed_set = set(removed_rows)
    num_remaining = num_rows - len(removed_set)
    freed_rows = [row for row in sorted(removed_set) if row < num_remaining]
    moved_rows = [row for row in range(num_remaining, num_rows) if row not in removed_set]
    return list(zip(moved_rows, freed_rows, strict=True))


#: Probe rows that are compared with other passes, in different tiles; their texts differ in length (`Forward._probe_ids`).
_PROBE_ROWS = (10, 36)
#: Number of probe rows in a joint pass on CPUs, more than two tiles; number of decoding passes after their prefill.
_NUM_BATCH_ROWS, _NUM_DECODED = 37, 2


class Forward:
    """Prefill and decoding of all rows jointly if the model permits batch invariance, otherwise row by row.

    The constructor compares prefills and decoding passes with one pass over each whole text, once for joint rows and, if
    they differ, once row by row; it refuses models that differ in both. On CPUs, the choice of shapes makes results bitwise
    identical (`batch_invariance`); the probe of joint rows verifies this by comparing rows alone and in a batch. Libraries of
    accelerators guarantee less. On accelerators, a decoding pass always computes the maximum number of rows, and a prefill
    computes one sequence, so that a row's results can depend only on the row's index.

    Args:
        model: Model of transformers; changed in place.
        device: Device of the computation.
        max_rows: Maximum number of rows.
        context: Maximum number of tokens of a sequence.
        vocabulary: Size of the vocabulary.
        exact: Whether the model computes with the trainer's bits (`exact`).

    Attributes:
        kv: KV cache of the rows.
        is_batched: Whether rows are computed jointly.
        has_states: Whether the model has recurrent states. A prefill then computes one sequence without padding, because its
            states are those after its last token.
        routing: Routers that are recorded; None if not requested.
        experts: Router choices of the last call, `[tokens, choices]` int16 for each sequence (prefill) or row (decoding).

    Raises:
        ConfigError: The model's results depend on the batch, so the engine cannot use it.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        max_rows: int,
        context: int,
        vocabulary: int,
        *,
        exact: bool = False,
    ) -> None:
        self._model = model
        self._device = device
        self._cpu = device.type == "cpu"
        self._max_rows = max_rows
        self._context = context
        self._vocabulary = vocabulary
        self.kv = KVCache(max_rows)
        self._cache: Any = None
        self._prefill_cache: Any = None
        self.routing: Routing | None = None
        self.experts: list[np.ndarray] = []
        self.has_states = has_states(model.config.get_text_config())
        attention = model.config._attn_implementation
        if self._cpu and torch.get_num_threads() > 1:
            _limit_activation_rows(model)
        self.is_batched = supports_batch_invariance(model, context)
        with torch.inference_mode():
            expected_logits = self._compute_expected_logits()
            if self.is_batched:
                use_batch_invariance(model, device)
                if exact:
                    from rlhpc.language.engines.exact import use_exactness

                    use_exactness(model, device)
                self.is_batched = not self._find_deviation(expected_logits)
            if exact and not self.is_batched:
                raise ConfigError(
                    f"runner.deterministic: the engine hf does not compute rows of {type(model).__name__} together with the "
                    "bits that they have alone; set it to false"
                )
            if not self.is_batched:
                model.set_attn_implementation(sub_attention(model, attention))
                if deviation := self._find_deviation(expected_logits):
                    raise ConfigError(
                        f"rollout.rollout_backend hf: a {model.config.model_type} model does not compute texts token by token "
                        f"as in one pass over each ({deviation}), so the engine would sample from another policy than the "
                        "trained one; take rollout.rollout_backend=vllm, another version of transformers, or another model"
                    )
                logger.warning(
                    "%s: sequences are computed one by one, since several at once could change each other's numbers",
                    type(model).__name__,
                )

    def record_routing(self, routing: Routing) -> int:
        """Starts recording the choices of a mixture-of-experts model's routers; returns the number of choices per token."""
        self.routing = routing
        return routing.choices

    def free(self) -> None:
        """Removes all rows and frees the memory."""
        self.kv.free()
        self._cache = None

    def num_cached_tokens(self) -> float:
        """Returns the number of tokens in the KV cache."""
        return float(self.kv.length[: self.kv.rows].sum())

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_indices: Sequence[int],
        images: Sequence[PromptImages | None] = (),
    ) -> Tensor:
        """Computes sequences and adds rows with their keys and values to the cache.

        Args:
            sequences: Token ids of prompts, each followed by its tokens sampled so far.
            prompt_indices: Index of each new row's sequence, ascending.
            images: Images of each sequence; a sequence with images is computed alone.

        Returns:
            Logits of the token after each sequence, `[sequences, V]`.
        """
        logits, self.experts = list[Tensor](), []
        images = images or [None] * len(sequences)
        for span in self._iter_prefill_spans(
            [len(sequence) for sequence in sequences], [sequence_images is not None for sequence_images in images]
        ):
            span_sequences = sequences[span.start : span.stop]
            sequence_lengths = [len(sequence) for sequence in span_sequences]
            span_images = images[span.start]
            position_ids = None if span_images is None else span_images.positions(sequence_lengths[0])
            logits.append(self._run_prefill(span_sequences, span_images, position_ids))
            span_positions = [index - span.start for index in prompt_indices if span.start <= index < span.stop]
            shifts = (
                [0] * len(span_sequences)
                if position_ids is None
                else [int(position_ids.max()) + 1 - sequence_lengths[0]]
            )
            self.kv.append(self._prefill_cache.layers, sequence_lengths, span_positions, shifts)
        self._prefill_cache = None
        return torch.cat(logits)

    def decode(self, last_tokens: Tensor) -> Tensor:
        """Reads the last sampled token of each row, `[rows]`; returns the logits of the next token, `[rows, V]`."""
        kv, self.experts = self.kv, []
        if self._cache is None:
            self._cache = decoding_cache(kv)
        if self.is_batched:
            num_rows = round_up_to_tile(kv.rows) if self._cpu else self._max_rows
            kv.reserve(padded_rows=num_rows)
            self._cache.select_rows()
            with (
                pass_shapes(Decoding(kv.length[: kv.rows], num_rows, self._model.dtype, self._device)),
                self._record_routing([1] * kv.rows),
            ):
                logits = self._decode(*(_pad(column, num_rows) for column in (last_tokens, kv.places)))[: kv.rows]
        else:
            logits_by_row = list[Tensor]()
            for row in range(kv.rows):
                kv.reserve(row)
                self._cache.select_rows()
                with self._record_routing([1]):
                    logits_by_row.append(self._decode(last_tokens[row : row + 1], kv.places))
            logits = torch.cat(logits_by_row)
        kv.length[: kv.rows] += 1
        return logits

    def _iter_prefill_spans(self, sequence_lengths: Sequence[int], has_images: Sequence[bool]) -> Iterator[slice]:
        """Yields slices of sequences that are prefilled jointly."""
        max_tokens = _PREFILL_TOKENS if self.is_batched and self._cpu and not self.has_states else 0
        span_start = num_tokens = 0
        for index, sequence_length in enumerate(sequence_lengths):
            if index > span_start and (
                num_tokens + sequence_length > max_tokens or has_images[index] or has_images[span_start]
            ):
                yield slice(span_start, index)
                span_start, num_tokens = index, 0
            num_tokens += sequence_length
        yield slice(span_start, len(sequence_lengths))

    def _run_prefill(
        self, sequences: Sequence[Sequence[int]], images: PromptImages | None, image_places: np.ndarray | None
    ) -> Tensor:
        sequence_lengths = [len(sequence) for sequence in sequences]
        is_padded = self.is_batched and not self.has_states
        num_positions = round_up_to_tile(sum(sequence_lengths)) if is_padded else sum(sequence_lengths)
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=self._device)
        token_positions, image_inputs = (
            torch.cat([torch.arange(sequence_length, device=self._device) for sequence_length in sequence_lengths]),
            {},
        )
        if images is not None and image_places is not None:
            token_positions = torch.from_numpy(image_places).to(self._device)
            image_inputs = images.inputs(num_positions, self._device)
        last_tokens: Any = torch.tensor(
            [end_position - 1 for end_position in accumulate(sequence_lengths)], device=self._device
        )
        self._prefill_cache = prefill_cache(self._model)
        with pass_shapes(sequence_lengths), self._record_routing(sequence_lengths):
            logits = self._model(
                input_ids=_pad(ids, num_positions)[None],
                position_ids=_pad(token_positions, num_positions).unsqueeze(-2),
                past_key_values=self._prefill_cache,
                use_cache=True,
                logits_to_keep=_pad(last_tokens, round_up_to_tile(len(last_tokens))) if is_padded else 1,
                **image_inputs,
            ).logits[0]
        outputs: Tensor = logits[: len(sequence_lengths)]
        return outputs

    @contextmanager
    def _record_routing(self, sequence_lengths: Sequence[int]) -> Iterator[None]:
        """Records the routers' choices within the block and appends them to `experts`, one array per sequence."""
        if self.routing is None:
            yield
            return
        with self.routing.watch() as router_outputs:
            yield
        expert_ids = (
            torch.cat([indices[: sum(sequence_lengths)] for _, indices in router_outputs], 1)
            .to(torch.int16)
            .cpu()
            .numpy()
        )
        self.experts += np.split(expert_ids, np.cumsum(sequence_lengths)[:-1])

    def _decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    # --- verification of prefills and decoding passes

    def _probe_ids(self, row: int) -> list[int]:
        probe_length = max(1, min(3 + row % 11, self._context - 3))
        return [(7 * row + 5 * token + 3) % self._vocabulary for token in range(probe_length)]

    def _probe_tokens(self, row: int) -> list[int]:
        """Returns the tokens that are decoded after a row's text."""
        return [(row + step) % self._vocabulary for step in range(_NUM_DECODED)]

    def _compute_expected_logits(self) -> Tensor:
        """Computes logits after the last tokens of each text of `_PROBE_ROWS`, in one ordinary pass each (`_probe`)."""
        logits = list[Tensor]()
        for row in _PROBE_ROWS:
            ids = torch.tensor([[*self._probe_ids(row), *self._probe_tokens(row)]], device=self._device)
            logits.append(self._model(input_ids=ids, use_cache=False).logits[0, -1 - _NUM_DECODED :])
        return torch.stack(logits)

    def _find_deviation(self, expected_logits: Tensor) -> str:
        """Probes rows as they are computed now, jointly or row by row; returns how they deviate, "" if they do not.

        A model that keeps state outside of the cache mixes the rows, or rejects the passes.
        """
        is_invariance_probed = self.is_batched and self._cpu
        rows = range(_NUM_BATCH_ROWS) if is_invariance_probed else _PROBE_ROWS
        try:
            logits = self._probe(rows)[[rows.index(row) for row in _PROBE_ROWS]]
        except (ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            return f"{type(error).__name__}: {first_line(error)}"
        if not agrees(logits, expected_logits, expected_logits.dtype):
            return "other numbers"
        if is_invariance_probed and not torch.equal(torch.cat([self._probe([row]) for row in _PROBE_ROWS]), logits):
            return "other bits alone than together"
        return ""

    def _probe(self, rows: Sequence[int]) -> Tensor:
        """Computes logits `[rows, 1 + decoded, V]` after the texts of probe rows and after each token decoded then.

        The cache is temporary.
        """
        tokens = torch.tensor([self._probe_tokens(row) for row in rows], device=self._device)
        saved_kv, saved_max_rows = self.kv, self._max_rows
        self.kv, self._cache, self._max_rows = KVCache(len(rows)), None, max(saved_max_rows, len(rows))
        try:
            logits = [self.prefill([self._probe_ids(row) for row in rows], range(len(rows)))]
            logits += [self.decode(step_tokens) for step_tokens in tokens.T]
        finally:
            self.kv, self._cache, self._max_rows = saved_kv, None, saved_max_rows
        return torch.stack(logits, 1)


def _pad(values: Tensor, padded_length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, padded_length - values.shape[-1]))


def _limit_activation_rows(model: nn.Module) -> None:
    """Makes activation functions process few rows at a time, so that torch divides no row among threads.

    Torch rounds elements at the boundary between two threads differently.
    """
    from transformers.activations import ACT2CLS

    activation_types: Any = tuple(
        {activation[0] if isinstance(activation, tuple) else activation for activation in ACT2CLS.values()}
    )
    for module in model.modules():
        if isinstance(module, activation_types):
            replace_forward(module, _in_row_chunks(module.forward))


def _in_row_chunks(function: Any) -> Any:
    def apply_in_chunks(x: Tensor) -> Tensor:
        step = _STEP // gcd(x.shape[-1], _STEP)
        num_rows = max(step, _MAX_THREAD_ELEMENTS // x.shape[-1] // step * step)
        flat_x = x.reshape(-1, x.shape[-1])
        if len(flat_x) <= num_rows:
            outputs: Tensor = function(x)
            return outputs
        return torch.cat([function(chunk) for chunk in flat_x.split(num_rows)]).view(x.shape)

    return apply_in_chunks
