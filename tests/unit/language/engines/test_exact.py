"""Attention and log-probs with the bits of decoding, in training: values, gradients and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.engines import exact
from rlhpc.language.engines.batch_invariance import Decoding, pass_shapes
from rlhpc.language.engines.hf_forward import KVCache
from rlhpc.language.models.logprobs import logprobs_and_entropy
from rlhpc.language.models.token_batch import Segments

CPU = torch.device("cpu")
LENGTHS = (1, 33, 70, 33)


def states(tokens: int, heads: int = 4, kv_heads: int = 2, size: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, number, tokens, size, generator=generator) for number in (heads, kv_heads, kv_heads)]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of each sequence by a mask, `[T, heads, d]`."""
    outputs, start = [], 0
    for length in LENGTHS:
        tokens = slice(start, start + length)
        start += length
        q, k, v = (part[0, :, tokens] for part in (query, key, value))
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 8, 40])
def test_attention_of_a_packed_row_has_the_usual_values_and_gradients(window: int | None) -> None:
    """Beyond the last sequence it is 0."""
    tokens = sum(LENGTHS)
    parts = [part.requires_grad_() for part in states(tokens + 5)]
    segments = Segments.from_lengths([*LENGTHS], CPU)
    outputs, _ = exact.attend(nn.Module(), *parts, sliding_window=window, segments=segments)
    others = [part.detach().clone().requires_grad_() for part in parts]
    expected = plain(*others, window=window)
    assert outputs.shape == (1, tokens + 5, 4, 16) and not outputs[0, tokens:].any()
    torch.testing.assert_close(outputs[0, :tokens], expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (outputs[0, :tokens] * weights).sum().backward()
    (expected * weights).sum().backward()
    for part, other in zip(parts, others, strict=True):
        torch.testing.assert_close(part.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("heads", "size"), [(4, 16), (3, 5)])
def test_each_token_has_the_bits_of_decoding(window: int | None, heads: int, size: int) -> None:
    """In a cache of two other rows, which decoding computes at the same time."""
    length = 70
    query, key, value = states(length, heads, 1, size)
    segments = Segments.from_lengths([length], CPU)
    outputs, _ = exact.attend(nn.Module(), query, key, value, sliding_window=window, segments=segments)
    for token in (0, 1, 31, 32, 69):
        cache, columns = KVCache(3), -(-(token + 1) // 32) * 32
        cache.rows, cache.length = 3, np.array([token, 5, 40])
        keys, values = (torch.randn(3, 1, max(columns, 64), size) for _ in range(2))
        keys[0, :, : token + 1], values[0, :, : token + 1] = key[0, :, : token + 1], value[0, :, : token + 1]
        queries = torch.randn(3, heads, 1, size)
        queries[0] = query[0, :, token : token + 1]
        with pass_shapes(Decoding(cache.length[: cache.rows], 32, torch.float32, CPU)):
            decoded, _ = exact.attend(nn.Module(), queries, keys, values, sliding_window=window)
        assert torch.equal(decoded[0, 0], outputs[0, token]), token


def test_log_probs_do_not_depend_on_the_other_rows_and_are_the_trainers() -> None:
    logits = 4 * torch.randn(45, 63, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(45)
    temperature = torch.tensor([0.7, 1.0, 1.3]).repeat(15)[:, None]
    together = exact.token_logprobs(logits, tokens, temperature)
    for row in (0, 31, 44):
        part = slice(row, row + 1)
        assert torch.equal(exact.token_logprobs(logits[part], tokens[part], temperature[part]), together[part])
    padded, targets = F.pad(logits, (0, 0, 0, 19)), F.pad(tokens, (0, 19))
    for value in (0.7, 1.0, 1.3):
        rows = temperature[:, 0] == value
        trained = logprobs_and_entropy(padded * (1.0 / value), targets, True)[0][:45]
        assert torch.equal(together[rows], trained[rows])


def test_a_rectangle_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows would be taken for one sequence."""
    parts = [part.repeat(2, 1, 1, 1) for part in states(8)]
    with pytest.raises(ValueError, match="rows without padding"):
        exact.attend(nn.Module(), *parts, config=SimpleNamespace())
