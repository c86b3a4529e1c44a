"""Ranks of a trainer share their samples, so that each has about equally much to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc import Worker
from rlhpc.config.parallel import MeshSizes
from rlhpc.language.models.micro_batching import balance_across_ranks, costs_of
from rlhpc.language.models.token_batch import TokenBatch
from tests.integration.language.lm_ranks import groups_of

RANKS = 3


def held(rank: int, case: str) -> TokenBatch:
    """Samples of a rank; each token's id says whose it was, and columns say it again."""
    lengths = {"skewed": [[50, 40, 31, 30], [3, 4, 5, 2], [1, 9, 8, 7]], "none": [[20, 21], [], []],
               "even": [[7, 7], [7, 7], [7, 7]]}[case][rank]  # fmt: skip
    ids = [[1000 * rank + 100 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    values = [torch.tensor(one, dtype=torch.float32) for one in ids]
    tables = [torch.stack([one, -one], -1) for one in values]
    batch = TokenBatch.from_sequences(
        ids, [[t % 2 == 1 for t in range(len(one))] for one in ids], {"one": values}, pad_id=7
    )
    batch.columns["two"] = torch.cat(tables) if tables else torch.zeros(0, 2)
    batch.reward = torch.tensor([float(10 * rank + i) for i in range(len(lengths))])
    return batch


class Sharer(Worker):
    """A rank."""

    def share(self, case: str, each: int) -> dict[str, Any]:
        """Shares once."""
        return balance_across_ranks(
            held(self.rank, case), self, MeshSizes(shard=self.world_size), unit_size=each, hidden_size=4
        ).pack()


@pytest.fixture(scope="module")
def ranks():
    yield from groups_of(Sharer, "sharers")


def shared(ranks, case: str, each: int = 1) -> list[TokenBatch]:
    return [TokenBatch.unpack(found) for found in ranks(RANKS).share(case, each).wait()]


def samples(batches: list[TokenBatch]) -> list[tuple]:
    """All that is known of each sample."""
    found = []
    for batch in batches:
        for i in range(len(batch)):
            one = batch.select(torch.tensor([i]))
            found.append((one.ids.tolist(), one.mask.tolist(), one.columns["one"].tolist(), one.columns["two"].tolist(),
                          one.reward.tolist(), one.pad_id))  # fmt: skip
    return found


def cost(batch: TokenBatch) -> int:
    return sum(costs_of(batch.lengths, 4))


@pytest.mark.parametrize("case", ["skewed", "none", "even"])
def test_every_sample_is_on_one_rank(ranks, case) -> None:
    before = [held(rank, case) for rank in range(RANKS)]
    after = shared(ranks, case)
    assert sorted(samples(after)) == sorted(samples(before))
    assert max(map(cost, after)) <= max(map(cost, before))


def test_costs_are_about_equal(ranks) -> None:
    """All that is dear was on one rank."""
    after = [cost(batch) for batch in shared(ranks, "skewed")]
    dearest = max(costs_of([50], 4))
    assert max(after) - min(after) <= dearest and max(after) < 0.6 * cost(held(0, "skewed"))


def test_where_nothing_is_gained_nothing_moves(ranks) -> None:
    assert [one.ids.tolist() for one in shared(ranks, "even")] == [held(r, "even").ids.tolist() for r in range(RANKS)]


def test_pairs_stay_together(ranks) -> None:
    after = shared(ranks, "skewed", each=2)
    for batch in after:
        first = [int(batch.ids[start]) for start in batch.cu_seqlens[:-1].tolist()]
        assert [b - a for a, b in zip(first[::2], first[1::2], strict=True)] == [100] * (len(first) // 2)
    assert sorted(samples(after)) == sorted(samples([held(rank, "skewed") for rank in range(RANKS)]))
    assert len({len(batch) for batch in after}) > 1, "a pair moved"
