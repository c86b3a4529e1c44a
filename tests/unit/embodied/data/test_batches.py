"""Minibatches of transitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhpc.embodied.data.batches import (
    DropReason,
    RolloutBatch,
    TrainBatch,
    local_minibatches,
    permutation,
    permutation_by_part,
)
from tests.unit.embodied.algorithms.ppo_updates import BATCH, TOTAL


def test_minibatches_partition_the_transitions():
    order = permutation(TOTAL, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(TOTAL))
    assert order.tolist() == permutation(TOTAL, 1, 2, 3).tolist() != permutation(TOTAL, 1, 2, 4).tolist()
    halves = [local_minibatches(order, BATCH, held) for held in (range(24), range(24, 48))]
    for m, (low, high) in enumerate(zip(*halves, strict=True)):
        assert sorted([*low.tolist(), *(high + 24).tolist()]) == sorted(order[m * BATCH : (m + 1) * BATCH].tolist())


def test_minibatches_of_the_rest_of_a_pass():
    """Ranks take their own transitions of any part of an order, also of one as long as a rank's share."""
    order = permutation(TOTAL, 1, 2, 3)[24:]
    low, high = (torch.cat(local_minibatches(order, 12, held)) for held in (range(24), range(24, 48)))
    assert sorted([*low.tolist(), *(high + 24).tolist()]) == sorted(order.tolist())
    assert low.max() < 24 and high.min() >= 0


def test_parts_come_one_after_the_other() -> None:
    slots, steps, parts = 3, 8, 2
    order = permutation_by_part(slots, steps, parts, 7, 1)
    first, second = ((order[:12] % steps).tolist(), (order[12:] % steps).tolist())
    assert sorted(order.tolist()) == list(range(slots * steps))
    assert max(first) == 3 and min(second) == 4
    assert (order[:12] - order[12:] + 4).any(), "each in an order of its own"


def groups(rewards: list[list[float]], valid: list[list[bool]] | None = None, **columns: np.ndarray) -> RolloutBatch:
    values = np.array(rewards, np.float32)
    ends = np.zeros(values.shape[:2], bool)
    return RolloutBatch(
        obs=values, actions=values, rewards=values, terminations=ends, truncations=ends,
        valid=None if valid is None else np.array(valid), **columns,
    )  # fmt: skip


def kept(batch: RolloutBatch) -> list[bool]:
    return [True] * len(batch.rewards) if batch.valid is None else batch.valid.any(1).tolist()


def test_groups_are_filtered_by_their_mean_return() -> None:
    """The bounds are allowed themselves."""
    batch = groups([[0, 1], [0, 0], [1, 1], [1, 1], [0, 0], [0, 0]])  # means 0.5, 2 and 0
    assert kept(batch.drop_groups(2, 0.5, 2.0)) == [True] * 4 + [False] * 2
    filtered = batch.drop_groups(2, 0.1, 0.9)
    assert kept(filtered) == [True] * 2 + [False] * 4
    assert filtered.dropped == {DropReason.FILTERED: 8}
    assert batch.drop_groups(2, 0.0, 2.0) is batch


def test_rewards_after_an_episode_and_of_slots_that_are_left_out_are_not_in_the_mean() -> None:
    valid = [[True, False], [True, True], [False, False], [True, True]]
    batch = groups([[1, 9], [1, 0], [np.nan, np.nan], [3, 0]], valid)
    assert kept(batch.drop_groups(2, 0.9, 1.1)) == [True, True, False, False]
    found = batch.drop_groups(2, 2.9, 3.1)
    assert kept(found) == [False, False, False, True]
    assert found.dropped == {DropReason.FILTERED: 3}, "what trained before"
    everything = groups([[0.0], [0.0]], [[False], [False]])
    assert everything.drop_groups(2, 1.0, 2.0) is everything


def test_actions_that_were_not_executed_are_not_in_the_mean() -> None:
    rewards = np.array([[[1.0, 5.0]], [[1.0, 0.0]]], np.float32)
    executed = np.array([[[True, False]], [[True, True]]])
    assert kept(groups(rewards, executed=executed).drop_groups(2, 0.9, 1.1)) == [True, True]
    assert kept(groups(rewards).drop_groups(2, 0.9, 1.1)) == [False, False]


@pytest.mark.parametrize("per_action", [False, True])
def test_sizes_of_sequences_count_what_trains(per_action: bool) -> None:
    """Two sequences of three decisions with two actions each; the second action of the first decision was not executed."""
    executed = torch.ones(6, 2)
    executed[0, 1], executed[2] = 0, 0
    mask = executed if per_action else executed.amax(1)
    zeros = torch.zeros(6)
    batch = TrainBatch(
        obs=zeros, actions=zeros, logprobs=torch.zeros(6, 2), values=zeros, advantages=mask, returns=mask, mask=mask,
        token_mask=executed,
    )  # fmt: skip
    sizes = batch.with_sequence_sizes(3).sequence_sizes
    assert sizes is not None
    assert sizes.tolist() == [[3.0, 3.0 if per_action else 2.0]] * 3 + [[6.0, 6.0 if per_action else 3.0]] * 3


@pytest.mark.parametrize("logprobs", [(2, 4), (2, 4, 3), (2, 4, 3, 2)])
def test_led_decisions_count_in_returns_and_not_in_the_policy_loss(logprobs: tuple[int, ...]) -> None:
    intervened = torch.zeros(2, 4, dtype=torch.bool)
    intervened[0, 1:3] = True
    per_action = len(logprobs) > 2
    rollout: RolloutBatch[torch.Tensor] = RolloutBatch(
        obs=torch.zeros(2, 4, 1), actions=torch.zeros(2, 4, 3, 2), rewards=torch.arange(8.0).reshape(2, 4),
        terminations=torch.zeros(2, 4, dtype=torch.bool), truncations=torch.zeros(2, 4, dtype=torch.bool),
        logprobs=torch.zeros(logprobs), values=torch.zeros(2, 4), next_values=torch.zeros(2, 4),
        executed=torch.ones(2, 4, 3, dtype=torch.bool) if per_action else None, intervened=intervened,
    )  # fmt: skip
    sequence = rollout.reward_sequence()
    assert sequence.rewards.equal(rollout.rewards) and sequence.valid.all()
    batch = rollout.with_advantages(torch.zeros(2, 4), torch.zeros(2, 4), sequence).flatten()
    assert batch.mask.tolist() == [1.0] * 8
    tokens = batch.token_weights()
    assert tokens.shape == (8, batch.tokens_per_row)
    assert tokens[[1, 2]].sum() == 0 and tokens[[0, 3, 4, 5, 6, 7]].all()
    assert batch.select(torch.tensor([1])).token_weights().sum() == 0 and batch.idle_row().token_weights().sum() == 0
