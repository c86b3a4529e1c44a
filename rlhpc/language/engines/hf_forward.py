"""Batch-invariant prefill and decoding for the hf engine: a row's results do not depend on the other rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.engines.batch_invariance import (
    Decoding,
    KVCache,
    decoding_cache,
    pass_shapes,
    round_up_to_tile,
    supports_batch_invariance,
    use_batch_invariance,
)
from rlhpc.language.models.loading import agrees
from rlhpc.language.models.vision import sub_attention
from rlhpc.runtime.torch_adapter import replace_forward

if TYPE_CHECKING:
    from rlhpc.language.data.images import PromptImages
    from rlhpc.language.models.moe_routing import Routing

logger = logging.getLogger(__name__)

#: Maximum number of tokens in a joint prefill; up to this number torch computes norms in one thread.
_PREFILL_TOKENS = 1024
#: Largest number of elements that torch does not divide among threads, and step of vectorized functions, in any dtype.
_MAX_THREAD_ELEMENTS, _STEP = 32768, 64


class Forward:
    """Prefill and decoding of all rows jointly if the model permits batch invariance, otherwise row by row.

    On CPUs, the choice of shapes makes results bitwise identical (`batch_invariance`); the constructor verifies this by
    comparing rows alone and in a batch. Libraries of accelerators guarantee less. On accelerators, a decoding pass always
    computes the maximum number of rows, and a prefill computes one sequence, so that a row's results can depend only on the
    row's index.

    Args:
        model: Model of transformers; changed in place.
        device: Device of the computation.
        max_rows: Maximum number of rows.
        context: Maximum number of tokens of a sequence.
        vocabulary: Size of the vocabulary.

    Attributes:
        kv: KV cache of the rows.
        batched: Whether rows are computed jointly.
        routing: Routers that are recorded; None if not requested.
        experts: Router choices of the last call, `[tokens, choices]` int16 for each sequence (prefill) or row (decoding).
    """

    def __init__(self, model: Any, device: torch.device, max_rows: int, context: int, vocabulary: int) -> None:
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
        attention = model.config._attn_implementation
        if self._cpu and torch.get_num_threads() > 1:
            _limit_activation_rows(model)
        self.batched = supports_batch_invariance(model, context)
        if self.batched:
            with torch.inference_mode():
                expected_logits = self._probe_logits(attention)
                use_batch_invariance(model, device)
                is_close = agrees(self._probe_logits(None), expected_logits, expected_logits.dtype)
                self.batched = is_close and (not self._cpu or self._is_batch_invariant())
        if not self.batched:
            model.set_attn_implementation(sub_attention(model, attention))
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

    def prefill(
        self, sequences: Sequence[Sequence[int]], source: Sequence[int], images: Sequence[PromptImages | None] = ()
    ) -> Tensor:
        """Computes sequences and adds rows with their keys and values to the cache.

        Args:
            sequences: Token ids of prompts, each followed by its tokens sampled so far.
            source: Index of each new row's sequence, ascending.
            images: Images of each sequence; a sequence with images is computed alone.

        Returns:
            Logits of the token after each sequence, `[sequences, V]`.
        """
        logits, self.experts = list[Tensor](), []
        images = images or [None] * len(sequences)
        for span in self._prefill_spans(
            [len(sequence) for sequence in sequences], [sequence_images is not None for sequence_images in images]
        ):
            span_sequences = sequences[span.start : span.stop]
            lengths = [len(sequence) for sequence in span_sequences]
            span_images = images[span.start]
            position_ids = None if span_images is None else span_images.positions(lengths[0])
            logits.append(self._prefill(span_sequences, span_images, position_ids))
            span_source = [index - span.start for index in source if span.start <= index < span.stop]
            shifts = [0] * len(span_sequences) if position_ids is None else [int(position_ids.max()) + 1 - lengths[0]]
            self.kv.append(self._prefill_cache.layers, lengths, span_source, shifts)
        self._prefill_cache = None
        return torch.cat(logits)

    def decode(self, last: Tensor) -> Tensor:
        """Reads the last sampled token of each row, `[rows]`; returns the logits of the next token, `[rows, V]`."""
        kv, self.experts = self.kv, []
        if self._cache is None:
            self._cache = decoding_cache(kv)
        if self.batched:
            kv.reserve()
            count = round_up_to_tile(kv.rows) if self._cpu else self._max_rows
            with (
                pass_shapes(Decoding(kv, count, self._model.dtype, self._device)),
                self._recorded_routing([1] * kv.rows),
            ):
                logits = self._decode(*(_pad(column, count) for column in (last, kv.places)))[: kv.rows]
        else:
            logits_by_row = list[Tensor]()
            for row in range(kv.rows):
                kv.reserve(row)
                with self._recorded_routing([1]):
                    logits_by_row.append(self._decode(last[row : row + 1], kv.places))
            logits = torch.cat(logits_by_row)
        kv.length[: kv.rows] += 1
        return logits

    def _prefill_spans(self, lengths: Sequence[int], has_images: Sequence[bool]) -> Iterator[slice]:
        """Yields slices of sequences that are prefilled jointly."""
        limit = _PREFILL_TOKENS if self.batched and self._cpu else 0
        start = tokens = 0
        for index, length in enumerate(lengths):
            if index > start and (tokens + length > limit or has_images[index] or has_images[start]):
                yield slice(start, index)
                start, tokens = index, 0
            tokens += length
        yield slice(start, len(lengths))

    def _prefill(
        self, sequences: Sequence[Sequence[int]], images: PromptImages | None, places: np.ndarray | None
    ) -> Tensor:
        from transformers.cache_utils import DynamicCache

        lengths = [len(sequence) for sequence in sequences]
        count = round_up_to_tile(sum(lengths)) if self.batched else sum(lengths)
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=self._device)
        positions, image_inputs = torch.cat([torch.arange(length, device=self._device) for length in lengths]), {}
        if images is not None and places is not None:
            positions = torch.from_numpy(places).to(self._device)
            image_inputs = images.inputs(count, self._device)
        last_tokens: Any = torch.tensor([end - 1 for end in accumulate(lengths)], device=self._device)
        self._prefill_cache = DynamicCache()
        with pass_shapes(lengths), self._recorded_routing(lengths):
            logits = self._model(
                input_ids=_pad(ids, count)[None],
                position_ids=_pad(positions, count).unsqueeze(-2),
                past_key_values=self._prefill_cache,
                use_cache=True,
                logits_to_keep=_pad(last_tokens, round_up_to_tile(len(last_tokens))) if self.batched else 1,
                **image_inputs,
            ).logits[0]
        outputs: Tensor = logits[: len(lengths)]
        return outputs

    @contextmanager
    def _recorded_routing(self, lengths: Sequence[int]) -> Iterator[None]:
        """Records the routers' choices within the block and appends them to `experts`, one array per sequence."""
        if self.routing is None:
            yield
            return
        with self.routing.watching() as router_outputs:
            yield
        expert_ids = (
            torch.cat([indices[: sum(lengths)] for _, indices in router_outputs], 1).to(torch.int16).cpu().numpy()
        )
        self.experts += np.split(expert_ids, np.cumsum(lengths)[:-1])

    def _decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    # --- verification of joint computation

    def _probe_ids(self, row: int) -> list[int]:
        length = max(1, min(3 + row % 11, self._context - 3))
        return [(7 * row + 5 * token + 3) % self._vocabulary for token in range(length)]

    def _probe_logits(self, attention: str | None) -> Tensor:
        """Computes logits `[3, V]` after the last three tokens of a probe text.

        With `attention`, one ordinary pass computes them; with None, a prefill and two decoding passes of this class.
        """
        probe_ids = [*self._probe_ids(10), 1, 2]
        if attention is not None:
            logits: Tensor = self._model(
                input_ids=torch.tensor([probe_ids], device=self._device), use_cache=False
            ).logits
            return logits[0, -3:]
        return torch.cat(self._logits([probe_ids[:-2]], [torch.tensor([token]) for token in probe_ids[-2:]]))

    def _is_batch_invariant(self) -> bool:
        """Returns whether two probe rows have bitwise the same logits alone as in a batch of 37 rows."""
        texts = [self._probe_ids(row) for row in range(37)]
        tokens = [torch.arange(37) % self._vocabulary for _ in range(2)]
        batch_logits = self._logits(texts, tokens)
        row_logits = {row: self._logits([texts[row]], [ids[row : row + 1] for ids in tokens]) for row in (1, 36)}
        return all(
            torch.equal(step_logits[0], step_batch_logits[row])
            for row, logits in row_logits.items()
            for step_logits, step_batch_logits in zip(logits, batch_logits, strict=True)
        )

    def _logits(self, texts: Sequence[Sequence[int]], tokens: Sequence[Tensor]) -> list[Tensor]:
        """Returns logits `[rows, V]` after texts, then after each of `tokens` (`[rows]` each), with a temporary cache."""
        saved_kv, saved_max_rows = self.kv, self._max_rows
        self.kv, self._cache, self._max_rows = KVCache(len(texts)), None, max(saved_max_rows, len(texts))
        logits = [self.prefill(texts, range(len(texts)))]
        logits += [self.decode(ids.to(self._device)) for ids in tokens]
        self.kv, self._cache, self._max_rows = saved_kv, None, saved_max_rows
        return logits


def _pad(values: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, count - values.shape[-1]))


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
