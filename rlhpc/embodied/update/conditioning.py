"""Which recorded actions turned out better than was expected: what advantage conditioning trains on (see
`rlhpc.embodied.models.conditioned`).

RECAP (Physical Intelligence 2025) estimates A(o_t, a_t) = Σ_{k<n} γ^k·r_{t+k} + γ^n·V(o_{t+n}) − V(o_t), with n the steps
up to the episode's end where it is less; the best part of all steps counts as improvements. Its value model is a distribution
over steps to success; here it is any policy's critic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhpc.checkpoint.start import find_weights
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.envs.observations import count_rows, take
from rlhpc.embodied.envs.spaces import space_to_json
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.saved import load_policy
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import Trust

KEY = "algorithm.value_model"
#: Observations that are valued at once.
_ROWS = 1024


def value_model(cfg: BcConfig, observation_space: object) -> Policy:
    """The policy whose critic says what was expected.

    Raises:
        ConfigError: There is none, it has no critic, or it sees something else.
    """
    policy = load_policy(find_weights(str(cfg.algorithm.value_model), KEY), Trust())
    if space_to_json(policy.observation_space) != space_to_json(observation_space):
        raise ConfigError(
            f"{KEY} is {cfg.algorithm.value_model!r}, which sees {policy.observation_space}; env.train has {observation_space}"
        )
    return policy


def advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, steps: int) -> np.ndarray:
    """How much better each step of an episode turned out than was expected, `[T]`; nothing follows the last.

    Args:
        rewards: `[T]`.
        values: Of the observations before the steps, `[T]`.
        gamma: Discount of a step.
        steps: How many rewards count before what follows is taken from `values`.
    """
    T = len(rewards)
    following = np.concatenate([values, np.zeros(steps)])
    found = gamma**steps * following[steps : steps + T] - values
    padded = np.concatenate([rewards, np.zeros(steps)])
    for k in range(min(steps, T)):
        found += gamma**k * padded[k : k + T]
    return found


def improvements(found: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """1 where an advantage is among the largest `fraction` of all, else −1, `[T, 1]` float32 for each episode."""
    least = np.quantile(np.concatenate(list(found)), 1 - fraction)
    return [np.where(each > least, 1, -1).astype(np.float32)[:, None] for each in found]


@torch.no_grad()
def label(cfg: BcConfig, trajectories: Sequence[Trajectory], model: Policy, device: torch.device) -> list[np.ndarray]:
    """Which steps of some episodes count as improvements, see `improvements`."""
    algorithm, scale = cfg.algorithm, cfg.env.train.reward_scale
    model.to(device)

    def valued(trajectory: Trajectory) -> np.ndarray:
        count = count_rows(trajectory["obs"]) - 1
        parts = (take(trajectory["obs"], slice(at, min(at + _ROWS, count))) for at in range(0, count, _ROWS))
        rows = [model.value(to_tensors(part, device)) for part in parts]
        return torch.cat([row.reshape(len(row), -1)[:, 0] for row in rows]).double().cpu().numpy()

    found = [
        advantages(scale * each["rewards"].astype(np.float64), valued(each), algorithm.gamma, algorithm.advantage_steps)
        for each in trajectories
    ]
    return improvements(found, algorithm.improved_fraction)
