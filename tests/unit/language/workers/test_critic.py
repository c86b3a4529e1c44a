"""PPO with a critic: advantages, returns and both losses against the numbers of named references.

`at the last token` are those of verl, SkyRL and a transcription of TRL 1.10's PPOTrainer with the score on the end token (TRL
itself puts it one token later).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.algorithms.losses import value_loss
from rlhpc.language.algorithms.base import RETURNS, VALUES
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.models.token_batch import TokenBatch
from tests.unit.language.algorithms.test_policy_gradient import config

#: Two answers of two and four tokens, after a prompt of two.
LENGTHS, SCORES = (2, 4), (1.0, 0.0)
LOGPROBS = ((-0.5, -0.2), (-1.0, -0.3, -0.4, -0.6))
REFERENCE = ((-0.7, -0.2), (-0.5, -0.3, -0.8, -0.6))
VALUED = ((0.2, 0.4), (0.1, 0.3, 0.5, 0.7))
CASES: list[dict[str, Any]] = [
    {"gamma": 1.0, "lam": 0.95, "kl": 0.0,
     "advantages": [0.77, 0.6, -0.0296625, -0.24175, -0.465, -0.7],
     "returns": [0.97, 1.0, 0.0703375, 0.05825, 0.035, 0.0]},
    {"gamma": 1.0, "lam": 1.0, "kl": 0.1,
     "advantages": [0.78, 0.6, -0.09, -0.34, -0.54, -0.7],
     "returns": [0.98, 1.0, 0.01, -0.04, -0.04, 0.0]},
    {"gamma": 0.9, "lam": 0.5, "kl": 0.1,
     "advantages": [0.41, 0.6, 0.2419375, 0.04875, -0.225, -0.7],
     "returns": [0.61, 1.0, 0.3419375, 0.34875, 0.275, 0.0]},
]  # fmt: skip


def batch() -> TokenBatch:
    lengths = [2 + n for n in LENGTHS]
    made = TokenBatch.from_sequences([[5] * n for n in lengths], [[False, False] + [True] * n for n in LENGTHS])
    made.reward = torch.tensor(SCORES)

    def column(rows: tuple[tuple[float, ...], ...]) -> torch.Tensor:
        return torch.cat([torch.tensor([7.0, 7.0, *row]) for row in rows])  # the prompt's must not matter

    made.columns = {"rollout_logprobs": column(LOGPROBS), "ref_logprobs": column(REFERENCE), VALUES: column(VALUED)}
    return made


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"gamma {case['gamma']}, lambda {case['lam']}, kl {case['kl']}"
)
def test_advantages_and_returns(case: dict[str, Any]) -> None:
    cfg = config(
        adv_type="gae", gamma=case["gamma"], gae_lambda=case["lam"], kl_coef=case["kl"], kl_type="k1", kl_in="reward",
        normalize_advantages="none",
    )  # fmt: skip
    given = batch()
    advantages = PolicyGradient(cfg).advantages(given, None)
    assert advantages[given.mask].tolist() == pytest.approx(case["advantages"], abs=1e-6)
    assert given.columns[RETURNS][given.mask].tolist() == pytest.approx(case["returns"], abs=1e-6)
    assert not advantages[~given.mask].any() and not given.columns[RETURNS][~given.mask].any()


def test_by_default_advantages_are_whitened_over_the_batch_and_returns_are_not() -> None:
    plain, white = batch(), batch()
    raw = PolicyGradient(config(adv_type="gae", normalize_advantages="none")).advantages(plain, None)[plain.mask]
    found = PolicyGradient(config(adv_type="gae")).advantages(white, None)[white.mask]
    assert found.tolist() == pytest.approx(((raw - raw.mean()) / (raw.std() + 1e-8)).tolist(), abs=1e-6)
    assert torch.equal(plain.columns[RETURNS], white.columns[RETURNS])


@pytest.mark.parametrize(
    ("clip", "loss", "gradient"),
    [(None, 0.065, [-0.05, 0.25, 0.0]), (0.2, 0.2225, [0.0, 0.25, 0.0]), (0.5, 0.125, [0.0, 0.25, 0.0])],
)
def test_the_critics_loss(clip: float | None, loss: float, gradient: list[float]) -> None:
    """TRL 1.10's vf_loss, which is verl's compute_value_loss."""
    values = torch.tensor([[0.9, 1.5, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    found, _ = value_loss(
        values=values, returns=torch.ones(1, 3), old_values=torch.tensor([[0.0, 1.0, 0.0]]), loss_mask=mask,
        value_clip=clip,
    )  # fmt: skip
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None and values.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)
