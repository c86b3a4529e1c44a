"""The loss scale of float16: torch's rule, its state, and passes that are recorded with it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from rlhpc import Worker
from rlhpc.config.sections import GradScalerConfig
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.training.backend import TrainingBackend
from rlhpc.training.captured_passes import CapturedPasses
from rlhpc.training.data_parallel import ReplicatedBackend
from rlhpc.training.loss_scale import MIN_SCALE, LossScaler
from tests.unit.training.half_module import HalfBlueprint, actor, batches, loss
from tests.unit.training.test_captured_passes import record

CPU = torch.device("cpu")


def scaler(scale: float = 1024.0, interval: int = 3) -> LossScaler:
    return LossScaler(GradScalerConfig(init_scale=scale, growth_interval=interval), CPU)


def test_the_scale_follows_torch_s_scaler() -> None:
    """Over 400 steps of which a fifth overflows, from gradients that overflow in one place."""
    drawn, weight = random.Random(0), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    ours, seen = scaler(2.0**40), set[float]()
    for _ in range(400):
        overflows = drawn.random() < 0.2
        factor = torch.tensor([1.0, 1.0, float("inf") if overflows else 2.0, 0.5])
        theirs.scale((weight * factor).sum()).backward()
        weight.grad = torch.nan_to_num(weight.grad, nan=0.0, posinf=float("inf"))
        theirs.unscale_(optimizer)
        gradient = ours.scaled(torch.ones(4)) * factor
        ours.unscale([gradient])
        assert torch.equal(gradient, weight.grad)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(bool(torch.linalg.vector_norm(gradient).isfinite()))
        assert ours.scale == theirs.get_scale() and ours.overflowed == overflows
        seen.add(ours.scale)
    assert len(seen) > 10 and min(seen) > MIN_SCALE


def test_the_smallest_scale_is_not_to_blame() -> None:
    smallest = scaler(2.0)
    smallest.update(False)
    assert smallest.scale == MIN_SCALE and smallest.overflowed
    smallest.update(False)
    assert smallest.scale == MIN_SCALE and not smallest.overflowed


def test_the_state_goes_on() -> None:
    first, again = scaler(), scaler(4.0)
    for is_finite in (False, True, True):
        first.update(is_finite)
    again.restore(first.state())
    for is_finite in (True, False, True):  # the first of which doubles the scale
        assert again.state() == first.state() and float(again.scaled(torch.ones(()))) == first.scale
        for one in (first, again):
            one.update(is_finite)
    before = first.state()
    first.restore(None)  # of a checkpoint in another dtype
    assert first.state() == before


@pytest.mark.parametrize(
    "state", [{}, {"scale": 8.0}, {"scale": "x", "growth_tracker": 0}, [1], {"scale": -1.0, "growth_tracker": 0},
              {"scale": float("inf"), "growth_tracker": 0}],
)  # fmt: skip
def test_a_damaged_state_is_one_message(state: Any) -> None:
    with pytest.raises(CheckpointError, match="loss scale of the checkpoint"):
        scaler().restore(state)


def test_recorded_passes_follow_the_scale() -> None:
    """A replay multiplies by the scale of its own step, which doubles after each, and halves after an overflow."""
    results = []
    for captures in (False, True):
        backend = ReplicatedBackend(HalfBlueprint(), actor(), Worker())
        if captures:
            backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)
        norms, scales = [], []
        for batch in batches(1.0, 2.0, 1e4, 3.0, 0.5):
            backend.forward_backward([batch, batch / 2], loss)
            norms.append(float(backend.optimizer_step(0.1)))
            scales.append(backend.loss_scale)
        results.append((norms, scales, backend.flat.weights.tolist()))
    assert str(results[0]) == str(results[1])  # a norm is not a number
    norms, scales, _ = results[0]
    assert scales == [128.0, 256.0, 128.0, 256.0, 512.0]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True]


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """The norm is that of an unscaled loss, and so is the update, whose scale is a power of two."""
    results = []
    for scale in (1.0, 4096.0):
        backend = ReplicatedBackend(HalfBlueprint(), actor(scale), Worker())
        backend.forward_backward(batches(3.0), loss)
        results.append((float(backend.optimizer_step(0.1)), backend.flat.gradients.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3) and results[0][0] > 0.5
    for _, gradient in results:
        assert float(torch.linalg.vector_norm(gradient)) == pytest.approx(0.5, rel=1e-4)


def test_a_backend_without_a_loss_scale_is_one_message() -> None:
    class Foreign(ReplicatedBackend):
        name, scales_loss = "foreign", False

    with pytest.raises(ConfigError, match=r"actor\.model\.dtype=float16 needs a scaled loss.*=foreign"):
        Foreign(HalfBlueprint(), actor(), Worker())
    assert not TrainingBackend.scales_loss
