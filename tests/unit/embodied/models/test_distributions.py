"""Action distributions: samples, log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf
from torch.distributions import Categorical

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models import build_model, policy_from_spec, register_model
from rlhpc.embodied.models.action_heads import CategoricalHead, GaussianHead, make_head
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust

STATE = spaces.Box(-1, 1, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "discrete from 3": spaces.Discrete(4, start=3),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 5]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (3,), np.float32),
    "box of two axes": spaces.Box(-2, 2, (2, 3), np.float32),
}


def section(**changes: Any) -> DictConfig:
    return OmegaConf.structured(ModelConfig(**{"hidden_sizes": [16, 16], **changes}))


def head_of(space: Any, log_std: float = 0.0) -> Any:
    return make_head(space, log_std)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(3))
def test_samples_follow_the_softmax(seed: int) -> None:
    head, count = head_of(spaces.MultiDiscrete([5, 3])), 50_000
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5, -3.0, 0.0, 1.0, -1.0])
    actions, _ = head.act(logits.expand(count, 8), head.sample_noise((count,), seeded(seed)))
    for part, (column, quantile) in zip(logits.split([5, 3]), ((0, 23.5), (1, 18.4)), strict=True):
        expected = count * torch.softmax(part.double(), 0)
        observed = torch.bincount(actions[:, 0, column], minlength=len(part)).double()
        statistic = ((observed - expected) ** 2 / expected).sum().item()
        assert statistic < quantile, "chi-square, 99.99 % of 4 and 2 degrees of freedom"


def test_components_are_independent() -> None:
    head, count = head_of(spaces.MultiDiscrete([2, 2])), 40_000
    actions, _ = head.act(torch.zeros(count, 4), head.sample_noise((count,), seeded(0)))
    first, second = actions[:, 0, 0].double(), actions[:, 0, 1].double()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.025


def test_noise_is_finite_and_repeats() -> None:
    head = CategoricalHead([64])
    noise = head.sample_noise((20_000,), seeded(1))
    assert noise.isfinite().all() and torch.equal(noise, head.sample_noise((20_000,), seeded(1)))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01), "Euler's constant"


def test_categorical_figures() -> None:
    head = CategoricalHead([4, 3])
    logits = torch.randn(50, 7, generator=seeded(0), dtype=torch.float64)
    actions = torch.stack([torch.arange(50) % 4, torch.arange(50) % 3], 1)[:, None]
    logprobs, entropy = head.evaluate(logits, actions, True)
    parts = [Categorical(logits=logits[:, :4]), Categorical(logits=logits[:, 4:])]
    expected = sum(d.log_prob(actions[:, 0, i]) for i, d in enumerate(parts))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(entropy, sum(d.entropy() for d in parts), rtol=0, atol=1e-9)


def test_gaussian_figures() -> None:
    head = GaussianHead(3, -0.7).double()
    mean = torch.randn(9, 3, generator=seeded(0), dtype=torch.float64)
    actions, acted = head.act(mean, head.sample_noise((9,), seeded(1)).double())
    logprobs, entropy = head.evaluate(mean, actions, True)
    reference = torch.distributions.Normal(mean, head.log_std.exp())
    for found in (acted, logprobs):
        torch.testing.assert_close(found, reference.log_prob(actions[:, 0]).sum(-1), rtol=0, atol=1e-6)
    assert entropy is not None
    torch.testing.assert_close(entropy, reference.entropy().sum(-1), rtol=0, atol=1e-6)
    entropy.sum().backward()
    assert head.log_std.grad is not None and head.log_std.grad.tolist() == [9, 9, 9]


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


class TestNames:
    """Models of one's own."""

    def test_registered(self) -> None:
        from rlhpc.embodied.models.mlp import MLPPolicy

        register_model("Test-Mine")(MLPPolicy)
        assert isinstance(build_model(section(model_type="TEST-mine"), STATE, spaces.Discrete(2)), MLPPolicy)
        for name in ("test-MINE", "MLP"):
            with pytest.raises(ConfigError, match="registered twice"):
                register_model(name)(MLPPolicy)

    def test_import_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "their_models.py").write_text(
            "from rlhpc.embodied.models.mlp import MLPPolicy\nclass Wide(MLPPolicy):\n    pass\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        policy = build_model(section(model_type="their_models:Wide"), STATE, spaces.Discrete(2))
        assert type(policy).__name__ == "Wide"
        assert type(policy_from_spec(policy.spec(), Trust(everything=True))).__name__ == "Wide"
        with pytest.raises(ConfigError, match="names code"):
            policy_from_spec(policy.spec())

    @pytest.mark.parametrize("path", ["nosuch_module:Net", "torch:Nosuch", ":Net"])
    def test_import_path_that_leads_nowhere(self, path: str) -> None:
        with pytest.raises(ConfigError, match="model_type"):
            build_model(section(model_type=path), STATE, spaces.Discrete(2))

    def test_what_does_not_fit(self) -> None:
        with pytest.raises(ConfigError, match="activation is 'sine'"):
            build_model(section(activation="sine"), STATE, spaces.Discrete(2))
        with pytest.raises(ConfigError, match="at least"):
            build_model(section(model_type="cnn"), spaces.Box(0, 1, (3, 3, 1), np.float32), spaces.Discrete(2))
