"""Rows without padding, and shares that cost about the same."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.language.models.micro_batching import balance, costs_of, micro_batches, rows, split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.models.batches import batch_of, lengths_of_samples


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(40, 90), st.integers(0, 8), st.integers(1, 9))
def test_every_sample_is_in_one_row_that_holds_it(lengths, max_tokens, hidden, at_least) -> None:
    cut = rows(lengths, max_tokens, hidden, at_least)
    assert sorted(i for row in cut for i in row.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in row.tolist()) for row in cut]
    assert max(sizes, default=0) <= max_tokens and len(cut) >= at_least
    for row in cut:
        own = [lengths[i] for i in row.tolist()]
        assert own == sorted(own, reverse=True)  # equal lengths are neighbours
    assert [row.tolist() for row in rows(lengths, max_tokens, hidden, at_least)] == [row.tolist() for row in cut]


def test_rows_are_few_and_cost_about_the_same() -> None:
    rng = random.Random(0)
    lengths = [int(min(4096, 64 + rng.expovariate(1 / 600))) for _ in range(512)]
    cut = rows(lengths, 16384, 2048)
    assert len(cut) <= -(-sum(lengths) // 16384) + 1
    costs = costs_of(lengths, 2048)
    sums = [sum(costs[i] for i in row.tolist()) for row in cut]
    assert max(sums) / (sum(sums) / len(sums)) < 1.02


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_dearest_share_is_at_most_a_third_dearer_than_the_best(costs, bins) -> None:
    found = balance(costs, bins)
    assert found is not None and sorted(itertools.chain(*found)) == list(range(len(costs)))
    best = min(
        max(sum(c for c, b in zip(costs, places, strict=True) if b == bin_) for bin_ in range(bins))
        for places in itertools.product(range(bins), repeat=len(costs))
    )
    assert max(sum(costs[i] for i in share) for share in found) <= 4 / 3 * best


def test_what_does_not_fit() -> None:
    assert balance([3, 3, 3], 2, [3, 3, 3], 5) is None
    assert balance([3, 3, 3], 2, [3, 3, 3], 6) == [[0, 2], [1]]
    with pytest.raises(ConfigError, match=r"41 tokens.*actor\.max_tokens_per_micro_batch\(40\)"):
        rows([3, 41], 40)


def test_long_samples_cost_more_than_their_tokens() -> None:
    """With h = 2: 12 h + length a token. 24 + 30 is dearer than six times 24 + 5, of as many tokens."""
    assert costs_of([30, 5], 2) == [30 * 54, 5 * 29]
    assert costs_of(torch.tensor([4]), 0) == [16]


@pytest.mark.parametrize("packed", [True, False])
def test_as_many_micro_batches_as_other_ranks_have(packed) -> None:
    batch = TokenBatch.of([[1, 2, 3], [4, 5]], [[True] * 3, [True] * 2])
    parts = split_micro_batches(batch, 16, packed=packed, agree_count=lambda count: max(count, 3))
    assert len(parts) == 3 and sum(part.tokens for _, part in parts) == 5
    assert all(part.packed == packed and len(part) for _, part in parts)
    if packed:
        assert sorted(part.tokens for _, part in parts) == [0, 2, 3], "shared out, rather than one with all"
    nothing = TokenBatch.of([], [])
    assert [part.tokens for _, part in split_micro_batches(nothing, 16, packed=packed)] == [0]


@settings(max_examples=200, deadline=None)
@given(lengths_of_samples, st.integers(40, 200))
def test_every_token_is_in_exactly_one_micro_batch_and_none_is_too_large(lengths, max_tokens):
    whole, seen, widths = batch_of(lengths), [], []
    for samples in micro_batches(whole.lengths, max_tokens):
        batch = whole.select(samples)
        ids, advantage = batch.padded(batch.ids, batch.pad_id), batch.padded(batch.columns["advantage"])
        assert ids.numel() <= max_tokens and ids.dtype == torch.int64
        widths.append(ids.shape[1])
        for row, index in enumerate(samples.tolist()):
            n = lengths[index]
            assert batch.attended()[row].tolist() == [True] * n + [False] * (ids.shape[1] - n)  # right padding
            assert ids[row, :n].tolist() == [100 * index + t for t in range(n)]
            assert (ids[row, n:] == -1).all() and (advantage[row, n:] == 0).all()
            assert advantage[row, :n].tolist() == [float(t) for t in range(n)]
            assert int(batch.episode[row]) == index
            seen.append(index)
    assert sorted(seen) == list(range(len(lengths)))
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
    found = [(len(part), max(lengths[i] for i in part)) for part in micro_batches(lengths, max_tokens)]
    assert cost(found) == min(every)


def test_cutting_is_deterministic_and_wastes_little():
    rng = random.Random(0)
    lengths = [int(min(4096, 64 + rng.expovariate(1 / 600))) for _ in range(512)]
    first, again = (micro_batches(lengths, 16384) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert 1 - sum(lengths) / sum(len(part) * max(lengths[i] for i in part) for part in first) < 0.05
    in_order = 1 - sum(lengths) / sum(
        len(lengths[i : i + 4]) * max(lengths[i : i + 4]) for i in range(0, len(lengths), 4)
    )
    assert in_order > 0.4  # what padding samples as they come would waste
    assert len(first) <= sum(lengths) / 16384 * 1.5 + 1


def test_a_sample_that_does_not_fit_names_the_key():
    with pytest.raises(ConfigError, match=r"41 tokens.*actor\.max_tokens_per_micro_batch\(40\)"):
        micro_batches([3, 41], 40)
    assert [part.tolist() for part in micro_batches([3, 40], 40)] == [[1], [0]]
