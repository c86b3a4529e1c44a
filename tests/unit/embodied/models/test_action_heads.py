"""Action distributions: samples, log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical

from rlhpc.embodied.models import build_model, policy_from_spec, register_model
from rlhpc.embodied.models.action_heads import CategoricalHead, GaussianHead, make_head
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust
from tests.unit.embodied.models.sections import STATE, section, seeded


def head_of(space: Any, log_std: float = 0.0) -> Any:
    return make_head(space, log_std)


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
