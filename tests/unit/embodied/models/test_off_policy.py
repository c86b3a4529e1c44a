"""Networks of off-policy algorithms: bounds, noise, observations and spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.off_policy import BatchRenorm
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.algorithms.networks import ACT, HIGH, LOW, OBS, SPACES, model


def test_renormalised_rows_are_those_of_the_running_statistics():
    """Once it has warmed up, and where the batch is not far off them; far off, the correction is bounded."""
    norm, random = BatchRenorm(3).double(), torch.Generator().manual_seed(1)
    norm.mean.copy_(torch.tensor([1.0, -2.0, 0.0]))
    norm.variance.copy_(torch.tensor([4.0, 0.5, 1.0]))
    norm.batches.fill_(norm.warmup)
    rows = torch.randn(64, 3, generator=random, dtype=torch.float64) + norm.mean
    expected = norm.eval()(rows)
    torch.testing.assert_close(norm.train()(rows), expected)
    norm.mean.copy_(torch.tensor([1.0, -2.0, 100.0]))  # for the third column, 100 deviations off: 5 count
    rows[:, 2] = torch.randn(64, generator=random, dtype=torch.float64)
    assert norm(rows)[:, 2].mean().item() == pytest.approx(-5, abs=1e-6)
    fresh = BatchRenorm(3).double()
    torch.testing.assert_close(fresh(rows), nn.BatchNorm1d(3, eps=1e-3, dtype=torch.float64)(rows))


def test_noise_of_a_deterministic_actor():
    """Without noise its own action; with noise one beside it, within the bounds, with the noise's density."""
    ours = build_model(model(model_type="td3", exploration_noise=0.25), *SPACES, seed=1)
    draw = torch.Generator().manual_seed(0)
    obs, noise = torch.rand(2000, OBS, generator=draw), torch.randn(2000, ACT, generator=draw)
    best, _ = ours.predict_action_batch(obs, mode="eval")
    actions, extras = ours.predict_action_batch(obs, noise=noise)
    wanted = (best[:, 0] + 0.25 * noise * torch.tensor((HIGH - LOW) / 2)).clamp(torch.tensor(LOW), torch.tensor(HIGH))
    torch.testing.assert_close(actions[:, 0], wanted)
    assert (actions[:, 0, 1] == 1).any()  # some were clipped
    spread = torch.distributions.Normal(best[:, 0], 0.25 * torch.tensor((HIGH - LOW) / 2))
    before = best[:, 0] + 0.25 * noise * torch.tensor((HIGH - LOW) / 2)
    torch.testing.assert_close(extras["prev_logprobs"], spread.log_prob(before).sum(-1), rtol=1e-4, atol=1e-4)
    again = ours.default_forward({"obs": obs, "actions": before[:, None]}, compute_entropy=True)
    torch.testing.assert_close(again["logprobs"], extras["prev_logprobs"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again["entropy"], spread.entropy().sum(-1), rtol=1e-4, atol=1e-4)


def test_actions_fill_the_bounds_and_log_probs_integrate_to_one():
    ours = build_model(model(), spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-3, 1, (1,), np.float32), seed=2)
    obs = torch.zeros(20_001, 1)
    actions, extras = ours.predict_action_batch(obs[:1000], mode="train", noise=torch.randn(1000, 1) * 30)
    assert actions.min() < -2.99 and actions.max() > 0.99 and actions.min() >= -3 and actions.max() <= 1
    grid = torch.linspace(-3 + 1e-4, 1 - 1e-4, len(obs))
    logprobs = ours.default_forward({"obs": obs, "actions": grid[:, None, None]})["logprobs"]
    assert torch.trapezoid(logprobs.exp(), grid).item() == pytest.approx(1, abs=2e-3)
    noise = torch.randn(64, 1)
    actions, extras = ours.predict_action_batch(obs[:64], noise=noise)
    again = ours.default_forward({"obs": obs[:64], "actions": actions}, compute_values=True)
    torch.testing.assert_close(again["logprobs"], extras["prev_logprobs"], rtol=1e-3, atol=1e-3)
    assert again["values"].shape == (64,)
    best, _ = ours.predict_action_batch(obs[:2], mode="eval")
    assert torch.equal(best, ours.predict_action_batch(obs[:2], mode="eval")[0])
    even = ours.head.uniform_actions(torch.randn(20_000, 1))
    assert even.mean().item() == pytest.approx(-1, abs=0.05) and even.std().item() == pytest.approx(
        4 / 12**0.5, abs=0.05
    )


def test_several_observations_and_the_spec():
    parts = {"state": spaces.Box(-1, 1, (3,), np.float32), "extra": spaces.Box(-1, 1, (2, 2), np.float32)}
    ours = build_model(model(), spaces.Dict(parts), SPACES[1], seed=1)
    obs = {"state": torch.rand(4, 3), "extra": torch.rand(4, 2, 2)}
    assert ours.predict_action_batch(obs)[0].shape == (4, 1, 2)
    plain = build_model(model(), *SPACES, seed=1)
    copied = policy_from_spec(plain.spec())
    copied.load_state_dict(plain.state_dict())
    rows = torch.rand(3, OBS)
    assert torch.equal(copied.predict_action_batch(rows, "eval")[0], plain.predict_action_batch(rows, "eval")[0])


@pytest.mark.parametrize(
    ("obs", "action", "words"),
    [
        (SPACES[0], spaces.Discrete(3), "bounded continuous actions"),
        (SPACES[0], spaces.Box(-np.inf, np.inf, (2,)), "bounded continuous actions"),
        (spaces.Box(0, 255, (2, 8, 8, 3), np.uint8), SPACES[1], "observations of numbers and images"),
    ],
)
def test_spaces_that_it_cannot_take(obs, action, words):
    with pytest.raises(ConfigError, match=words):
        build_model(model(), obs, action)
