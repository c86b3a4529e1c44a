"""Sources of interventions: scripts, names and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhpc.config.constraints import Fail
from rlhpc.embodied.config import PpoConfig, SacConfig
from rlhpc.embodied.interventions.sources import Scripted, check_intervene, find_intervention
from rlhpc.runtime.errors import ConfigError


def nothing(obs: Any) -> np.ndarray:
    """An expert who does not move."""
    return np.zeros((len(obs), 2))


def test_a_script_lets_small_differences_pass_reacts_late_and_leads_for_a_while() -> None:
    script = find_intervention("{scripted: {expert: '" + __name__ + ":nothing', apart: 0.5, patience: 2, hold: 3}}")
    far, near = [0.0, 0.9], [0.4, 0.4]
    led = []
    for step in (far, near, far, far, near, near, near, far, far, far, far, near):
        chosen, taken = script.act(np.zeros((2, 1)), np.float32([step, near]), None)
        np.testing.assert_array_equal(chosen, np.float32([[0, 0] if taken[0] else step, near]))
        assert not taken[1]
        led.append(int(taken[0]))
    assert led == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    script.act(np.zeros((2, 1)), np.float32([far, near]), None)
    script.end_episodes(np.array([True, False]))  # what was seen of an episode does not count in the next
    assert not script.act(np.zeros((2, 1)), np.float32([far, near]), None)[1].any()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("keybord", "--intervene is 'keybord', which is unknown; did you mean 'keyboard'"),
        (
            "[keyboard, gamepad]",
            r"--intervene is \['keyboard', 'gamepad'\]; allowed: .* with its settings: \{keyboard: \{hz: 5\}\}",
        ),
        ("{scripted: {apart: 1}}", r"refuses {'apart': 1}: .*'expert'"),
        ("{scripted: {expert: 'a.b:c'}}", r"scripted\.expert is 'a.b:c', which cannot be imported"),
        ("{scripted: {expert: 'math:sin', patience: 0}}", "patience 0"),
        ("{scripted: {expert: 'math:sin', chance: 2}}", "chance is 2"),
        ("{scripted: {expert: 'math:sin', hold: 5, max_hold: 4}}", "max_hold 4"),
        ("{gamepad: {device: /nowhere/hidraw0}}", "/nowhere/hidraw0 is not attached"),
        ("[1", "which is no name and no mapping"),
        ("{keyboard: {hz: 0}}", "hz is 0"),
        ("{keyboard: {keys: {nokey: [0, 1]}}}", "keys are named as pygame names them"),
        ("{spacemouse: {size: 0}}", "size 0"),
    ],
)
def test_what_is_said_of_a_mistake(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_intervention(given)


def test_a_script_takes_over_by_chance_and_for_a_limited_time() -> None:
    def led(slots: range) -> np.ndarray:
        script = Scripted(f"{__name__}:nothing", apart=0.5, patience=1, hold=3, max_hold=5, chance=0.1)
        script.begin(slots, 7)
        actions = np.full((len(slots), 2), 0.9, np.float32)
        return np.array([script.act(np.zeros((len(slots), 1)), actions, None)[1] for _ in range(300)])

    both = led(range(2))
    np.testing.assert_array_equal(both[:, 1], led(range(1, 2))[:, 0])  # by slot, on any rank
    assert (both[:, 0] != both[:, 1]).any()
    starts = np.flatnonzero(np.diff(both[:, 0].astype(int)) == 1)
    assert 10 < len(starts) < 35
    assert {int(both[start + 1 : start + 7, 0].sum()) for start in starts[:-1]} == {5}


def fail(key: str, rule: str) -> ConfigError:
    return ConfigError(f"{key}: {rule}")


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        (SacConfig, {"env.train.intervene.source": "keybord"}, r"intervene\.source is 'keybord'.*'keyboard'"),
        (SacConfig, {"env.train.num_envs": 2}, r"num_envs: a person watches one slot"),
        (SacConfig, {"actor.model.model_type": "dsrl"}, "dsrl learns of noise"),
        (PpoConfig, {"algorithm.adv_type": "grpo"}, "adv_type grpo compares whole episodes"),
        (PpoConfig, {"env.train.env_type": "tensors"}, "out of a person's reach"),
    ],
)
def test_runs_that_nobody_can_help(section: Any, changes: dict[str, Any], says: str) -> None:
    from omegaconf import OmegaConf

    cfg = OmegaConf.structured(section())
    OmegaConf.update(cfg, "env.train.num_envs", 1)
    OmegaConf.update(cfg, "env.train.intervene.source", "keyboard")
    check: Fail = fail
    check_intervene(cfg, check)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    with pytest.raises(ConfigError, match=says):
        check_intervene(cfg, check)
