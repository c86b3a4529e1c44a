"""A script in the place of a person: takes over where the policy strays from what an expert would do."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhpc.embodied.intervention.base import Intervention
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import load_attribute


class Scripted(Intervention):
    """Watches as a person does: lets small differences pass, reacts late, and leads for a while.

    Args:
        expert: `obs [N, ...] -> actions [N, dim]`, as `module:function`.
        apart: How far, in any number of an action, the policy may be from the expert.
        patience: Steps in a row for which it must be farther, before the expert takes over.
        hold: Steps that the expert leads at least; then until the policy is near again.
    """

    def __init__(self, expert: str, apart: float = 0.5, patience: int = 3, hold: int = 10) -> None:
        if apart < 0 or patience < 1 or hold < 1:
            raise ConfigError(
                f"--intervene scripted: apart is {apart}, patience {patience}, hold {hold}; at least 0, 1 and 1 are wanted"
            )
        self._expert = load_attribute(expert, "--intervene scripted.expert")
        self._apart, self._patience, self._hold = apart, patience, hold
        self._strayed = self._led = np.zeros(0, np.int64)

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What is done in this step (`Intervention.act`)."""
        del picture
        if len(self._led) != len(actions):
            self._strayed, self._led = np.zeros(len(actions), np.int64), np.zeros(len(actions), np.int64)
        wanted = np.asarray(self._expert(obs), actions.dtype).reshape(actions.shape)
        far = np.abs(wanted - actions).max(1) > self._apart
        self._strayed = np.where(far, self._strayed + 1, 0)
        leading = self._led > 0
        leads = np.where(leading, far | (self._led < self._hold), self._strayed >= self._patience)
        self._led = np.where(leads, self._led + 1, 0)
        return np.where(leads[:, None], wanted, actions), leads

    def ended(self, slots: np.ndarray) -> None:
        """See `Intervention.ended`."""
        self._strayed, self._led = np.where(slots, 0, self._strayed), np.where(slots, 0, self._led)
