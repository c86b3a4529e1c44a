"""Translation tables of RLinf's π0 and π0.5 (`model_type: openpi`), whose file names one of openpi's configurations in RLinf's
code (models/embodiment/openpi/dataconfig).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rlhpc.cli.foreign.rlinf_environments import is_grpo
from rlhpc.cli.foreign.rules import ForeignConfig, is_null

_OPENPI = "actor.model.openpi"


class _OpenpiConfig(NamedTuple):
    """Numbers of one of openpi's configurations, which a file may replace.

    Attributes:
        action_horizon: Number of actions that the network predicts at once.
        discrete_state_input: π0.5: whether its prompt contains the state.
        max_token_len: Number of tokens of a prompt.
    """

    action_horizon: int = 50
    discrete_state_input: bool | None = None
    max_token_len: int = 48


def _pi05(action_horizon: int = 50, has_state: bool = False) -> _OpenpiConfig:
    return _OpenpiConfig(action_horizon, has_state, 200)


#: openpi's configurations in RLinf (dataconfig/__init__.py).
_CONFIGS = {
    "pi0_libero": _OpenpiConfig(),
    "pi0_libero_horizon10": _OpenpiConfig(10),
    "pi05_libero": _pi05(10),
    "pi0_maniskill": _OpenpiConfig(),
    "pi05_maniskill": _pi05(10),
    "pi05_rlt_maniskill_joint": _pi05(10, has_state=True),
    "pi05_franka": _pi05(8),
    "pi05_franka_state": _pi05(20, has_state=True),
    "pi05_franka_pnp": _pi05(5),
    "pi05_maniskill_sim_real_co_training": _pi05(8),
    "pi0_metaworld": _OpenpiConfig(5),
    "pi05_metaworld": _pi05(5),
    "pi0_calvin": _OpenpiConfig(5),
    "pi05_calvin": _pi05(5),
    "pi0_robocasa_human": _OpenpiConfig(5),
    "pi0_robocasa365_pretrain_human300": _OpenpiConfig(max_token_len=96),
    "pi05_robocasa365_pretrain_human300": _pi05(has_state=True),
    "pi0_aloha_robotwin": _OpenpiConfig(),
    "pi05_aloha_robotwin": _pi05(has_state=True),
    "pi0_behavior": _OpenpiConfig(),
    "pi05_behavior": _pi05(32, has_state=True),
    "pi05_gsenv": _pi05(5),
    "pi0_realworld": _OpenpiConfig(10),
    "pi0_custom": _OpenpiConfig(),
    "pi05_isaaclab_stack_cube": _pi05(10),
    "pi05_dualfranka_tcp_rot6d": _pi05(20),
    "pi0_droid_polaris": _OpenpiConfig(10),
    "pi05_droid_polaris": _pi05(15, has_state=True),
}


def openpi_options(config: ForeignConfig, learns_by_rl: bool) -> dict[str, Any]:
    """Returns `actor.model.kwargs` of LeRobot's π0 or π0.5; imitation needs no noise and no values."""
    options: dict[str, Any] = {
        "num_steps": config("actor.model.num_steps") or config(f"{_OPENPI}.num_steps"),
        "noise_level": config(f"{_OPENPI}.noise_level"),
        "train_expert_only": config.flag(f"{_OPENPI}.train_expert_only"),
        **_network(config),
    }
    if learns_by_rl:
        options |= _noise(config)
        if not is_grpo(config):
            options |= _value_head(config)
    else:
        for key in ("noise_method", "value_after_vlm"):
            config.omit(f"{_OPENPI}.{key}", "imitation needs no noise and no values", False)
        _explain_imitation(config)
    if components := _relative_components(config):
        options["delta_actions"] = components
    if config(f"{_OPENPI}.config_name") == "pi05_aloha_robotwin":
        options["adapt_to_pi"] = True
    return {name: value for name, value in options.items() if value is not None}


def _explain_imitation(config: ForeignConfig) -> None:
    """Explains openpi's loss of imitation (openpi_action_model.py, `sft_forward`), which differs from LeRobot's."""
    counts_padding = config.leaves.get("runner.task_type") == "sft"
    components = "all padded components of an action" if counts_padding else "the executed actions of a chunk alone"
    config.omit(
        f"actor.model.model_type {_OPENPI}.config_name",
        f"openpi learns from pictures that it crops, turns and recolours at random, and its loss counts {components}; "
        "LeRobot's loss counts the components of all predicted actions, of the pictures as they are",
        missing_feature=r"^option lerobot\S* .*(augment|recolour)",
    )


def _network(config: ForeignConfig) -> dict[str, Any]:
    """Returns the options that openpi's configuration sets: a file's own value replaces the configuration's."""
    key = f"{_OPENPI}.config_name"
    if (numbers := _CONFIGS.get(str(config(key, "pi0_libero")))) is None:
        config.omit(
            key,
            "the importer does not know this configuration of openpi: set action_horizon, discrete_state_input, prompt_tokens "
            "and delta_actions of actor.model.kwargs as it does",
        )
        numbers = _OpenpiConfig()
    options: dict[str, Any] = {
        "action_horizon": config.integer(f"{_OPENPI}.action_horizon", numbers.action_horizon),
        "prompt_tokens": config.integer(f"{_OPENPI}.max_token_len", numbers.max_token_len),
    }
    if numbers.discrete_state_input is not None:
        options["discrete_state_input"] = config.flag(f"{_OPENPI}.discrete_state_input", numbers.discrete_state_input)
    elif not is_null(config.leaves.get(f"{_OPENPI}.discrete_state_input")):
        config.omit(f"{_OPENPI}.discrete_state_input", "π0 takes the state as numbers", False)
    return options


#: openpi's configurations whose actions are relative to the state (RLinf's dataconfig/__init__.py), with the components.
_RELATIVE_ACTIONS = {
    "pi0_libero": 6, "pi0_libero_horizon10": 6, "pi0_behavior": 6, "pi0_droid_polaris": 7, "pi05_droid_polaris": 7,
}  # fmt: skip
#: openpi's configurations of two arms, whose grippers (components 6 and 13) are not relative.
_TWO_ARMS = ("pi0_aloha_robotwin", "pi05_aloha_robotwin")
#: openpi's configurations for which RLinf's value head is wider (openpi_action_model.py).
_WIDE_VALUE_HEADS = ("pi05_maniskill", "pi05_libero", "pi05_droid_polaris")


def _relative_components(config: ForeignConfig) -> list[int]:
    """Returns the components of an action that openpi's transforms take relative to the state."""
    key = "actor.model.openpi.config_name"
    name = str(config(key, "pi0_libero"))
    if name == "pi05_dualfranka_tcp_rot6d":
        config.omit(key, "openpi composes poses of two arms for it, which is not here", missing_feature=r"rot6d")
    if name in _TWO_ARMS:
        return [*range(6), *range(7, 13)]
    return list(range(_RELATIVE_ACTIONS.get(name, 0)))


def _value_head(config: ForeignConfig) -> dict[str, Any]:
    """Returns the options of the value head of π0 and π0.5."""
    is_wide = str(config("actor.model.openpi.config_name")) in _WIDE_VALUE_HEADS
    hidden_sizes = [1024, 512, 256] if is_wide else [512, 256, 128]
    if not config.flag("actor.model.openpi.value_after_vlm"):
        detached = config.flag("actor.model.openpi.detach_critic_input")
        config.omit("actor.model.openpi.value_vlm_mode", "RLinf reads it with value_after_vlm", False)
        return {"value_input": "action_expert", "value_hidden": hidden_sizes, "detach_value_input": detached}
    config.omit("actor.model.openpi.detach_critic_input", "RLinf reads it without value_after_vlm", False)
    mode = config.text("actor.model.openpi.value_vlm_mode", "mean_token")
    if mode not in ("mean_token", "first_token"):
        config.omit(
            "actor.model.openpi.value_vlm_mode",
            "RLinf's last token is the last position, which is padding; rlhpc's is the last token of the prompt",
        )
    return {"value_input": mode, "value_hidden": hidden_sizes}


def _noise(config: ForeignConfig) -> dict[str, Any]:
    """Returns the options of the noise of denoising steps (openpi_action_model.py, `sample_actions`): one step for each chunk,
    unless `joint_logprob` is true.
    """
    options: dict[str, Any] = {"noise_steps": "one"}
    if config("actor.model.openpi.noise_method") == "flow_noise":
        options |= {"noise_method": "flow_noise"}
        if (noise_range := config("actor.model.openpi.noise_logvar_range")) is not None:
            options["noise_range"] = noise_range
    if config.flag("actor.model.openpi.joint_logprob"):
        return {**options, "noise_steps": "all", "step_logprobs": "mean"}
    if config.flag("actor.model.openpi.ignore_last"):
        config.omit("actor.model.openpi.ignore_last", "the last denoising step may be the noisy one, too")
    return options
