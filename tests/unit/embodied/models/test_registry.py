"""Policies: acting and training agree, samples follow the distribution, a spec rebuilds the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.embodied import checks
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.registry import MODELS

CFG = OmegaConf.structured(ModelConfig(hidden_sizes=[16, 16], log_std_init=-0.3))
STATE = spaces.Box(-1, 1, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (40, 40, 3), np.uint8)
SEVERAL = spaces.Dict(
    {
        "rgb": IMAGE, "wrist": IMAGE, "depth": spaces.Box(0, 1, (40, 40, 1), np.float32), "state": STATE,
        "instruction": spaces.Box(0, 255, (8,), np.uint8),
    }
)  # fmt: skip
CASES = {
    "discrete": (CFG, STATE, spaces.Discrete(4)),
    "multidiscrete": (CFG, STATE, spaces.MultiDiscrete([3, 2])),
    "box": (CFG, STATE, spaces.Box(-2, 2, (3,), np.float32)),
    "cnn": (OmegaConf.merge(CFG, {"model_type": "cnn"}), IMAGE, spaces.Discrete(3)),
    "resnet": (
        OmegaConf.merge(CFG, {"model_type": "resnet", "kwargs": {"channels": [4, 8]}}),
        IMAGE,
        spaces.Discrete(3),
    ),
    "images and state": (OmegaConf.merge(CFG, {"model_type": "cnn"}), SEVERAL, spaces.Box(-2, 2, (3,), np.float32)),
    "several numbers": (CFG, spaces.Dict({"state": STATE, "goal": STATE}), spaces.Discrete(3)),
    "small images, channel first": (
        OmegaConf.merge(CFG, {"model_type": "cnn"}),
        spaces.Box(0, 1, (2, 9, 9), np.float32),
        spaces.Discrete(3),
    ),
}


def observations(space, count):
    if isinstance(space, spaces.Dict):
        return {key: observations(part, count) for key, part in space.spaces.items()}
    space.seed(0)
    return torch.as_tensor(np.stack([space.sample() for _ in range(count)]))


@pytest.mark.parametrize("name", CASES)
def test_acting_and_training_agree_on_log_probs_and_values(name):
    cfg, obs_space, action_space = CASES[name]
    policy = build_model(cfg, obs_space, action_space, seed=3)
    obs = observations(obs_space, 6)
    noise = policy.sample_noise((6,), torch.Generator().manual_seed(1))
    actions, extras = policy.predict_action_batch(obs, "train", noise)
    assert actions.shape[:2] == (6, 1)
    out = policy.default_forward({"obs": obs, "actions": actions}, True, True, True)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"])
    torch.testing.assert_close(out["values"], extras["prev_values"])
    torch.testing.assert_close(out["values"], policy.value(obs))
    assert out["entropy"].shape == (6,) and (out["entropy"] > -10).all()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_what_acts_needs_no_gradient(kind, mode):
    """Also that of a subclass which acts in its own way; training differentiates `default_forward`."""
    cfg = OmegaConf.merge(CFG, {"model_type": kind})
    policy = build_model(cfg, STATE, spaces.Box(-2, 2, (3,), np.float32), seed=3)

    class Shifted(type(policy)):
        def predict_action_batch(self, obs, mode="train", noise=None):
            actions, extras = super().predict_action_batch(obs, mode, noise)
            return actions + next(self.parameters()).sum(), extras

    obs = observations(STATE, 6)
    for cls in (type(policy), Shifted):
        policy.__class__ = cls
        actions, extras = policy.predict_action_batch(obs, mode)
        assert not actions.requires_grad and not extras["prev_values"].requires_grad
        extras["prev_logprobs"].numpy()
        mean = policy.mean_action(obs)
        assert mean.requires_grad and torch.equal(mean.detach(), policy.predict_action_batch(obs, "eval")[0])
        assert not policy.predict_action_batch(obs, mode)[0].requires_grad
    assert policy.value(obs).requires_grad


def test_gumbel_samples_follow_the_softmax():
    policy = build_model(CFG, STATE, spaces.Discrete(4), seed=0)
    logits = torch.tensor([[0.5, -1.0, 1.5, 0.0]]).expand(40_000, 4)
    noise = policy.sample_noise((40_000,), torch.Generator().manual_seed(0))
    actions, _ = policy.head.act(logits, noise)
    frequencies = torch.bincount(actions.reshape(-1), minlength=4) / 40_000
    torch.testing.assert_close(frequencies, torch.softmax(logits[0], 0), atol=0.01, rtol=0)


def test_an_action_does_not_depend_on_its_batch():
    policy = build_model(CFG, STATE, spaces.Discrete(4), seed=0)
    obs, noise = observations(STATE, 8), policy.sample_noise((8,), torch.Generator().manual_seed(0))
    together, _ = policy.predict_action_batch(obs, "train", noise)
    halves = [policy.predict_action_batch(obs[i : i + 4], "train", noise[i : i + 4])[0] for i in (0, 4)]
    assert torch.equal(together, torch.cat(halves))


def test_gaussian_log_prob_and_entropy_are_torchs():
    policy = build_model(CFG, STATE, spaces.Box(-2, 2, (3,), np.float32), seed=0)
    obs = observations(STATE, 5)
    actions, extras = policy.predict_action_batch(obs)
    mean = policy.actor(obs)
    reference = torch.distributions.Normal(mean, policy.head.log_std.exp())
    torch.testing.assert_close(extras["prev_logprobs"], reference.log_prob(actions[:, 0]).sum(-1))
    out = policy.default_forward({"obs": obs, "actions": actions}, True, True)
    torch.testing.assert_close(out["entropy"], reference.entropy().sum(-1))


def test_a_spec_rebuilds_the_network_and_seeds_repeat():
    policy = build_model(CFG, STATE, spaces.Box(-2, 2, (3,), np.float32), seed=7)
    twin = policy_from_spec(policy.spec())
    twin.load_state_dict(policy.state_dict())
    obs = observations(STATE, 4)
    assert torch.equal(twin.predict_action_batch(obs, "eval")[0], policy.predict_action_batch(obs, "eval")[0])
    again = build_model(CFG, STATE, spaces.Box(-2, 2, (3,), np.float32), seed=7)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_the_last_layers_start_as_large_as_is_asked():
    box = spaces.Box(-2, 2, (3,), np.float32)
    plain = build_model(CFG, STATE, box, seed=7)
    larger = build_model(OmegaConf.merge(CFG, {"kwargs": {"actor_gain": 0.02, "critic_gain": 2}}), STATE, box, seed=7)
    obs = observations(STATE, 4)
    torch.testing.assert_close(larger.value(obs), 2 * plain.value(obs))
    both = [policy.predict_action_batch(obs, "eval")[0] for policy in (larger, plain)]
    torch.testing.assert_close(both[0], 2 * both[1])


@pytest.mark.parametrize("model", ["cnn", "resnet"])
def test_every_image_and_number_counts_and_integers_are_scaled(model):
    policy = build_model(OmegaConf.merge(CFG, {"model_type": model}), SEVERAL, spaces.Discrete(3), seed=0)
    obs = observations(SEVERAL, 3)
    before = policy.value(obs)
    for key in ("rgb", "wrist", "depth", "state"):
        changed = {**obs, key: torch.roll(obs[key], 1, 0)}
        assert not torch.allclose(policy.value(changed), before), key
    floats = spaces.Dict({**SEVERAL.spaces, "rgb": spaces.Box(0, 1, (40, 40, 3), np.float32)})
    twin = build_model(OmegaConf.merge(CFG, {"model_type": model}), floats, spaces.Discrete(3), seed=0)
    torch.testing.assert_close(twin.value({**obs, "rgb": obs["rgb"] / 255}), before)


def test_pictures_may_have_their_channels_first_or_last():
    cfg = OmegaConf.merge(CFG, {"model_type": "resnet"})
    first, last = spaces.Box(0, 255, (3, 12, 9), np.uint8), spaces.Box(0, 255, (12, 9, 3), np.uint8)
    a, b = (build_model(cfg, space, spaces.Discrete(2), seed=0) for space in (first, last))
    images = observations(first, 4)
    torch.testing.assert_close(a.value(images), b.value(images.permute(0, 2, 3, 1).contiguous()))
    # Of a small grid there may be more channels than pixels a side.
    cells, moved = spaces.Box(0, 1, (7, 7, 20), np.float32), spaces.Box(0, 1, (20, 7, 7), np.float32)
    a, b = (build_model(cfg, space, spaces.Discrete(2), seed=0) for space in (moved, cells))
    images = observations(moved, 4)
    torch.testing.assert_close(a.value(images), b.value(images.permute(0, 2, 3, 1).contiguous()))


def test_wrong_names_and_spaces_are_explained():
    with pytest.raises(ConfigError, match="did you mean 'mlp'"):
        build_model(OmegaConf.merge(CFG, {"model_type": "mpl"}), STATE, spaces.Discrete(2))
    with pytest.raises(ConfigError, match="needs images"):
        build_model(OmegaConf.merge(CFG, {"model_type": "cnn"}), STATE, spaces.Discrete(2))
    with pytest.raises(ConfigError, match="allowed: channels"):
        build_model(OmegaConf.merge(CFG, {"model_type": "resnet", "kwargs": {"width": 2}}), IMAGE, spaces.Discrete(2))
    with pytest.raises(ConfigError, match=r"gain is 2; .*allowed: actor_gain, critic_gain"):
        build_model(OmegaConf.merge(CFG, {"kwargs": {"gain": 2}}), STATE, spaces.Discrete(2))
    with pytest.raises(ConfigError, match="is an image or a text, and only numbers"):
        build_model(CFG, SEVERAL, spaces.Discrete(2))
    with pytest.raises(ConfigError, match="not supported"):
        build_model(CFG, STATE, spaces.Text(3))


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.MultiDiscrete([3, 2]), spaces.Box(-2, 2, (2,), np.float32)], ids=str
)
def test_log_probs_of_chunks_add_up_over_the_levels(space):
    cfg = OmegaConf.merge(CFG, {"num_action_chunks": 3, "value_per_action": True})
    policy = build_model(cfg, STATE, space, seed=1)
    obs, noise = observations(STATE, 5), policy.sample_noise((5,), torch.Generator().manual_seed(0))
    dim = 1 if isinstance(space, spaces.Discrete) else 2
    found = {}
    for level, shape in {"token_level": (5, 3, dim), "action_level": (5, 3), "chunk_level": (5,)}.items():
        policy.logprob_type = level
        actions, extras = policy.predict_action_batch(obs, "train", noise)
        out = policy.default_forward({"obs": obs, "actions": actions}, True, True, True)
        assert actions.shape == (5, 3, dim) and out["logprobs"].shape == out["entropy"].shape == shape
        assert out["values"].shape == extras["prev_values"].shape == (5, 3)
        torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"])
        found[level] = out["logprobs"], out["entropy"]
    for i in range(2):
        torch.testing.assert_close(found["token_level"][i].sum(-1), found["action_level"][i])
        torch.testing.assert_close(found["action_level"][i].sum(-1), found["chunk_level"][i])


def test_token_log_probs_are_torchs():
    cfg = OmegaConf.merge(CFG, {"num_action_chunks": 2})
    policy = build_model(cfg, STATE, spaces.MultiDiscrete([3, 2]), seed=1)
    policy.logprob_type, obs = "token_level", observations(STATE, 4)
    actions, extras = policy.predict_action_batch(obs)
    logits = policy.actor(obs).reshape(4, 2, 5).split([3, 2], -1)
    for i, part in enumerate(logits):
        reference = torch.distributions.Categorical(logits=part)
        torch.testing.assert_close(extras["prev_logprobs"][..., i], reference.log_prob(actions[..., i]))


def test_what_comes_with_the_package_is_known_without_importing_it() -> None:
    """`rlhpc plan` and the driver look names up there, and need no torch for it."""
    assert {*checks.MODELS} == {*MODELS.built_in}
