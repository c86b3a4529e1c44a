"""Pi0: released weights need statistics, and their times are openpi's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhpc import ConfigError
from rlhpc.embodied.models import build_model
from tests.extras import need_extra

need_extra("llm")

from tests.unit.embodied.models.norm_stats import FILE, pi0
from tests.unit.embodied.models.test_action_tokens import ACTION, SPACE, section


def test_a_policy_of_released_weights_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_extra("llm")
    from rlhpc.embodied.models import pi0 as module

    tiny = section("pi0")
    monkeypatch.setattr(module, "load_vlm", lambda cfg, *rest, load=module.load_vlm: load(tiny, *rest))
    with pytest.raises(ConfigError, match=r"looked for .*norm_stats.json"):
        build_model(section("pi0", model_path=str(tmp_path)), SPACE, ACTION)
    (tmp_path / "norm_stats.json").write_text(json.dumps(FILE))
    policy = build_model(section("pi0", model_path=str(tmp_path)), SPACE, ACTION)
    assert policy.action_stats is not None and policy.state_stats is not None


def test_times_are_drawn_as_openpi_does(tmp_path: Path) -> None:
    """Beta(1.5, 1) · 0.999 + 0.001, near 1, which is noise, more often."""
    need_extra("llm")
    torch.manual_seed(0)
    times = pi0(tmp_path).draw_times(200_000)
    expected = 0.999 * torch.distributions.Beta(1.5, 1.0).sample((200_000,)) + 0.001
    assert times.min() >= 0.001 and times.max() <= 1
    torch.testing.assert_close(times.quantile(torch.tensor([0.1, 0.5, 0.9])), expected.quantile(torch.tensor([0.1, 0.5, 0.9])),
                               atol=0.01, rtol=0)  # fmt: skip
