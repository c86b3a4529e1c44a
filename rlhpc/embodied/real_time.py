"""A policy that is evaluated as if it took time: real-time chunking (`env.eval.real_time_chunking`).

Of the observation of step t a chunk is made that is there at step t + d. Meanwhile the robot plays what the chunk before has
for these steps, and the new one is guided to go on from there (`rlhpc.embodied.models.guidance`). An episode begins once its
first chunk is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.config.typed import mapping
from rlhpc.embodied.config import EvalEnvConfig, RealTimeConfig
from rlhpc.embodied.envs.observations import count_rows
from rlhpc.embodied.models.base import Policy, PolicyObs
from rlhpc.embodied.models.guidance import Guide, overlap_weights
from rlhpc.runtime.errors import ConfigError

_KEY = "env.eval.real_time_chunking"


class RealTime:
    """Acts as a policy does, with the delay.

    Args:
        policy: Acts by a flow.
        delay: d, steps until a chunk is there.
        executed: s, actions that are played from one chunk to the next.
        most: The largest weight of the guidance; 0 for none.
    """

    def __init__(self, policy: Policy, delay: int, executed: int, most: float) -> None:
        self._policy, self._delay, self._executed, self._most = policy, delay, executed, most
        self._weights = overlap_weights(policy.horizon, executed, delay)
        self._plan: Tensor | None = None
        self._going = np.zeros(0, bool)

    def predict_action_batch(
        self, obs: PolicyObs, mode: str = "eval", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions `[B, s, dim]`, as a policy's; the first d are of the chunk before, where there is one."""
        del mode
        delay, executed, before, policy = self._delay, self._executed, self._plan, self._policy
        with torch.inference_mode(False), torch.no_grad():  # guidance needs a gradient
            self._plan = plan = policy.plan(_copied(obs), self._guide(), None if noise is None else noise.clone())
            actions = policy.played(plan, slice(0, executed)).clone()
            if before is not None and delay:
                going = torch.from_numpy(self._going)
                actions[going, :delay] = policy.played(before, slice(executed, executed + delay))[going]
        self._going = np.ones(count_rows(obs), bool)
        return actions, {}

    def ended(self, done: np.ndarray) -> None:
        """Slots (their numbers) whose episode has ended: the next one's first chunk has none before it."""
        self._going[done] = False

    def _guide(self) -> Guide | None:
        if self._plan is None or not self._most or not self._going.any():
            return None
        left = torch.zeros_like(self._plan)
        left[:, : -self._executed] = self._plan[:, self._executed :]
        weights = torch.zeros(left.shape[1])
        weights[: len(self._weights)] = self._weights
        each = torch.from_numpy(self._going).float()[:, None] * weights
        return Guide(left, each.to(left.device)[..., None], self._most)


def is_late(env_cfg: EvalEnvConfig) -> bool:
    """Whether there is to be a delay. Off-policy runs and configurations of older checkpoints have no such section."""
    section: RealTimeConfig | None = mapping(env_cfg).get("real_time_chunking")
    return section is not None and section.inference_delay is not None


def real_time(policy: Any, env_cfg: EvalEnvConfig) -> RealTime | None:
    """The policy as `env.eval.real_time_chunking` has it; None where the simulator waits for it.

    Raises:
        ConfigError: It does not act by a flow, or its chunks are too short.
    """
    section: RealTimeConfig | None = mapping(env_cfg).get("real_time_chunking")
    if section is None:
        return None
    delay, executed, most = section.inference_delay, section.execution_horizon, section.max_guidance_weight
    if delay is None:
        return None
    horizon = policy.horizon if isinstance(policy, Policy) else 0
    if not horizon:
        raise ConfigError(
            f"{_KEY}.inference_delay is {delay}; chunks are guided where a policy acts by a flow (flow, pi0, and lerobot's "
            f"smolvla, pi0 and pi05), which {type(policy).__name__} does not"
        )
    executed = min(policy.chunk, horizon - delay) if executed is None else executed
    if not delay <= executed or executed < 1 or executed + delay > horizon:
        raise ConfigError(
            f"{_KEY}: inference_delay is {delay} and execution_horizon {executed}; the former may be no more than the latter, "
            f"and both together no more than the {horizon} actions that the policy predicts at once"
        )
    return RealTime(policy, delay, executed, most)


def _copied(obs: PolicyObs) -> PolicyObs:
    """Tensors that a gradient may be computed through, which those made in inference mode are not."""
    return {name: part.clone() for name, part in obs.items()} if isinstance(obs, dict) else obs.clone()
