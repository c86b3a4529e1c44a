"""Keys, values and states of the running rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.extras import need_extra

need_extra("llm")

import torch

from rlhpc.language.engines.hf_forward import KVCache, decoding_cache

LENGTHS = [3, 40, 1]


def prefilled(lengths: list[int], generator: torch.Generator) -> list[Any]:
    """Returns two layers' keys and values of sequences, one after the other."""
    shape = (1, 2, sum(lengths), 8)
    return [
        SimpleNamespace(keys=torch.randn(shape, generator=generator), values=torch.randn(shape, generator=generator))
        for _ in range(2)
    ]


def cache_of(lengths: list[int]) -> tuple[KVCache, list[Any]]:
    layers = prefilled(lengths, torch.Generator().manual_seed(0))
    cache = KVCache(max_rows=8)
    cache.append(layers, lengths, range(len(lengths)), [0] * len(lengths))
    return cache, layers


def test_each_row_begins_at_column_0_and_a_leaving_row_is_replaced_by_the_last() -> None:
    cache, layers = cache_of(LENGTHS)
    assert cache.rows == 3 and cache.length[:3].tolist() == LENGTHS
    assert torch.equal(cache.keys[1][1, :, :40], layers[1].keys[0, :, 3:43])
    assert cache.drop([0]) == [(2, 0)]
    assert cache.rows == 2 and cache.length[:2].tolist() == [1, 40]
    assert torch.equal(cache.values[0][0, :, :1], layers[0].values[0, :, 43:44])
    assert torch.equal(cache.values[0][1, :, :40], layers[0].values[0, :, 3:43])
    cache.free()
    assert cache.rows == 0 and cache.keys == []


def test_a_decoded_token_is_written_behind_its_row_at_its_position() -> None:
    layers = prefilled(LENGTHS, torch.Generator().manual_seed(0))
    cache = KVCache(max_rows=8)
    cache.append(layers, LENGTHS, [0, 1, 2], [0, 5, 0])  # images before the second row's end shift its positions
    cache.reserve()
    assert cache.places.tolist() == [3, 45, 1]
    states = torch.arange(3.0)[:, None, None, None].expand(3, 2, 1, 8)
    keys, values = decoding_cache(cache).layers[1].update(states, -states)
    for row, length in enumerate(LENGTHS):
        assert (keys[row, :, length] == row).all() and (values[row, :, length] == -row).all()
    cache.reserve(single_row=1)
    keys, _ = decoding_cache(cache).layers[0].update(states[1:2], states[1:2])
    assert keys.shape[:3] == (1, 2, 41) and (keys[0, :, 40] == 1).all()


def test_states_stay_with_their_rows() -> None:
    """A layer with states alone, one with states and attention, and one without either."""
    cache = KVCache(max_rows=8)
    for row in range(3):
        states = torch.full((1, 4, 3), float(row))
        keys = torch.full((1, 2, 5, 8), float(row))
        layers = [
            SimpleNamespace(conv_states={0: states}, recurrent_states={0: None}),
            SimpleNamespace(conv_states={0: states}, recurrent_states={0: 10 + states}, keys=keys, values=-keys),
            SimpleNamespace(conv_states={0: None}, recurrent_states={0: None}),
        ]
        cache.append(layers, [5], [0], [0])
    assert cache.attention_indices == [None, 0, None] and [len(states) for states in cache.states] == [1, 2, 0]
    cache.drop([0])
    cache.reserve(padded_rows=32)
    decoding = decoding_cache(cache)
    decoding.select_rows()
    assert decoding.layers[0].conv_states[0][:2, 0, 0].tolist() == [2.0, 1.0]
    decoding.layers[1].recurrent_states[0].add_(1.0)  # models change states in place
    cache.reserve(single_row=1)
    decoding.select_rows()
    assert decoding.layers[1].recurrent_states[0].tolist() == torch.full((1, 4, 3), 12.0).tolist()
    assert decoding.has_previous_state(0) and cache.keys[0][0, 0, 0, 0] == 2
    cache.free()
    assert cache.states == [] and cache.keys == []
