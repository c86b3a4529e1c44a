"""openpi's statistics: what π0 is shown and says, and released weights without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc import ConfigError
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.normalization import NormStats, read_norm_stats
from tests.extras import need_extra

need_extra("llm")

from tests.unit.embodied.models.norm_stats import ACTIONS, FILE, STATE, pi0
from tests.unit.embodied.models.test_action_tokens import ACTION, SPACE, observations, section


def test_the_equations_are_openpis() -> None:
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    mean, std, q01, q99 = (np.array(ACTIONS[name]) for name in ("mean", "std", "q01", "q99"))
    expected = {"mean_std": (x - mean) / (std + 1e-6), "quantiles": 2 * (x - q01) / (q99 - q01 + 1e-6) - 1}
    for normalisation, values in expected.items():
        stats = NormStats(ACTIONS, normalisation, 3, "here")
        np.testing.assert_allclose(stats.normalise(torch.from_numpy(x)), values, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(stats.unnormalise(torch.from_numpy(values).float()), x, rtol=1e-4, atol=1e-4)


def test_released_weights_without_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"looked for .*/norm_stats.json and .*/assets/\*\*/norm_stats.json: there is none"
    ):
        read_norm_stats(None, str(tmp_path))
    for name in ("droid", "libero"):
        (tmp_path / "assets" / name).mkdir(parents=True)
        (tmp_path / "assets" / name / "norm_stats.json").write_text(json.dumps(FILE))
    with pytest.raises(ConfigError, match=r"there are several: .*droid.*libero"):
        read_norm_stats(None, str(tmp_path))
    given = tmp_path / "assets" / "libero"
    for place in (given, given / "norm_stats.json"):
        assert read_norm_stats(str(place), str(tmp_path)) == FILE["norm_stats"]
    assert read_norm_stats("bounds", str(tmp_path)) is None and read_norm_stats(None, "builtin:tiny") is None


@pytest.mark.parametrize("normalisation", ["mean_std", "quantiles"])
def test_state_and_actions_are_in_the_datasets_units(tmp_path: Path, normalisation: str) -> None:
    need_extra("llm")
    policy, obs = pi0(tmp_path, normalisation=normalisation), observations(3)
    state = policy._state(obs, 3)
    expected = NormStats(STATE, normalisation, 5, "here").normalise(obs["state"])
    torch.testing.assert_close(state[:, :5], expected)
    assert not state[:, 5:].any(), "what is padded stays 0"
    with torch.no_grad():
        plan = policy.plan(obs)
        actions, _ = policy.predict_action_batch(obs, "eval")
    torch.testing.assert_close(actions, NormStats(ACTIONS, normalisation, 3, "here").unnormalise(plan[:, :2, :3]))
    torch.testing.assert_close(policy.scaled(actions), plan[:, :2, :3], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_has_the_statistics(tmp_path: Path) -> None:
    need_extra("llm")
    policy, obs = pi0(tmp_path), observations(2)
    (tmp_path / "norm_stats.json").unlink()
    twin = policy_from_spec(json.loads(json.dumps(policy.spec()))).eval()
    twin.load_state_dict(policy.state_dict())
    with torch.no_grad():
        assert torch.equal(twin.predict_action_batch(obs, "eval")[0], policy.predict_action_batch(obs, "eval")[0])


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"normalisation": "q99"}, "allowed: mean_std, quantiles"),
        ({"statistics": {"actions": {"mean": [0.0]}}}, "actions, lacks mean and std"),
        ({"statistics": {"actions": {"mean": [0.0], "std": [1.0]}}}, "actions, has 1 components, the environment 3"),
    ],
)
def test_what_does_not_fit_is_one_message(tmp_path: Path, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pi0(tmp_path, **kwargs)


def test_a_released_openvla_without_statistics_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_extra("llm")
    from rlhpc.embodied.models import openvla

    monkeypatch.setattr(openvla, "folder_of", lambda cfg: tmp_path)
    with pytest.raises(ConfigError, match=r"looked for .*dataset_statistics.json and norm_stats in its config.json"):
        build_model(section("openvla"), SPACE, ACTION)
    build_model(section("openvla", kwargs={"statistics": "bounds"}), SPACE, ACTION)
