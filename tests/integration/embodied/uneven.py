"""CartPole that stands still until something has happened elsewhere, which so must not wait for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.embodied.envs.base import Step
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.embodied.models.mlp import MLPPolicy

DECISIONS = 32


def wait_for(path: Path, why: str) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, why
        time.sleep(0.002)


class Held(GymnasiumVectorEnv):
    """The env rank with the first slot tells by a file which rollout it has played, and the one with the last slot waits for
    that at its first step.

    Where who acts waits for all of them, nobody comes to that rollout's end.
    """

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        self._first, self._last, self._made = slot_offset == 0, slot_offset + num_envs == cfg.num_envs, 0
        self._folder = os.environ.get("RLHPC_TEST_HELD")

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        rollout, t = divmod(self._made, DECISIONS)
        self._made += 1
        if self._folder and self._last and t == 0:
            wait_for(Path(self._folder) / str(rollout), f"the others do not play rollout {rollout} without this rank")
        found = super().step(actions)
        if self._folder and self._first and t == DECISIONS - 1:
            (Path(self._folder) / str(rollout)).touch()
        return found


def trained() -> Path | None:
    folder = os.environ.get("RLHPC_TEST_HELD")
    return Path(folder) / "trained" if folder else None


class HeldHalfway(GymnasiumVectorEnv):
    """The last slot plays the second half of a rollout only once a forward pass of training has been made since its start."""

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        self._held, self._made = trained() if slot_offset + num_envs == cfg.num_envs else None, 0

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        rollout, t = divmod(self._made, DECISIONS)
        self._made += 1
        if self._held and t == 0:
            self._held.unlink(missing_ok=True)
        if self._held and t == DECISIONS // 2:
            wait_for(self._held, f"the first half of rollout {rollout} is not trained on before the second is played")
        return super().step(actions)


class Telling(MLPPolicy):
    """Tells by a file that it is trained."""

    def default_forward(self, inputs: dict[str, Any], **wanted: bool) -> dict[str, torch.Tensor]:
        """See `Policy.default_forward`."""
        if (told := trained()) and torch.is_grad_enabled():
            told.touch()
        return super().default_forward(inputs, **wanted)
