"""SAC and related algorithms against plain implementations."""

from __future__ import annotations

import pytest
import torch

from rlhpc.embodied.algorithms.registry import algorithm_for
from tests.unit.embodied.algorithms.networks import (
    ALGORITHMS,
    OPTIM,
    PlainIql,
    PlainSac,
    PlainTd3,
    algorithm,
    batch,
    policy,
)
from tests.unit.training.test_captured_passes import record


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sac", {}),
        ("sac", {"auto_entropy_tuning": False, "backup_entropy": False}),
        ("sac", {"critic_actor_ratio": 2, "target_update_freq": 3, "target_entropy": -0.5}),
        ("sac", {"alpha_type": "softplus", "alpha_clip_grad": 0.02}),
        ("crossq", {"critic_actor_ratio": 3}),
        ("td3", {}),
        ("td3", {"critic_actor_ratio": 2, "target_update_freq": 2, "policy_noise": 0.9}),
        ("iql", {}),
        ("iql", {"critic_actor_ratio": 2, "expectile": 0.9, "inverse_temperature": 10.0, "max_weight": 1.5}),
    ],
)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_updates_equal_those_of_a_plain_implementation(name, changes, layer_norm):
    ours, alg = policy(model_type=name, critic_layer_norm=layer_norm), algorithm(**changes)
    learns, kind = ALGORITHMS[name]
    assert algorithm_for(name, ours, name) is learns
    plain, update = kind(ours, alg), learns(alg, OPTIM, ours)
    for number in range(1, 7):
        update.step(batch(number))
        plain.step(batch(number), number)
        metrics = update.metrics()
        assert metrics["q_loss"] == pytest.approx(plain.q_loss.item(), rel=1e-5)
        if number % alg.critic_actor_ratio == 0:
            assert metrics["actor_loss"] == pytest.approx(plain.actor_loss.item(), rel=1e-5)
        if isinstance(plain, PlainSac):
            assert metrics["alpha"] == pytest.approx(plain.alpha.item(), rel=1e-5)
        if isinstance(plain, PlainIql):
            assert metrics["value_loss"] == pytest.approx(plain.value_loss.item(), rel=1e-5)
            assert metrics["advantage"] == pytest.approx(plain.advantage.mean().item(), rel=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-7}
    actors = [(ours.actor, plain.actor)]
    if isinstance(plain, PlainTd3):
        actors.append((update.targets["actor"].module, plain.target_actor))
    for ours_of, theirs_of in actors:
        for mine, theirs in zip(ours_of.parameters(), theirs_of.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    if isinstance(plain, PlainIql):
        for mine, theirs in zip(ours.critics.value.parameters(), plain.value.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    pairs = [(ours.critics, plain.critics)]
    if "critics" in update.targets:
        pairs.append((update.targets["critics"].module, plain.targets))
    for networks, theirs in pairs:
        for i, critic in enumerate(theirs):
            again = plain.critic(networks, i)
            for mine, other in zip(again.parameters(), critic.parameters(), strict=True):
                torch.testing.assert_close(mine, other, **close)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("sac", {}), ("sac", {"critic_actor_ratio": 2}), ("crossq", {"critic_actor_ratio": 3}), ("td3", {}), ("iql", {})],
)
def test_replayed_updates_are_the_updates(name, changes):
    """Bit for bit, with a stand-in for a device's graphs; one recording for each kind of pass. CrossQ's correction, which sets
    in after some batches, is in the recording, too."""
    recordings = []

    def counted(compute):
        recordings.append(compute)
        return record(compute)

    states = []
    for captures in (False, True):
        torch.manual_seed(3)
        ours, alg = policy(model_type=name), algorithm(**changes)
        update = ALGORITHMS[name][0](alg, OPTIM, ours)
        if captures:
            update.capture_passes(counted)
        if name == "crossq":
            for module in ours.modules():
                if hasattr(module, "batches"):
                    module.batches += module.warmup - 2
        for number in range(1, 7):
            update.step(batch(number))
        states.append((update.metrics(), {key: value.clone() for key, value in ours.state_dict().items()}))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(states[1][1][key], value) for key, value in states[0][1].items())
    assert len(recordings) == 2
