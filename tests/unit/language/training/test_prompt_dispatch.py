"""Which ranks exchange prompts and weights."""

from __future__ import annotations

import pytest

from rlhpc.language.training.prompt_dispatch import PromptMap, weight_sources

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
def test_an_engine_gets_the_weights_from_the_trainer_rank_on_its_accelerator(actor, rollout, sources) -> None:
    assert weight_sources(actor, rollout) == sources
    prompts = PromptMap(8, 2, len(rollout), len(actor), sources=sources)
    ranks = range(len(rollout))
    assert [prompts.source_of(rank) for rank in ranks] == list(sources or [0] * len(rollout))
    served = [rank for sender in range(len(actor)) for rank in prompts.receivers_of(sender, ranks)]
    assert sorted(served) == [*ranks], "each by one"
