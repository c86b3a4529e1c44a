"""What goes wrong numerically in the tests of `runner.on_nonfinite`; named in their configurations as `nonfinite_things:…`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch

from rlhpc.algorithms.losses import ppo
from rlhpc.embodied.models.mlp import MLPPolicy

BAD = {"nan": float("nan"), "inf": float("inf")}


class Spoiled(gymnasium.Env):
    """Twenty steps of noise; the first environment that a process builds for training, and no other, gives one number that is
    not finite: in its `at`-th step, as `what` says.

    Args:
        what: "reward" or "observation"; "always" gives a reward that is not finite in each step of all environments.
        at: From 1.
        value: "nan" or "inf".
        continuous: Box actions.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    built = 0

    def __init__(self, what: str = "", at: int = 0, value: str = "nan", continuous: bool = False) -> None:
        self.what, self.at, self.value = what, at, BAD[value]
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,)) if continuous else gymnasium.spaces.Discrete(2)
        self.steps = self.t = 0
        self.chosen = Spoiled.built == 0
        Spoiled.built += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def _obs(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps, self.t = self.steps + 1, self.t + 1
        obs, reward = self._obs(), float(np.sum(action))
        if (self.steps == self.at and self.chosen) or self.what == "always":
            if self.what == "observation":
                obs[1] = self.value
            else:
                reward = self.value
        return obs, reward, False, self.t >= 20, {}


gymnasium.register("Spoiled-v0", Spoiled)


def broken_loss(*, logprobs: torch.Tensor, **kw: Any) -> Any:
    """PPO's, but not a number for a rank's first batch."""
    loss, metrics = ppo(logprobs=logprobs, **kw)
    broken_loss.calls = getattr(broken_loss, "calls", 0) + 1  # type: ignore[attr-defined]
    return loss * (float("nan") if broken_loss.calls == 1 else 1.0), {**metrics, "mine": torch.tensor(2.0)}  # type: ignore[attr-defined]


class Overflowing(MLPPolicy):
    """A policy of which a part that is saved, and not trained, overflows in the second step."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.register_buffer("running", torch.ones(1))

    def default_forward(self, inputs: dict[str, Any], *args: Any, **kw: Any) -> dict[str, Any]:
        self.running.mul_(1e8)
        return super().default_forward(inputs, *args, **kw)
