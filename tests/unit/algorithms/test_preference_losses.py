"""Losses of reward models against numbers of TRL 1.16's RewardTrainer, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc.algorithms import REWARD_LOSSES, find_reward_loss, register_reward_loss
from rlhpc.runtime.errors import ConfigError

#: Computed by `RewardTrainer.compute_loss` of TRL 1.16.0: rewards, margins, weight of the centering; loss and gradients.
TRL = [
    ([1.0, 0.5], [0.0, 0.7], None, 0.0, 0.55570028, [-0.13447071, -0.274917]),
    ([1.0, 0.5], [0.0, 0.7], [0.5, 0.0], 0.0, 0.63610793, [-0.18877033, -0.274917]),
    ([1.0, 0.5], [0.0, 0.7], None, 0.01, 0.56790028, [-0.12447071, -0.262917]),
    ([50.0], [-50.0], None, 0.0, 0.0, [0.0]),
    ([-50.0], [50.0], [1.0], 0.1, 101.0, [-1.0]),
]


@pytest.mark.parametrize(("chosen", "rejected", "margins", "centering", "expected", "gradient"), TRL)
def test_bradley_terry_is_that_of_trl(chosen, rejected, margins, centering, expected, gradient) -> None:
    loss, form = find_reward_loss("Bradley_Terry", {"centering": centering})
    first, second = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (chosen, rejected))
    given = torch.tensor(margins or [0.0] * len(chosen), dtype=torch.float64)
    value = loss(first, second, given).mean()
    value.backward()
    assert form == "pairs" and value.item() == pytest.approx(expected, abs=1e-6)
    assert first.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    pull = 4 * centering * (torch.tensor(chosen) + torch.tensor(rejected)) / len(chosen)
    assert second.grad.tolist() == pytest.approx((pull - first.grad).tolist(), abs=1e-6)


def test_one_loss_a_pair_so_that_parts_add_up() -> None:
    loss, _ = find_reward_loss("bradley_terry", {"centering": 0.5})
    one = loss(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.5]))
    by_hand = [math.log(1 + math.exp(-1.0)) + 0.5 * 9, math.log(1 + math.exp(2.5))]
    assert one.tolist() == pytest.approx(by_hand, rel=1e-6)


def test_regression_is_the_squared_error() -> None:
    loss, form = find_reward_loss("regression")
    assert form == "labels"
    assert loss(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0])).tolist() == [0.25, 9.0]


def test_a_loss_of_ones_own() -> None:
    name = "hinge_of_the_test"
    if name not in REWARD_LOSSES.names():

        @register_reward_loss(name)
        def hinge(chosen, rejected, margins, scale=1.0):
            return scale * (margins - chosen + rejected).clamp(min=0)

    loss, form = find_reward_loss(name, {"scale": 2.0})
    assert form == "pairs" and loss(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.5])).tolist() == [3.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        (
            "bradley_tery",
            {},
            r"algorithm\.loss_type is 'bradley_tery', which is unknown; did you mean 'bradley_terry'\?",
        ),
        ("math:hypot", {}, r"a function of \(.*\); a reward model's loss is one of \(chosen, rejected, margins\) or"),
        ("bradley_terry", {"center": 1}, r"algorithm\.loss_kwargs\.center is 1; .*'centering'.*allowed: centering"),
        (
            "regression",
            {"centering": 1},
            r"algorithm\.loss_kwargs\.centering is 1; loss regression has no such option; allowed: none",
        ),
        ("bradley_terry", {"centering": -1}, r"algorithm\.loss_kwargs\.centering is -1; it must not be negative"),
        ("bradley_terry", {"centering": "much"}, r"algorithm\.loss_kwargs\.centering is 'much'"),
        ("bradley_terry", {"centering": True}, r"algorithm\.loss_kwargs\.centering is True"),
    ],
)
def test_what_is_no_loss_is_refused(name: str, kwargs: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_reward_loss(name, kwargs)
