"""Optimizer over flat parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.flat_parameters import AdamOptions, FlatModule, decay_factor, remaining_fraction
from tests.unit.embodied.algorithms.ppo_updates import OPTIM, Tiny


def loss_of(module):
    inputs = {"obs": torch.ones(2, 3, dtype=torch.float64), "actions": torch.tensor([0, 1])}
    return (
        module.default_forward(inputs, True, True, True)["logprobs"].sum() + module.critic(inputs["obs"]).square().sum()
    )


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_is_torchs(name, kind, decay):
    module, other = Tiny(), Tiny()
    other.load_state_dict(module.state_dict())
    options = SimpleNamespace(**{**vars(OPTIM), "name": name, "weight_decay": decay, "clip_grad": None})
    backend = FlatModule(module, AdamOptions.from_config(options))
    reference = kind(other.parameters(), lr=1e-2, eps=1e-5, weight_decay=decay)
    for _ in range(5):
        backend.zero_grad()
        loss_of(module).backward()
        backend.optimizer_step(1e-2)
        reference.zero_grad()
        loss_of(other).backward()
        reference.step()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_optimizer_state_survives_a_round_trip():
    backend, other = (
        FlatModule(Tiny(), AdamOptions.from_config(OPTIM)),
        FlatModule(Tiny(), AdamOptions.from_config(OPTIM)),
    )
    for b in (backend, other):
        if b is other:
            other.module.load_state_dict(backend.module.state_dict())
            other.load_state_dict(backend.state_dict())
        for _ in range(2 if b is backend else 0):
            b.zero_grad()
            loss_of(b.module).backward()
            b.optimizer_step(1e-2)
    for b in (backend, other):
        b.zero_grad()
        loss_of(b.module).backward()
        b.optimizer_step(1e-2)
    for a, b in zip(backend.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_optimizer_of_another_model_is_refused():
    state = FlatModule(nn.Linear(2, 2), AdamOptions.from_config(OPTIM)).state_dict()
    with pytest.raises(CheckpointError, match="other parameters"):
        FlatModule(nn.Linear(3, 2), AdamOptions.from_config(OPTIM)).load_state_dict(state)


def critic(name):
    return name.startswith("critic.")


def stepped(flat, steps, lr=1e-2):
    for _ in range(steps):
        flat.zero_grad()
        loss_of(flat.module).backward()
        flat.optimizer_step(lr)


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_values_have_a_learning_rate_that_follows_the_schedule(name, kind):
    """A schedule multiplies both; the gradient is clipped by the norm of all."""
    module, other = Tiny(), Tiny()
    other.load_state_dict(module.state_dict())
    options = SimpleNamespace(**vars(OPTIM) | {"name": name, "value_lr": 3e-2, "weight_decay": 0.1})
    flat = FlatModule(module, AdamOptions.from_config(options), is_value=critic)
    groups = [{"params": other.body.parameters(), "lr": 1e-2}, {"params": other.critic.parameters(), "lr": 3e-2}]
    reference = kind(groups, eps=1e-5, weight_decay=0.1)
    for factor in (1.0, 0.5, 0.1):
        stepped(flat, 1, lr=1e-2 * factor)
        reference.zero_grad()
        loss_of(other).backward()
        nn.utils.clip_grad_norm_(other.parameters(), OPTIM.clip_grad)
        for group, rate in zip(reference.param_groups, (1e-2, 3e-2), strict=True):
            group["lr"] = rate * factor
        reference.step()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def test_a_critic_warm_up_ends_after_its_steps_and_goes_on_from_a_checkpoint():
    """The policy begins as a new optimizer would; its gradient is not in the norm by which the critic's is clipped."""
    options = AdamOptions.from_config(SimpleNamespace(**vars(OPTIM) | {"critic_warmup_steps": 3}))
    flat = FlatModule(Tiny(), options, is_value=critic)
    start = {name: weight.clone() for name, weight in flat.named_weights().items()}
    flat.zero_grad()
    loss_of(flat.module).backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in flat.module.critic.parameters()]))
    assert torch.equal(flat.optimizer_step(1e-2), norm)
    stepped(flat, 1)
    other = FlatModule(Tiny(), options, is_value=critic)
    other.replace(flat.named_weights())
    other.load_state_dict(flat.state_dict())
    for one in (flat, other):
        stepped(one, 1)
        for name, weight in one.named_weights().items():
            assert torch.equal(weight, start[name]) == (not critic(name)), name
        stepped(one, 1)
        moved = (one.named_weights()["body.weight"] - start["body.weight"]).abs()
        assert moved.max() == pytest.approx(1e-2, rel=1e-2), "a first step of Adam is as large as the learning rate"
        stepped(one, 2)
    for name, weight in flat.named_weights().items():
        assert torch.equal(weight, other.named_weights()[name])


def test_a_schedule_ends_at_the_lowest_learning_rate():
    optim = SimpleNamespace(lr=1e-2, min_lr=1e-3)
    assert [decay_factor(optim, fraction) for fraction in (1.0, 0.5, 0.0)] == pytest.approx([1.0, 0.55, 0.1])
    assert decay_factor(SimpleNamespace(lr=3e-4, min_lr=0.0), 0.7) == 0.7, "bit for bit as without"


def test_schedules_fall_over_the_run():
    fractions = {
        name: [remaining_fraction(name, at) for at in (0, 0.25, 1)] for name in ("constant", "linear", "cosine")
    }
    assert fractions["constant"] == [1, 1, 1] and fractions["linear"] == [1, 0.75, 0]
    assert fractions["cosine"] == pytest.approx([1, 0.5 + 0.5**1.5, 0])
