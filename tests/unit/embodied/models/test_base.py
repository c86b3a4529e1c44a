"""Guidance of a flow: the paper's weights, its correction in closed form, and chunks that agree with what is decided."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc.embodied.models.base import Guide, overlap_weights
from rlhpc.embodied.models.flow import Flow


@pytest.mark.parametrize(("horizon", "executed", "delay"), [(8, 3, 2), (8, 4, 4), (50, 10, 4), (5, 5, 0), (6, 2, 0)])
def test_weights_are_those_of_the_paper(horizon: int, executed: int, delay: int) -> None:
    """And of LeRobot's and Kinetix's code, which take them from a line between 1 and 0."""
    end = horizon - executed
    line = torch.linspace(1, 0, end - delay + 2)[1:-1]
    between = line * torch.expm1(line) / (math.e - 1)
    theirs = torch.cat([torch.ones(delay), between, torch.zeros(executed)])
    torch.testing.assert_close(overlap_weights(horizon, executed, delay), theirs)


@pytest.mark.parametrize(("t", "weight"), [(1.0, 5.0), (0.5, 2.0), (0.75, (1 / 16 + 9 / 16) / (3 / 16)), (0.05, 5.0)])
def test_the_correction_in_closed_form(t: float, weight: float) -> None:
    """Of v = a·x, whose x̂ = (1 − t·a)·x has the derivative 1 − t·a."""
    a, x, wanted = 0.3, torch.tensor([[[1.0], [-2.0], [0.5]]]), torch.tensor([[[0.7], [0.1], [0.9]]])
    weights = torch.tensor([1.0, 0.25, 0.0])[None, :, None]
    found = Guide(wanted, weights, 5.0)(lambda x, t: a * x)(x, torch.tensor([t]))
    pull = weights * (wanted - (1 - t * a) * x) * (1 - t * a)
    torch.testing.assert_close(found, a * x - weight * pull)


def test_a_chunk_agrees_with_what_is_decided_and_goes_on_from_there() -> None:
    """Actions N(2, 0.5²), the later ones like the first: the velocity that flow matching would learn is known."""
    var, mean, alike = 0.25, 2.0, 0.9
    covariance = var * (alike * torch.ones(4, 4) + (1 - alike) * torch.eye(4))

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        now = t[0].item()
        total = (1 - now) ** 2 * covariance + now**2 * torch.eye(4)
        gap = torch.linalg.solve(total, x.squeeze(-1).T - (1 - now) * mean).T
        return (now * gap - (mean + (1 - now) * gap @ covariance))[..., None]

    wanted = torch.tensor([3.0, 3.0, 0.0, 0.0])[None, :, None]
    guide = Guide(wanted, overlap_weights(4, 2, 2)[None, :, None], 50.0)
    start = torch.zeros(1, 4, 1)
    free = Flow(100, 0.5).act(velocity, None, start)[0, -1, :, 0]
    guided = Flow(100, 0.5).act(guide(velocity), None, start)[0, -1, :, 0]
    assert free.tolist() == pytest.approx([2.0] * 4, abs=0.03)
    assert guided[:2].tolist() == pytest.approx([3.0, 3.0], abs=0.1)
    likely = mean + (covariance[2, :2] @ torch.linalg.solve(covariance[:2, :2], torch.ones(2))).item()
    assert all(2.6 < each < likely for each in guided[2:].tolist())  # drawn to what the first two make probable
