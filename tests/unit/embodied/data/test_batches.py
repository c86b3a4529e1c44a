"""Minibatches of transitions."""

from __future__ import annotations

from rlhpc.embodied.data.batches import local_minibatches, permutation, permutation_by_part
from tests.unit.embodied.algorithms.ppo_updates import BATCH, TOTAL


def test_minibatches_partition_the_transitions():
    order = permutation(TOTAL, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(TOTAL))
    assert order.tolist() == permutation(TOTAL, 1, 2, 3).tolist() != permutation(TOTAL, 1, 2, 4).tolist()
    halves = [local_minibatches(order, BATCH, held) for held in (range(24), range(24, 48))]
    for m, (low, high) in enumerate(zip(*halves, strict=True)):
        assert sorted([*low.tolist(), *(high + 24).tolist()]) == sorted(order[m * BATCH : (m + 1) * BATCH].tolist())


def test_parts_come_one_after_the_other() -> None:
    slots, steps, parts = 3, 8, 2
    order = permutation_by_part(slots, steps, parts, 7, 1)
    first, second = ((order[:12] % steps).tolist(), (order[12:] % steps).tolist())
    assert sorted(order.tolist()) == list(range(slots * steps))
    assert max(first) == 3 and min(second) == 4
    assert (order[:12] - order[12:] + 4).any(), "each in an order of its own"
