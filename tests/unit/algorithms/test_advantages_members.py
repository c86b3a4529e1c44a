"""Membership: rows that are left out count in no statistic of those that remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.algorithms.registry import ADVANTAGES

ROWS, STEPS = 12, 7


def episodes(draw: torch.Generator) -> dict[str, Any]:
    mask = torch.rand(ROWS, STEPS, generator=draw) > 0.2
    mask[torch.arange(ROWS), torch.randint(0, STEPS, (ROWS,), generator=draw)] = True
    ends = torch.rand(2, ROWS, STEPS, generator=draw) > 0.8
    normal = {name: torch.randn(ROWS, STEPS, generator=draw) for name in ("rewards", "values", "kl")}
    return {
        **normal, "loss_mask": mask, "terminations": ends[0], "truncations": ends[1],
        "group_ids": torch.randint(0, 3, (ROWS,), generator=draw),
    }  # fmt: skip


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", sorted(ADVANTAGES.names()))
def test_the_others_are_as_if_rows_had_been_removed_beforehand(name: str, normalize: bool) -> None:
    """Bit for bit, and whatever is in the rows that are left out."""
    options: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8, "normalize": normalize, "kl_coef": 0.1}
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        whole = episodes(draw)
        members = torch.rand(ROWS, generator=draw) > (0.4 if seed else 1.0)
        rest = {key: values[members] for key, values in whole.items()}
        for key in ("rewards", "values", "kl"):
            whole[key][~members] = float("nan")
        found = calculate_adv_and_returns(name, **whole, **options, members=members)
        expected = calculate_adv_and_returns(name, **rest, **options)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[members], other) and not one[~members].any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_a_member_without_a_valid_position_counts(name: str) -> None:
    """A mask says what is trained, not who is compared: the third has the outcome 0."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    _, found = calculate_adv_and_returns(name, rewards=rewards, loss_mask=mask)
    assert (found[:2] > 0).all()
    _, alone = calculate_adv_and_returns(
        name, rewards=rewards, loss_mask=mask, members=torch.tensor([True, True, False])
    )
    assert not alone.any()
