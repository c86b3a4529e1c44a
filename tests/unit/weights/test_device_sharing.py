"""Weights on accelerators that trainer and receivers share: who sends to whom, and what a chunk may take."""

from __future__ import annotations

import pytest

from rlhpc.runtime.comm.shared_memory import capacity_of
from rlhpc.runtime.devices import message_budget
from rlhpc.weights.device_sharing import (
    CHUNK_BYTES,
    NUM_DEVICE_CHUNKS,
    buffer_bytes,
    device_chunk_bytes,
    receivers_of,
    source_of,
    weight_sources,
)

CARDS = [frozenset({(node, index)}) for node in range(2) for index in range(4)]


@pytest.mark.parametrize(
    ("actor", "rollout", "sources"),
    [
        (CARDS, CARDS, tuple(range(8))),
        (CARDS, CARDS[::-1], tuple(range(7, -1, -1))),
        (CARDS, CARDS[2:4], (2, 3)),  # fewer engines than trainer ranks
        (CARDS[:1], [CARDS[0], CARDS[0]], (0, 0)),  # two engines on one accelerator
        ([CARDS[0], CARDS[0]], CARDS[:1], (0,)),  # two trainer ranks: the first
        (CARDS[:4], CARDS[4:], ()),  # apart
        (CARDS[:4], CARDS[2:6], ()),  # some of them
        ([CARDS[0] | CARDS[1]], [CARDS[0]], ()),  # in part
        ([frozenset()], [frozenset()], ()),  # on the CPU
    ],
)  # fmt: skip
def test_a_rank_gets_the_weights_from_the_trainer_rank_on_its_accelerator(actor, rollout, sources) -> None:
    assert weight_sources(actor, rollout) == sources
    ranks = range(len(rollout))
    assert [source_of(sources, rank) for rank in ranks] == list(sources or [0] * len(rollout))
    served = [rank for sender in range(len(actor)) for rank in receivers_of(sources, sender, ranks)]
    assert sorted(served) == [*ranks], "each by one"


@pytest.mark.parametrize("memory", [16 << 20, 8 << 30, 24 << 30, 80 * 10**9, 141 << 30, 123456789])
def test_chunks_fit_into_the_budget_all_at_once(memory: int) -> None:
    """Each takes a buffer of a capacity that is rounded up (`capacity_of`)."""
    budget = message_budget(memory)
    largest = device_chunk_bytes(budget)
    assert 0 < NUM_DEVICE_CHUNKS * capacity_of(largest) <= budget and largest <= CHUNK_BYTES
    assert largest == CHUNK_BYTES or NUM_DEVICE_CHUNKS * largest > 0.8 * budget, "and little of it is left"
    assert buffer_bytes(memory) == NUM_DEVICE_CHUNKS * largest


def test_a_budget_too_small_for_a_chunk_splits_nothing() -> None:
    assert device_chunk_bytes(0) == device_chunk_bytes(4095) == 0
