"""Adam in one kernel, as on an accelerator: torch's updates, in pieces, and bit for bit those of a run that was resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.config.sections import ScheduledOptimConfig
from rlhpc.runtime.devices import accelerator
from rlhpc.training import flat_parameters as adam
from rlhpc.training.flat_parameters import AdamOptions, FlatAdam, schedule_factor
from tests.accelerators import ON_CPU

SIZE = 1003


def options(name: str, decay: float) -> AdamOptions:
    return AdamOptions(name, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=decay, clip_grad=0.0)


def gradients(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator).to(device) for _ in range(6)]


def optimizer(of: AdamOptions, device: str = "cpu") -> FlatAdam:
    weights = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    return FlatAdam(weights, torch.zeros_like(weights), of)


def trained(one: FlatAdam, given: list[torch.Tensor]) -> FlatAdam:
    for gradient in given:
        one.gradient.copy_(gradient)
        one.step()
    return one


def test_the_device_decides() -> None:
    assert not optimizer(options("adam", 0.0)).fuses
    assert FlatAdam(torch.empty(3, device="meta"), torch.empty(3, device="meta"), options("adam", 0.0)).fuses


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as the CPU has it; and several of it."""
    monkeypatch.setattr(FlatAdam, "fuses", True)
    monkeypatch.setattr(adam, "_MAX_KERNEL_ELEMENTS", 400)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_it_makes_the_updates_of_torchs_optimizer(fused: None, name: str, decay: float) -> None:
    of = options(name, decay)
    mine = trained(optimizer(of), gradients())
    weights = torch.nn.Parameter(optimizer(of).parameter)
    reference = of.torch_optimizer([weights])
    for gradient in gradients():
        weights.grad = gradient.clone()
        reference.step()
    assert mine.steps == 6
    torch.testing.assert_close(mine.parameter, weights.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_it_goes_on_bit_for_bit_from_what_was_saved(fused: None, name: str) -> None:
    of = options(name, 0.1)
    whole = trained(optimizer(of), gradients())
    first = trained(optimizer(of), gradients()[:3])
    second = optimizer(of)
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        getattr(second, kind).copy_(getattr(first, kind))
    second.steps = first.steps
    assert torch.equal(trained(second, gradients()[3:]).parameter, whole.parameter)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_on_an_accelerator_it_differs_from_the_cpu_by_rounding(name: str, decay: float) -> None:
    device = "cpu" if ON_CPU else accelerator()
    of: Any = options(name, decay)
    there, here = trained(optimizer(of, device), gradients(device)), trained(optimizer(of), gradients())
    assert there.fuses is (device != "cpu")
    torch.testing.assert_close(there.parameter.cpu(), here.parameter, rtol=1e-5, atol=1e-6)
    assert torch.equal(there.parameter, trained(optimizer(of, device), gradients(device)).parameter)


def test_a_schedule_rises_falls_to_its_end_and_stays_there() -> None:
    optim = ScheduledOptimConfig(lr=1.0, min_lr=0.1, lr_warmup_steps=3, lr_scheduler="linear")
    factors = [schedule_factor(optim, done, done / 13) for done in range(13)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[8] == pytest.approx(0.1 + 0.9 * 0.5) and factors[12] == pytest.approx(0.1 + 0.9 * 0.1)
    optim.lr_decay_steps = 8
    factors = [schedule_factor(optim, done, done / 13) for done in range(13)]
    assert factors[8:] == pytest.approx([0.1] * 5), "from the end of the schedule on"
    assert schedule_factor(optim, 4, 4 / 13) == pytest.approx(0.1 + 0.9 * 0.8)
    plain = ScheduledOptimConfig(lr=1.0, min_lr=0.1)
    assert schedule_factor(plain, 5, 0.5) == 1.0
    assert schedule_factor(plain, 5, 0.5, is_annealed=True) == pytest.approx(0.55)
