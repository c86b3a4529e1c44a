"""Which ranks exchange prompts and weights."""

from __future__ import annotations

from rlhpc.language.training.prompt_dispatch import PromptMap


def test_each_engine_gets_the_weights_from_one_trainer_rank() -> None:
    paired, broadcast = (PromptMap(8, 2, 3, 2, sources=sources) for sources in ((1, 0, 1), ()))
    assert [paired.source_of(rank) for rank in range(3)] == [1, 0, 1] and paired.receivers_of(1, [0, 1, 2]) == [0, 2]
    assert [broadcast.source_of(rank) for rank in range(3)] == [0] * 3 and broadcast.receivers_of(1, [0, 1, 2]) == []
