"""Advantage-conditioned policy: an extra input marks improvements (RECAP: Physical Intelligence 2025, "π*0.6: a VLA
That Learns From Experience"). The policy is trained on all episodes, good and bad. When it acts, the extra input says
"improvement".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.checkpoint.start import find_weights
from rlhpc.config.typed import with_value
from rlhpc.embodied.config import BcConfig, PolicyConfig
from rlhpc.embodied.config.model_options import ConditionedOptions, model_options
from rlhpc.embodied.envs.observations import space_to_json
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.registry import build_model, load_policy
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust

#: Added observation: 1 for an improvement, −1 for none, 0 for unknown.
IMPROVEMENT = "improvement"


class ConditionedPolicy(Policy):
    """Policy that adds an improvement label to the observations of an inner policy.

    `actor.model.kwargs` are `ConditionedOptions` and the options of the inner policy.

    Attributes:
        inner: Inner policy.
        unconditioned: Fraction of training samples without the label.
    """

    has_head = False
    start_options = ("weights",)

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        option_names = {option_field.name for option_field in dataclasses.fields(ConditionedOptions)}
        inner_options = {name: option_value for name, option_value in cfg.kwargs.items() if name not in option_names}
        outer_options = {name: option_value for name, option_value in cfg.kwargs.items() if name in option_names}
        options = model_options(ConditionedOptions, with_value(cfg, "kwargs", outer_options))
        self.unconditioned = options.unconditioned
        inner_cfg = with_value(with_value(cfg, "model_type", options.of), "kwargs", inner_options)
        self.inner = build_model(inner_cfg, _with_improvement(observation_space), action_space)
        self.mixed_precision = self.inner.mixed_precision

    @property
    def imitated_offsets(self) -> range:
        """Offsets of the actions that behaviour cloning learns (`Policy.imitated_offsets`)."""
        return self.inner.imitated_offsets

    def set_logprob_type(self, level: str) -> None:
        """Sets the level of both policies (`Policy.set_logprob_type`)."""
        super().set_logprob_type(level)
        self.inner.set_logprob_type(level)

    def recompute_activations(self) -> bool:
        """Enables gradient checkpointing (`Policy.recompute_activations`)."""
        return self.inner.recompute_activations()

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the inner policy's features, conditioned on an improvement (`Policy.features`)."""
        return self.inner.features(_add_improvement(obs), policy, value)

    def default_forward(self, inputs: dict[str, Any], *args: bool, **kwargs: bool) -> dict[str, Tensor]:
        """Runs the training pass, conditioned on an improvement as in acting (`Policy.default_forward`)."""
        return self.inner.default_forward({**inputs, "obs": _add_improvement(inputs["obs"])}, *args, **kwargs)

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions, conditioned on an improvement (`Policy.predict_action_batch`)."""
        return self.inner.predict_action_batch(_add_improvement(obs), mode, noise)

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws the inner policy's noise (`Policy.sample_noise`)."""
        return self.inner.sample_noise(shape, generator)

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of the inner policy's starting noise (`Policy.start_shape`)."""
        return self.inner.start_shape

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of behaviour cloning (`Policy.bc_loss`); `improvement [B, 1]` labels the actions. A random
        fraction of the labels is hidden; torch's default generator draws it.
        """
        improvement: Tensor = inputs[IMPROVEMENT]
        is_labeled = torch.rand(improvement.shape).to(improvement.device) >= self.unconditioned
        return self.inner.bc_loss({**inputs, "obs": _add_improvement(inputs["obs"], improvement * is_labeled)})


def _with_improvement(space: Any) -> spaces.Dict:
    boxes = dict(space.spaces) if isinstance(space, spaces.Dict) else {"state": space}
    if IMPROVEMENT in boxes:
        raise ConfigError(
            f"an observation of env.train is called {IMPROVEMENT!r} already; model_type conditioned adds one"
        )
    return spaces.Dict({**boxes, IMPROVEMENT: spaces.Box(-1, 1, (1,), np.float32)})


def _add_improvement(obs: Obs, improvement: Tensor | None = None) -> dict[str, Tensor]:
    obs_arrays = dict(obs) if isinstance(obs, dict) else {"state": obs}
    if improvement is None:
        first_array = next(iter(obs_arrays.values()))
        improvement = torch.ones((first_array.shape[0], 1), device=first_array.device)
    return {**obs_arrays, IMPROVEMENT: improvement}


KEY = "algorithm.value_model"


def load_value_model(cfg: BcConfig, observation_space: object) -> Policy:
    """Loads the policy whose critic estimates the expected return.

    Raises:
        ConfigError: The policy is missing, has no critic, or takes other observations.
    """
    policy = load_policy(find_weights(str(cfg.algorithm.value_model), KEY), Trust())
    if space_to_json(policy.observation_space) != space_to_json(observation_space):
        raise ConfigError(
            f"{KEY} is {cfg.algorithm.value_model!r}, which sees {policy.observation_space}; env.train has {observation_space}"
        )
    return policy


def advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, horizon: int) -> np.ndarray:
    """Returns the n-step advantage of each step of an episode, `[T]`; values after the last step are 0.

    Args:
        rewards: Rewards `[T]`.
        values: Values of the observations before the steps, `[T]`.
        gamma: Discount of a step.
        horizon: Number of rewards before the bootstrap value from `values`.
    """
    T = len(rewards)
    padded_values = np.concatenate([values, np.zeros(horizon)])
    advantage = gamma**horizon * padded_values[horizon : horizon + T] - values
    padded_rewards = np.concatenate([rewards, np.zeros(horizon)])
    for k in range(min(horizon, T)):
        advantage += gamma**k * padded_rewards[k : k + T]
    return advantage


def improvements(episode_advantages: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """Returns the improvement labels of each episode, `[T, 1]` float32: 1 for the largest `fraction` of all advantages,
    and −1 for the other advantages.
    """
    threshold = np.quantile(np.concatenate(list(episode_advantages)), 1 - fraction)
    return [np.where(advantage > threshold, 1, -1).astype(np.float32)[:, None] for advantage in episode_advantages]


@torch.no_grad()
def episode_advantages(
    cfg: BcConfig, batches: Iterable[Mapping[str, Any]], model: Policy, device: torch.device
) -> np.ndarray:
    """Returns the advantage of each step of an episode, `[T]` (`advantages`).

    Args:
        cfg: Configuration.
        batches: Consecutive parts of the episode: `obs` before each step, and `rewards`.
        model: Policy whose critic estimates the values, on the device.
        device: Device.
    """
    state_values, rewards = [], []
    for batch in batches:
        state_values.append(model.value(to_tensors(batch["obs"], device)))
        rewards.append(batch["rewards"])
    return advantages(
        cfg.env.train.reward_scale * np.concatenate(rewards).astype(np.float64),
        torch.cat([value_part.reshape(len(value_part), -1)[:, 0] for value_part in state_values])
        .double()
        .cpu()
        .numpy(),
        cfg.algorithm.gamma,
        cfg.algorithm.advantage_steps,
    )
