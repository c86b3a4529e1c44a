"""Each token that the model has drawn is trained on, or counted with why it is not."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from rlhpc.language.agents.episodes import Episode, Outcome
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout import group_builder
from rlhpc.language.rollout.pending_group import PendingGroup, count_dropped_on_refill, count_trainable_tokens


def episode(versions: list[int], *, reason: str = "stop", error: str = "", lost: int = 0) -> Episode:
    """Of two samples, the second of which shares the first's beginning."""
    samples = [
        Episode(0, (1,), token_ids=[2] * len(versions), versions=versions, loss_mask=[True] * len(versions)),
        Episode(0, (1,), token_ids=[2, 3], versions=[versions[0], 9], loss_mask=[False, True]),
    ]
    outcome = Outcome(error=error, metrics={"not_received": float(lost)})
    return Episode(0, (1,), finish_reason=reason, outcome=outcome, branches=samples)


def slot(*episodes: Episode) -> PendingGroup:
    return PendingGroup(5, 3, 0, Prompt(0, ()), (1,), dict(enumerate(episodes)))


def test_reasons_and_counts() -> None:
    given = slot(episode([2, 3, 4]), episode([4], reason="length", lost=7), episode([4, 4], error="it broke"))
    group_builder.drop_tokens(given, 3, drop_truncated=True, drop_reason="")
    assert given.dropped_tokens == {"lost": 7, "old": 1, "cut": 2, "failed": 3}
    assert given.episodes[0].samples[0].loss_mask == [False, True, True], "too old: masked"
    assert count_trainable_tokens(given.episodes.values()) == 3 + 2 + 3
    assert group_builder.dropped_token_metrics(given) == {
        "agent_failed": 1.0, "untrained/lost": 7.0, "untrained/old": 1.0, "untrained/cut": 2.0, "untrained/failed": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize("drop_reason", ["alone", "nonfinite"])
def test_a_group_that_is_left_out_and_one_whose_place_another_took(drop_reason: str) -> None:
    first = slot(episode([4, 4]), episode([4], error="it broke"))
    second = slot(episode([4, 4]), episode([4], error="it broke"))
    second.dropped_tokens.update(count_dropped_on_refill(first))
    group_builder.drop_tokens(second, 0, drop_truncated=False, drop_reason=drop_reason)
    assert second.dropped_tokens == Counter({"refilled": 5, drop_reason: 3, "failed": 2, "lost": 0})
    assert set(second.dropped_tokens) <= set(group_builder.REASONS)


def test_what_is_wholly_too_old_is_in_no_baseline_and_of_several_roles_only_those_that_are() -> None:
    silent = Episode(0, (1,))  # says nothing, and so nothing old
    group = slot(episode([2, 2]), episode([2, 4]), episode([4], error="it broke"), silent)
    assert [group_builder.trained_members(group, oldest) for oldest in (3, 9, 10)] == [[0, 1, 3], [0, 1, 3], [3]]
    group.episodes[0].branches.pop()  # with the other sample's token of version 9
    assert group_builder.trained_members(group, 3) == [1, 3], "too few would be left: another prompt takes the place"
    # Two roles: the second's only token is of version 9.
    for oldest, roles in ((3, [0, 1]), (5, [1]), (10, [0, 1])):
        given = slot(episode([2, 4]))
        given.episodes[0].samples[1].role = 1
        group_builder.drop_tokens(given, oldest, drop_truncated=False, drop_reason="")
        assert [sample.role for sample in given.episodes[0].samples] == roles, "never none at all"
        assert given.dropped_tokens["old"] == sum(version < oldest for version in (2, 4, 9))


def test_versions_are_compared_token_by_token() -> None:
    """Whatever versions and masks samples have, also where all entries of a list are one value."""
    generator = random.Random(3)
    for _ in range(300):
        samples = []
        for _ in range(generator.randint(1, 3)):
            count, newest = generator.randint(0, 4), generator.randint(2, 5)
            versions = [generator.randint(2, newest) for _ in range(count)]
            mask = [generator.random() < 0.7 for _ in range(count)]
            samples.append(
                Episode(0, (1,), token_ids=[2] * count, versions=versions, loss_mask=mask, logprobs=[0.0] * count)
            )
        group = slot(Episode(0, (1,), branches=samples, finish_reason="stop"))
        trained = [v for s in samples for v, is_trained in zip(s.versions, s.loss_mask, strict=True) if is_trained]
        is_too_old = bool(trained) and max(trained) < 4
        assert group_builder.trained_members(group, 4) == ([] if is_too_old else [0])
        score = Scored(1.0, {"math": 1.0})
        metrics = group_builder.group_metrics(6, [group.episodes[0]], [score], np.ones(1, np.float32), 0, False)
        assert metrics["stale"] == metrics["max_stale"] == (5 - min(trained) if trained else 0)
        kept = [[is_trained and v >= 4 for v, is_trained in zip(s.versions, s.loss_mask, strict=True)] for s in samples]
        group_builder.drop_tokens(group, 4, drop_truncated=False, drop_reason="")
        assert [sample.loss_mask for sample in samples] == kept
        assert group.dropped_tokens["old"] == len(trained) - sum(map(sum, kept))
