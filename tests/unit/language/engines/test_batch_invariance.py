"""KV cache of the running rows, and the attention and expert kernels whose results do not depend on the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

import torch
from torch import nn
from torch.nn import functional as F

from rlhpc.language.engines import batch_invariance
from rlhpc.language.engines.batch_invariance import (
    Decoding,
    DecodingLinear,
    pass_shapes,
    supports_batch_invariance,
)
from rlhpc.language.engines.hf_forward import decoding_cache
from tests.unit.language.engines.test_hf_forward_cache import LENGTHS, cache_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 4])
def test_attention_of_a_decoded_token_is_causal_attention_over_its_row(window: int | None) -> None:
    cache, layers = cache_of(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, heads, 1, 8, generator=generator) for heads in (4, 2, 2))
    cache.reserve()
    keys, values = decoding_cache(cache).layers[0].update(key, value)
    with pass_shapes(Decoding(cache.length[: cache.rows], 32, torch.float32, CPU)):
        outputs, _ = batch_invariance._compute_attention(nn.Identity(), query, keys, values, sliding_window=window)
    start = 0
    for row, length in enumerate(LENGTHS):
        past = slice(start, start + length)
        start += length
        row_keys, row_values = (
            torch.cat([states[0, :, past], new[row]], 1)[:, -(window or length + 1) :]
            for states, new in ((layers[0].keys, key), (layers[0].values, value))
        )
        expected = F.scaled_dot_product_attention(
            query[row], row_keys.repeat_interleave(2, 0), row_values.repeat_interleave(2, 0)
        )
        torch.testing.assert_close(outputs[row, 0], expected[:, 0])


def test_sequences_of_a_prefill_do_not_attend_to_each_other() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, heads, 7, 8, generator=generator) for heads in (4, 2, 2))
    with pass_shapes([3, 4]):
        outputs, _ = batch_invariance._compute_attention(nn.Identity(), query, key, value)
    for tokens in (slice(0, 3), slice(3, 7)):
        with pass_shapes([tokens.stop - tokens.start]):
            alone, _ = batch_invariance._compute_attention(
                nn.Identity(), *(states[:, :, tokens] for states in (query, key, value))
            )
        assert torch.equal(outputs[:, tokens], alone)


def test_a_linear_layer_computes_only_the_rows_in_use() -> None:
    cache, _ = cache_of(LENGTHS)
    layer = DecodingLinear(8, 5)
    inputs = torch.randn(32, 1, 8, generator=torch.Generator().manual_seed(3))
    with pass_shapes(Decoding(cache.length[: cache.rows], 32, torch.float32, CPU)), torch.no_grad():
        outputs = layer(inputs)
        assert torch.equal(layer(inputs[:5]), F.linear(inputs[:5], layer.weight, layer.bias))  # of other rows
    assert torch.equal(outputs[:16], F.linear(inputs[:16], layer.weight, layer.bias))
    assert not outputs[16:].any() and outputs.shape == (32, 1, 5)


def test_experts_give_each_token_the_weighted_sum_of_its_experts() -> None:
    generator = torch.Generator().manual_seed(4)
    gate_up, down = torch.randn(4, 64, 32, generator=generator), torch.randn(4, 32, 32, generator=generator)
    module = SimpleNamespace(num_experts=4, has_bias=False, is_transposed=False, has_gate=True, gate_up_proj=gate_up,
                             down_proj=down, _apply_gate=lambda x: F.silu(x[:, :32].contiguous()) * x[:, 32:])  # fmt: skip
    hidden = torch.randn(11, 32, generator=generator)
    weights, experts = torch.rand(11, 4, generator=generator).topk(2)
    outputs = batch_invariance._compute_expert_products(module, hidden, experts, weights)
    for token in range(11):
        expected = sum(
            weights[token, k] * (down[expert] @ module._apply_gate((gate_up[expert] @ hidden[token])[None])[0])
            for k, expert in enumerate(experts[token].tolist())
        )
        torch.testing.assert_close(outputs[token], expected, rtol=1e-3, atol=1e-3)
        alone = batch_invariance._compute_expert_products(module, hidden[token : token + 1], experts[token : token + 1],
                                                  weights[token : token + 1])  # fmt: skip
        assert torch.equal(outputs[token], alone[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": ["full_attention", "linear_attention"]}, True),
        ({"layer_types": ["full_attention", "indexed_attention"]}, False),
        ({"alibi": True}, False),
        ({"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 32}}, False),
        ({"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 64}}, True),
    ],
)
def test_a_model_joins_if_it_mixes_tokens_by_this_attention_or_by_states_of_its_rows(
    changes: dict[str, Any], expected: bool
) -> None:
    config = SimpleNamespace(_attn_implementation="sdpa", **changes)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, _supports_attention_backend=True, named_parameters=list)
    assert supports_batch_invariance(model, 64) is expected
