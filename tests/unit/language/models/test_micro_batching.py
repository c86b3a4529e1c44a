"""Rows without padding, and shares that cost about the same."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.language.models.micro_batching import (
    balance,
    costs_of,
    micro_batches,
    rows,
    split_micro_batches,
    units_of,
)
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.models.batches import batch_of, lengths_of_samples
from tests.unit.language.models.trees import NODES, one_group, paths


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
    batch = TokenBatch.from_sequences([[1, 2, 3], [4, 5]], [[True] * 3, [True] * 2])
    parts = split_micro_batches(batch, 16, is_packed=packed, agree_count=lambda count: max(count, 3))
    assert len(parts) == 3 and sum(part.tokens for _, part in parts) == 5
    assert all(part.packed == packed and len(part) for _, part in parts)
    if packed:
        assert sorted(part.tokens for _, part in parts) == [0, 2, 3], "shared out, rather than one with all"
    nothing = TokenBatch.from_sequences([], [])
    assert [part.tokens for _, part in split_micro_batches(nothing, 16, is_packed=packed)] == [0]


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_samples_with_a_common_prefix_share_rows_that_hold_them(data) -> None:
    samples = [*paths(NODES, seed=0), *paths(NODES[:6], seed=1)]
    batch = one_group(samples)
    batch.group[len(NODES) :] = 1
    batch = batch.select(torch.tensor(data.draw(st.permutations(range(len(batch))))))
    max_tokens, at_least = data.draw(st.integers(int(batch.lengths.max()), 900)), data.draw(st.integers(1, 5))
    parts = split_micro_batches(
        batch, max_tokens, is_packed=True, shares_prefixes=True, hidden_size=8, agree_count=lambda n: max(n, at_least)
    )
    assert sorted(i for indices, _ in parts for i in indices.tolist()) == list(range(len(batch)))
    assert all(len(part.row.tokens) <= max_tokens for _, part in parts) and len(parts) >= at_least
    if max_tokens > 700 and at_least == 1:
        assert len(parts) == 1 and len(parts[0][1].row.tokens) < batch.tokens / 3


def test_samples_that_share_nothing_are_in_the_rows_of_before() -> None:
    batch = batch_of([9, 40, 3, 17, 40, 22, 8])
    flat, shared = (
        split_micro_batches(batch, 50, is_packed=True, shares_prefixes=shares, hidden_size=4)
        for shares in (False, True)
    )
    assert [indices.tolist() for indices, _ in flat] == [indices.tolist() for indices, _ in shared]


def test_a_shared_prefix_costs_once() -> None:
    batch = one_group(paths([(-1, 100), (0, 10), (0, 20)])[1:])
    [unit] = units_of(batch, hidden_size=3)
    assert (unit.samples, unit.size) == ([0, 1] if unit.samples[0] == 0 else [1, 0], 130)
    assert unit.cost == 110 * (36 + 110) + 20 * (36 + 220) or unit.cost == 120 * (36 + 120) + 10 * (36 + 210)
    assert sum(costs_of([110, 120], 3)) > 1.5 * unit.cost
    assert [part.samples for part in units_of(batch, 3, max_tokens=120)] == [[sample] for sample in unit.samples]
