"""DPO's loss against its formulas in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlhpc.algorithms.preference_losses import dpo_loss


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain(pi: tuple[float, float], ref: tuple[float, float], beta: float, loss_type: str, smoothing: float) -> float:
    """As the papers and TRL write it, of the log-probs of the chosen and the rejected completion."""
    logits = (pi[0] - pi[1]) - (ref[0] - ref[1])
    if loss_type == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * math.log(sigma(beta * logits)) - smoothing * math.log(sigma(-beta * logits))


@pytest.mark.parametrize(
    ("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)], ids=["sigmoid", "smoothed", "ipo"]
)
@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_it_is_the_formula(loss_type: str, smoothing: float, beta: float) -> None:
    draw = random.Random(f"{loss_type} {smoothing} {beta}")
    pairs = [[(draw.gauss(-20, 8), draw.gauss(-20, 8)) for _ in range(2)] for _ in range(50)]
    pi, ref = (torch.tensor([pair[k] for pair in pairs], dtype=torch.float64) for k in range(2))
    chosen, rejected = (pi - ref).unbind(1)
    found = dpo_loss(chosen, rejected, beta=beta, loss_type=loss_type, label_smoothing=smoothing)
    expected = [plain(*pair, beta, loss_type, smoothing) for pair in pairs]  # type: ignore[call-arg]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_it_begins_at_log_2() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    for smoothing in (0.0, 0.1, 0.4):
        losses = dpo_loss(zero, zero, beta=0.3, label_smoothing=smoothing)
        assert losses.tolist() == pytest.approx([math.log(2)] * 3, rel=1e-15)
    assert dpo_loss(zero, zero, beta=0.25, loss_type="ipo").tolist() == [4.0] * 3


def test_its_gradient_is_that_of_the_paper() -> None:
    """−β σ(−β h) of the chosen completion's log-prob, and the opposite of the other's."""
    h = torch.tensor([-30.0, -1.0, 0.0, 2.0, 400.0], dtype=torch.float64)
    chosen, rejected = h.clone().requires_grad_(), torch.zeros_like(h).requires_grad_()
    dpo_loss(chosen, rejected, beta=0.5).sum().backward()
    expected = [-0.5 * sigma(-0.5 * value) for value in h.tolist()]
    assert chosen.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert rejected.grad.tolist() == pytest.approx([-value for value in expected], rel=1e-12)


def test_ipo_stops_at_its_target() -> None:
    chosen = torch.tensor([5.0], dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(chosen, torch.zeros(1, dtype=torch.float64), beta=0.1, loss_type="ipo")
    loss.sum().backward()
    assert loss.item() == 0 and chosen.grad.item() == 0


def test_a_pair_that_is_far_off_has_a_finite_loss() -> None:
    far = torch.tensor([-1e6, 1e6])
    assert dpo_loss(far, -far, beta=1.0, label_smoothing=0.1).isfinite().all()
