"""Optimizer over flat parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.flat_parameters import AdamOptions, FlatModule
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
    backend = FlatModule(module, AdamOptions.of(options))
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
    backend, other = FlatModule(Tiny(), AdamOptions.of(OPTIM)), FlatModule(Tiny(), AdamOptions.of(OPTIM))
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
    state = FlatModule(nn.Linear(2, 2), AdamOptions.of(OPTIM)).state_dict()
    with pytest.raises(CheckpointError, match="other parameters"):
        FlatModule(nn.Linear(3, 2), AdamOptions.of(OPTIM)).load_state_dict(state)
