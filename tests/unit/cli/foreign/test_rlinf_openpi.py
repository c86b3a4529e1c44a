"""Import of RLinf's π0 and π0.5."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.runtime.errors import ConfigError
from tests.unit.cli.foreign.rlinf_configs import merged
from tests.unit.cli.foreign.test_rlinf_demonstrations import OPENPI
from tests.unit.cli.foreign.test_rlinf_environments import translated


def test_pi0_is_lerobots_and_says_what_is_different() -> None:
    result = translated({"actor": {"model": {**OPENPI, "num_steps": 5}}})
    expected = {
        "actor.model.model_type": "lerobot", "actor.training_backend": "local",
        "actor.model.kwargs": {
            "num_steps": 5, "noise_steps": "one", "value_input": "action_expert", "value_hidden": [512, 256, 128],
            "detach_value_input": False, "delta_actions": [0, 1, 2, 3, 4, 5], "train_expert_only": False,
            "action_horizon": 50, "prompt_tokens": 48,
        },
    }  # fmt: skip
    assert {key: result.ours[key] for key in expected} == expected and "actor.model.dtype" not in result.ours
    assert result.omitted["actor.model.model_path"][1] and "actor.model.openpi.noise_method" not in result.omitted
    assert "actor.model.model_type" not in result.omitted


@pytest.mark.parametrize(
    ("openpi", "kwargs"),
    [
        ({"detach_critic_input": True}, {"value_input": "action_expert", "detach_value_input": True}),
        (
            {"value_after_vlm": True, "config_name": "pi05_libero"},
            {"value_input": "mean_token", "value_hidden": [1024, 512, 256]},
        ),
        (
            {"value_after_vlm": True, "value_vlm_mode": "first_token"},
            {"value_input": "first_token", "value_hidden": [512, 256, 128]},
        ),
    ],
)
def test_the_critic_of_pi0_reads_what_rlinfs_does(openpi: Any, kwargs: Any) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": openpi})}})
    assert kwargs.items() <= result.ours["actor.model.kwargs"].items()
    assert not any(result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] for key in openpi)


def test_a_last_token_that_is_padding_is_a_difference() -> None:
    last = {"value_after_vlm": True, "value_vlm_mode": "last_token"}
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": last})}})
    assert result.omitted["actor.model.openpi.value_vlm_mode"][1]


def test_actions_of_openpi_are_relative_to_the_state_where_its_configuration_says() -> None:
    def components(name: str) -> Any:
        model = merged(OPENPI, {"openpi": {"config_name": name}})
        return translated({"actor": {"model": model}}).ours["actor.model.kwargs"].get("delta_actions")

    assert components("pi0_libero") == [0, 1, 2, 3, 4, 5] and components("pi05_libero") is None
    assert components("pi0_aloha_robotwin") == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    for name, flips in (("pi05_aloha_robotwin", True), ("pi0_aloha_robotwin", None)):
        result = translated({"actor": {"model": merged(OPENPI, {"openpi": {"config_name": name}})}})
        assert result.ours["actor.model.kwargs"].get("adapt_to_pi") is flips
        assert not result.omitted.get("actor.model.openpi.config_name", ("", False))[1]


@pytest.mark.parametrize(
    ("openpi", "expected"),
    [
        ({"config_name": "pi0_metaworld"}, (5, None, 48, False)),
        ({"config_name": "pi05_libero", "train_expert_only": True}, (10, False, 200, True)),
        ({"config_name": "pi05_behavior"}, (32, True, 200, False)),
        ({"config_name": "pi05_maniskill", "action_horizon": 8, "discrete_state_input": True}, (8, True, 200, False)),
        ({"config_name": "pi0_robocasa365_pretrain_human300", "max_token_len": 64}, (50, None, 64, False)),
    ],
)
def test_networks_and_prompts_are_those_of_openpis_configuration(openpi: Any, expected: Any) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": openpi})}})
    kwargs = result.ours["actor.model.kwargs"]
    names = ("action_horizon", "discrete_state_input", "prompt_tokens", "train_expert_only")
    assert tuple(kwargs.get(name) for name in names) == expected
    assert not any(result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] for key in openpi)


def test_an_unknown_configuration_of_openpi_is_a_difference() -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": {"config_name": "pi07_kitchen"}})}})
    assert result.omitted["actor.model.openpi.config_name"][1]


@pytest.mark.parametrize(
    ("name", "openpi_data", "expected"),
    [
        ("pi05_isaaclab_stack_cube", {}, {"sign_actions": [6]}),
        ("pi0_behavior", {}, {"max_cameras": 2, "state_components": [[i] for i in range(32)]}),
        ("pi0_robocasa_human", {"state_space": "16d"}, {"state_components": [[i] for i in (*range(11, 25), 7, 8)]}),
        ("pi0_robocasa_human", {}, {}),
        ("pi05_libero", {}, {}),
    ],
)
def test_openpis_transforms_of_states_and_actions_are_kept(name: str, openpi_data: Any, expected: Any) -> None:
    model = merged({**OPENPI, "action_dim": 7, "openpi_data": openpi_data}, {"openpi": {"config_name": name}})
    kwargs = translated({"actor": {"model": model}}, {"env_type": "isaaclab", "init_params": {"id": "x"}}).ours[
        "env.train.kwargs"
    ]
    found = {key: kwargs[key] for key in ("sign_actions", "max_cameras", "state_components") if key in kwargs}
    assert found == expected


def test_a_learned_noise_of_pi0_keeps_its_log_probability_and_entropy() -> None:
    noisy = {"noise_method": "flow_noise", "joint_logprob": True, "action_env_dim": 7}
    tree = {
        "actor": {"model": merged(OPENPI, {"openpi": noisy, "num_action_chunks": 5})},
        "algorithm": {"entropy_bonus": 0.35, "logprob_type": "chunk_level"},
    }
    ours = translated(tree).ours
    kwargs = {"noise_method": "flow_noise", "noise_steps": "all", "step_logprobs": "mean"}
    assert kwargs.items() <= ours["actor.model.kwargs"].items()
    # RLinf averages over 5 actions of 7 components.
    assert ours["algorithm.entropy_coef"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("option", "steps"),
    [({"joint_logprob": True}, "all"), ({"joint_logprob": False}, "one"), ({"ignore_last": True}, "one")],
)
def test_the_noise_of_pi0_enters_the_steps_that_rlinf_draws(option: dict[str, bool], steps: str) -> None:
    result = translated({"actor": {"model": merged(OPENPI, {"openpi": option})}})
    assert result.ours["actor.model.kwargs"]["noise_steps"] == steps
    (key,) = option
    assert result.omitted.get(f"actor.model.openpi.{key}", ("", False))[1] == (key == "ignore_last")


@pytest.mark.parametrize("method", ["flow_cps", "reinflow"])
def test_another_noise_of_a_flow_policy_is_refused(method: str) -> None:
    model = merged(OPENPI, {"openpi": {"noise_method": method}})
    with pytest.raises(ConfigError, match=f"noise_method is '{method}'"):
        translated({"actor": {"model": model}})


def test_imitation_by_pi0_has_no_value_head_and_no_noise() -> None:
    result = translated({"actor": {"model": OPENPI}, "algorithm": {"loss_type": "embodied_dagger"}})
    assert "noise_steps" not in result.ours["actor.model.kwargs"]
    assert "rlhpc has no such policy" not in result.omitted["actor.model.model_type"][0]
    assert not result.omitted["actor.model.openpi.noise_method"][1]
