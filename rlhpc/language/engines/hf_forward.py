"""A model's passes over the rows under way, in which a row's numbers do not depend on the other rows."""

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

from rlhpc.language.engines.batch_invariance import Decoding, KeyValues, can_join, decoding_cache, join, present, tiles
from rlhpc.language.models.vision import sub_attention

if TYPE_CHECKING:
    from rlhpc.language.data.images import PromptImages
    from rlhpc.language.models.moe_routing import Routing

logger = logging.getLogger(__name__)

#: Most tokens that several sequences are prefilled of at once; torch leaves what norms compute of them to one thread.
_PREFILL_TOKENS = 1024
#: Elements that torch does not divide among threads, and the step in which vectorized functions take them, in any dtype.
_UNDIVIDED, _STEP = 32768, 64
#: Rows of a product of matrices are computed in multiples of this, if there are fewer than vectorized functions take.
_ROWS = 8
#: How far, of the largest number, logits may be from those of the model's own attention: in float32, and in half precision.
_FAR, _FAR_HALF = 1e-3, 0.1


class Forward:
    """Prefills and decodes: rows together, if their numbers are then the same as alone; otherwise each by itself.

    That they are the same, bit for bit, is seen to on CPUs: by shapes (`alike`), and by a look at what a row says alone and in
    company when the engine starts. Accelerators' libraries promise less: there, a step always computes as many rows as there
    may be, and a prefill one sequence, so that a row's numbers could only depend on where it sits.

    Args:
        model: From transformers; changed in place.
        device: Where it computes.
        max_rows: Most rows.
        context: Tokens of the longest sequence.
        vocabulary: Token ids are below this.

    Attributes:
        kv: The rows' keys and values.
        together: Whether rows are computed together.
        routing: Watches a mixture's routers, if somebody wants to know what they choose.
        experts: What they chose in the last call: for the tokens of each sequence, or for one of each row.
    """

    def __init__(self, model: Any, device: torch.device, max_rows: int, context: int, vocabulary: int) -> None:
        self._model, self._device, self._cpu = model, device, device.type == "cpu"
        self._max_rows, self._context, self._vocabulary = max_rows, context, vocabulary
        self.kv = KeyValues(max_rows)
        self._cache: Any = None
        self._filled: Any = None
        self._rows: tuple[int, int] | None = None
        self.routing: Routing | None = None
        self.experts: list[np.ndarray] = []
        own = model.config._attn_implementation
        if self._cpu and torch.get_num_threads() > 1:
            _leave_undivided(model)
        self.together = can_join(model, context)
        if self.together and self._cpu:
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.forward = self._of_rows(module.forward, module.out_features)  # type: ignore[method-assign]
        if self.together:
            with torch.inference_mode():
                said = self._says(own)
                join(model, device)
                self.together = _near(self._says(None), said) and (not self._cpu or self._same_alone())
        if not self.together:
            model.set_attn_implementation(sub_attention(model, own))
            logger.warning(
                "%s: sequences are computed one by one, since several at once could change each other's numbers",
                type(model).__name__,
            )

    def free(self) -> None:
        """Drops the rows and the memory."""
        self.kv.free()
        self._cache = None

    def prefill(
        self, sequences: Sequence[Sequence[int]], source: Sequence[int], seen: Sequence[PromptImages | None] = ()
    ) -> Tensor:
        """Fills the cache with sequences.

        Args:
            sequences: Prompts, and what was said since.
            source: The sequence of each new row, ascending.
            seen: What each sequence shows; one that shows something is computed by itself.

        Returns:
            `[sequences, V]`, the logits behind each.
        """
        logits, self.experts = list[Tensor](), []
        seen = seen or [None] * len(sequences)
        for part in self._parts([len(sequence) for sequence in sequences], [one is not None for one in seen]):
            chosen = sequences[part.start : part.stop]
            lengths = [len(sequence) for sequence in chosen]
            looked = seen[part.start]
            places = None if looked is None else looked.positions(lengths[0])
            logits.append(self._prefill(chosen, looked, places))
            own = [one - part.start for one in source if part.start <= one < part.stop]
            shifts = [0] * len(chosen) if places is None else [int(places.max()) + 1 - lengths[0]]
            self.kv.append(self._filled.layers, lengths, own, shifts)
        self._filled = None
        return torch.cat(logits)

    def decode(self, last: Tensor) -> Tensor:
        """One token for each row: `last` `[rows]` are the present ones; logits `[rows, V]` of the next."""
        kv, self.experts = self.kv, []
        if self._cache is None:
            self._cache = decoding_cache(kv)
        if self.together:
            kv.reserve()
            count = tiles(kv.rows) if self._cpu else self._max_rows
            self._rows = tiles(kv.rows, _ROWS), count
            with present(Decoding(kv, self._model.dtype, self._device)), self._watching([1] * kv.rows):
                logits = self._decode(*(_filled_up(each, count) for each in (last, kv.places)))[: kv.rows]
            self._rows = None
        else:
            parts = list[Tensor]()
            for row in range(kv.rows):
                kv.reserve(row)
                with self._watching([1]):
                    parts.append(self._decode(last[row : row + 1], kv.places))
            logits = torch.cat(parts)
        kv.length[: kv.rows] += 1
        return logits

    def _parts(self, lengths: Sequence[int], alone: Sequence[bool]) -> Iterator[slice]:
        """Which sequences are prefilled at once."""
        limit = _PREFILL_TOKENS if self.together and self._cpu else 0
        begin = tokens = 0
        for index, length in enumerate(lengths):
            if index > begin and (tokens + length > limit or alone[index] or alone[begin]):
                yield slice(begin, index)
                begin, tokens = index, 0
            tokens += length
        yield slice(begin, len(lengths))

    def _prefill(
        self, sequences: Sequence[Sequence[int]], looked: PromptImages | None, places: np.ndarray | None
    ) -> Tensor:
        from transformers.cache_utils import DynamicCache

        lengths = [len(sequence) for sequence in sequences]
        count = tiles(sum(lengths)) if self.together else sum(lengths)
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=self._device)
        positions, looks = torch.cat([torch.arange(length, device=self._device) for length in lengths]), {}
        if looked is not None and places is not None:
            positions = torch.from_numpy(places).to(self._device)
            looks = looked.inputs(count, self._device)
        ends: Any = torch.tensor([end - 1 for end in accumulate(lengths)], device=self._device)
        self._filled = DynamicCache()
        with present(lengths), self._watching(lengths):
            logits = self._model(
                input_ids=_filled_up(ids, count)[None],
                position_ids=_filled_up(positions, count).unsqueeze(-2),
                past_key_values=self._filled,
                use_cache=True,
                logits_to_keep=_filled_up(ends, tiles(len(ends))) if self.together else 1,
                **looks,
            ).logits[0]
        found: Tensor = logits[: len(lengths)]
        return found

    @contextmanager
    def _watching(self, lengths: Sequence[int]) -> Iterator[None]:
        """Writes down what routers choose for sequences of these lengths, one after the other."""
        if self.routing is None:
            yield
            return
        with self.routing.watching() as seen:
            yield
        chosen = torch.cat([each[: sum(lengths)] for _, each in seen], 1).to(torch.int16).cpu().numpy()
        self.experts += np.split(chosen, np.cumsum(lengths)[:-1])

    def _decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _of_rows(self, product: Any, width: int) -> Any:
        """A layer's product, in decoding of the rows there are: the others only fill up what is not a product."""

        def computed(x: Tensor) -> Tensor:
            some, count = self._rows or (0, 0)
            if some == count or len(x) != count:
                whole: Tensor = product(x)
                return whole
            found = x.new_zeros((*x.shape[:-1], width))
            found[:some] = product(x[:some])
            return found

        return computed

    # --- whether rows can be computed together

    def _probe(self, row: int) -> list[int]:
        length = max(1, min(3 + row % 11, self._context - 3))
        return [(7 * row + 5 * token + 3) % self._vocabulary for token in range(length)]

    def _says(self, own: str | None) -> Tensor:
        """Logits behind each token of a text but the first few: of one pass by attention of the model's own, or by ours."""
        text = [*self._probe(10), 1, 2]
        if own is not None:
            logits: Tensor = self._model(input_ids=torch.tensor([text], device=self._device), use_cache=False).logits
            return logits[0, -3:]
        return torch.cat(self._said([text[:-2]], [torch.tensor([token]) for token in text[-2:]]))

    def _same_alone(self) -> bool:
        """Whether two of several rows say, bit for bit, what they say alone."""
        texts = [self._probe(row) for row in range(37)]
        tokens = [torch.arange(37) % self._vocabulary for _ in range(2)]
        company = self._said(texts, tokens)
        for row in (1, 36):
            alone = self._said([texts[row]], [each[row : row + 1] for each in tokens])
            if not all(torch.equal(a[0], b[row]) for a, b in zip(alone, company, strict=True)):
                return False
        return True

    def _said(self, texts: Sequence[Sequence[int]], tokens: Sequence[Tensor]) -> list[Tensor]:
        """Logits `[rows, V]` behind texts, and behind each further token of each."""
        mine, fixed = self.kv, self._max_rows
        self.kv, self._cache, self._max_rows = KeyValues(len(texts)), None, max(fixed, len(texts))
        found = [self.prefill(texts, range(len(texts)))]
        found += [self.decode(each.to(self._device)) for each in tokens]
        self.kv, self._cache, self._max_rows = mine, None, fixed
        return found


def _filled_up(values: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, count - values.shape[-1]))


def _near(found: Tensor, expected: Tensor) -> bool:
    far = float((found.float() - expected.float()).abs().max()) / max(float(expected.float().abs().max()), 1e-6)
    return far < (_FAR if expected.dtype == torch.float32 else _FAR_HALF)


def _leave_undivided(model: nn.Module) -> None:
    """Has activations take so few rows at a time that no thread's part ends within one, where numbers differ by a rounding."""
    from transformers.activations import ACT2CLS

    kinds: Any = tuple({each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()})
    for module in model.modules():
        if isinstance(module, kinds):
            module.forward = _by_rows(module.forward)


def _by_rows(function: Any) -> Any:
    def computed(x: Tensor) -> Tensor:
        step = _STEP // gcd(x.shape[-1], _STEP)
        rows = max(step, _UNDIVIDED // x.shape[-1] // step * step)
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= rows:
            found: Tensor = function(x)
            return found
        return torch.cat([function(part) for part in flat.split(rows)]).view(x.shape)

    return computed
