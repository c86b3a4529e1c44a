"""The form of a batch, its ways there and back, and micro-batches by token count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.language.config.training import SHORTEST_PREFIX
from rlhpc.language.models.micro_batching import micro_batches, prefix_trees
from rlhpc.language.models.token_batch import Pictures, TokenBatch, branch_points, cumulate
from tests.unit.language.models.batches import batch_of, lengths_of_samples
from tests.unit.language.models.trees import one_group, paths


def same(one: TokenBatch, other: TokenBatch) -> bool:
    names = ("cu_seqlens", "ids", "mask", "turn", "episode", "role", "group", "reward")
    fields = [(getattr(one, name), getattr(other, name)) for name in names]
    columns = [(values, other.columns[name]) for name, values in one.columns.items()]
    return one.columns.keys() == other.columns.keys() and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in fields + columns
    )


@settings(max_examples=100, deadline=None)
@given(lengths_of_samples, st.randoms(use_true_random=False))
def test_there_and_back(lengths, rng):
    whole = batch_of(lengths)
    for values in (whole.ids, whole.mask, whole.columns["advantage"], torch.randn(whole.tokens, 3)):
        assert torch.equal(whole.flat(whole.padded(values)), values)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    shuffled = whole.select(torch.tensor(order))
    back = shuffled.select(torch.tensor(np.argsort(order)))
    assert same(back, whole)
    assert same(TokenBatch.joined([whole.select(torch.tensor([i])) for i in range(len(lengths))]), whole)
    # A column that is made by micro-batch stands where its tokens are.
    made = torch.zeros(whole.tokens)
    for samples in micro_batches(whole.lengths, 50):
        made[whole.tokens_of(samples)] = whole.select(samples).columns["advantage"]
    assert torch.equal(made, whole.columns["advantage"])
    assert same(TokenBatch.unpack(whole.pack()), whole)


def test_gradients_go_through_rectangles():
    batch = batch_of([3, 1, 2])
    values = torch.randn(6, requires_grad=True)
    (batch.padded(values) * torch.arange(9.0).view(3, 3)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 1, 2, 3, 6, 7]
    rectangle = torch.randn(3, 3, requires_grad=True)
    batch.flat(rectangle).sum().backward()
    assert rectangle.grad is not None and torch.equal(rectangle.grad, batch.attended().float())


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"column rewards has shape \(2,\); its sample has 3 tokens"):
        TokenBatch.from_sequences([[1, 2, 3]], [[False, True, True]], {"rewards": [[0.0, 1.0]]})


def test_nothing_trains_nothing():
    assert micro_batches([], 10) == []
    whole = batch_of([5, 3])
    none = whole.empty_sample()
    assert (len(none), none.tokens, none.width) == (1, 0, 2)
    assert none.padded(none.ids, 7).tolist() == [[7, 7]] and not none.attended().any()
    assert {name: values.dtype for name, values in none.columns.items()} == {"advantage": torch.float32}
    assert len(TokenBatch.from_sequences([], [])) == 0
    for packed in (False, True):  # values of a rank that has nothing to do
        assert none.read_by(packed).before(torch.zeros(0)).shape == (0,)


def test_what_a_role_says_in_an_episode_is_one():
    """Two episodes: the first in three samples of two roles, the second in one."""
    batch = batch_of([2, 3, 1, 4])
    batch.episode, batch.role = torch.tensor([7, 7, 7, 8]), torch.tensor([0, 0, 1, 0])
    batch.reward = torch.tensor([0.5, 0.5, 0.5, 1.0])
    units = batch.by_episode()
    assert units.lengths.tolist() == [5, 1, 4] and units.tokens == batch.tokens
    assert (units.episode.tolist(), units.role.tolist()) == ([7, 7, 8], [0, 1, 0])
    assert units.reward.tolist() == [0.5, 0.5, 1.0]
    assert torch.equal(units.flat(units.padded(batch.ids)), batch.ids)
    assert same(batch_of([2, 3]).by_episode(), batch_of([2, 3])), "one sample an episode is the case of one"
    assert cumulate([2, 3]).tolist() == [0, 2, 5]


def test_a_sequences_tokens_are_in_the_order_of_time():
    """The second sample begins with the prompt of turn 0, and the first has the turns 1 and 3: by turn, then by position."""
    batch = batch_of([4, 5, 2])
    batch.episode, batch.ids = torch.tensor([0, 0, 1]), torch.arange(11)
    batch.turn = torch.tensor([1, 1, 3, 3, 0, 0, 0, 2, 2, 0, 0])
    units = batch.by_episode()
    assert units.padded(batch.ids, -1).tolist() == [[4, 5, 6, 0, 1, 7, 8, 2, 3], [9, 10, *[-1] * 7]]
    assert torch.equal(units.flat(units.padded(batch.ids)), batch.ids)
    batch.mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    assert batch.sequence_tokens().tolist() == [5] * 9 + [1] * 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_row_with_shared_prefixes_has_each_samples_tokens_in_their_order(data) -> None:
    """Any tree in any order: a token attends to exactly the tokens before it in its sample, each once."""
    number = data.draw(st.integers(1, 12))
    nodes = [(data.draw(st.integers(-1, i - 1)), data.draw(st.integers(1, 45))) for i in range(number)]
    samples = data.draw(st.permutations(paths(nodes, vocabulary=data.draw(st.sampled_from([3, 60])))))
    batch = one_group(samples).read_by(True).sharing_prefixes()
    if data.draw(st.booleans()):
        order = [i for tree, _ in prefix_trees(batch) for i in tree]
        assert sorted(order) == list(range(number))
        batch = batch.select(torch.tensor(order))
    row, lengths = batch.row, batch.lengths.tolist()
    assert torch.equal(batch.ids[row.tokens][row.places], batch.ids)
    attended = [set[int]() for _ in row.tokens]
    segments = batch.inputs()["segments"]
    for start, end in itertools.pairwise(segments.ends.tolist()):
        for place in range(start, min(end, len(attended))):
            attended[place].update(range(start, place + 1))
    for level in segments.prefixes:
        assert len({*level.queries.tolist()}) == len(level.queries) and len({*level.keys.tolist()}) == len(level.keys)
        queries, keys = ([*itertools.pairwise(ends.tolist())] for ends in (level.query_ends, level.key_ends))
        assert level.longest == tuple(max(b - a for a, b in pairs) for pairs in (queries, keys))
        for (start, end), (first, last) in zip(queries, keys, strict=True):
            assert last - first >= SHORTEST_PREFIX
            for place in level.queries[start:end].tolist():
                prefix = {*level.keys[first:last].tolist()}
                assert not prefix & attended[place]
                attended[place] |= prefix
    for start, length in zip(batch.cu_seqlens.tolist(), lengths, strict=False):
        path = row.places[start : start + length].tolist()
        assert row.positions[path].tolist() == [*range(length)]
        for index, place in enumerate(path):
            assert attended[place] == {*path[: index + 1]}


def test_parts_of_a_prefix_are_not_shorter_than_the_shortest() -> None:
    n = SHORTEST_PREFIX
    assert branch_points([0, n - 1, n, n + 3, 5 * n, 2 * n + 3]) == [0, 0, n, n, 5 * n, 2 * n + 3]
    assert branch_points([0, n + 3, n, n + 3, 5 * n, 2 * n + 3]) == [0, n, n, n, 5 * n, 2 * n + 3]
    assert branch_points([0, n + 3, n, n + 3, 2 * n - 1, 0, 2 * n]) == [0, n, n, n, n, 0, 2 * n]
    assert branch_points([]) == [] and branch_points([0]) == [0]


def test_groups_and_samples_with_images_share_nothing() -> None:
    samples = paths([(-1, 40), (0, 3), (0, 5), (0, 7)])
    batch = one_group(samples)
    assert batch.common_prefixes(range(4)) == [0, 40, 40, 40]
    batch.group = torch.tensor([0, 0, 1, 1])
    assert batch.common_prefixes(range(4)) == [0, 40, 0, 40]
    assert [sorted(tree) for tree, _ in prefix_trees(batch)] == [[0, 1], [2, 3]]
    batch.pictures = Pictures(torch.zeros(4, 2), torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                              torch.zeros(1, dtype=torch.int64), torch.tensor([1, 0, 0, 0]), 1)  # fmt: skip
    assert batch.common_prefixes(range(4)) == [0, 0, 0, 0]


def test_without_shared_prefixes_a_row_is_that_of_its_samples() -> None:
    batch = one_group(paths([(-1, 40), (0, 3)])).read_by(True)
    for each in (batch, batch.sharing_prefixes().select(torch.tensor([0]))):
        given = each.inputs()
        assert torch.equal(given["input_ids"][0], each.ids) and not given["segments"].prefixes
        assert given["segments"].ends.tolist() == each.cu_seqlens.tolist()
