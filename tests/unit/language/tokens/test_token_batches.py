"""Packing by token count, balancing over ranks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.language.tokens.batches import balance, empty_batch, fill_up, pack, padding_waste
from rlhpc.runtime.errors import ConfigError

lengths_of_sequences = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def sequences_of(lengths: list[int]) -> list[dict]:
    return [
        {"ids": [100 * i + t for t in range(n)], "advantage": [float(t) for t in range(n)], "index": i, "flag": n > 3}
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=200, deadline=None)
@given(lengths_of_sequences, st.integers(40, 200))
def test_every_token_is_in_exactly_one_micro_batch_and_none_is_too_large(lengths, max_tokens):
    sequences = sequences_of(lengths)
    batches = pack(sequences, max_tokens, pad_id=-1)
    seen = []
    for batch in batches:
        assert batch.input_ids.numel() <= max_tokens
        assert batch.input_ids.dtype == torch.int64 and batch.attention_mask.dtype == torch.bool
        for row, index in enumerate(batch.fields["index"].tolist()):
            mask, n = batch.attention_mask[row], lengths[index]
            assert mask.tolist() == [True] * n + [False] * (len(mask) - n)  # right padding
            assert batch.input_ids[row, :n].tolist() == sequences[index]["ids"]
            assert (batch.input_ids[row, n:] == -1).all() and (batch.fields["advantage"][row, n:] == 0).all()
            assert batch.fields["advantage"][row, :n].tolist() == sequences[index]["advantage"]
            assert batch.fields["flag"][row].item() is (n > 3)
            seen.append(index)
    assert sorted(seen) == list(range(len(lengths)))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=7), st.integers(12, 40))
def test_no_cut_of_the_sorted_lengths_costs_less(lengths, max_tokens):
    def cost(shapes):
        return sum(rows * width + max_tokens // 16 for rows, width in shapes)

    ordered = sorted(lengths, reverse=True)
    every = []
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ordered)]
        shapes = [(b - a, ordered[a]) for a, b in itertools.pairwise(edges)]
        if all(rows * width <= max_tokens for rows, width in shapes):
            every.append(cost(shapes))
    assert cost(batch.input_ids.shape for batch in pack(sequences_of(lengths), max_tokens, 0)) == min(every)


def test_packing_is_deterministic_and_wastes_little():
    rng = random.Random(0)
    lengths = [int(min(4096, 64 + rng.expovariate(1 / 600))) for _ in range(512)]
    first, again = (pack(sequences_of(lengths), 16384, 0) for _ in range(2))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, again, strict=True))
    assert padding_waste(first) < 0.05
    in_order = 1 - sum(lengths) / sum(
        len(lengths[i : i + 4]) * max(lengths[i : i + 4]) for i in range(0, len(lengths), 4)
    )
    assert in_order > 0.4  # what padding rows as they come would waste
    assert len(first) <= sum(lengths) / 16384 * 1.5 + 1


def test_a_sequence_that_does_not_fit_names_the_key():
    with pytest.raises(ConfigError, match=r"41 tokens.*actor\.max_tokens_per_micro_batch\(40\)"):
        pack(sequences_of([3, 41]), 40, 0)
    assert [b.input_ids.shape for b in pack(sequences_of([3, 40]), 40, 0)] == [(1, 40), (1, 3)]


def test_a_field_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"field rewards has shape \(2,\)"):
        pack([{"ids": [1, 2, 3], "rewards": [0.0, 1.0]}], 10, 0)


def test_nothing_gives_nothing():
    assert pack([], 10, 0) == [] and padding_waste([]) == 0.0
    assert balance([], 3) == [[], [], []]


def test_fill_up_with_batches_that_train_nothing():
    batches = pack(sequences_of([5, 3]), 10, 7)
    filled = fill_up(batches, len(batches) + 2, 7)
    assert filled[: len(batches)] == batches and len(filled) == len(batches) + 2
    last = filled[-1]
    assert last.input_ids.tolist() == [[7, 7]] and not last.attention_mask.any()
    assert {name: (t.dtype, t.dim()) for name, t in last.fields.items()} == {
        name: (t.dtype, t.dim()) for name, t in batches[0].fields.items()
    }
    assert not any(t.any() for t in last.fields.values())
    assert fill_up(batches, 1, 7) is batches
    with pytest.raises(ValueError, match="like"):
        fill_up([], 1, 7)
    assert len(fill_up([], 2, 7, like=empty_batch(batches[0], 7))) == 2


def test_karmarkar_karp_on_its_textbook_examples():
    # {8,7,6,5,4}: differencing ends with a difference of 2 (the best split has 0; greedy gives 4).
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in balance([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]
    sums = [sum([5, 5, 5, 5, 5, 5][i] for i in part) for part in balance([5] * 6, 3)]
    assert sums == [10, 10, 10]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=0, max_size=60), st.integers(1, 9))
def test_balance_is_a_partition_with_sums_within_the_longest(lengths, ranks):
    parts = balance(lengths, ranks)
    assert len(parts) == ranks and sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    assert parts == balance(lengths, ranks)
