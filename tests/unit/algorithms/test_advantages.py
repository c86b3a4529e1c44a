"""Advantage estimators against figures computed by hand or by a named reference, in float64."""

from __future__ import annotations

import pytest
import torch

from rlhpc import ConfigError
from rlhpc.algorithms import calculate_adv_and_returns, overlong_penalty, register_advantage, varied_groups
from tests.unit.algorithms.tensors import bools, close, t

torch.set_default_dtype(torch.float32)


GAE = {"rewards": t([0, 0, 1]), "values": t([0.5, 0.4, 0.3]), "gamma": 0.9, "gae_lambda": 0.8}


def test_gae_reference_figures():
    advantages, returns = calculate_adv_and_returns("gae", **GAE, terminations=bools([0, 0, 1]))
    close(advantages, [[0.12928, 0.374, 0.7]])
    close(returns, [[0.62928, 0.774, 1.0]])


def test_truncation_bootstraps_and_termination_does_not():
    end = bools([0, 0, 1])
    following = t([0.4, 0.3, 2.0])
    cut, _ = calculate_adv_and_returns("gae", **GAE, next_values=following, truncations=end)
    over, _ = calculate_adv_and_returns("gae", **GAE, next_values=following, terminations=end)
    close(cut[:, 2], [1 + 0.9 * 2.0 - 0.3])
    close(over[:, 2], [0.7])


def test_a_cut_episode_does_not_leak_into_the_one_before():
    rewards, values, following = t([1, 1, 5, 5]), t([0.1, 0.2, 0.3, 0.4]), t([0.2, 7.0, 0.4, 0.5])
    whole, _ = calculate_adv_and_returns(
        "gae", rewards=rewards, values=values, next_values=following, truncations=bools([0, 1, 0, 0]), gamma=0.9,
        gae_lambda=0.8,
    )  # fmt: skip
    first, _ = calculate_adv_and_returns(
        "gae", rewards=rewards[:, :2], values=values[:, :2], next_values=following[:, :2], truncations=bools([0, 1]),
        gamma=0.9, gae_lambda=0.8,
    )  # fmt: skip
    close(whole[:, :2], first)


def test_gae_skips_masked_positions_wherever_they_are():
    mask = bools([0, 1, 0, 1, 1, 0])
    rewards, values = t([9, 0, 9, 0, 1, 9]), t([9, 0.5, 9, 0.4, 0.3, 9])
    advantages, returns = calculate_adv_and_returns(
        "gae", rewards=rewards, values=values, loss_mask=mask, terminations=bools([0, 0, 0, 0, 1, 0]), gamma=0.9,
        gae_lambda=0.8,
    )  # fmt: skip
    close(advantages[mask], [0.12928, 0.374, 0.7])
    close(returns[mask], [0.62928, 0.774, 1.0])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize(("name", "figure"), [("grpo", 0.8660239), ("rloo", 0.6666667), ("dr_grpo", 0.5)])
def test_group_estimators(name, figure):
    rewards = t([0, 1], [0, 0], [0, 0], [0, 1])
    advantages, _ = calculate_adv_and_returns(name, rewards=rewards, group_ids=torch.tensor([7, 7, 7, 7]))
    close(advantages, [[s * figure] * 2 for s in (1, -1, -1, 1)])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_groups_of_one_or_of_equal_rewards_give_nothing(name):
    rewards = t([1.0], [1.0], [3.0])
    advantages, _ = calculate_adv_and_returns(name, rewards=rewards, group_ids=torch.tensor([0, 0, 1]))
    close(advantages, [[0.0], [0.0], [0.0]])


def test_reinforce_plus_plus_puts_the_outcome_on_the_last_valid_token_of_each_row():
    mask = bools([0, 1, 1, 0], [1, 1, 1, 1])
    rewards = t([0, 0, 2, 0], [0, 0, 0, -1])
    advantages, returns = calculate_adv_and_returns("reinforce++", rewards=rewards, loss_mask=mask, gamma=1.0)
    close(returns, [[0, 2, 2, 0], [-1, -1, -1, -1]])
    values = torch.tensor([2.0, 2, -1, -1, -1, -1], dtype=torch.float64)
    expected = (values - values.mean()) / values.var(unbiased=False).sqrt()
    close(advantages[mask], expected)


def test_normalisation_covers_all_ranks_and_valid_entries_only():
    rewards, mask = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5) > 0.3
    whole, _ = calculate_adv_and_returns("raw", rewards=rewards, loss_mask=mask, normalize=True)
    close(whole[mask].mean(), 0.0)
    close(whole[mask].std(), 1.0)
    sums: list[list[torch.Tensor]] = [[], []]
    for rank, part in enumerate((slice(0, 2), slice(2, 6))):  # first pass: what each rank contributes

        def record(x: torch.Tensor, rank: int = rank) -> torch.Tensor:
            sums[rank].append(x.clone())
            return x

        calculate_adv_and_returns("raw", rewards=rewards[part], loss_mask=mask[part], normalize=True, all_reduce=record)
    count = sums[0][0] + sums[1][0]
    mean = count[1] / count[0]
    raw, _ = calculate_adv_and_returns("raw", rewards=rewards, loss_mask=mask)
    squares = ((raw - mean)[mask] ** 2).sum().reshape(1)
    for part in (slice(0, 2), slice(2, 6)):
        answers = iter([count, squares])
        out, _ = calculate_adv_and_returns(
            "raw", rewards=rewards[part], loss_mask=mask[part], normalize=True, all_reduce=lambda _, a=answers: next(a)
        )
        close(out, whole[part])


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw"])
def test_rows_without_a_valid_token_give_no_nan(name):
    advantages, returns = calculate_adv_and_returns(
        name, rewards=torch.zeros(2, 3), values=torch.zeros(2, 3), loss_mask=bools([0, 0, 0], [0, 0, 0]), normalize=True
    )
    assert torch.equal(advantages, torch.zeros(2, 3)) and torch.equal(returns, torch.zeros(2, 3))


def test_rewards_that_shape():
    close(
        overlong_penalty(lengths=torch.tensor([50, 75, 100, 120]), max_length=100, buffer=50).double(),
        [0, -0.5, -1, -1],
    )
    assert varied_groups(t(1, 1, 0, 1), torch.tensor([0, 0, 1, 1])).tolist() == [False, False, True, True]


def test_names_are_case_insensitive_unique_and_helped_with():
    @register_advantage("Test-Only")
    def nothing(*, rewards, **_):
        return rewards, rewards

    out, _ = calculate_adv_and_returns("TEST-only", rewards=t([1.0]))
    assert out.item() == 1
    with pytest.raises(ConfigError, match="registered twice"):
        register_advantage("test-ONLY")(nothing)
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        calculate_adv_and_returns("gpro", rewards=t([1.0]))
    with pytest.raises(ConfigError, match="values has shape"):
        calculate_adv_and_returns("gae", rewards=t([1.0]), values=t([1.0, 2.0]))
