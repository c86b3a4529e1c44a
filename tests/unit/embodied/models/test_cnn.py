"""Convolutional networks: weights, channels and specs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.embodied.models import build_model, policy_from_spec
from tests.unit.embodied.models.sections import STATE, section, seeded

IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "discrete from 3": spaces.Discrete(4, start=3),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 5]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (3,), np.float32),
    "box of two axes": spaces.Box(-2, 2, (2, 3), np.float32),
}


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("name", ACTIONS)
def test_acting_agrees_with_training(name: str, model: str) -> None:
    obs_space = IMAGE if model == "cnn" else STATE
    policy = build_model(section(model_type=model, log_std_init=-0.4), obs_space, ACTIONS[name], seed=1)
    obs_space.seed(0)
    obs = torch.as_tensor(np.stack([obs_space.sample() for _ in range(10)]))
    for mode in ("train", "eval"):
        actions, extras = policy.predict_action_batch(obs, mode)
        again, _ = policy.predict_action_batch(obs, mode)
        assert actions.shape[:2] == (10, 1) and (mode == "train" or torch.equal(actions, again))
        out = policy.default_forward({"obs": obs, "actions": actions}, True, True, True)
        torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"], rtol=0, atol=1e-5)
        torch.testing.assert_close(out["values"], extras["prev_values"])
    assert set(policy.default_forward({"obs": obs, "actions": actions}, False, False, True)) == {"values"}
    assert set(policy.default_forward({"obs": obs, "actions": actions})) == {"logprobs"}


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("name", ACTIONS)
def test_a_spec_is_json_and_rebuilds_the_policy(name: str, model: str) -> None:
    obs_space = IMAGE if model == "cnn" else STATE
    policy = build_model(section(model_type=model, activation="relu"), obs_space, ACTIONS[name], seed=1)
    twin = policy_from_spec(json.loads(json.dumps(policy.spec())))
    twin.load_state_dict(policy.state_dict())
    assert twin.spec() == policy.spec()
    assert (twin.observation_space, twin.action_space) == (obs_space, ACTIONS[name])
    obs = torch.as_tensor(np.stack([obs_space.sample() for _ in range(4)]))
    noise = policy.sample_noise((4,), seeded(2))
    for a, b in zip(policy.predict_action_batch(obs, "train", noise), twin.predict_action_batch(obs, "train", noise),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_seed_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (build_model(section(), STATE, spaces.Discrete(2), seed=seed) for seed in (1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(one.state_dict()["actor.0.weight"], two.state_dict()["actor.0.weight"])


def test_orthogonal_weights() -> None:
    policy = build_model(section(hidden_sizes=[5]), STATE, spaces.Discrete(4), seed=0)
    weight = policy.state_dict()["actor.0.weight"]
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(5))
    assert (policy.state_dict()["actor.0.bias"] == 0).all()
    last = policy.state_dict()["actor.2.weight"]
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(4))


def test_integers_are_scaled_and_channels_found() -> None:
    policy = build_model(section(model_type="cnn"), IMAGE, spaces.Discrete(2), seed=0)
    first = spaces.Box(0, 1, (3, 12, 12), np.float32)
    twin = build_model(section(model_type="cnn"), first, spaces.Discrete(2), seed=0)
    images = torch.randint(0, 256, (4, 12, 12, 3), generator=seeded(0), dtype=torch.uint8)
    torch.testing.assert_close(policy.value(images), twin.value(images.permute(0, 3, 1, 2).float() / 255))
